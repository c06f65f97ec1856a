//! The launch record: an ordered list of operations that a cloned child walks from clone to exec, one system call or
//! a few each. Every decision is taken before, by `sandbox::plan`; the child obeys, and answers with the number of
//! the operation that failed. The pod's own setup (host name, loopback, /dev/shm, sysctls) is a record of the same
//! form that the monitor walks once, before it serves.
//!
//! ```text
//!   | RecordHeader | Op | Op | … | Op::Exec |      each one postcard message, back to back, in a sealed memfd
//! ```
//!
//! The order of a container's record, which is also the reason it is safe: join the cgroup → open every host path as
//! a detached tree (`OpenTree`) while the host's files are still in view → mount the root → `PivotRoot`. From there
//! no path can name anything of the host, and targets are resolved inside the new root without magic links.

use core::ffi::CStr;

use serde::{Deserialize, Serialize};

/// Version of the record format; the child refuses a newer one (operation 0, errno 0).
pub const RECORD_VERSION: u16 = 1;

/// First in every record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordHeader {
    /// [`RECORD_VERSION`] of the writer.
    pub version: u16,
}

/// A path or name with its terminating NUL in the bytes, so that the child needs no copy to call the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text<'a>(#[serde(borrow)] &'a [u8]);

impl<'a> Text<'a> {
    /// Borrows a C string.
    pub fn new(text: &'a CStr) -> Self {
        Self(text.to_bytes_with_nul())
    }

    /// The C string; `None` where the record is damaged (no NUL, or one inside).
    pub fn as_cstr(&self) -> Option<&'a CStr> {
        CStr::from_bytes_with_nul(self.0).ok()
    }
}

impl core::fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.as_cstr() {
            Some(text) => write!(f, "{text:?}"),
            None => f.write_str("(damaged)"),
        }
    }
}

/// Several NUL-terminated strings back to back: arguments, environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block<'a> {
    /// How many.
    pub count: u32,
    /// The strings, each with its NUL.
    #[serde(borrow)]
    pub bytes: &'a [u8],
}

impl<'a> Block<'a> {
    /// The strings in order; stops early where the block is damaged, so compare with `count`.
    pub fn iter(&self) -> impl Iterator<Item = &'a CStr> + use<'a> {
        let mut rest = self.bytes;
        core::iter::from_fn(move || {
            let text = CStr::from_bytes_until_nul(rest).ok()?;
            rest = rest.get(text.to_bytes_with_nul().len()..)?;
            Some(text)
        })
    }
}

/// How mounts travel between a mount and its peers (mount_namespaces(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Propagation {
    /// Not at all.
    Private,
    /// From the host into the container.
    Slave,
    /// Both ways.
    Shared,
}

/// The mount namespace of the host, for `Op::JoinNamespace` of a container's record: place 5 among its descriptors.
pub const HOST_NAMESPACE: &CStr = c"/proc/self/fd/5";

/// Where a monitor keeps the procfs of the PID namespace that its containers share, in its own mount namespace.
pub const SHARED_PROC: &CStr = c"/shared-proc";

