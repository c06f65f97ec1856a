//! The digest of an unpacked layer, by which a copy of its tree on another file system is verified. It does not depend on times, because
//! not every read-only file system has those of an archive.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use sha2::{Digest, Sha256};

use crate::check::{Verdict, damage};
use crate::entry::attributes;
use crate::read::{FILE_BYTES_MIN, Reader};
use crate::write::FileError;

/// Compares the tree at `tree` with its digest.
///
/// # Errors
/// An error that says nothing about the tree: it may pass.
pub fn check_tree(tree: &Path, digest: &str, reader: &mut Reader<'_>) -> io::Result<Verdict> {
    Ok(match digest_of_tree(tree, reader) {
        Ok(found) if found == digest => Verdict::Whole,
        Ok(_) => Verdict::Damaged("it is not the tree that was bundled".to_owned()),
        Err(file) => Verdict::Damaged(damage(file.error, &file.path)?),
    })
}

/// The digest `sha256:…` of a tree: of the name, type, mode, owner, device number, link target, extended attributes and content of each file,
/// and which files are hard links of each other.
///
/// # Errors
/// The first file that cannot be read.
pub fn digest_of_tree(tree: &Path, reader: &mut Reader<'_>) -> Result<String, FileError> {
    let mut hash = Sha256::new();
    // The number of the first name of each inode with several.
    let mut inodes = BTreeMap::new();
    let (mut waiting, mut count) = (vec![PathBuf::new()], 0_u64);
    while let Some(below) = waiting.pop() {
        let path = tree.join(&below);
        let mut add = || {
            let about = path.symlink_metadata()?;
            field(&mut hash, below.as_os_str().as_bytes());
            for number in [about.mode().into(), about.uid().into(), about.gid().into(), about.rdev()] {
                hash.update(number.to_le_bytes());
            }
            if about.is_dir() {
                reader.pass(FILE_BYTES_MIN);
                let mut names = BTreeSet::new();
                for entry in fs::read_dir(&path)? {
                    names.insert(entry?.file_name());
                }
                // The last one is taken first.
                waiting.extend(names.into_iter().rev().map(|name| below.join(name)));
            } else if about.is_symlink() {
                field(&mut hash, fs::read_link(&path)?.as_os_str().as_bytes());
            } else if about.is_file() {
                let add = |sum: &mut Sha256, bytes: &[u8]| sum.update(bytes);
                let (_, sum) = reader.read(CWD, path.as_path(), about.len(), add)?;
                field(&mut hash, text(sum).as_bytes());
            }
            let first = match about.nlink() > 1 && !about.is_dir() {
                true => *inodes.entry(about.ino()).or_insert(count),
                false => count,
            };
            hash.update((count - first).to_le_bytes());
            for (name, value) in attributes(path.as_os_str().as_bytes())? {
                field(&mut hash, &name);
                field(&mut hash, &value);
            }
            field(&mut hash, b"");
            Ok(())
        };
        add().map_err(|error| FileError { path: below.as_os_str().as_bytes().to_vec(), error })?;
        count += 1;
    }
    Ok(text(hash))
}

/// Adds bytes after their number, so that no two lists of fields are the same bytes.
fn field(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

fn text(hash: Sha256) -> String {
    let mut text = String::from("sha256:");
    for byte in hash.finalize() {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
