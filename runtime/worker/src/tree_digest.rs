//! The digest of an unpacked layer, by which a copy of its tree on another file system is verified. It does not depend on times, because
//! not every read-only file system has those of an archive.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use coracle_manifest::digest_text;
use sha2::{Digest, Sha256};

use crate::check::{names, xattrs};
use crate::import::digest_of_file;

/// The digest `sha256:…` of a tree: of the name, type, mode, owner, device number, link target, extended attributes and content of each file,
/// and which files are hard links of each other. `pulse` is called for each file.
///
/// # Errors
/// The first file that cannot be read, with its path.
pub fn digest_of_tree(tree: &Path, pulse: &mut dyn FnMut()) -> io::Result<String> {
    let mut hash = Sha256::new();
    // The number of the first name of each inode with several.
    let mut inodes = BTreeMap::new();
    let (mut waiting, mut count) = (vec![PathBuf::new()], 0_u64);
    while let Some(below) = waiting.pop() {
        pulse();
        let path = tree.join(&below);
        let mut add = || {
            let about = path.symlink_metadata()?;
            field(&mut hash, below.as_os_str().as_bytes());
            for number in [about.mode().into(), about.uid().into(), about.gid().into(), about.rdev()] {
                hash.update(number.to_le_bytes());
            }
            if about.is_dir() {
                // The last one is taken first.
                waiting.extend(names(&path)?.into_iter().rev().map(|name| below.join(name)));
            } else if about.is_symlink() {
                field(&mut hash, fs::read_link(&path)?.as_os_str().as_bytes());
            } else if about.is_file() {
                let digest = digest_of_file(&path).map_err(|failure| io::Error::other(failure.message))?;
                field(&mut hash, digest.as_bytes());
            }
            let first = match about.nlink() > 1 && !about.is_dir() {
                true => *inodes.entry(about.ino()).or_insert(count),
                false => count,
            };
            hash.update((count - first).to_le_bytes());
            for (name, value) in xattrs(&path)? {
                field(&mut hash, &name);
                field(&mut hash, &value);
            }
            field(&mut hash, b"");
            Ok(())
        };
        add().map_err(|error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("/{}: {}", below.display(), coracle_sandbox::describe_io(&error)),
            )
        })?;
        count += 1;
    }
    Ok(digest_text(&hash.finalize()))
}

/// Adds bytes after their number, so that no two lists of fields are the same bytes.
fn field(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}
