//! The launch record: an ordered list of operations that a cloned child executes between clone and exec, each with one
//! or a few system calls. `sandbox::plan` makes all decisions beforehand; the child executes the operations and reports
//! the number of the one that fails. The setup of the pod itself (host name, loopback, /dev/shm, sysctls) is a record
//! of the same format that the monitor executes once at its start.
//!
//! ```text
//!   | RecordHeader | Op | Op | … | Op::Exec |      each one postcard message, back to back, in a sealed memfd
//! ```
//!
//! The order of a container's record, which is also the reason it is safe: join the cgroup → open every host path as a
//! detached tree (`OpenTree`) while the host's files are still accessible → mount the root → `PivotRoot`. After that,
//! no path can refer to the host, and targets are resolved inside the new root without magic links. With hooks that need
//! the mounts and the host, `OpenRoot` comes before the mounts and `PivotRoot` after them: the targets are resolved in the
//! same way, from the descriptor of the root.

use core::ffi::CStr;

use serde::{Deserialize, Serialize};

/// Version of the record format. A child refuses a newer version (operation 0, errno 0).
pub const RECORD_VERSION: u16 = 1;

/// The first message of every record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordHeader {
    /// The [`RECORD_VERSION`] with which the record was written.
    pub version: u16,
}

/// A path or name, encoded with its terminating NUL, so that the child can pass it to the kernel without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text<'a>(#[serde(borrow)] &'a [u8]);

impl<'a> Text<'a> {
    /// Borrows a C string.
    pub fn new(text: &'a CStr) -> Self {
        Self(text.to_bytes_with_nul())
    }

    /// The C string; `None` if the record is damaged (no terminating NUL, or a NUL before the end).
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

/// A sequence of NUL-terminated strings: arguments, environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block<'a> {
    /// Number of strings.
    pub count: u32,
    /// The strings, each with its NUL.
    #[serde(borrow)]
    pub bytes: &'a [u8],
}

impl<'a> Block<'a> {
    /// The strings in order. If the block is damaged, the iterator ends early, so compare the number of strings with
    /// `count`.
    pub fn iter(&self) -> impl Iterator<Item = &'a CStr> + use<'a> {
        let mut rest = self.bytes;
        core::iter::from_fn(move || {
            let text = CStr::from_bytes_until_nul(rest).ok()?;
            rest = rest.get(text.to_bytes_with_nul().len()..)?;
            Some(text)
        })
    }
}

/// Propagation type of a mount (mount_namespaces(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Propagation {
    /// Mounts are not propagated.
    Private,
    /// Mounts propagate from the host to the container.
    Slave,
    /// Mounts propagate in both directions.
    Shared,
}

/// Path of the host's mount namespace for `Op::JoinNamespace` in a container's record: the child has it as descriptor
/// 5.
pub const HOST_NAMESPACE: &CStr = c"/proc/self/fd/5";

/// Path in the monitor's mount namespace of the procfs of the pod's shared PID namespace.
pub const SHARED_PROC: &CStr = c"/shared-proc";

