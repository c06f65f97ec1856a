//! Resolves paths of a container. The kernel resolves each path inside the container's root, from the root's
//! descriptor, without magic links (openat2, Linux 5.6), so no link in an image or a shared volume can lead outside.
//! Missing components are created one by one below the descriptor of their parent.

use core::cell::Cell;
use core::ffi::CStr;

use coracle_sys::{Errno, Fd, FdRef, fs};

/// Maximum length of a path in the kernel, with its NUL.
const PATH_BYTES_MAX: usize = 4096;

/// Maximum number of retries of a resolution that raced with a rename (EAGAIN). A container that shares a volume could
/// rename forever.
const ATTEMPTS_MAX: u32 = 32;

/// Maximum number of dangling links that are followed when a path is created. An example is an /etc/resolv.conf that
/// points into an empty /run.
const LINKS_MAX: u32 = 4;

/// Mount points of the kernel's file systems. Mounts at these paths are recorded, to distinguish a link to one of them
/// from the path itself.
pub(crate) const KERNEL: [&CStr; 3] = [c"/proc", c"/sys", c"/dev"];

/// The kind of file to create if a path is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Make {
    /// A directory with these permission bits.
    Directory(u32),
    /// An empty file.
    File,
}

/// The root directory of a container.
pub(crate) struct Root {
    directory: Fd,
    kernel: [Cell<Made>; KERNEL.len()],
}

/// A mount that was created at one of [`KERNEL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Made {
    /// The mount id; 0: there is no mount, or Linux is older than 5.8.
    pub(crate) mount: u64,
    /// The device of the mount's file system: major, minor.
    pub(crate) device: (u32, u32),
}

impl Root {
    /// Opens the root directory of the calling process, which must have called pivot_root.
    pub(crate) fn open() -> Result<Self, Errno> {
        Self::at(c"/")
    }

    /// Opens any directory, to resolve paths inside it.
    pub(crate) fn at(directory: &CStr) -> Result<Self, Errno> {
        let directory = fs::open(FdRef::WORKING_DIRECTORY, directory, fs::O_PATH | fs::O_DIRECTORY, 0)?;
        Ok(Self { directory, kernel: Default::default() })
    }

