//! The CRI handlers: one file per RPC, which validates and converts the request, then makes one call into the
//! engine or the image service. CRI types are not used below; rules about the kernel, disks and plugins are
//! not in this module.

pub(crate) mod container_config;
mod filter;
mod handler_defaults;
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

/// Number of items per message of a stream: far below the maximum message size, whatever labels the items have.
const CHUNK_ITEMS: usize = 64;

/// Splits a list into messages of a stream; an empty list results in no message.
fn chunks<T, M>(items: Vec<T>, message: impl Fn(Vec<T>) -> M) -> impl Stream<Item = Result<M, Error>> {
    let mut items = items.into_iter().peekable();
    smol::stream::iter(std::iter::from_fn(move || {
        items.peek()?;
        Some(Ok(message(items.by_ref().take(CHUNK_ITEMS).collect())))
    }))
}

/// Converts `NotFound` to `None`: Stop and Remove of an unknown object succeed (CRI 1.3: idempotent calls).
fn unknown_is_done<T>(found: Result<T, Error>) -> Result<Option<T>, Error> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == Kind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
