//! Compares a layer with its list. The memory does not depend on the number of files, except those with several names.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use coracle_sandbox::describe_io;
use rustix::fs::{Dir, FileType, OFlags};
use rustix::io::Errno;

use crate::entry::{Entry, Record, Records, invalid, look, open_directory, push};
use crate::read::{FILE_BYTES_MIN, Reader, drop_pages};
use crate::write::{Sums, open_root, write};

/// The state of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The layer is as its list says.
    Whole,
    /// The layer has no list; all of its files can be read.
    Readable,
    /// A file is not what the list says, or cannot be read; the text has its path.
    Damaged(String),
    /// The list itself is damaged, for this reason, so that nothing is known of the layer.
    ListDamaged(String),
    /// The layer was removed or replaced meanwhile, or is not there.
    Gone,
}

impl Verdict {
    /// The text about a damaged file.
    pub fn damage(self) -> Option<String> {
        match self {
            Self::Damaged(why) => Some(why),
            _ => None,
        }
    }
}

/// Compares the layer at `layer` with the list at `list`.
///
/// # Errors
/// An error that says nothing about the layer (no memory, too many open files): it may pass.
pub fn check(layer: &Path, list: &Path, reader: &mut Reader<'_>) -> io::Result<Verdict> {
    let root = match open_root(layer) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Verdict::Gone),
        root => root,
    };
    let begun = root.as_ref().ok().and_then(|root| identity(root.try_clone().ok()?));
    let verdict = match root {
        Err(error) => Verdict::Damaged(damage(error, b"")?),
        Ok(root) => match open_list(list) {
            Ok(records) => compare_all(&root, records, reader)?,
            Err(error) if error.kind() == ErrorKind::NotFound => read_all(layer, reader)?,
            Err(error) => Verdict::ListDamaged(of_list(error)?),
        },
    };
    let now = layer.symlink_metadata().ok().map(|about| (about.dev(), about.ino()));
    let is_there = begun.is_none() || begun == now;
    Ok(if is_there { verdict } else { Verdict::Gone })
}

fn identity(directory: OwnedFd) -> Option<(u64, u64)> {
    File::from(directory).metadata().ok().map(|about| (about.dev(), about.ino()))
}

fn open_list(list: &Path) -> io::Result<Records<BufReader<File>>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::options().read(true).custom_flags(flags.bits() as i32).open(list)?;
    if !file.metadata()?.is_file() {
        return Err(invalid("not a regular file"));
    }
    drop_pages(&file);
    Records::new(BufReader::new(file))
}

fn compare_all(
    root: &OwnedFd,
    mut records: Records<impl Read>,
    reader: &mut Reader<'_>,
) -> io::Result<Verdict> {
    let compared = match Comparison::new(root, reader).run(&mut records) {
        Ok(compared) => compared,
        Err(Stop::List(error)) => return Ok(Verdict::ListDamaged(of_list(error)?)),
        Err(Stop::Passing(error)) => return Err(error),
    };
    // A difference counts only if the list is what was written.
    let rest = || -> io::Result<()> {
        while compared.is_some() && records.next()? != Record::Last {}
        records.finish()
    };
    Ok(match (rest(), compared) {
        (Err(error), _) => Verdict::ListDamaged(of_list(error)?),
        (Ok(()), Some(difference)) => Verdict::Damaged(difference),
        (Ok(()), None) => Verdict::Whole,
    })
}

/// Reads all files of a layer without a list.
fn read_all(layer: &Path, reader: &mut Reader<'_>) -> io::Result<Verdict> {
    match write(layer, &[], &Sums::default(), reader, io::sink()) {
        Ok(()) => Ok(Verdict::Readable),
        // The kernel's limit of a path: the rest of the layer is not known to be damaged.
        Err(file) if file.error.raw_os_error() == Some(Errno::NAMETOOLONG.raw_os_error()) => {
            Ok(Verdict::Readable)
        }
        Err(file) => Ok(Verdict::Damaged(damage(file.error, &file.path)?)),
    }
}

/// The text for an error that shows damage of a file.
///
/// # Errors
/// The error itself, if it is one of the node: of its limits, or of a security module.
pub(crate) fn damage(error: io::Error, path: &[u8]) -> io::Result<String> {
    use Errno as E;
    const OF_NODE: [Errno; 7] = [E::NOMEM, E::MFILE, E::NFILE, E::AGAIN, E::INTR, E::ACCESS, E::PERM];
    let is_of_node = OF_NODE.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()));
    let text = || format!("/{}: {}", OsStr::from_bytes(path).display(), describe_io(&error));
    if is_of_node { Err(error) } else { Ok(text()) }
}

/// The text for an error of reading a list.
fn of_list(error: io::Error) -> io::Result<String> {
    if error.kind() == ErrorKind::UnexpectedEof {
        return Ok("it is cut off".to_owned());
    }
    damage(error, b"").map(|text| text.trim_start_matches("/: ").to_owned())
}

/// The reason why a comparison ended early.
enum Stop {
    /// The list cannot be read.
    List(io::Error),
    /// An error of the node.
    Passing(io::Error),
}

struct Comparison<'a, 'b> {
    root: &'a OwnedFd,
    reader: &'a mut Reader<'b>,
    /// Path of the directory whose entries are being compared.
    path: Vec<u8>,
    /// For each directory above the file that is being compared: the length of its parent's path and the number of its entries.
    open: Vec<(usize, u64)>,
    /// The directory that was opened last, which has the files that follow it in the list.
    directory: Option<OwnedFd>,
    /// Inodes of files with several names, by their numbers in the list.
    links: Vec<u64>,
}

