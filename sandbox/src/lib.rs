//! The kernel interface of the daemon as a library: short synchronous calls that an event loop can make, and pure
//! functions that compute their input.
//!
//! ```text
//!   request ─► identity, capability ─► plan ─► launch record ─► monitor ─► coracle-pod
//!                   (pure)            (pure)                                   │ joins
//!   limits ──────────────────────────────────► cgroup ◄────────────────────────┘
//!   names of network namespaces ─────────────► netns         host's device nodes ─► device
//!   host paths that can block ───────────────► hostpath
//!   mount namespace of monitors ─────────────► base_mount_ns
//!   features of this kernel ─────────────────► probe         confinement of workers ─► jail
//!   processes outside of their cgroup ───────► process
//!   files of the daemon ─────────────────────► disk
//!   CPU and I/O scheduling ──────────────────► sched         modes of new files ─► umask
//! ```
//! No function here waits, sleeps or starts a thread, except where its documentation says so; the documentation also
//! says which operations may have to be retried. The crate has no knowledge of images, gRPC or plugins. Callers choose
//! the names of kernel objects before the objects are created.
#![forbid(unsafe_code)]

mod checksum;
mod error;
mod exit_record;
mod mountinfo;

pub mod base_mount_ns;
pub mod capability;
pub mod cgroup;
pub mod collect;
pub mod device;
pub mod disk;
pub mod hostpath;
pub mod identity;
pub mod jail;
pub mod lsm;
pub mod monitor;
pub mod netns;
pub mod plan;
pub mod probe;
pub mod process;
pub mod sched;
pub mod seccomp;
#[cfg(feature = "simulation")]
pub mod simulation;
pub mod umask;
pub mod userns;

pub use checksum::crc32;
pub use coracle_sys::program::forget_constant_pages;
pub use coracle_wire::{
    CONTAINERS_MAX, ContainerId, EXECS_MAX, Event, Exit, ExitRecord, Failure, FromMonitor, PidNamespace,
    PodId, Propagation, Reply, Request, Streams, ToMonitor, VERSION as FRAMES_VERSION,
};
pub use error::{Error, describe_errno, describe_io, describe_thread_error};
pub use exit_record::exit_record;

/// Returns 32 bytes from the kernel's random number generator, for IDs of pods and containers.
///
/// # Errors
/// [`Error::Kernel`] if getrandom(2) fails.
pub fn random_id() -> Result<[u8; 32], Error> {
    #[cfg(feature = "simulation")]
    if let Some(node) = simulation::node() {
        return node.random_id();
    }
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| {
        let errno = error.raw_os_error().map_or(nix::errno::Errno::EIO, nix::errno::Errno::from_raw);
        Error::kernel("getrandom", "32 bytes", errno)
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #[test]
    fn random_ids_differ() {
        assert_ne!(super::random_id(), super::random_id());
    }
}
