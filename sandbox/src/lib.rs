//! Everything the daemon asks of the kernel about pods, as a library: short, synchronous calls that an event loop may
//! make, and pure functions that decide what will be asked.
//!
//! ```text
//!   request ─► identity, capability ─► plan ─► launch record ─► monitor ─► coracle-pod
//!                   (pure)            (pure)                                   │ joins
//!   limits ──────────────────────────────────► cgroup ◄────────────────────────┘
//!   names of network namespaces ─────────────► netns         host's device nodes ─► device
//!   paths that may not answer ───────────────► hostpath
//!   what monitors see of the host's files ───► view
//!   links, addresses, routes, nftables ──────► netlink
//!   what this kernel has ────────────────────► probe         a worker shuts itself in ─► jail
//!   whose turn it is ────────────────────────► rank          modes of new files ─► umask
//! ```
//! Nothing here waits, sleeps or starts a thread; what may have to be tried again says so. Nothing here knows images,
//! gRPC or plugins. Kernel objects are named by their callers, before they are made.
#![forbid(unsafe_code)]

mod error;
mod exit_record;
mod mountinfo;

pub mod base_mount_ns;
pub mod capability;
pub mod cgroup;
pub mod device;
pub mod hostpath;
pub mod identity;
pub mod jail;
pub mod lsm;
pub mod monitor;
pub mod netlink;
pub mod netns;
pub mod plan;
pub mod probe;
pub mod sched;
pub mod seccomp;
pub mod umask;
pub mod userns;

pub use coracle_sys::process::forget_code;
pub use coracle_wire::{
    ContainerId, Event, Exit, ExitRecord, Failure, FromMonitor, PidNamespace, PodId, Propagation, Reply,
    Request, Streams, ToMonitor, VERSION as FRAMES_VERSION,
};
pub use error::Error;
pub use exit_record::exit_record;

/// 32 random bytes of the kernel's generator: what ids of pods and containers are made from.
///
/// # Errors
/// [`Error::Kernel`] where the kernel has no getrandom(2) or refuses it.
pub fn random_id() -> Result<[u8; 32], Error> {
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
    fn ids_differ() {
        assert_ne!(super::random_id(), super::random_id());
    }
}
