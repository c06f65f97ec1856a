//! Finds the host's device nodes for a container: those of a `devices` entry in the request, or all of them for a
//! privileged container. Rules: CRI 3.13 (a node, or every node in a directory) and 3.4 (all of /dev except the
//! container's own files).

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::Error;
use crate::collect;
use crate::plan::{DeviceKind, DeviceNode};

/// Maximum number of device nodes in one request; a host with a thousand disks has fewer.
const NODES_MAX: usize = 8192;

/// Maximum depth of directories; the deepest in use is /dev/bus/usb/001/002.
const DEPTH_MAX: usize = 8;

/// Names in /dev that are excluded also for privileged containers: they are the container's own file systems and links,
/// and udev's files.
const OF_THE_CONTAINER: [&str; 8] = ["pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev", "console"];

/// The device nodes at the host path `host`, with their paths below `container`: the device itself (links are
/// followed), or every device below a directory.
///
/// # Errors
/// [`Error::Kernel`] if the path cannot be read, [`Error::Invalid`] if it is neither a device nor a directory.
pub fn resolve(host: &Path, container: &str) -> Result<Vec<DeviceNode>, Error> {
    let metadata = fs::metadata(host).map_err(|error| Error::io("look at device", host.display(), &error))?;
    if metadata.is_dir() {
        return below(host, container, &[]);
    }
    match node(&metadata, container) {
        Some(node) => Ok(vec![node]),
        None => Err(Error::invalid("devices", format!("{} is not a device node", host.display()))),
    }
}

/// All devices in the host's /dev, for a privileged container.
///
/// # Errors
/// [`Error::Kernel`] if /dev cannot be read.
pub fn all() -> Result<Vec<DeviceNode>, Error> {
    below(Path::new("/dev"), "/dev", &OF_THE_CONTAINER)
}

/// The devices below a directory. Links are not followed, because their targets are also below /dev.
fn below(host: &Path, container: &str, without: &[&str]) -> Result<Vec<DeviceNode>, Error> {
    let mut nodes = Vec::new();
    let mut directories: Vec<(PathBuf, String, usize)> = vec![(host.to_path_buf(), container.to_string(), 0)];
    while let Some((directory, prefix, depth)) = directories.pop() {
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            // The device was removed meanwhile.
            Err(_) if depth > 0 => continue,
            Err(error) => return Err(Error::io("list devices", directory.display(), &error)),
        };
        for entry in entries.flatten() {
            // A name that is not valid UTF-8 is not a device's.
            let Ok(name) = entry.file_name().into_string() else { continue };
            let Ok(metadata) = entry.metadata() else { continue };
            if depth == 0 && without.contains(&name.as_str()) {
                continue;
            }
            let path = format!("{}/{name}", prefix.trim_end_matches('/'));
            if metadata.is_dir() && depth < DEPTH_MAX {
                directories.push((entry.path(), path, depth + 1));
            } else if let Some(node) = node(&metadata, &path) {
                nodes.push(node);
            }
            if nodes.len() > NODES_MAX {
                return Err(Error::invalid(
                    "devices",
                    format!("{} has more than {NODES_MAX} nodes", host.display()),
                ));
            }
        }
    }
    collect::sort_by(&mut nodes, |one, other| one.path.cmp(&other.path));
    Ok(nodes)
}

fn node(metadata: &fs::Metadata, path: &str) -> Option<DeviceNode> {
    let kind = match metadata.file_type() {
        kind if kind.is_char_device() => DeviceKind::Character,
        kind if kind.is_block_device() => DeviceKind::Block,
        _ => return None,
    };
    let (major, minor) = numbers(metadata.rdev());
    Some(DeviceNode {
        path: path.to_string(),
        kind,
        major,
        minor,
        mode: metadata.mode() & 0o7777,
        owner: (0, 0),
    })
}

/// Major and minor of a `dev_t` as stat(2) returns it: 12 bits of major from bit 8, 20 of minor around them. The
/// kernel has no larger numbers.
fn numbers(rdev: u64) -> (u32, u32) {
    let major = (rdev >> 8) & 0xfff;
    let minor = (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00);
    (major as u32, minor as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_or_a_directory_of_devices_is_resolved() {
        let null = resolve(Path::new("/dev/null"), "/dev/mine").unwrap();
        let kind = DeviceKind::Character;
        assert_eq!(
            null,
            [DeviceNode { path: "/dev/mine".into(), kind, major: 1, minor: 3, mode: 0o666, owner: (0, 0) }]
        );
        let many = resolve(Path::new("/dev"), "/devices/").unwrap();
        assert!(many.iter().any(|node| node.path == "/devices/zero" && node.minor == 5));
        assert!(matches!(resolve(Path::new("/etc/passwd"), "/dev/x"), Err(Error::Invalid { .. })));
        assert!(matches!(resolve(Path::new("/dev/no-such"), "/dev/x"), Err(Error::Kernel { .. })));
    }

    #[test]
    fn privileged_gets_all_but_what_a_container_has_of_its_own() {
        let all = all().unwrap();
        assert!(all.iter().any(|node| node.path == "/dev/null"));
        for own in ["/dev/pts/", "/dev/shm/", "/dev/console"] {
            assert!(!all.iter().any(|node| node.path.starts_with(own)), "{own}");
        }
    }

    #[test]
    fn device_numbers_are_decoded_like_those_of_stat() {
        assert_eq!(numbers(0x103), (1, 3));
        assert_eq!(numbers(0x8800), (136, 0));
        assert_eq!(numbers(0x0011_0300), (259, 256));
    }
}