/// One operation. Host paths are those before `PivotRoot`; container paths are resolved inside the container's root
/// (`openat2` with RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS from the root's descriptor), so they are possible after
/// `OpenRoot` or `PivotRoot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op<'a> {
    /// Writes `data` to a file of the host with one write(2): `cgroup.procs` ("0" means the writing process),
    /// oom_score_adj, a sysctl below /proc/sys.
    WriteFile {
        /// Absolute path of the file.
        #[serde(borrow)]
        path: Text<'a>,
        /// The bytes to write.
        #[serde(borrow)]
        data: &'a [u8],
        /// Whether EPERM, EACCES and ENOENT are ignored, for example when lowering oom_score_adj without
        /// CAP_SYS_RESOURCE.
        optional: bool,
    },
    /// Creates new mount or cgroup namespaces (`unshare(2)`), after the cgroup has been joined.
    Unshare {
        /// The kinds of namespaces (CLONE_NEW…).
        flags: u32,
    },
    /// Changes the propagation of all mounts below `/` in the process's own mount namespace.
    RootPropagation {
        /// The new propagation type.
        propagation: Propagation,
    },
    /// Clones the mount tree at `path` as a detached tree (`open_tree`, OPEN_TREE_CLONE) and stores it in `slot`.
    OpenTree {
        /// Slot for the tree, below 256, chosen by the plan.
        slot: u16,
        /// Host path; symbolic links are followed.
        #[serde(borrow)]
        path: Text<'a>,
        /// Whether submounts are included.
        recursive: bool,
        /// Whether the tree is cloned in the host's mount namespace instead of the process's own, so that the clone
        /// stays in the source's peer group (bidirectional propagation).
        from_host: bool,
    },
    /// Mounts an overlay on the host path `target`.
    Overlay {
        /// Base directory of relative names in `options` (the length of mount options is limited to one page).
        #[serde(borrow)]
        directory: Text<'a>,
        /// Mount options: `lowerdir=…,upperdir=…,workdir=…,volatile`.
        #[serde(borrow)]
        options: Text<'a>,
        /// Path of an empty directory.
        #[serde(borrow)]
        target: Text<'a>,
    },
    /// Mounts a tmpfs on the host path `target`, in this mount namespace only: the pod's /dev/shm.
    Tmpfs {
        /// Mount options, for example `mode=1777,size=65536k`.
        #[serde(borrow)]
        options: Text<'a>,
        /// Path of an existing directory.
        #[serde(borrow)]
        target: Text<'a>,
        /// Mount flags (MS_…).
        flags: u64,
    },
    /// Makes `new_root`, which must be a mount, the root directory, and detaches the old root.
    PivotRoot {
        /// Host path of the new root.
        #[serde(borrow)]
        new_root: Text<'a>,
    },
    /// Mounts a new file system of type `kind` on `target`, which is created (a directory, 0755) if missing.
    Filesystem {
        /// The type of the file system: proc, sysfs, tmpfs, devpts, mqueue, cgroup2 and others.
        #[serde(borrow)]
        kind: Text<'a>,
        /// Mount options: `key=value` and flags, one string each.
        #[serde(borrow)]
        options: Block<'a>,
        /// Mount attributes MOUNT_ATTR_… (`fsmount`).
        attributes: u64,
        /// Container path of the mount point.
        #[serde(borrow)]
        target: Text<'a>,
    },
    /// Attaches the tree in `slot` at `target`, which is created if missing: a directory (0755) or an empty file, like
    /// the tree's root.
    Attach {
        /// Slot in which an earlier operation stored the tree.
        slot: u16,
        /// Container path of the mount point.
        #[serde(borrow)]
        target: Text<'a>,
        /// Mount attributes MOUNT_ATTR_… that are set on the tree's root (`mount_setattr`; before Linux 5.12 by
        /// remount).
        attributes: u64,
        /// Whether the attributes are also set on all submounts. Needs Linux 5.12: ENOSYS otherwise.
        attributes_recursive: bool,
        /// Propagation type of the whole tree.
        propagation: Propagation,
        /// Whether the operation is skipped if the target is missing, instead of creating the target: for masked and
        /// read-only paths.
        skip_missing: bool,
    },
    /// Masks `target`: mounts an empty read-only tmpfs on a directory, or the tree in `slot` (the host's /dev/null) on
    /// a file. A missing target is skipped.
    Mask {
        /// Slot with a tree of /dev/null that no other operation uses.
        slot: u16,
        /// Container path that is masked.
        #[serde(borrow)]
        target: Text<'a>,
    },
    /// Bind-mounts `target` on itself, read-only and recursive. A missing target is skipped.
    ReadOnly {
        /// Container path that becomes read-only.
        #[serde(borrow)]
        target: Text<'a>,
    },
    /// Makes the root mount itself read-only.
    ReadOnlyRoot,
    /// Creates a device node at a container path whose directory exists (`mknod`); the owner is 0:0.
    Node {
        /// Container path of the node.
        #[serde(borrow)]
        path: Text<'a>,
        /// Type and permission bits, for example S_IFCHR | 0666; the umask does not apply.
        mode: u32,
        /// Major and minor number of the device in the kernel's encoding.
        device: u64,
    },
    /// Creates a symbolic link at a container path; an existing file at the path is success.
    Symlink {
        /// Target of the link.
        #[serde(borrow)]
        content: Text<'a>,
        /// Container path of the link.
        #[serde(borrow)]
        path: Text<'a>,
    },
    /// Creates a directory at a container path, with its parents; an existing one is success.
    Directory {
        /// Container path of the directory.
        #[serde(borrow)]
        path: Text<'a>,
        /// Permission bits.
        mode: u32,
    },
    /// Sets the host name (`sethostname`).
    HostName {
        /// The name, at most 64 bytes.
        #[serde(borrow)]
        name: &'a [u8],
    },
    /// Sets the interface `lo` of this network namespace up.
    LoopbackUp,
    /// Sets a resource limit (`setrlimit`); EPERM is ignored, because a nested daemon may not raise limits.
    Limit {
        /// The resource, a number RLIMIT_….
        resource: u32,
        /// Soft limit.
        soft: u64,
        /// Hard limit.
        hard: u64,
    },
    /// Opens a controlling terminal in the container's own devpts, bind-mounts its slave on /dev/console, and sends the
    /// master side to the monitor.
    Terminal,
    /// Changes the working directory, inside the root.
    WorkingDirectory {
        /// Container path of the working directory.
        #[serde(borrow)]
        path: Text<'a>,
        /// Whether missing directories are created (0755).
        create: bool,
    },
    /// Drops every capability that is not in `keep` from the bounding set.
    BoundingSet {
        /// The kept capabilities: bit n is capability n.
        keep: u64,
    },
    /// Sets the supplementary groups (`setgroups`).
    Groups {
        /// Group IDs as little-endian u32, four bytes each.
        #[serde(borrow)]
        gids: &'a [u8],
    },
    /// Sets the group and user IDs (`setresgid`, `setresuid`); capabilities are kept for
    /// [`Op::Capabilities`].
    User {
        /// User ID of the process.
        uid: u32,
        /// Group ID of the process.
        gid: u32,
    },
    /// Sets the capability sets (`capset`), then raises the ambient set.
    Capabilities {
        /// Effective set as a bit mask.
        effective: u64,
        /// Permitted set as a bit mask.
        permitted: u64,
        /// Inheritable set as a bit mask.
        inheritable: u64,
        /// Ambient set as a bit mask.
        ambient: u64,
    },
    /// Sets no_new_privs (PR_SET_NO_NEW_PRIVS).
    NoNewPrivileges,
    /// Installs a seccomp filter of `struct sock_filter`, 8 bytes each.
    Seccomp {
        /// The instructions of the program.
        #[serde(borrow)]
        program: &'a [u8],
        /// Flags of the filter (SECCOMP_FILTER_FLAG_…).
        flags: u32,
    },
    /// Sets the file mode creation mask (`umask`).
    Umask {
        /// The new mask.
        mask: u32,
    },
    /// Executes the first candidate path that can be executed; always the last operation of a record. After ENOENT,
    /// ENOTDIR and EACCES the next candidate is tried; EACCES is reported if no later candidate works.
    Exec {
        /// Container paths of the program, tried in order.
        #[serde(borrow)]
        candidates: Block<'a>,
        /// The program's arguments (argv).
        #[serde(borrow)]
        arguments: Block<'a>,
        /// The program's environment (envp).
        #[serde(borrow)]
        environment: Block<'a>,
    },
    /// Sets the effective user and group, which become the owner of created files, to these IDs of the host;
    /// capabilities do not change. 0:0 resets the IDs. For files that must belong to the root of a user namespace and
    /// are created before the namespace is entered.
    ActAs {
        /// User ID of the host.
        uid: u32,
        /// Group ID of the host.
        gid: u32,
    },
    /// Mounts the host's directory `path` on itself in this mount namespace, idmapped with the pod's user namespace
    /// (MOUNT_ATTR_IDMAP, Linux 5.12): for the layers of an overlay (Linux 5.19).
    IdmapOver {
        /// Absolute path of the directory.
        #[serde(borrow)]
        path: Text<'a>,
    },
    /// Makes the tree in `slot` and its submounts idmapped with the pod's user namespace.
    Idmap {
        /// Slot in which an earlier operation stored the tree.
        slot: u16,
    },
    /// Resolves `path` inside the host's directory `base`, clones the mount there as a detached tree, and stores it in
    /// `slot`.
    OpenBelow {
        /// Slot for the tree, below 256, chosen by the plan.
        slot: u16,
        /// Absolute path of the directory that is the root of the resolution.
        #[serde(borrow)]
        base: Text<'a>,
        /// Relative or absolute path; `base` is its root, also for symbolic links.
        #[serde(borrow)]
        path: Text<'a>,
    },
    /// An image volume: bind-mounts the container's directory `path`, which is created if missing, on itself, so that
    /// it stays writable when the root becomes read-only. Submounts are not included, so the operation must be before
    /// all mounts except those of the kernel's file systems. ELOOP if a link of the image leads `path` out of the
    /// root's own file system or to the root itself (monitors before version 4 do not check this).
    BindSelf {
        /// Container path of the image volume.
        #[serde(borrow)]
        path: Text<'a>,
    },
    /// Changes the owner of those standard streams that are pipes to this ID of the host, so that the process can open
    /// them again through /proc.
    GiveStreams {
        /// User ID of the host.
        uid: u32,
    },
    /// Enters the pod's user namespace as its root, with a mount namespace that belongs to it, in which earlier mounts
    /// are locked (mount_namespaces(7)).
    UserNamespace,
    /// Reports to the monitor that this point is reached, and waits for `Request::Resume`.
    Wait,
    /// Enters the namespace that a file of the host refers to.
    JoinNamespace {
        /// Absolute path of the file.
        #[serde(borrow)]
        path: Text<'a>,
        /// CLONE_NEW… flag of the namespace.
        flag: u32,
    },
    /// Sets scheduling attributes (`sched_setattr`); must be before the required capabilities are dropped.
    Schedule {
        /// The scheduling policy (SCHED_…).
        policy: u32,
        /// Scheduling flags (SCHED_FLAG_…).
        flags: u64,
        /// Nice value, -20 to 19.
        nice: i32,
        /// Priority for realtime policies.
        priority: u32,
        /// Runtime, deadline and period in nanoseconds, for SCHED_DEADLINE.
        times: [u64; 3],
    },
    /// Sets the I/O priority (`ioprio_set`).
    IoPriority {
        /// I/O class: 1 realtime, 2 best effort, 3 idle.
        class: u32,
        /// Level, 0 to 7.
        level: u32,
    },
    /// Sets the memory policy (`set_mempolicy`).
    MemoryPolicy {
        /// The policy MPOL_… with its flags.
        mode: u32,
        /// Nodes 0 to 127 as a bit set.
        nodes: [u64; 2],
    },
    /// Changes the owner and group of the file at a container path; a symbolic link there is not followed.
    Owner {
        /// Container path of the file.
        #[serde(borrow)]
        path: Text<'a>,
        /// User ID in the container.
        uid: u32,
        /// Group ID in the container.
        gid: u32,
    },
    /// Verifies through descriptors that the resulting mounts are those that were planned; changes nothing. Must be
    /// after all mounts and before a user namespace is entered. Fails with a [`Mismatch`]. Since version 4 of the
    /// frames ([`crate::VERSION`]).
    Verify {
        /// The expected mounts at /proc, /sys and /dev.
        kernel: [KernelDirectory; 3],
        /// Whether the root mount must be read-only.
        root_read_only: bool,
        /// Masked paths: each must be the root of a mount, either the device 1:3 or an empty read-only tmpfs. A path
        /// that is missing in procfs or sysfs must be missing in the mount that was created at /proc or /sys.
        #[serde(borrow)]
        masked: Block<'a>,
        /// Paths that must be on a read-only mount if they exist.
        #[serde(borrow)]
        read_only: Block<'a>,
    },
    /// Only in a pod's setup record: creates the PID namespace that the pod's containers share, with a first process
    /// that only sleeps, and its procfs at [`SHARED_PROC`].
    SharedPidNamespace,
    /// Lets the process's own calls of clone, sched_setaffinity, setsid and TIOCSCTTY pass the filter of the next
    /// [`Op::Seccomp`], which would refuse them. Needed if a second process is created in the container's PID namespace.
    SpareOwnCalls,
    /// Joins the container's session keyring. The start of the container creates the keyring; its owner is the
    /// process's effective user at this point. Skipped if the kernel has no keyrings.
    Keyring,
    /// Opens the mount `path` as the container's root, before [`Op::PivotRoot`] with the same path: the operations between
    /// the two resolve container paths inside the root, and the host's files are still accessible to hooks. Since version 8.
    OpenRoot {
        /// Host path of the new root.
        #[serde(borrow)]
        path: Text<'a>,
    },
}

