//! Paths of a container: every one is resolved by the kernel inside the container's root, from the root's descriptor,
//! without magic links (openat2, Linux 5.6). An image or a shared volume may hold any link it likes; none leads out.
//! What is missing is made component by component below the descriptor of the one before.

use core::cell::Cell;
use core::ffi::CStr;

use coracle_sys::{Errno, Fd, FdRef, fs};

/// Longest path the kernel takes, with its NUL.
const PATH_BYTES_MAX: usize = 4096;

/// How often a look-up that raced with a rename is repeated; then EAGAIN. A container that shares a volume could
/// rename for ever.
const ATTEMPTS_MAX: u32 = 32;

/// Links to nothing that are followed in making one path: a /etc/resolv.conf that points into an empty /run is one.
const LINKS_MAX: u32 = 4;

/// Where a container has the kernel's own files. Which mounts were made there is remembered, so that a link of an image to
/// one of them is told apart from the place itself.
pub(crate) const KERNEL: [&CStr; 3] = [c"/proc", c"/sys", c"/dev"];

/// What to make where nothing is.
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

/// A mount that was made at one of [`KERNEL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Made {
    /// Its id; 0: there is none, or Linux is older than 5.8.
    pub(crate) mount: u64,
    /// Its file system's device.
    pub(crate) device: (u32, u32),
}

impl Root {
    /// That of the calling process, which must have pivoted into it.
    pub(crate) fn open() -> Result<Self, Errno> {
        Self::at(c"/")
    }

    /// Any directory, to resolve paths inside it.
    pub(crate) fn at(directory: &CStr) -> Result<Self, Errno> {
        let directory = fs::open(FdRef::WORKING_DIRECTORY, directory, fs::O_PATH | fs::O_DIRECTORY, 0)?;
        Ok(Self { directory, kernel: Default::default() })
    }

    /// Its descriptor.
    pub(crate) fn directory(&self) -> FdRef<'_> {
        self.directory.borrow()
    }

    /// Remembers the mount `mounted` refers to, where `target` is one of [`KERNEL`].
    pub(crate) fn remember(&self, target: &CStr, mounted: FdRef<'_>) -> Result<(), Errno> {
        let Some(index) = KERNEL.iter().position(|path| *path == target) else { return Ok(()) };
        let stat = fs::stat(mounted)?;
        self.kernel[index].set(Made { mount: stat.mount, device: stat.device() });
        Ok(())
    }

    /// The mounts that were made at [`KERNEL`].
    pub(crate) fn made(&self) -> [Made; KERNEL.len()] {
        [self.kernel[0].get(), self.kernel[1].get(), self.kernel[2].get()]
    }

    /// Opens what `path` names in the container.
    pub(crate) fn find(&self, path: &CStr, flags: u64) -> Result<Fd, Errno> {
        let resolve = fs::RESOLVE_IN_ROOT | fs::RESOLVE_NO_MAGICLINKS;
        for _ in 0..ATTEMPTS_MAX {
            match fs::open_resolved(self.directory.borrow(), path, flags, resolve) {
                Err(Errno::EAGAIN) => {}
                found => return found,
            }
        }
        Err(Errno::EAGAIN)
    }

    /// As [`Root::find`] with O_PATH; where nothing is, makes it and the directories (0755) on the way.
    pub(crate) fn find_or_make(&self, path: &CStr, make: Make) -> Result<Fd, Errno> {
        match self.find(path, fs::O_PATH) {
            Err(Errno::ENOENT) => self.make(path, make, LINKS_MAX),
            found => found,
        }
    }

    /// The directory that holds the last component of `path`, handed with that component to `with`.
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

    /// Makes `path`; at most `links` links that lead nowhere are followed by making what they lead to.
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

    /// Finds `bytes[..end]`; where nothing is, makes its last component below `parent` first.
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
            // Someone was faster, or a link that leads nowhere is there.
            Err(Errno::EEXIST) => match self.find(prefix, fs::O_PATH) {
                Err(Errno::ENOENT) => self.behind_link(parent, &bytes[..start], name, make, links),
                found => found,
            },
            Err(errno) => Err(errno),
        }
    }

    /// Makes what the link `name` leads to; `above` is the path of its directory, with its slash. The path is resolved
    /// inside the root like every other, so that `..` and `/` end there.
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

/// Without slashes at the end.
fn trimmed(path: &CStr) -> &[u8] {
    let mut bytes = path.to_bytes();
    while let Some(shorter) = bytes.strip_suffix(b"/") {
        bytes = shorter;
    }
    bytes
}

fn terminated<'a>(buffer: &'a mut [u8; PATH_BYTES_MAX], bytes: &[u8]) -> Result<&'a CStr, Errno> {
    // One byte stays for the NUL.
    buffer[..PATH_BYTES_MAX - 1].get_mut(..bytes.len()).ok_or(Errno::ENAMETOOLONG)?.copy_from_slice(bytes);
    CStr::from_bytes_until_nul(buffer).map_err(|_| Errno::EINVAL)
}
