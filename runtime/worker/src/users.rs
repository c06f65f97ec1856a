//! Copies /etc/passwd and /etc/group out of an image's layers once, so that creating a container does not
//! require a merged view: user names are resolved with these copies (CRI 3.9).

use std::fs::{self, Metadata};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use coracle_job::{Failure, USERS_FILE_BYTES_MAX, USERS_RECORD, USERS_RECORD_BYTES_MAX, UsersFiles};
use coracle_sandbox::describe_io;
use coracle_trees::remove;
use rustix::io::Errno;

use crate::failure::io_failure;
use crate::store::{Move, Store};

/// Maximum number of symbolic links in a path, as in the kernel.
const LINKS_MAX: u32 = 40;

/// Writes the future directory `images/users/HEX` of image `id` under a temporary name; returns the move that
/// publishes it, or `None` if the directory already exists. `directories` are those of the image's layers,
/// topmost first.
pub(crate) fn extract(store: &Store, id: &str, directories: &[PathBuf]) -> Result<Option<Move>, Failure> {
    let target = store.users(id)?;
    if target.is_dir() {
        return Ok(None);
    }
    let aside = store.new_spool()?;
    match write(&aside, directories) {
        Ok(()) => Ok(Some((aside, target))),
        Err(failure) => {
            // A second error would hide the first one; the daemon removes such directories when it starts.
            let _ = fs::remove_dir_all(&aside);
            Err(failure)
        }
    }
}

/// Describes damage of the kept user files of an image; `None` if there is none. If `layers` are given,
/// topmost first, the kept files are compared with the files in these layers.
pub(crate) fn damage(store: &Store, id: &str, layers: Option<&[PathBuf]>) -> Result<Option<String>, Failure> {
    let path = store.users(id)?.join(USERS_RECORD);
    let mut kept = Vec::new();
    let read =
        fs::File::open(&path).and_then(|file| file.take(USERS_RECORD_BYTES_MAX).read_to_end(&mut kept));
    Ok(match read {
        Err(error) => Some(describe_io(&error)),
        Ok(_) => match UsersFiles::decode(&kept) {
            Err(why) => Some(why.to_owned()),
            Ok(kept) => match layers.map(read_from).transpose()? {
                Some(held) if held != kept => Some("they are not those of the layers".to_owned()),
                Some(_) | None => None,
            },
        },
    })
}

/// Replaces the kept user files of an image by the files in its layers, topmost first.
pub(crate) fn repair(store: &Store, id: &str, layers: &[PathBuf]) -> Result<(), Failure> {
    let (aside, target) = (store.new_spool()?, store.users(id)?);
    let record = target.join(USERS_RECORD);
    let repaired = write(&aside, layers).and_then(|()| match target.is_dir() {
        true => {
            if record.is_dir() {
                remove::run(std::slice::from_ref(&record))?;
            }
            store.publish(&aside.join(USERS_RECORD), &record)
        }
        false => {
            remove::run(std::slice::from_ref(&target))?;
            store.publish(&aside, &target)
        }
    });
    // Gone already where it was published whole; else the daemon sweeps such directories at its start.
    let _ = fs::remove_dir_all(&aside);
    repaired
}

fn write(aside: &Path, layers: &[PathBuf]) -> Result<(), Failure> {
    let bytes = read_from(layers)?
        .encode()
        .map_err(|error| Failure::invalid(format!("users of the image: {error}")))?;
    let path = aside.join(USERS_RECORD);
    fs::write(&path, bytes).map_err(|error| io_failure("write", &path, &error))
}

fn read_from(layers: &[PathBuf]) -> Result<UsersFiles, Failure> {
    Ok(UsersFiles { passwd: read_one(layers, "passwd")?, group: read_one(layers, "group")? })
}

/// The content of a file in the image's /etc; empty if the image has none. Lines beyond the maximum size are left out:
/// containers cannot use their names.
fn read_one(layers: &[PathBuf], name: &str) -> Result<Vec<u8>, Failure> {
    let Some(found) = find(layers, &format!("etc/{name}"))? else { return Ok(Vec::new()) };
    let mut content = Vec::new();
    let read =
        fs::File::open(&found).and_then(|file| file.take(USERS_FILE_BYTES_MAX + 1).read_to_end(&mut content));
    read.map_err(|error| io_failure("read", &found, &error))?;
    if content.len() as u64 > USERS_FILE_BYTES_MAX {
        eprintln!(
            "/etc/{name} of the image: only the names in its first {USERS_FILE_BYTES_MAX} bytes can be used"
        );
        content.truncate(USERS_FILE_BYTES_MAX as usize);
        let end = content.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        content.truncate(end);
    }
    Ok(content)
}

/// The regular file at `path` in the merged view of `layers`, topmost first; `None` if there is none.
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
                return Ok(None); // like ELOOP: a process in the image could not open it, either
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

/// The directories of the layers that form one merged directory, topmost first.
fn merged(layers: &[PathBuf], path: &[String]) -> Result<Vec<PathBuf>, Failure> {
    let mut directories = layers.to_vec();
    for name in path {
        let mut below = Vec::new();
        for directory in &directories {
            let candidate = directory.join(name);
            match status(&candidate)? {
                None => {}
                Some(metadata) if metadata.is_dir() => {
                    let opaque = is_opaque(&candidate)?;
                    below.push(candidate);
                    if opaque {
                        break;
                    }
                }
                Some(_) => break, // a whiteout or a file hides the lower layers
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

/// Whether a directory is opaque.
///
/// # Errors
/// The attribute cannot be read.
pub(crate) fn is_opaque(directory: &Path) -> Result<bool, Failure> {
    let mut value = [0; 1];
    match rustix::fs::lgetxattr(directory, "trusted.overlay.opaque", &mut value) {
        Ok(length) => Ok(length == 1 && value == *b"y"),
        // No such attribute, a longer value, no attributes on this file system.
        Err(Errno::NODATA | Errno::RANGE | Errno::NOTSUP) => Ok(false),
        Err(errno) => Err(io_failure("read extended attributes of", directory, &errno.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_long_file_is_cut_after_a_line() {
        let top = std::env::temp_dir().join(format!("coracle-long-users-{}", std::process::id()));
        fs::create_dir_all(top.join("etc")).unwrap();
        let line = "user:x:1000:1000::/:/bin/sh\n";
        let text = line.repeat(USERS_FILE_BYTES_MAX as usize / line.len() + 1);
        fs::write(top.join("etc/passwd"), &text).unwrap();
        let kept = read_one(std::slice::from_ref(&top), "passwd").unwrap();
        assert_eq!(kept.len(), text.len() - line.len());
        assert!(text.as_bytes().starts_with(&kept) && kept.ends_with(b"\n"));
        fs::remove_dir_all(&top).unwrap();
    }

    /// Requires root, because whiteouts are device nodes.
    #[test]
    fn files_are_found_in_the_merged_view() {
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
        assert_eq!(
            read("etc/group").as_deref(),
            Some("linked"),
            "a symbolic link is resolved within the image"
        );
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
