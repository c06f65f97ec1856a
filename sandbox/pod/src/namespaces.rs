//! The namespaces of a container: its start sends descriptors of them to the monitor, and its execs join them. The
//! current namespaces of the main process are not used, because that process may have called unshare(2) since, and an
//! exec could then lack IDs or files.
//!
//! No descriptors are needed for the pod's namespaces, because the monitor and its clones are in them, and for the PID
//! namespace, because a process cannot leave it.

use coracle_sys::{Errno, Fd, FdRef, fs, process, socket};

use crate::mounts::Identity;

/// The kinds of namespaces that a container may have of its own, in the order in which an exec joins them. The mount
/// namespace is last, because paths resolve differently after it.
pub(crate) const KINDS: [(u64, &core::ffi::CStr); 5] = [
    (process::CLONE_NEWCGROUP, c"cgroup"),
    (process::CLONE_NEWNET, c"net"),
    (process::CLONE_NEWIPC, c"ipc"),
    (process::CLONE_NEWUTS, c"uts"),
    (process::CLONE_NEWNS, c"mnt"),
];

/// Index of the mount namespace in [`KINDS`].
pub(crate) const MOUNTS: usize = 4;

/// First byte of the message with a start's namespaces to the monitor.
const MESSAGE: u8 = b'n';
/// Length of the message in bytes: kind, a bit set of the namespaces, whether there is a procfs, and its identity.
const MESSAGE_BYTES: usize = 3 + 4 + 4 + 8;

/// The monitor's descriptors of a container's namespaces.
#[derive(Default)]
pub(crate) struct ContainerNamespaces {
    /// The container's own namespaces, in the order of [`KINDS`]; `None` for kinds that it does not have.
    pub(crate) namespaces: [Option<Fd>; KINDS.len()],
    /// Identity of the procfs at /proc when the container was started; `None` without a procfs.
    pub(crate) proc: Option<Identity>,
}

/// The state that a start collects and then sends to the monitor.
pub(crate) struct OwnNamespaces {
    /// Descriptor of /proc/self/ns in the node's procfs, which later has no path.
    directory: Fd,
    /// CLONE_NEW… flags of the namespaces that the process has created or joined.
    pub(crate) own: u64,
    pub(crate) proc: Option<Identity>,
}

impl OwnNamespaces {
    /// Opens /proc/self/ns; the node's procfs must be mounted at /proc.
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = fs::O_PATH | fs::O_DIRECTORY;
        let directory = fs::open(FdRef::WORKING_DIRECTORY, c"/proc/self/ns", flags, 0)?;
        Ok(Self { directory, own: 0, proc: None })
    }

    /// Opens the mount namespace of this process.
    pub(crate) fn mounts(&self) -> Result<Fd, Errno> {
        fs::open(self.directory.borrow(), KINDS[MOUNTS].1, fs::O_RDONLY, 0)
    }

    /// Sends those current namespaces of this process that are not the pod's to the monitor.
    pub(crate) fn tell(&self, line: FdRef<'_>) -> Result<(), Errno> {
        let mut opened: [Option<Fd>; KINDS.len()] = [const { None }; KINDS.len()];
        let mut message = [0; MESSAGE_BYTES];
        message[0] = MESSAGE;
        for (bit, (slot, (flag, name))) in opened.iter_mut().zip(KINDS).enumerate() {
            if self.own & flag != 0 {
                *slot = Some(fs::open(self.directory.borrow(), name, fs::O_RDONLY, 0)?);
                message[1] |= 1 << bit;
            }
        }
        if let Some((major, minor, inode)) = self.proc {
            message[2] = 1;
            message[3..7].copy_from_slice(&major.to_ne_bytes());
            message[7..11].copy_from_slice(&minor.to_ne_bytes());
            message[11..].copy_from_slice(&inode.to_ne_bytes());
        }
        let mut files = heapless::Vec::<FdRef<'_>, { KINDS.len() }>::new();
        for file in opened.iter().flatten() {
            files.push(file.borrow()).map_err(|_| Errno::EMSGSIZE)?;
        }
        socket::send(line, &message, &files)
    }
}

/// Descriptors that a process sent over its socket before exec.
#[derive(Default)]
pub(crate) struct Received {
    /// The master side of the process's terminal; `None` if it has none.
    pub(crate) terminal: Option<Fd>,
    pub(crate) home: ContainerNamespaces,
}

/// Receives all pending messages.
pub(crate) fn receive(line: FdRef<'_>) -> Received {
    let mut told = Received::default();
    let mut message = [0; MESSAGE_BYTES];
    while let Ok(received) = socket::receive(line, &mut message) {
        let mut files = received.descriptors.into_iter().flatten();
        if received.length == 0 {
            break;
        }
        if received.length < MESSAGE_BYTES || message[0] != MESSAGE {
            told.terminal = files.next();
            continue;
        }
        for (bit, slot) in told.home.namespaces.iter_mut().enumerate() {
            if message[1] >> bit & 1 == 1 {
                *slot = files.next();
            }
        }
        let [_, _, has_proc, a, b, c, d, e, f, g, h, inode @ ..] = message;
        let device = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
        told.home.proc = (has_proc == 1).then_some((device.0, device.1, u64::from_ne_bytes(inode)));
    }
    told
}

/// Joins a container's namespaces, the pod's user namespace last, because the process needs the node's root privileges
/// until then.
pub(crate) fn join(
    namespaces: &[Option<FdRef<'_>>; KINDS.len()],
    user: Option<FdRef<'_>>,
) -> Result<(), Errno> {
    for (namespace, (flag, _)) in namespaces.iter().zip(KINDS) {
        if let Some(namespace) = namespace {
            process::setns(*namespace, flag)?;
        }
    }
    match user {
        Some(user) => process::setns(user, process::CLONE_NEWUSER),
        None => Ok(()),
    }
}
