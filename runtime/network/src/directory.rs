//! The directory of network configurations: what is in it, and which file counts.
//! Files are small and on the local disk, so they are read in line; a reader that meets a half-written one keeps the
//! last good list. Rules: CRI 5.1.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use coracle_base::error::plain;

use super::conf::{self, List};

/// Longest file that is read; real ones have a few KiB.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// Entries of a directory that are looked at: a kubelet's node has a handful.
const ENTRIES_MAX: usize = 256;

/// What one look at the directory found.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// The first file by name that can be used.
    pub(super) list: Option<List>,
    /// Names of the files that cannot be used, each with the reason; only those before `list`.
    pub(super) bad: Vec<(String, String)>,
    /// Why there was no look at all, other than that there is no such directory.
    pub(super) error: Option<String>,
}

/// Looks through `dir` for the network.
pub(super) fn scan(dir: &Path) -> Scan {
    let mut scan = Scan::default();
    let names = match names(dir) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return scan,
        Err(error) => {
            scan.error = Some(format!("read {}: {}", dir.display(), plain(&error)));
            return scan;
        }
    };
    for name in names.into_iter().filter(|name| conf::is_configuration(name)) {
        let path = dir.join(&name);
        if path.is_dir() {
            continue;
        }
        match read(&path).and_then(|bytes| conf::parse(&name, &bytes, |network| folder(&dir.join(network)))) {
            Ok(list) => {
                scan.list = Some(list);
                break;
            }
            Err(why) => scan.bad.push((name, why)),
        }
    }
    scan
}

/// Which list is in force after a look, and what is wrong, if anything. A list whose file is still there but cannot be
/// read now stays in force: it is being rewritten, and a typo must not take the node's network away.
pub(super) fn settle(
    current: Option<Rc<List>>,
    scan: Scan,
    dir: &Path,
) -> (Option<Rc<List>>, Result<(), String>) {
    let first_bad = scan.bad.first().map(|(name, why)| format!("{}: {why}", dir.join(name).display()));
    let is_bad_now =
        |list: &Rc<List>| scan.error.is_some() || scan.bad.iter().any(|(name, _)| *name == list.file);
    let list = match (current, scan.list) {
        (Some(current), _) if is_bad_now(&current) => Some(current),
        (Some(current), Some(found)) if *current == found => Some(current),
        (_, found) => found.map(Rc::new),
    };
    let status = match (scan.error.or(first_bad), &list) {
        (Some(why), _) => Err(why),
        (None, Some(_)) => Ok(()),
        (None, None) => Err(format!("no CNI configuration file in {}", dir.display())),
    };
    (list, status)
}

/// Tells one state of a directory from another without reading files: name, inode, size and time of change of each
/// entry, and of those one level below.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Signature(Vec<(PathBuf, u64, u64, i64, i64)>);

/// The signature of `dir` now; empty when there is none.
pub(super) fn signature(dir: &Path) -> Signature {
    let mut entries = Vec::new();
    let mut dirs = vec![(dir.to_owned(), true)];
    while let Some((dir, descend)) = dirs.pop() {
        for name in names(&dir).unwrap_or_default() {
            let path = dir.join(name);
            let Ok(about) = fs::metadata(&path) else { continue };
            if about.is_dir() && descend {
                dirs.push((path.clone(), false));
            }
            entries.push((path, about.ino(), about.size(), about.mtime(), about.mtime_nsec()));
        }
    }
    Signature(entries)
}

/// Names in a directory, sorted as bytes; those that are no text cannot be configuration.
fn names(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)?.take(ENTRIES_MAX) {
        names.extend(entry?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

/// Contents of a file, if it is one and not too long.
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let about = fs::metadata(path).map_err(|error| plain(&error))?;
    // A FIFO would be waited for.
    if !about.is_file() {
        return Err("not a file".to_owned());
    }
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(|error| plain(&error))?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| plain(&error))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("longer than {FILE_BYTES_MAX} bytes"));
    }
    Ok(bytes)
}

/// The `.conf` files of a network's own folder, sorted; no folder: none.
fn folder(dir: &Path) -> Result<Vec<(String, Vec<u8>)>, String> {
    let names = match names(dir) {
        Ok(names) => names,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(format!("read {}: {}", dir.display(), plain(&error))),
    };
    // One more than a list may have, so that it is refused and not cut.
    let names = names.into_iter().filter(|name| name.ends_with(".conf")).take(conf::PLUGINS_MAX + 1);
    names.map(|name| read(&dir.join(&name)).map(|bytes| (name, bytes))).collect()
}

#[cfg(test)]
mod tests;
