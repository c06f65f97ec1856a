//! Reads the directory of CNI configurations and chooses the file that applies. The files are small and on
//! the local disk, so they are read directly. If a file is only partly written, the last valid list stays
//! active. Rules: CRI 5.1.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use coracle_base::error::describe_io;
use coracle_sandbox::collect;

use super::conf::{self, List};

/// Maximum length of a file in bytes; real files have a few KiB.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// Maximum number of directory entries; usually there are fewer than ten.
const ENTRIES_MAX: usize = 256;

/// The result of reading the directory.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// The first valid file in the order of names; `None` if there is none.
    pub(super) list: Option<List>,
    /// Names of the invalid files before `list`, each with the reason.
    pub(super) bad: Vec<(String, String)>,
    /// The error if the directory exists but could not be read; otherwise `None`.
    pub(super) error: Option<String>,
}

/// Reads all configurations in `dir` until the first valid one.
pub(super) fn scan(dir: &Path) -> Scan {
    let mut scan = Scan::default();
    let names = match names(dir) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return scan,
        Err(error) => {
            scan.error = Some(format!("read {}: {}", dir.display(), describe_io(&error)));
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

/// Returns the list that is active after a scan, and the problem if there is one. A list whose file exists
/// but is now invalid stays active: the file may be partly written, and a typing error must not disable the
/// node's network.
pub(super) fn choose(
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

/// Identifies a state of a directory without reading files: name, inode, size and time of change of each
/// entry, and of the entries in its subdirectories.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Signature(Vec<(PathBuf, u64, u64, i64, i64)>);

/// The current signature of `dir`; empty if it does not exist.
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

/// Names in a directory, sorted by bytes; names that are not UTF-8 are ignored, because they cannot be
/// configurations.
fn names(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)?.take(ENTRIES_MAX) {
        names.extend(entry?.file_name().into_string());
    }
    collect::sort(&mut names);
    Ok(names)
}

/// Content of a regular file of at most [`FILE_BYTES_MAX`].
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let about = fs::metadata(path).map_err(|error| describe_io(&error))?;
    // Opening a FIFO would block.
    if !about.is_file() {
        return Err("not a regular file".to_owned());
    }
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(|error| describe_io(&error))?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| describe_io(&error))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("longer than {FILE_BYTES_MAX} bytes"));
    }
    Ok(bytes)
}

/// The `.conf` files of a network's own directory, sorted; empty if the directory does not exist.
fn folder(dir: &Path) -> Result<Vec<(String, Vec<u8>)>, String> {
    let names = match names(dir) {
        Ok(names) => names,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(format!("read {}: {}", dir.display(), describe_io(&error))),
    };
    // One more than the maximum, so that the list is refused and not truncated.
    let names = names.into_iter().filter(|name| name.ends_with(".conf")).take(conf::PLUGINS_MAX + 1);
    names.map(|name| read(&dir.join(&name)).map(|bytes| (name, bytes))).collect()
}

#[cfg(test)]
mod tests;
