//! Jails for processes of ours that read what strangers wrote: a process shuts itself in, step by step, and cannot get out
//! again. Each step stands alone, so that a host that lacks one still has the others; who calls says which are missed.
//!
//! ```text
//!   close_descriptors ─► what was inherited is gone
//!   shut_in ─► the current directory is all there is of the file system; no network
//!   keep_capabilities ─► what is not named is gone, also for programs it starts
//!   allow_only, deny ─► system calls
//! ```

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;

use coracle_sys::process::Control;
use coracle_sys::{bpf, mount, process};
use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::sched::CloneFlags;

use crate::Error;
use crate::seccomp::{Action, Architecture, Profile, Rule, compile};

/// More capabilities than any kernel has.
const CAPABILITIES_MAX: u32 = 64;

fn refused(op: &'static str, target: &str) -> impl Fn(coracle_sys::Errno) -> Error {
    let target = target.to_owned();
    move |errno| Error::kernel(op, &target, Errno::from_raw(errno.0))
}

/// Makes the current directory the root of a mount namespace in which nothing else is mounted. There devices cannot be
/// opened, programs cannot be run and set-user-ID bits do nothing. The network, System V IPC and host names are its own,
/// empty ones.
///
/// # Errors
/// [`Error::Kernel`]: this process is not root, or a namespace cannot be had.
pub fn shut_in() -> Result<(), Error> {
    let path = std::env::current_dir().map_err(|error| Error::io("read", "the current directory", &error))?;
    let shown = path.display().to_string();
    let path = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::invalid("directory", "its path holds a NUL"))?;
    let new = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS;
    process::unshare(new.bits() as u64).map_err(refused("unshare", "namespaces"))?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount::mount(None, c"/", None, private.bits(), None).map_err(refused("make private", "/"))?;
    let bind = MsFlags::MS_BIND;
    mount::mount(Some(&path), &path, None, bind.bits(), None).map_err(refused("bind", &shown))?;
    let bare = bind | MsFlags::MS_REMOUNT | MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    mount::mount(None, &path, None, bare.bits(), None).map_err(refused("remount", &shown))?;
    // Into the mount on top, in place of the one below.
    std::env::set_current_dir(&shown).map_err(|error| Error::io("change to", &shown, &error))?;
    mount::pivot_root(c".", c".").map_err(refused("pivot_root to", &shown))?;
    let detach = nix::mount::MntFlags::MNT_DETACH.bits() as usize;
    mount::unmount(c".", detach).map_err(refused("detach", "the old root"))?;
    std::env::set_current_dir("/").map_err(|error| Error::io("change to", "/", &error))
}

/// Closes every descriptor but standard input, output and error: what a careless parent of our parents left open.
///
/// # Errors
/// [`Error::Kernel`] for what the kernel refuses.
pub fn close_descriptors() -> Result<(), Error> {
    coracle_sys::fs::close_from(3).map_err(refused("close", "inherited descriptors"))
}

/// A network namespace of its own, with nothing in it.
///
/// # Errors
/// [`Error::Kernel`]: this process is not root, or the kernel has none.
pub fn leave_network() -> Result<(), Error> {
    process::unshare(CloneFlags::CLONE_NEWNET.bits() as u64).map_err(refused("unshare", "the network"))
}

/// Gives up all capabilities but these (`CAP_…`) for good, and all ways to get any (`no_new_privs`).
///
/// # Errors
/// [`Error::Kernel`] for what the kernel refuses.
pub fn keep_capabilities(names: &[&str]) -> Result<(), Error> {
    let keep = names.iter().filter_map(|name| crate::capability::bit(name)).fold(0, |set, bit| set | bit);
    process::control(Control::NoNewPrivileges).map_err(refused("set", "no_new_privs"))?;
    for capability in (0..CAPABILITIES_MAX).filter(|capability| keep >> capability & 1 == 0) {
        match process::control(Control::DropBounding(capability)) {
            Ok(()) => {}
            // Beyond the last that this kernel has.
            Err(errno) if Errno::from_raw(errno.0) == Errno::EINVAL => break,
            Err(errno) => return Err(refused("drop", "capabilities")(errno)),
        }
    }
    let held = caps::read(None, caps::CapSet::Permitted)
        .map_err(|_| Error::kernel("read", "capabilities", Errno::last()))?;
    let keep = held.iter().fold(0, |set, one| set | one.bitmask()) & keep;
    process::set_capabilities(keep, keep, 0).map_err(refused("set", "capabilities"))
}

/// Only these system calls from now on, of this machine's own convention; any other is EPERM.
///
/// # Errors
/// [`Error::Kernel`]: no seccomp, or neither root nor `no_new_privs`.
pub fn allow_only(calls: &[&str]) -> Result<(), Error> {
    filter(Action::Errno(Errno::EPERM as u16), calls, Action::Allow)
}

/// All system calls but these from now on, of this machine's own convention; these are EPERM.
///
/// # Errors
/// As [`allow_only`].
pub fn deny(calls: &[&str]) -> Result<(), Error> {
    filter(Action::Allow, calls, Action::Errno(Errno::EPERM as u16))
}

fn filter(default: Action, calls: &[&str], action: Action) -> Result<(), Error> {
    let names = calls.iter().map(|name| (*name).to_owned()).collect();
    let profile = Profile {
        default,
        unknown: Action::Errno(Errno::ENOSYS as u16),
        architectures: vec![Architecture::HERE[0]],
        rules: vec![Rule { names, conditions: Vec::new(), action }],
        flags: 0,
    };
    bpf::set_filter(&compile(&profile)?.program, 0).map_err(refused("set", "a seccomp filter"))
}
