//! The CRI edge: one file per RPC, which validates and translates, then makes one call into `pod/` or `image/`. CRI's
//! types end here; rules of the kernel, of disks and of plugins are not known here.

pub(crate) mod container_config;
mod filter;
pub(crate) mod pod_config;

pub(crate) mod list_pod_sandbox;
pub(crate) mod pod_sandbox_metrics;
pub(crate) mod pod_sandbox_stats;
pub(crate) mod pod_sandbox_status;
pub(crate) mod remove_pod_sandbox;
pub(crate) mod run_pod_sandbox;
pub(crate) mod stop_pod_sandbox;
pub(crate) mod update_pod_sandbox_resources;

pub(crate) mod attach;
pub(crate) mod container_stats;
pub(crate) mod container_status;
pub(crate) mod create_container;
pub(crate) mod exec;
pub(crate) mod exec_sync;
pub(crate) mod get_container_events;
pub(crate) mod list_containers;
pub(crate) mod port_forward;
pub(crate) mod remove_container;
pub(crate) mod reopen_container_log;
pub(crate) mod start_container;
pub(crate) mod stop_container;
pub(crate) mod update_container_resources;

pub(crate) mod runtime_config;
pub(crate) mod status;
pub(crate) mod update_runtime_config;
pub(crate) mod version;

pub(crate) mod image_fs_info;
pub(crate) mod image_status;
pub(crate) mod list_images;
pub(crate) mod pull_image;
pub(crate) mod remove_image;

use coracle_base::error::{Error, Kind};
use smol::stream::Stream;

/// Items of one message of a stream: far below what a message holds, whatever labels they have.
const CHUNK_ITEMS: usize = 64;

/// A list as messages of a stream; an empty list is no message at all.
fn chunks<T, M>(items: Vec<T>, message: impl Fn(Vec<T>) -> M) -> impl Stream<Item = Result<M, Error>> {
    let mut items = items.into_iter().peekable();
    smol::stream::iter(std::iter::from_fn(move || {
        items.peek()?;
        Some(Ok(message(items.by_ref().take(CHUNK_ITEMS).collect())))
    }))
}

/// Stop and Remove of what is not there have nothing to do (CRI 1.3: idempotent calls).
fn unknown_is_done<T>(found: Result<T, Error>) -> Result<Option<T>, Error> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == Kind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
