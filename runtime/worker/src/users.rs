//! /etc/passwd and /etc/group of an image, taken out of its layers once, so that creating a container needs no look
//! into a merged tree: names resolve from these copies (CRI 3.9).

use std::fs::{self, Metadata};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use coracle_job::Failure;

use crate::failure::{invalid, io_failure};
use crate::store::{Move, Store};

/// Longest file taken: a thousand users are 60 KiB.
const BYTES_MAX: u64 = 1 << 20;
/// As many symlinks as the kernel follows in one path.
const LINKS_MAX: u32 = 40;

/// Writes what becomes `images/users/HEX/{passwd,group}` of image `id` once it is published: where it is, and where it
/// goes. A file that the image lacks is left out; none where that is there already. The directories are those of its
/// layers, topmost first.
pub(crate) fn extract(store: &Store, id: &str, directories: &[PathBuf]) -> Result<Option<Move>, Failure> {
    let target = store.users(id)?;
    if target.is_dir() {
        return Ok(None);
    }
    let aside = store.new_spool()?;
    match write(&aside, directories) {
        Ok(()) => Ok(Some((aside, target))),
        Err(failure) => {
            // Its own failure would hide the first one; the daemon sweeps such directories at its start.
            let _ = fs::remove_dir_all(&aside);
            Err(failure)
        }
    }
}

fn write(aside: &Path, layers: &[PathBuf]) -> Result<(), Failure> {
    for name in ["passwd", "group"] {
        let Some(found) = find(layers, &format!("etc/{name}"))? else { continue };
        let mut content = Vec::new();
        let read = fs::File::open(&found).and_then(|file| file.take(BYTES_MAX + 1).read_to_end(&mut content));
        read.map_err(|error| io_failure("read", &found, &error))?;
        if content.len() as u64 > BYTES_MAX {
            return Err(invalid(format!("/etc/{name} of the image is longer than {BYTES_MAX} bytes")));
        }
        let path = aside.join(name);
        fs::write(&path, content).map_err(|error| io_failure("write", &path, &error))?;
    }
    Ok(())
}

/// The regular file that `path` leads to in the merged view of `layers`, topmost first.
fn find(layers: &[PathBuf], path: &str) -> Result<Option<PathBuf>, Failure> {
    let mut rest: Vec<String> = path.split('/').rev().map(str::to_owned).collect();
    let mut done: Vec<String> = Vec::new();
    let mut links = 0;
    while let Some(name) = rest.pop() {
        match name.as_str() {
            "" | "." => continue,
            ".." => {
                done.pop();
                continue;
            }
            _ => {}
        }
        let Some((found, metadata)) = topmost(&merged(layers, &done)?, &name)? else { return Ok(None) };
        if metadata.is_symlink() {
            links += 1;
            if links > LINKS_MAX {
                return Ok(None); // the kernel would say ELOOP: no such file for a process in the image, too
            }
            let target = fs::read_link(&found).map_err(|error| io_failure("read link", &found, &error))?;
            if target.is_absolute() {
                done.clear();
            }
            rest.extend(target.to_string_lossy().split('/').rev().map(str::to_owned));
        } else if metadata.is_dir() {
            done.push(name);
        } else {
            return Ok((rest.is_empty() && metadata.is_file()).then_some(found));
        }
    }
    Ok(None)
}

/// The directories that make up one merged directory, topmost first.
fn merged(layers: &[PathBuf], path: &[String]) -> Result<Vec<PathBuf>, Failure> {
    let mut directories = layers.to_vec();
    for name in path {
        let mut below = Vec::new();
        for directory in &directories {
            let candidate = directory.join(name);
            match status(&candidate)? {
                None => {}
                Some(metadata) if metadata.is_dir() => {
                    let opaque = is_opaque(&candidate);
                    below.push(candidate);
                    if opaque {
                        break;
                    }
                }
                Some(_) => break, // a whiteout or a file: nothing below it is seen
            }
        }
        directories = below;
    }
    Ok(directories)
}

fn topmost(directories: &[PathBuf], name: &str) -> Result<Option<(PathBuf, Metadata)>, Failure> {
    for directory in directories {
        let candidate = directory.join(name);
        if let Some(metadata) = status(&candidate)? {
            let is_whiteout = metadata.file_type().is_char_device() && metadata.rdev() == 0;
            return Ok((!is_whiteout).then_some((candidate, metadata)));
        }
    }
    Ok(None)
}

fn status(path: &Path) -> Result<Option<Metadata>, Failure> {
    match path.symlink_metadata() {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_failure("stat", path, &error)),
    }
}

/// Whether a directory hides what layers below have in it.
pub(crate) fn is_opaque(directory: &Path) -> bool {
    let mut value = [0; 1];
    rustix::fs::lgetxattr(directory, "trusted.overlay.opaque", &mut value)
        .is_ok_and(|length| length == 1 && value == *b"y")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Runs as root: whiteouts are device nodes.
    #[test]
    fn the_merged_view_decides() {
        let top = std::env::temp_dir().join(format!("coracle-users-{}", std::process::id()));
        let layer = |name: &str| top.join(name);
        let write = |path: &str, text: &str| {
            let path = top.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("low/etc/passwd", "low");
        write("low/etc/group", "low");
        write("low/real/group", "linked");
        write("mid/etc/passwd", "mid");
        fs::create_dir_all(top.join("up/etc")).unwrap();
        let layers = [layer("up"), layer("mid"), layer("low")];
        let read = |path: &str| find(&layers, path).unwrap().map(|path| fs::read_to_string(path).unwrap());
        assert_eq!(read("etc/passwd").as_deref(), Some("mid"));
        assert_eq!(read("etc/group").as_deref(), Some("low"));
        symlink("../../../real/group", top.join("up/etc/group")).unwrap();
        assert_eq!(read("etc/group").as_deref(), Some("linked"), "a link stays inside the image");
        symlink("loop", top.join("up/etc/loop")).unwrap();
        assert_eq!(read("etc/loop"), None);
        let place = rustix::fs::open(top.join("up/etc"), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty())
            .unwrap();
        let mode = rustix::fs::Mode::empty();
        rustix::fs::mknodat(&place, "passwd", rustix::fs::FileType::CharacterDevice, mode, 0).unwrap();
        assert_eq!(read("etc/passwd"), None, "whited out");
        fs::remove_dir_all(&top).unwrap();
    }
}
