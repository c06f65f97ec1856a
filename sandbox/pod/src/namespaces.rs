//! The namespaces of a container: its start hands descriptors of them to the monitor, its execs join them. Not those that
//! its main process is in: that may have made others for itself (unshare(2)) since, in which an exec would find itself
//! without ids or files.
//!
//! What is the pod's needs no descriptor: the monitor is in it, and so is whatever it clones. The PID namespace needs
//! none either: a process cannot leave it.

use coracle_sys::{Errno, Fd, FdRef, fs, process, socket};

use crate::mounts::Identity;

/// Kinds a container may have of its own, in the order in which an exec joins them. The mount namespace is last: paths mean
/// something else after it.
pub(crate) const KINDS: [(u64, &core::ffi::CStr); 5] = [
    (process::CLONE_NEWCGROUP, c"cgroup"),
    (process::CLONE_NEWNET, c"net"),
    (process::CLONE_NEWIPC, c"ipc"),
    (process::CLONE_NEWUTS, c"uts"),
    (process::CLONE_NEWNS, c"mnt"),
];

/// The mount namespace among [`KINDS`].
pub(crate) const MOUNTS: usize = 4;

/// First byte of the message to the monitor.
const MESSAGE: u8 = b'n';
/// Kind, which ones as the bits of a byte, whether there is a procfs, and which.
const MESSAGE_BYTES: usize = 3 + 4 + 4 + 8;

/// What the monitor knows of a container's home.
#[derive(Default)]
pub(crate) struct ContainerNamespaces {
    /// Those of its own, as in [`KINDS`].
    pub(crate) namespaces: [Option<Fd>; KINDS.len()],
    /// The procfs it was started with at /proc.
    pub(crate) proc: Option<Identity>,
}

/// What a start remembers until it tells.
pub(crate) struct OwnNamespaces {
    /// /proc/self/ns of the node's procfs, which is out of reach by name later.
    directory: Fd,
    /// CLONE_NEW… of those that it has made or joined.
    pub(crate) own: u64,
    pub(crate) proc: Option<Identity>,
}

impl OwnNamespaces {
    /// While the node's procfs is in view.
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = fs::O_PATH | fs::O_DIRECTORY;
        let directory = fs::open(FdRef::WORKING_DIRECTORY, c"/proc/self/ns", flags, 0)?;
        Ok(Self { directory, own: 0, proc: None })
    }

    /// The mount namespace of this process.
    pub(crate) fn mounts(&self) -> Result<Fd, Errno> {
        fs::open(self.directory.borrow(), KINDS[MOUNTS].1, fs::O_RDONLY, 0)
    }

    /// Hands the namespaces that this process is in now, as far as they are its own, to the monitor.
    pub(crate) fn tell(&self, line: FdRef<'_>) -> Result<(), Errno> {
        let mut opened: [Option<Fd>; KINDS.len()] = [const { None }; KINDS.len()];
        let mut message = [0; MESSAGE_BYTES];
        message[0] = MESSAGE;
        for (bit, (place, (flag, name))) in opened.iter_mut().zip(KINDS).enumerate() {
            if self.own & flag != 0 {
                *place = Some(fs::open(self.directory.borrow(), name, fs::O_RDONLY, 0)?);
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

/// What a process sent over its line before exec.
#[derive(Default)]
pub(crate) struct Received {
    /// The master side of its terminal.
    pub(crate) terminal: Option<Fd>,
    pub(crate) home: ContainerNamespaces,
}

/// Takes all of it.
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
        for (bit, place) in told.home.namespaces.iter_mut().enumerate() {
            if message[1] >> bit & 1 == 1 {
                *place = files.next();
            }
        }
        let [_, _, has_proc, a, b, c, d, e, f, g, h, inode @ ..] = message;
        let device = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
        told.home.proc = (has_proc == 1).then_some((device.0, device.1, u64::from_ne_bytes(inode)));
    }
    told
}

/// Joins a container's namespaces, the pod's user namespace last: until then this is the node's root.
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