/// One operation. Paths before `PivotRoot` are the host's; after it they are the container's, resolved inside its
/// root (`openat2` with RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS from the root's descriptor).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op<'a> {
    /// Write `data` to a file of the host in one write: `cgroup.procs` ("0" is the writer itself), oom_score_adj,
    /// a sysctl under /proc/sys.
    WriteFile {
        /// Absolute.
        #[serde(borrow)]
        path: Text<'a>,
        /// What.
        #[serde(borrow)]
        data: &'a [u8],
        /// EPERM, EACCES and ENOENT are passed over: a lower oom_score_adj without CAP_SYS_RESOURCE.
        optional: bool,
    },
    /// `unshare(2)`: mount and cgroup namespace, once the cgroup is joined.
    Unshare {
        /// CLONE_NEW…
        flags: u32,
    },
    /// Change the propagation of everything below `/` (of the process's own mount namespace).
    RootPropagation {
        /// What it becomes.
        propagation: Propagation,
    },
    /// Detach a copy of the mount tree at `path` (`open_tree`, OPEN_TREE_CLONE) and keep it under `slot`.
    OpenTree {
        /// Chosen by the plan, below 256.
        slot: u16,
        /// Host path; symlinks are followed.
        #[serde(borrow)]
        path: Text<'a>,
        /// With everything mounted below it.
        recursive: bool,
        /// Taken in the mount namespace of the host instead of the process's own, so that the copy stays in the
        /// source's peer group (bidirectional propagation).
        from_host: bool,
    },
    /// Mount an overlay on the host path `target`.
    Overlay {
        /// Directory that relative names in `options` start from (mount options are limited to one page).
        #[serde(borrow)]
        directory: Text<'a>,
        /// `lowerdir=…,upperdir=…,workdir=…`
        #[serde(borrow)]
        options: Text<'a>,
        /// An empty directory.
        #[serde(borrow)]
        target: Text<'a>,
    },
    /// Mount a tmpfs on the host path `target`, in this mount namespace only: the pod's /dev/shm.
    Tmpfs {
        /// For example `mode=1777,size=65536k`.
        #[serde(borrow)]
        options: Text<'a>,
        /// An existing directory.
        #[serde(borrow)]
        target: Text<'a>,
        /// MS_…
        flags: u64,
    },
    /// Make `new_root` (a mount) the root and drop the old one.
    PivotRoot {
        /// Host path.
        #[serde(borrow)]
        new_root: Text<'a>,
    },
    /// Mount a fresh file system of type `kind` on `target`, which is made (a directory, 0755) where it is missing.
    Filesystem {
        /// proc, sysfs, tmpfs, devpts, mqueue, cgroup2…
        #[serde(borrow)]
        kind: Text<'a>,
        /// `key=value` and flag options, one each.
        #[serde(borrow)]
        options: Block<'a>,
        /// MOUNT_ATTR_… (`fsmount`).
        attributes: u64,
        /// Container path.
        #[serde(borrow)]
        target: Text<'a>,
    },
    /// Attach the tree of `slot` at `target`, which is made (as the tree's root: a directory, 0755, or an empty file)
    /// where it is missing.
    Attach {
        /// As opened before.
        slot: u16,
        /// Container path.
        #[serde(borrow)]
        target: Text<'a>,
        /// MOUNT_ATTR_… set on the tree's root (`mount_setattr`; before Linux 5.12 by remount).
        attributes: u64,
        /// Set them on everything below, too. Needs Linux 5.12: ENOSYS otherwise.
        attributes_recursive: bool,
        /// Of the whole tree.
        propagation: Propagation,
        /// A missing target is passed over instead of made: masked and read-only paths.
        skip_missing: bool,
    },
    /// Cover `target` so that nothing of it is seen: a directory by an empty read-only tmpfs, a file by the tree of
    /// `slot` (the host's /dev/null). A missing target is passed over.
    Mask {
        /// A tree of /dev/null of its own.
        slot: u16,
        /// Container path.
        #[serde(borrow)]
        target: Text<'a>,
    },
    /// Bind `target` over itself read-only, recursively. A missing target is passed over.
    ReadOnly {
        /// Container path.
        #[serde(borrow)]
        target: Text<'a>,
    },
    /// Make the root mount itself read-only.
    ReadOnlyRoot,
    /// `mknod` at a container path whose directory exists; mode with type bits, owner 0:0.
    Node {
        /// Container path.
        #[serde(borrow)]
        path: Text<'a>,
        /// S_IFCHR | 0666…; umask does not apply.
        mode: u32,
        /// Kernel's encoding of major and minor.
        device: u64,
    },
    /// Symbolic link at a container path; EEXIST is success.
    Symlink {
        /// What it points to.
        #[serde(borrow)]
        content: Text<'a>,
        /// Container path.
        #[serde(borrow)]
        path: Text<'a>,
    },
    /// Directory at a container path with its parents; existing is success.
    Directory {
        /// Container path.
        #[serde(borrow)]
        path: Text<'a>,
        /// Permission bits.
        mode: u32,
    },
    /// `sethostname`.
    HostName {
        /// At most 64 bytes.
        #[serde(borrow)]
        name: &'a [u8],
    },
    /// Bring up `lo` in this network namespace.
    LoopbackUp,
    /// `setrlimit`; EPERM is passed over (a nested daemon may not raise limits).
    Limit {
        /// RLIMIT_…
        resource: u32,
        /// Soft.
        soft: u64,
        /// Hard.
        hard: u64,
    },
    /// Make the controlling terminal from the container's own devpts, bind its slave on /dev/console, and hand the
    /// master side to the monitor.
    Terminal,
    /// Change directory, inside the root; `create` makes missing parts (0755).
    WorkingDirectory {
        /// Container path.
        #[serde(borrow)]
        path: Text<'a>,
        /// Make it where it is missing.
        create: bool,
    },
    /// Drop every capability not in `keep` from the bounding set.
    BoundingSet {
        /// Bit n is capability n.
        keep: u64,
    },
    /// `setgroups`: little-endian u32 each.
    Groups {
        /// 4 bytes a group.
        #[serde(borrow)]
        gids: &'a [u8],
    },
    /// `setresgid`, `setresuid`, with capabilities kept across it for [`Op::Capabilities`].
    User {
        /// Of the process.
        uid: u32,
        /// Of the process.
        gid: u32,
    },
    /// `capset`, then the ambient set.
    Capabilities {
        /// Effective set.
        effective: u64,
        /// Permitted set.
        permitted: u64,
        /// Inheritable set.
        inheritable: u64,
        /// Ambient set, raised one by one.
        ambient: u64,
    },
    /// PR_SET_NO_NEW_PRIVS.
    NoNewPrivileges,
    /// Install a seccomp filter: `struct sock_filter`, 8 bytes each.
    Seccomp {
        /// The program.
        #[serde(borrow)]
        program: &'a [u8],
        /// SECCOMP_FILTER_FLAG_…
        flags: u32,
    },
    /// `umask`.
    Umask {
        /// Mask.
        mask: u32,
    },
    /// Always the last one walked: try each candidate path until one can be exec'ed. ENOENT and ENOTDIR go on to the next;
    /// so does EACCES, which is then the answer if no later one works.
    Exec {
        /// Container paths.
        #[serde(borrow)]
        candidates: Block<'a>,
        /// argv.
        #[serde(borrow)]
        arguments: Block<'a>,
        /// envp.
        #[serde(borrow)]
        environment: Block<'a>,
    },
    /// Effective user and group become these ids of the host, and with them the owner of whatever is made; capabilities
    /// stay as they are. 0:0 ends it. For what must belong to the root of a user namespace before it is entered.
    ActAs {
        /// Of the host.
        uid: u32,
        /// Of the host.
        gid: u32,
    },
    /// Cover the host's directory `path`, in this mount namespace, by itself as the pod's user namespace maps its owners
    /// (MOUNT_ATTR_IDMAP, Linux 5.12): the layers below an overlay (Linux 5.19).
    IdmapOver {
        /// Absolute.
        #[serde(borrow)]
        path: Text<'a>,
    },
    /// Map the owners in the tree of `slot`, and in all that is mounted below, as the pod's user namespace does.
    Idmap {
        /// As opened before.
        slot: u16,
    },
    /// Detach a copy of what `path` names below the host's directory `base`, resolved inside it, and keep it under `slot`.
    OpenBelow {
        /// Chosen by the plan, below 256.
        slot: u16,
        /// Absolute.
        #[serde(borrow)]
        base: Text<'a>,
        /// Relative or absolute: `base` is its root, for links on the way, too.
        #[serde(borrow)]
        path: Text<'a>,
    },
    /// An image volume: mount the container's directory `path`, which is made where it is missing, on itself, so that it
    /// stays writable when the root around it becomes read-only. What is mounted below is not part of it, so it comes
    /// before all mounts but those of the kernel. ELOOP where a link of the image leads `path` out of the root's own file
    /// system or to the root itself (monitors before version 4 do not check that).
    BindSelf {
        /// Container path.
        #[serde(borrow)]
        path: Text<'a>,
    },
    /// Give the pipes among the standard streams to this id of the host, so that they can be opened again by name.
    GiveStreams {
        /// Of the host.
        uid: u32,
    },
    /// Enter the pod's user namespace as its root, with a mount namespace that belongs to it: mounts made before are
    /// locked there (mount_namespaces(7)).
    UserNamespace,
    /// Tells the monitor that this point is reached, and waits until it says to go on (`Request::Resume`).
    Wait,
    /// Enter the namespace that a file of the host holds.
    JoinNamespace {
        /// Absolute.
        #[serde(borrow)]
        path: Text<'a>,
        /// CLONE_NEW… of its kind.
        flag: u32,
    },
    /// `sched_setattr`, before anything that needs rights for it is dropped.
    Schedule {
        /// SCHED_…
        policy: u32,
        /// SCHED_FLAG_…
        flags: u64,
        /// -20 to 19.
        nice: i32,
        /// Of realtime policies.
        priority: u32,
        /// Runtime, deadline, period in nanoseconds.
        times: [u64; 3],
    },
    /// `ioprio_set`.
    IoPriority {
        /// 1 realtime, 2 best effort, 3 idle.
        class: u32,
        /// 0 to 7.
        level: u32,
    },
    /// `set_mempolicy`.
    MemoryPolicy {
        /// MPOL_… with its flags.
        mode: u32,
        /// Nodes 0 to 127 as a bit set.
        nodes: [u64; 2],
    },
    /// Give what is at a container path to a user and a group; a link there is not followed.
    Owner {
        /// Container path.
        #[serde(borrow)]
        path: Text<'a>,
        /// In the container.
        uid: u32,
        /// In the container.
        gid: u32,
    },
    /// When all mounts are made, and before a user namespace is entered: check by descriptor that the container has what
    /// was planned. Changes nothing. Fails with a [`Mismatch`]. Since version 4 of the frames ([`crate::VERSION`]).
    Verify {
        /// What is to be found at /proc, /sys and /dev.
        kernel: [KernelDirectory; 3],
        /// The root mount is read-only.
        root_read_only: bool,
        /// Paths that are masked: each is the root of a mount, the device 1:3 or an empty read-only tmpfs. One that is
        /// missing in procfs or sysfs must be missing in the very mount that was made at /proc or /sys.
        #[serde(borrow)]
        masked: Block<'a>,
        /// Paths that are on a read-only mount, if there is anything.
        #[serde(borrow)]
        read_only: Block<'a>,
    },
    /// In a pod's setup record: make the PID namespace that its containers share, with a first process that only reaps and
    /// sleeps, and its procfs at [`SHARED_PROC`].
    SharedPidNamespace,
    /// The filter of the next [`Op::Seccomp`] would keep a process from being handed over to another one, in the container's
    /// PID namespace: where that is to be done, the process's own calls get past it.
    SpareOwnCalls,
    /// Join the container's session keyring, which a start makes, its owner the user of the process at this point. Passed
    /// over where the kernel has no keys.
    Keyring,
}

