//! A disk in memory that simulates power cuts.
//!
//! Names behave as on a file system with an ordered journal (ext4, xfs): a sync of a file or a directory
//! makes its last change of names and all earlier ones durable, and nothing if it has not changed; a power cut keeps a random number of the later changes, in
//! order. The content of a file is durable only after its own sync: otherwise the file is empty, torn, filled
//! with zeros, or complete after a power cut; of a part that was written over, each sector is old or new.
//! A sync of the content alone makes no names durable. Everything outside of the durable directory is lost, as
//! on a tmpfs.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::rc::Rc;

use nix::errno::Errno;

use crate::random::Random;

/// Size of a sector, which a disk writes completely or not at all.
const SECTOR_BYTES: usize = 512;

/// The current content of a file, and the content at its last sync.
#[derive(Debug, Default)]
struct Content {
    live: RefCell<Vec<u8>>,
    synced: RefCell<Vec<u8>>,
    /// Whether each read fails, because of a bad sector.
    is_bad: Cell<bool>,
    /// Whether the file was written as a whole since its last sync, and not only over a part of it.
    is_new: Cell<bool>,
}

impl Content {
    fn sync(&self) {
        *self.synced.borrow_mut() = self.live.borrow().clone();
        self.is_new.set(false);
    }

    fn lose_power(&self, random: &mut Random) {
        let (mut live, mut synced) = (self.live.borrow_mut(), self.synced.borrow_mut());
        if *live == *synced {
            return;
        }
        let torn = random.below(live.len() as u64 + 1) as usize;
        match (self.is_new.replace(false), random.below(4)) {
            (false, _) => {
                let sectors = live.chunks_mut(SECTOR_BYTES).zip(synced.chunks(SECTOR_BYTES));
                for (new, old) in sectors.filter(|(new, old)| new != old) {
                    if random.happens(500) {
                        new.copy_from_slice(old);
                    }
                }
            }
            (true, 0) => *live = synced.clone(),
            (true, 1) => live.truncate(torn),
            (true, 2) => live[torn..].fill(0),
            (true, _) => live.clear(),
        }
        *synced = live.clone();
    }
}

#[derive(Clone, Debug)]
enum Entry {
    Directory,
    File(Rc<Content>),
}

type Names = BTreeMap<String, Entry>;

/// A change of the file system's names.
#[derive(Clone, Debug)]
enum Change {
    Put(String, Entry),
    /// Removes a file, or a directory with its content.
    Remove(String),
    Rename(String, String),
}

impl Change {
    /// Whether the change is one of the file or directory at `path`, or of its entries.
    fn concerns(&self, path: &str) -> bool {
        let is_at =
            |name: &String| name == path || name.rsplit_once('/').is_some_and(|(parent, _)| parent == path);
        match self {
            Self::Put(name, _) | Self::Remove(name) => is_at(name),
            Self::Rename(from, to) => is_at(from) || is_at(to),
        }
    }
}

/// A disk; all paths are absolute, without a trailing slash.
pub(crate) struct Disk {
    /// The directory that survives a power cut.
    durable_root: &'static str,
    live: Names,
    durable: Names,
    /// Changes of names that are not durable yet, oldest first.
    journal: Vec<Change>,
}

impl Disk {
    pub(crate) fn new(durable_root: &'static str, volatile_root: &'static str) -> Self {
        let mut disk = Self { durable_root, live: Names::new(), durable: Names::new(), journal: Vec::new() };
        for root in [durable_root, volatile_root] {
            disk.live.insert(root.to_owned(), Entry::Directory);
        }
        disk.durable.insert(durable_root.to_owned(), Entry::Directory);
        disk
    }