impl<'a, 'b> Comparison<'a, 'b> {
    fn new(root: &'a OwnedFd, reader: &'a mut Reader<'b>) -> Self {
        Self { root, reader, path: Vec::new(), open: Vec::new(), directory: None, links: Vec::new() }
    }

    /// Returns the first difference, or `None` after the last record.
    fn run(&mut self, records: &mut Records<impl Read>) -> Result<Option<String>, Stop> {
        loop {
            let record = records.next().map_err(Stop::List)?;
            let length = self.path.len();
            let difference = match record {
                Record::Last if self.open.is_empty() && self.directory.is_some() => return Ok(None),
                Record::Last => return Err(Stop::List(invalid("it ends within a directory"))),
                Record::End(entries) => {
                    let (parent, found) =
                        self.open.pop().ok_or_else(|| Stop::List(invalid("a second end")))?;
                    let differs = found != entries;
                    let why = differs
                        .then(|| format!("/{}: has other entries", OsStr::from_bytes(&self.path).display()));
                    self.path.truncate(parent);
                    why
                }
                Record::Entry(wanted) => {
                    if self.open.is_empty() == self.directory.is_some() || wanted.name.contains(&b'/') {
                        return Err(Stop::List(invalid("an entry out of place")));
                    }
                    push(&mut self.path, &wanted.name);
                    let is_directory = wanted.kind() == FileType::Directory;
                    let found = if is_directory { self.enter(&wanted, length) } else { self.file(&wanted) };
                    let path = OsStr::from_bytes(&self.path).display();
                    let why = match found {
                        Ok(why) => why.map(|why| format!("/{path}: {why}")),
                        Err(error) => Some(damage(error, &self.path).map_err(Stop::Passing)?),
                    };
                    if !is_directory {
                        self.path.truncate(length);
                    }
                    why
                }
            };
            if difference.is_some() {
                return Ok(difference);
            }
        }
    }

    /// Compares a directory, and opens it for its entries.
    fn enter(&mut self, wanted: &Entry, parent: usize) -> io::Result<Option<String>> {
        let directory = open_directory(self.root, &self.path)?;
        let (found, _) = look(&directory, c".")?;
        self.reader.pass(FILE_BYTES_MIN);
        let mut entries = 0;
        for entry in Dir::read_from(&directory)? {
            entries += u64::from(!matches!(entry?.file_name().to_bytes(), b"." | b".."));
        }
        self.open.push((parent, entries));
        self.directory = Some(directory);
        Ok(differs(&found, wanted).or_else(|| time_differs(&found, wanted)))
    }

    fn file(&mut self, wanted: &Entry) -> io::Result<Option<String>> {
        let directory = self.directory.as_ref().ok_or(ErrorKind::NotFound)?;
        let name = CString::new(&wanted.name[..])?;
        let (found, inode) = look(directory, &name)?;
        if let Some(why) = differs(&found, wanted) {
            return Ok(Some(why));
        }
        let mut is_read = wanted.kind() == FileType::RegularFile;
        if let Some((_, number)) = wanted.links {
            match self.links.get(number as usize) {
                Some(known) if *known != inode => return Ok(Some("has other hard links".to_owned())),
                Some(_) => is_read = false,
                // The inode of another file would have more names.
                None => self.links.push(inode),
            }
        }
        let is_same = !is_read || self.reader.sum(directory, &name, wanted.content.0)? == wanted.content;
        let other_content = (!is_same).then(|| "has other content".to_owned());
        Ok(other_content.or_else(|| time_differs(&found, wanted)))
    }
}

/// The first difference that needs no read of a file, except that of the time.
fn differs(found: &Entry, wanted: &Entry) -> Option<String> {
    if (found.mode, found.owner) != (wanted.mode, wanted.owner) {
        let text = |entry: &Entry| format!("{:o}, {}:{}", entry.mode, entry.owner.0, entry.owner.1);
        return Some(format!("mode and owner {} instead of {}", text(found), text(wanted)));
    }
    if found.device != wanted.device {
        return Some(format!("device {:#x} instead of {:#x}", found.device, wanted.device));
    }
    match found.kind() {
        FileType::RegularFile if found.content.0 != wanted.content.0 => {
            return Some(format!("{} bytes instead of {}", found.content.0, wanted.content.0));
        }
        FileType::Symlink if found.content != wanted.content => {
            return Some("has another link target".to_owned());
        }
        _ => {}
    }
    if found.attributes != wanted.attributes {
        let mut all = found.attributes.iter().chain(&wanted.attributes);
        let only = all.find(|one| !(found.attributes.contains(one) && wanted.attributes.contains(one)));
        let name = only.map_or("".into(), |(name, _)| String::from_utf8_lossy(name));
        return Some(format!("has another extended attribute {name}"));
    }
    if found.links.map(|(count, _)| count) != wanted.links.map(|(count, _)| count) {
        return Some("has other hard links".to_owned());
    }
    None
}

fn time_differs(found: &Entry, wanted: &Entry) -> Option<String> {
    (wanted.time.is_some() && found.time != wanted.time).then(|| "has another modification time".to_owned())
}