impl Op<'_> {
    /// The version of the frames ([`crate::VERSION`]) from which on monitors know the operation. Records for older ones go
    /// without it.
    pub fn since(&self) -> u16 {
        match self {
            Self::SharedPidNamespace | Self::SpareOwnCalls | Self::Keyring => 5,
            Self::Verify { .. } => 4,
            _ => 1,
        }
    }
}

/// What [`Op::Verify`] expects at /proc, /sys or /dev.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KernelDirectory {
    /// Nothing: it was left out, or is masked as a whole.
    Unchecked,
    /// A fresh procfs, sysfs or tmpfs made by this record, and no other mount on top of it.
    Fresh,
    /// Another mount made by this record: a volume of the pod.
    Volume,
}

/// What [`Op::Verify`] found, in place of an error number of the kernel's, which is 4095 at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// What is not as planned: 0 to 2 are /proc, /sys and /dev, 3 is the root, [`Mismatch::FIRST_PATH`] the first masked
    /// path, and the read-only paths follow the masked ones.
    pub item: u16,
    /// Why it could not be looked at; 0: it could, and is something else.
    pub errno: u16,
}

impl Mismatch {
    /// The root.
    pub const ROOT: u16 = 3;
    /// The first masked path.
    pub const FIRST_PATH: u16 = 4;
    /// No error number has it.
    const FLAG: i32 = 1 << 28;
    /// Bits of an error number.
    const ERRNO_BITS: u32 = 12;