    pub(crate) fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        match self.get(path)? {
            Entry::File(content) if content.is_bad.get() => Err(Errno::EIO.into()),
            Entry::File(content) => Ok(content.live.borrow().clone()),
            Entry::Directory => Err(Errno::EISDIR.into()),
        }
    }

    /// Lets each read of a file fail, wherever it is moved, until it is written anew.
    pub(crate) fn spoil(&mut self, path: &str) {
        if let Ok(Entry::File(content)) = self.get(path) {
            content.is_bad.set(true);
        }
    }

    /// Whether reads of a file fail.
    pub(crate) fn is_bad(&self, path: &str) -> bool {
        matches!(self.get(path), Ok(Entry::File(content)) if content.is_bad.get())
    }

    pub(crate) fn write(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.require_parent(path)?;
        match self.live.get(path) {
            Some(Entry::File(content)) => {
                *content.live.borrow_mut() = bytes.to_vec();
                content.is_new.set(true);
                content.is_bad.set(false);
            }
            Some(Entry::Directory) => return Err(Errno::EISDIR.into()),
            None => {
                let live = RefCell::new(bytes.to_vec());
                let content = Content { live, is_new: Cell::new(true), ..Content::default() };
                self.change(Change::Put(path.to_owned(), Entry::File(Rc::new(content))));
            }
        }
        Ok(())
    }

    /// Writes over a part of an existing file.
    pub(crate) fn write_over(&mut self, path: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let Entry::File(content) = self.get(path)? else { return Err(Errno::EISDIR.into()) };
        let (mut live, offset) = (content.live.borrow_mut(), offset as usize);
        let end = offset + bytes.len();
        if live.len() < end {
            live.resize(end, 0);
            content.is_new.set(true);
        }
        live[offset..end].copy_from_slice(bytes);
        Ok(())
    }

    /// Makes the content of a file durable, and no names.
    pub(crate) fn sync_content(&mut self, path: &str) -> io::Result<()> {
        match self.get(path)? {
            Entry::File(content) => content.sync(),
            Entry::Directory => return Err(Errno::EISDIR.into()),
        }
        Ok(())
    }

    /// Makes the content of a file, or the entries of a directory, durable.
    pub(crate) fn sync(&mut self, path: &str) -> io::Result<()> {
        if let Entry::File(content) = self.get(path)? {
            content.sync();
        }
        if path.starts_with(self.durable_root) {
            let last = self.journal.iter().rposition(|change| change.concerns(path));
            for change in self.journal.drain(..last.map_or(0, |last| last + 1)) {
                apply(&mut self.durable, change);
            }
        }
        Ok(())
    }

    /// Makes everything durable (syncfs(2)).
    pub(crate) fn sync_all(&mut self) {
        for change in self.journal.drain(..) {
            apply(&mut self.durable, change);
        }
        for entry in self.durable.values() {
            if let Entry::File(content) = entry {
                content.sync();
            }
        }
    }

    pub(crate) fn create_dir_all(&mut self, path: &str) -> io::Result<()> {
        let parts = path.match_indices('/').skip(1).map(|(end, _)| &path[..end]).chain([path]);
        for part in parts {
            match self.live.get(part) {
                Some(Entry::Directory) => {}
                Some(Entry::File(_)) => return Err(Errno::ENOTDIR.into()),
                None => self.change(Change::Put(part.to_owned(), Entry::Directory)),
            }
        }
        Ok(())
    }

    pub(crate) fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let source = self.get(from)?.clone();
        self.require_parent(to)?;
        match (source, self.live.get(to)) {
            (Entry::Directory, Some(Entry::File(_))) => return Err(Errno::ENOTDIR.into()),
            (Entry::File(_), Some(Entry::Directory)) => return Err(Errno::EISDIR.into()),
            (Entry::Directory, Some(Entry::Directory)) if self.below(to).next().is_some() => {
                return Err(Errno::ENOTEMPTY.into());
            }
            (Entry::Directory | Entry::File(_), _) => {}
        }
        self.change(Change::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }

    pub(crate) fn remove_file(&mut self, path: &str) -> io::Result<()> {
        match self.get(path)? {
            Entry::Directory => Err(Errno::EISDIR.into()),
            Entry::File(_) => {
                self.change(Change::Remove(path.to_owned()));
                Ok(())
            }
        }
    }

    pub(crate) fn remove_dir_all(&mut self, path: &str) -> io::Result<()> {
        match self.get(path)? {
            Entry::File(_) => Err(Errno::ENOTDIR.into()),
            Entry::Directory => {
                self.change(Change::Remove(path.to_owned()));
                Ok(())
            }
        }
    }

    /// The last path below a directory, which is empty or a file: the first one that a recursive removal
    /// removes. `None` if the directory is empty.
    pub(crate) fn last_below(&self, path: &str) -> Option<String> {
        self.below(path).next_back().map(|(name, _)| name.clone())
    }

    /// Removes one file or directory.
    pub(crate) fn remove_one(&mut self, path: &str) {
        self.change(Change::Remove(path.to_owned()));
    }

    pub(crate) fn entries(&self, path: &str) -> io::Result<Vec<(OsString, bool)>> {
        match self.get(path)? {
            Entry::File(_) => Err(Errno::ENOTDIR.into()),
            Entry::Directory => Ok(self
                .below(path)
                .map(|(name, entry)| (&name[path.len() + 1..], matches!(entry, Entry::Directory)))
                .filter(|(name, _)| !name.contains('/'))
                .map(|(name, is_dir)| (OsString::from(name), is_dir))
                .collect()),
        }
    }

    pub(crate) fn has(&self, path: &str) -> bool {
        self.live.contains_key(path)
    }

    /// All paths that contain `part`.
    pub(crate) fn containing(&self, part: &str) -> Vec<String> {
        self.live.keys().filter(|path| path.contains(part)).cloned().collect()
    }

    /// Simulates a power cut: data that was not synced is lost or damaged.
    pub(crate) fn lose_power(&mut self, random: &mut Random) {
        let kept = random.below(self.journal.len() as u64 + 1) as usize;
        for change in self.journal.drain(..).take(kept) {
            apply(&mut self.durable, change);
        }
        for entry in self.durable.values() {
            if let Entry::File(content) = entry {
                content.lose_power(random);
            }
        }
        self.live = self.durable.clone();
    }

    fn get(&self, path: &str) -> io::Result<&Entry> {
        self.live.get(path).ok_or_else(|| Errno::ENOENT.into())
    }

    fn require_parent(&self, path: &str) -> io::Result<()> {
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
        match self.get(parent)? {
            Entry::Directory => Ok(()),
            Entry::File(_) => Err(Errno::ENOTDIR.into()),
        }
    }

    fn below(&self, path: &str) -> std::collections::btree_map::Range<'_, String, Entry> {
        // '0' follows '/'.
        self.live.range(format!("{path}/")..format!("{path}0"))
    }

    fn change(&mut self, change: Change) {
        let (Change::Put(path, _) | Change::Remove(path) | Change::Rename(path, _)) = &change;
        if path.starts_with(self.durable_root) {
            self.journal.push(change.clone());
        }
        apply(&mut self.live, change);
    }
}