    /// The descriptor of the root directory.
    pub(crate) fn directory(&self) -> FdRef<'_> {
        self.directory.borrow()
    }

    /// Records the mount that `mounted` refers to if `target` is one of [`KERNEL`].
    pub(crate) fn remember(&self, target: &CStr, mounted: FdRef<'_>) -> Result<(), Errno> {
        let Some(index) = KERNEL.iter().position(|path| *path == target) else { return Ok(()) };
        let stat = fs::stat(mounted)?;
        self.kernel[index].set(Made { mount: stat.mount, device: stat.device() });
        Ok(())
    }

    /// The recorded mounts at [`KERNEL`].
    pub(crate) fn made(&self) -> [Made; KERNEL.len()] {
        [self.kernel[0].get(), self.kernel[1].get(), self.kernel[2].get()]
    }

    /// Opens `path` inside the root.
    pub(crate) fn find(&self, path: &CStr, flags: fs::OFlags) -> Result<Fd, Errno> {
        let resolve = fs::RESOLVE_IN_ROOT | fs::RESOLVE_NO_MAGICLINKS;
        for _ in 0..ATTEMPTS_MAX {
            match fs::open_resolved(self.directory.borrow(), path, flags, resolve) {
                Err(Errno::EAGAIN) => {}
                found => return found,
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Opens `path` inside the root with O_PATH; if it is missing, creates it and its parent directories (0755).
    pub(crate) fn find_or_make(&self, path: &CStr, make: Make) -> Result<Fd, Errno> {
        match self.find(path, fs::O_PATH) {
            Err(Errno::ENOENT) => self.make(path, make, LINKS_MAX),
            found => found,
        }
    }

    /// Calls `with` with the parent directory of `path` and the last component.
    // Not inlined: its path buffers would be part of the walker's frame, and stay resident in the monitor.
    #[inline(never)]
    pub(crate) fn in_parent(
        &self,
        path: &CStr,
        with: impl FnOnce(FdRef<'_>, &CStr) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut parent = [0; PATH_BYTES_MAX];
        let bytes = trimmed(path);
        let start = bytes.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        let mut name = [0; PATH_BYTES_MAX];
        let name = terminated(&mut name, &bytes[start..])?;
        if start == 0 {
            return with(self.directory.borrow(), name);
        }
        let parent = self.find(terminated(&mut parent, &bytes[..start])?, fs::O_PATH | fs::O_DIRECTORY)?;
        with(parent.borrow(), name)
    }

    /// Creates `path` inside the root; the targets of at most `links` dangling links are created, too.
    fn make(&self, path: &CStr, make: Make, links: u32) -> Result<Fd, Errno> {
        let bytes = trimmed(path);
        let mut parent: Option<Fd> = None;
        let mut start = 0;
        while start < bytes.len() {
            let length = bytes[start..].iter().position(|byte| *byte == b'/').unwrap_or(bytes.len() - start);
            let end = start + length;
            if length > 0 {
                let make = if end == bytes.len() { make } else { Make::Directory(0o755) };
                let parent_fd = parent.as_ref().map_or(self.directory.borrow(), Fd::borrow);
                parent = Some(self.step(parent_fd, bytes, (start, end), make, links)?);
            }
            start = end + 1;
        }
        parent.ok_or(Errno::ENOENT)
    }

    /// Opens `bytes[..end]`; if it is missing, first creates its last component below `parent`.
    // Not inlined: its path buffers would be part of the walker's frame, and stay resident in the monitor.
    #[inline(never)]
    fn step(
        &self,
        parent: FdRef<'_>,
        bytes: &[u8],
        (start, end): (usize, usize),
        make: Make,
        links: u32,
    ) -> Result<Fd, Errno> {
        let mut buffer = [0; PATH_BYTES_MAX];
        let prefix = terminated(&mut buffer, &bytes[..end])?;
        match self.find(prefix, fs::O_PATH) {
            Err(Errno::ENOENT) => {}
            found => return found,
        }
        let name =
            CStr::from_bytes_until_nul(&prefix.to_bytes_with_nul()[start..]).map_err(|_| Errno::EINVAL)?;
        let made = match make {
            Make::Directory(mode) => fs::make_directory(parent, name, mode),
            Make::File => fs::make_node(parent, name, fs::S_IFREG | 0o644, 0),
        };
        match made {
            Ok(()) => self.find(prefix, fs::O_PATH),
            // Another process has created it, or it is a dangling link.
            Err(Errno::EEXIST) => match self.find(prefix, fs::O_PATH) {
                Err(Errno::ENOENT) => self.behind_link(parent, &bytes[..start], name, make, links),
                found => found,
            },
            Err(errno) => Err(errno),
        }
    }

    /// Creates the target of the link `name`; `above` is the path of its directory, with the trailing slash. The target
    /// is resolved inside the root like all paths, so that `..` and `/` stay inside.
    #[inline(never)]
    fn behind_link(
        &self,
        parent: FdRef<'_>,
        above: &[u8],
        name: &CStr,
        make: Make,
        links: u32,
    ) -> Result<Fd, Errno> {
        let links = links.checked_sub(1).ok_or(Errno::ELOOP)?;
        let mut content = [0; PATH_BYTES_MAX];
        let length = fs::read_link(parent, name, &mut content)?;
        let above = if content.starts_with(b"/") { &above[..0] } else { above };
        let mut path = [0; PATH_BYTES_MAX];
        let room = path[..PATH_BYTES_MAX - 1].get_mut(..above.len() + length).ok_or(Errno::ENAMETOOLONG)?;
        room[..above.len()].copy_from_slice(above);
        room[above.len()..].copy_from_slice(&content[..length]);
        self.make(CStr::from_bytes_until_nul(&path).map_err(|_| Errno::EINVAL)?, make, links)
    }
}

/// The path without trailing slashes.
fn trimmed(path: &CStr) -> &[u8] {
    let mut bytes = path.to_bytes();
    while let Some(shorter) = bytes.strip_suffix(b"/") {
        bytes = shorter;
    }
    bytes
}

fn terminated<'a>(buffer: &'a mut [u8; PATH_BYTES_MAX], bytes: &[u8]) -> Result<&'a CStr, Errno> {
    // One byte is reserved for the NUL.
    buffer[..PATH_BYTES_MAX - 1].get_mut(..bytes.len()).ok_or(Errno::ENAMETOOLONG)?.copy_from_slice(bytes);
    CStr::from_bytes_until_nul(buffer).map_err(|_| Errno::EINVAL)
}