impl Op<'_> {
    /// The frame version ([`crate::VERSION`]) since which monitors support the operation. The daemon removes the
    /// operation from records for older monitors.
    pub fn since(&self) -> u16 {
        match self {
            Self::OpenRoot { .. } => 8,
            Self::SharedPidNamespace | Self::SpareOwnCalls | Self::Keyring => 5,
            Self::Verify { .. } => 4,
            _ => 1,
        }
    }
}

/// The file system that [`Op::Verify`] expects at /proc, /sys or /dev.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KernelDirectory {
    /// The mount is not verified, because it is omitted or is masked entirely.
    Unchecked,
    /// A new procfs, sysfs or tmpfs that this record mounted, with no other mount on top.
    Fresh,
    /// A volume of the pod that this record mounted.
    Volume,
}

/// The result of a failed [`Op::Verify`], encoded as a number above the kernel's error numbers (at most 4095).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The object that does not match: 0 to 2 are /proc, /sys and /dev, 3 is the root, [`Mismatch::FIRST_PATH`] is the
    /// first masked path, and the read-only paths follow the masked ones.
    pub item: u16,
    /// The error of examining the object; 0: the object was examined and does not match.
    pub errno: u16,
}

impl Mismatch {
    /// Item number of the root.
    pub const ROOT: u16 = 3;
    /// Item number of the first masked path.
    pub const FIRST_PATH: u16 = 4;
    /// A bit that is set in no error number.
    const FLAG: i32 = 1 << 28;
    /// Number of bits of an error number.
    const ERRNO_BITS: u32 = 12;

    /// Encodes the mismatch as a number.
    pub fn to_number(self) -> i32 {
        let errno = i32::from(self.errno) & ((1 << Self::ERRNO_BITS) - 1);
        Self::FLAG | i32::from(self.item) << Self::ERRNO_BITS | errno
    }

    /// Decodes a number; `None` for an error number of the kernel.
    pub fn from_number(number: i32) -> Option<Self> {
        if number < 0 || number & Self::FLAG == 0 {
            return None;
        }
        let item = u16::try_from((number & !Self::FLAG) >> Self::ERRNO_BITS).ok()?;
        let errno = u16::try_from(number & ((1 << Self::ERRNO_BITS) - 1)).ok()?;
        Some(Self { item, errno })
    }
}

/// Iterator over the operations of a record, in order. If the record cannot be read, the iterator returns `Err` once
/// and then ends.
pub struct Walk<'a> {
    rest: Option<&'a [u8]>,
}

/// Starts reading a record.
///
/// # Errors
/// The header is damaged, or its version is newer than [`RECORD_VERSION`].
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