fn apply(names: &mut Names, change: Change) {
    match change {
        Change::Put(path, entry) => drop(names.insert(path, entry)),
        Change::Remove(path) => drop(take(names, &path)),
        Change::Rename(from, to) => {
            let moved = take(names, &from);
            names.extend(
                moved.into_iter().map(|(path, entry)| (format!("{to}{}", &path[from.len()..]), entry)),
            );
        }
    }
}

/// Removes a file, or a directory with its content, and returns what was removed.
fn take(names: &mut Names, path: &str) -> Vec<(String, Entry)> {
    let mut taken: Vec<(String, Entry)> = names.remove_entry(path).into_iter().collect();
    let below: Vec<String> =
        names.range(format!("{path}/")..format!("{path}0")).map(|(name, _)| name.clone()).collect();
    taken.extend(below.iter().filter_map(|name| names.remove_entry(name)));
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_keeps_all_earlier_names_and_its_own_content_only() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut disk = Disk::new("/root", "/state");
            disk.create_dir_all("/root/a").unwrap();
            disk.write("/root/a/unsynced", b"one").unwrap();
            disk.write("/root/a/.new", b"two").unwrap();
            disk.sync("/root/a/.new").unwrap();
            disk.rename("/root/a/.new", "/root/a/record").unwrap();
            disk.sync("/root/a").unwrap();
            disk.write("/root/a/later", b"three").unwrap();
            disk.create_dir_all("/state/b").unwrap();
            disk.lose_power(&mut random);
            assert_eq!(disk.read("/root/a/record").unwrap(), b"two");
            assert!(disk.has("/root/a/unsynced") && !disk.has("/root/a/.new") && !disk.has("/state/b"));
            assert!(disk.read("/root/a/unsynced").unwrap().len() <= 3);
        }
    }

    #[test]
    fn a_directory_moves_with_its_content() {
        let mut disk = Disk::new("/root", "/state");
        disk.create_dir_all("/root/a/b").unwrap();
        disk.create_dir_all("/root/a-b").unwrap();
        disk.write("/root/a/b/file", b"x").unwrap();
        disk.rename("/root/a", "/root/c").unwrap();
        assert_eq!(disk.read("/root/c/b/file").unwrap(), b"x");
        assert!(!disk.has("/root/a") && disk.has("/root/a-b"));
        assert_eq!(disk.entries("/root").unwrap(), [("a-b".into(), true), ("c".into(), true)]);
        disk.remove_dir_all("/root/c").unwrap();
        assert!(disk.rename("/root/c", "/root/d").is_err());
    }
}