    /// The number that stands for it.
    pub fn to_number(self) -> i32 {
        let errno = i32::from(self.errno) & ((1 << Self::ERRNO_BITS) - 1);
        Self::FLAG | i32::from(self.item) << Self::ERRNO_BITS | errno
    }

    /// And back; `None` for an error number of the kernel's.
    pub fn from_number(number: i32) -> Option<Self> {
        if number < 0 || number & Self::FLAG == 0 {
            return None;
        }
        let item = u16::try_from((number & !Self::FLAG) >> Self::ERRNO_BITS).ok()?;
        let errno = u16::try_from(number & ((1 << Self::ERRNO_BITS) - 1)).ok()?;
        Some(Self { item, errno })
    }
}

/// Operations of a record, in order. `Err` once where it cannot be read, then the end.
pub struct Walk<'a> {
    rest: Option<&'a [u8]>,
}

/// Starts walking a record; `Err` where the header is damaged or newer than this code.
pub fn walk(record: &[u8]) -> Result<Walk<'_>, postcard::Error> {
    let (header, rest) = postcard::take_from_bytes::<RecordHeader>(record)?;
    if header.version > RECORD_VERSION {
        return Err(postcard::Error::WontImplement);
    }
    Ok(Walk { rest: Some(rest) })
}

impl<'a> Iterator for Walk<'a> {
    type Item = Result<Op<'a>, postcard::Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.rest.take().filter(|rest| !rest.is_empty())?;
        match postcard::take_from_bytes(rest) {
            Ok((op, rest)) => {
                self.rest = Some(rest);
                Some(Ok(op))
            }
            Err(error) => Some(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Mismatch;

    #[test]
    fn mismatches_are_numbers_that_no_errno_has() {
        for item in [0, Mismatch::ROOT, Mismatch::FIRST_PATH, u16::MAX] {
            for errno in [0, 1, 4095] {
                let mismatch = Mismatch { item, errno };
                assert!(mismatch.to_number() > 4095);
                assert_eq!(Mismatch::from_number(mismatch.to_number()), Some(mismatch));
            }
        }
        for errno in [i32::MIN, -1, 0, 1, 22, 4095] {
            assert_eq!(Mismatch::from_number(errno), None, "{errno}");
        }
    }
}
