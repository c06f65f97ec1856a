//! Sets SELinux labels of volumes (CRI `selinux_relabel`). The content of a volume is untrusted, and
//! containers may change it during the operation. Therefore symbolic links are not followed and mounts not
//! crossed: each name is opened by openat2 with these restrictions, and the label is set on the opened file.
//! Stack and number of descriptors do not depend on the depth of directories.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use coracle_job::Failure;
use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, XattrFlags, openat2};
use rustix::io::Errno;

use crate::io_failure;

/// Directories of the node that are never relabelled, because other programs need their labels: otherwise the
/// node could no longer boot or permit logins. The last ones may contain volumes in subdirectories.
const NEVER: [&str; 22] = [
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/media", "/mnt", "/opt",
    "/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/var/tmp",
];

/// Directories of [`NEVER`] whose content must not be relabelled, either.
const NEVER_BELOW: [&str; 10] =
    ["/bin", "/boot", "/dev", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/usr"];

/// Directories of state whose direct subdirectories must not be relabelled, either.
const NEVER_OF_STATE: [&str; 4] = ["/var/lib", "/var/log", "/var/cache", "/var/run"];

/// Maximum number of directories of one volume that wait to be read.
const DIRECTORIES_MAX: usize = 1 << 20;

const LABEL: &str = "security.selinux";

/// Labels each path recursively. A missing path is skipped: the mount creates or refuses it. A file system
/// without labels is skipped as in every runtime: its mount options determine the label.
///
/// # Errors
/// A path is a system directory of the node; those of the system calls.
pub fn run(paths: &[PathBuf], label: &str) -> Result<(), Failure> {
    // The kernel stores labels with a terminating NUL.
    let label = [label.as_bytes(), b"\0"].concat();
    paths.iter().try_for_each(|path| relabel(path, &label))
}

fn relabel(path: &Path, label: &[u8]) -> Result<(), Failure> {
    let real = match path.canonicalize() {
        Ok(real) => real,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_failure("resolve", path, &error)),
    };
    let is = |one: &&str| real == Path::new(one);
    let is_below = |one: &&str| real.starts_with(one);
    if NEVER.iter().chain(&NEVER_OF_STATE).any(is) || NEVER_BELOW.iter().any(is_below) {
        return Err(Failure::invalid(format!(
            "{}: a system directory of the node, which must keep its label",
            real.display()
        )));
    }
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let failed = |errno: Errno| io_failure("relabel", path, &errno.into());
    let top =
        openat2(rustix::fs::CWD, &real, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).map_err(failed)?;
    match set(&top, label) {
        Err(Errno::OPNOTSUPP) => return Ok(()),
        done => done.map_err(failed)?,
    }
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&top).map_err(failed)?.st_mode);
    if kind == FileType::Directory {
        label_below(&top, label)
            .map_err(|(below, errno)| io_failure("relabel", &path.join(below), &errno.into()))
    } else {
        Ok(())
    }
}

/// The path at which an operation failed, and the error.
type Below = (PathBuf, Errno);

fn label_below(top: &OwnedFd, label: &[u8]) -> Result<(), Below> {
    use std::os::unix::ffi::OsStrExt;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    // Paths relative to the top directory.
    let mut waiting = vec![CString::from(c".")];
    while let Some(path) = waiting.pop() {
        let shown = PathBuf::from(std::ffi::OsStr::from_bytes(path.as_bytes()));
        let failed = |errno| (shown.clone(), errno);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = match openat2(top, &path, flags, Mode::empty(), resolve) {
            Ok(directory) => directory,
            // It was removed or replaced meanwhile.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => continue,
            Err(errno) => return Err(failed(errno)),
        };
        for entry in Dir::read_from(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = match openat2(&directory, name, flags, Mode::empty(), resolve) {
                Ok(file) => file,
                Err(Errno::NOENT | Errno::XDEV) => continue,
                Err(errno) => return Err(failed(errno)),
            };
            set(&file, label).map_err(failed)?;
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&file).map_err(failed)?.st_mode);
            if kind == FileType::Directory {
                if waiting.len() == DIRECTORIES_MAX {
                    return Err(failed(Errno::NOBUFS));
                }
                let below = [path.as_bytes(), b"/", name.to_bytes()].concat();
                waiting.extend(CString::new(below).ok());
            }
        }
    }
    Ok(())
}

/// Sets the label of an open file through its link in procfs: fsetxattr would require that the file is open
/// for reading, which has side effects for devices and FIFOs. A file that already has the label is not
/// written.
fn set(file: impl AsFd, label: &[u8]) -> Result<(), Errno> {
    let link = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let mut has = [0; 256];
    match rustix::fs::getxattr(&link, LABEL, &mut has) {
        Ok(length) if has[..length] == *label => return Ok(()),
        Ok(_) | Err(Errno::NODATA | Errno::RANGE) => {}
        Err(errno) => return Err(errno),
    }
    rustix::fs::setxattr(&link, LABEL, label, XattrFlags::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The label of a file. Works without SELinux: root can set the attribute on any file system with
    /// extended attributes.
    fn label_of(path: &Path) -> Option<Vec<u8>> {
        let mut label = [0; 256];
        let length = rustix::fs::lgetxattr(path, LABEL, &mut label).ok()?;
        Some(label[..length].to_vec())
    }

    #[test]
    fn files_are_labelled_recursively_without_following_links() {
        use std::os::unix::fs::symlink;
        let folder = PathBuf::from(format!("/var/tmp/coracle-relabel-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let volume = folder.join("volume");
        std::fs::create_dir_all(volume.join("a/b")).unwrap();
        std::fs::create_dir_all(folder.join("outside")).unwrap();
        std::fs::write(volume.join("a/b/file"), "").unwrap();
        std::fs::write(folder.join("outside/file"), "").unwrap();
        symlink("../outside", volume.join("link")).unwrap();
        let before = label_of(&folder.join("outside"));
        run(&[volume.clone(), folder.join("missing")], "u:r:t:s0:c1,c2").unwrap();
        let expected = Some(b"u:r:t:s0:c1,c2\0".to_vec());
        if label_of(&volume).is_none() {
            println!("skipped: not root, or a file system without labels");
            return;
        }
        for name in ["", "a", "a/b", "a/b/file", "link"] {
            assert_eq!(label_of(&volume.join(name)), expected, "{name}");
        }
        for name in ["outside", "outside/file"] {
            assert_eq!(label_of(&folder.join(name)), before, "{name}");
        }
        // A volume that is given by a symbolic link.
        symlink("volume", folder.join("alias")).unwrap();
        run(&[folder.join("alias")], "u:r:t:s0:c3,c4").unwrap();
        assert_eq!(label_of(&volume.join("a/b/file")), Some(b"u:r:t:s0:c3,c4\0".to_vec()));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn directories_of_the_node_keep_their_labels() {
        for path in
            ["/", "/etc", "/usr", "/usr/bin", "/var", "/var/lib", "/proc/self", "/dev/null", "/tmp/../etc"]
        {
            let refused = run(&[PathBuf::from(path)], "u:r:t:s0").unwrap_err();
            assert!(
                refused.message.ends_with(": a system directory of the node, which must keep its label"),
                "{path}: {refused:?}"
            );
        }
    }
}
