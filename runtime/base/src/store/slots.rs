//! Record files with two slots, for records that change often: those of pods and containers. A flush is the costly
//! part of a commit on flash: replacing a file takes two commits of the file system's journal, that is four flushes on
//! most cheap devices. Here a change is written over the older of the two slots, and fdatasync(2) makes it durable with one
//! flush, because neither the file's size nor a name changes. If the power goes meanwhile, the other slot is complete.
//!
//! Format of the file: two slots of equal size, a multiple of 4096 bytes. Format of a slot:
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 4 | `CORS` |
//! | 4 | 1 | kind: [`Kind`] |
//! | 5 | 1 | version of the body, by kind |
//! | 6 | 4 | length of the body, little-endian |
//! | 10 | 4 | sequence number, little-endian: the slot with the larger one is the record |
//! | 14 | length | body |
//! | 14 + length | 4 | CRC-32 over everything before it, little-endian |
//! | | | any bytes up to the end of the slot |
//!
//! A new record needs no commit of the journal either: it is written into a spare file, `ROOT/spare/N`, which already has
//! its blocks and a durable name, and the file is renamed to the record's name without a sync. If a power cut undoes
//! the rename, the next daemon finds the record in its spare file and renames it again ([`Slots::adopt`]). Spare files
//! are created a second later, several with one sync. Without a spare file, and for bodies that are too large for
//! one, a new file is written and synced like other records; so it is on a file system that does not order changes of names
//! (ext4 without a journal), where a rename without a sync may lose the file.
//!
//! fdatasync does not make the removal of other records durable, so that after a power cut a removed object and a newer one
//! with its name might both exist. Therefore a new record is preceded by a sync of the directories from which records were
//! removed, which are synced some moments after a removal, too, so that a pod's start rarely waits for it. An earlier daemon may have been killed before its sync, so the first write of a daemon is preceded by a sync of the file
//! system: otherwise both slots of a record, one of them never synced, could be lost.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use coracle_sandbox::collect::ordered;
use coracle_sandbox::{crc32, disk};

use super::{CHECKSUM_BYTES, Damage, Kind, Loaded, MAGIC, replace, sync_dir};
use crate::error::{Error, describe_io, failed};
use crate::{log, reactor, time};

const SLOT_MAGIC: &[u8; 4] = b"CORS";
const SLOT_HEADER_BYTES: usize = 14;

/// Slots are multiples of the usual block size of file systems, so that a torn write to one does not damage the other.
const BLOCK_BYTES: usize = 4096;

/// Size of a slot of a spare file. The record of a usual pod or container takes 1 to 3 KiB.
const SPARE_SLOT_BYTES: usize = BLOCK_BYTES;

/// Number of spare files after they were refilled, and the number at which they are refilled: enough for the pods of a
/// minute on a busy node.
const SPARE_FILES: usize = 16;
const SPARE_FILES_LOW: usize = 8;

/// Time between the use of a spare file and the creation of others: the start of a pod has priority.
const REFILL_DELAY: Duration = Duration::from_secs(1);

/// Time between a removal and its sync, unless a new record needs it earlier: the removals of a pod and its containers share one,
/// and a pod that is started later does not wait for it.
const REMOVAL_DELAY: Duration = Duration::from_millis(500);

/// Least time between two syncs of that kind without a new record in between: a file system writes its journal every five seconds
/// itself (ext4's default), so that a series of removals costs no more flushes than without them.
const REMOVAL_INTERVAL: Duration = Duration::from_secs(5);

/// Number of attempts to move a record from its spare file: nothing else tells the daemon about its object, and an error such
/// as ENOMEM may pass.
const ADOPT_TRIES: usize = 8;

/// Bodies up to this size are stored in slots; a larger one is replaced as a whole, because two slots of it would waste space.
const BODY_BYTES_MAX: usize = 256 << 10;

/// Writes the records of pods and containers below one root directory.
#[derive(Debug)]
pub struct Slots {
    root: PathBuf,
    spare: PathBuf,
    this: Weak<Self>,
    /// Whether something of an earlier daemon may not be durable yet.
    is_unsynced: Cell<bool>,
    /// Directories whose names were changed by removals, or by new spare files, and may not be durable yet.
    changed: RefCell<BTreeSet<PathBuf>>,
    /// Whether a refill is already planned.
    is_refilling: Cell<bool>,
    /// Whether a sync of removals is already planned.
    is_syncing: Cell<bool>,
    /// Start of the last planned sync of removals, if no new record has been written since.
    synced_at: Cell<Option<Instant>>,
    /// Whether a file that was renamed has one of its names after a power cut.
    orders_names: bool,
    /// Number in the name of the next spare file.
    next: Cell<u64>,
    /// Spare files of which [`Slots::adopt`] could not move the record, each with the kind that was asked for.
    unmoved: RefCell<BTreeMap<(u8, PathBuf), io::Error>>,
    /// Directories that were removed while there were such spare files.
    gone: RefCell<BTreeSet<PathBuf>>,
}

impl Slots {
    /// The spare files are in `ROOT/spare`, which is created with the first of them.
    pub fn new(root: &Path) -> Rc<Self> {
        Self::on(root, disk::orders_names(root))
    }

    fn on(root: &Path, orders_names: bool) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            root: root.to_owned(),
            spare: root.join("spare"),
            this: this.clone(),
            is_unsynced: Cell::new(true),
            changed: RefCell::default(),
            is_refilling: Cell::new(false),
            is_syncing: Cell::new(false),
            synced_at: Cell::new(None),
            orders_names,
            next: Cell::new(0),
            unmoved: RefCell::default(),
            gone: RefCell::default(),
        })
    }

    /// Must be called after the directory of a record was removed: a record in a spare file is then moved there no more.
    pub fn removed(&self, directory: &Path) {
        if !self.unmoved.borrow().is_empty() {
            self.gone.borrow_mut().insert(directory.to_owned());
        }
    }

    /// Must be called after a record, or its directory, was removed from `directory` or renamed: the removal becomes durable
    /// before the next new record, or some moments later if there is none. Has no effect on a file system that does not order names, where other
    /// changes, such as those of the directories of pods, are not durable either.
    pub fn removed_from(&self, directory: &Path) {
        if !self.orders_names {
            return;
        }
        self.changed.borrow_mut().insert(directory.to_owned());
        let since = self
            .synced_at
            .get()
            .map_or(REMOVAL_INTERVAL, |begun| time::now().saturating_duration_since(begun));
        let delay = REMOVAL_DELAY.max(REMOVAL_INTERVAL.saturating_sub(since));
        self.later(delay, |slots| &slots.is_syncing, Self::sync_removals_in_turns);
    }

    /// Makes removals durable. Other tasks run between two directories, because the sync of each may take long on a slow disk. After an
    /// error the commit of the next new record repeats the sync, and fails if the sync fails again.
    async fn sync_removals_in_turns(self: Rc<Self>) {
        self.synced_at.set(Some(time::now()));
        // What is removed meanwhile plans the next sync.
        let directories: Vec<PathBuf> = self.changed.borrow().iter().cloned().collect();
        for directory in directories {
            if let Err(error) = self.sync_removals_from(&directory) {
                log::warn!("cannot make removals of records durable, will retry with the next new record"; path = directory.display(), error = describe_io(&error));
            }
            smol::future::yield_now().await;
        }
    }

    /// Makes what an earlier daemon has written durable, before the first write.
    fn sync_earlier(&self) -> io::Result<()> {
        if self.is_unsynced.get() {
            disk::sync_file_system(&self.root)?;
            self.is_unsynced.set(false);
        }
        Ok(())
    }

    /// Makes removals durable, before a new record is written.
    fn sync_removals(&self) -> io::Result<()> {
        self.synced_at.set(None);
        loop {
            let Some(directory) = self.changed.borrow().first().cloned() else { return Ok(()) };
            self.sync_removals_from(&directory)?;
        }
    }

    /// Makes the removals from one directory durable, unless that was done.
    fn sync_removals_from(&self, directory: &Path) -> io::Result<()> {
        if !self.changed.borrow().contains(directory) {
            return Ok(());
        }
        match sync_dir(directory) {
            // It was removed itself, from a directory that is in the set, too.
            Err(error) if !is_absent(&error) => return Err(error),
            Ok(()) | Err(_) => self.changed.borrow_mut().remove(directory),
        };
        Ok(())
    }

    /// Writes the record `name` in the existing directory `dir`; it is durable when the function returns. After an error
    /// the old record is unchanged; only if a sync fails, a power cut may leave either record.
    ///
    /// # Errors
    /// `ResourceExhausted` if the disk is full or the body is larger than 8 MiB; otherwise the I/O error.
    pub fn commit(&self, dir: &Path, name: &str, kind: Kind, version: u8, body: &[u8]) -> Result<(), Error> {
        let target = dir.join(name);
        let failed = |error| failed("write record", &target, &error);
        self.sync_earlier().map_err(failed)?;
        if body.len() > BODY_BYTES_MAX {
            self.sync_removals().map_err(failed)?;
            return super::commit(dir, name, kind, version, body);
        }
        let record = Record { kind, version, body };
        match Slotted::open(&target) {
            Ok(Some(file)) if file.fits(&record) => match file.write(&record) {
                Ok(()) => return Ok(()),
                // Written as a new file, as if there were no slots.
                Err(error) => {
                    log::debug!("cannot write over a record"; path = target.display(), error = describe_io(&error))
                }
            },
            // A large body, or bytes that fail verification: replaced as a whole.
            Ok(Some(_)) => {}
            Ok(None) if self.orders_names && record.fits(SPARE_SLOT_BYTES) => {
                match self.commit_to_spare(&target, &record) {
                    Ok(true) => return Ok(()),
                    Ok(false) => self.refill_later(),
                    Err(error) => {
                        log::debug!("cannot use a spare file"; path = target.display(), error = describe_io(&error))
                    }
                }
            }
            // It cannot be read: replaced as a whole, which needs no reading.
            Ok(None) | Err(_) => {}
        }
        self.sync_removals().map_err(failed)?;
        let bytes = record.file();
        replace(dir, name, |temporary| disk::write_synced(temporary, &bytes))
            .and_then(|()| sync_dir(dir))
            .map_err(failed)
    }

    /// Writes a new record into a spare file and renames it. Returns false if there is no spare file.
    fn commit_to_spare(&self, target: &Path, record: &Record<'_>) -> io::Result<bool> {
        let names = self.files()?;
        let open = |name| Slotted::open(&self.spare.join(name)).ok().flatten().filter(Slotted::is_free);
        let Some(file) = names.iter().find_map(open) else { return Ok(false) };
        // The directory of an object that was removed meanwhile: nothing of it may be left in a spare file.
        disk::inspect(target.parent().unwrap_or(target))?;
        self.sync_removals()?;
        file.write(record)
            .and_then(|()| disk::rename(&file.path, target))
            // Otherwise the next daemon would take the record for one whose rename was lost.
            .inspect_err(|_| match disk::remove_file(&file.path) {
                Ok(()) => self.removed_from(&self.spare),
                Err(_) => file.invalidate(0),
            })?;
        if names.len() <= SPARE_FILES_LOW {
            self.refill_later();
        }
        Ok(true)
    }

    /// Names of the spare files.
    fn files(&self) -> io::Result<Vec<String>> {
        match super::entries(&self.spare) {
            Err(error) if is_absent(&error) => Ok(Vec::new()),
            names => names,
        }
    }

    /// Creates spare files a moment later, after the operation in progress.
    fn refill_later(&self) {
        self.later(
            REFILL_DELAY,
            |slots| &slots.is_refilling,
            async |slots: Rc<Self>| {
                // Records are then written as new files, and the next one tries it again.
                if let Err(error) = slots.refill() {
                    log::debug!("cannot create spare files of records"; error = error);
                }
            },
        );
    }

    /// Does `work` after `delay`, unless that is planned already.
    fn later(
        &self,
        delay: Duration,
        is_planned: fn(&Self) -> &Cell<bool>,
        work: impl AsyncFnOnce(Rc<Self>) + 'static,
    ) {
        let Some(slots) = self.this.upgrade().filter(|_| reactor::is_running()) else { return };
        if is_planned(&slots).replace(true) {
            return;
        }
        reactor::spawn(async move {
            reactor::sleep(delay).await;
            is_planned(&slots).set(false);
            work(slots).await;
        })
        .detach();
    }

    /// Creates spare files until there are 16, and makes their names durable.
    ///
    /// # Errors
    /// The I/O error.
    pub fn refill(&self) -> Result<(), Error> {
        let refill = || {
            disk::create_private_dir_all(&self.spare)?;
            let present = super::entries(&self.spare)?;
            self.changed.borrow_mut().insert(self.spare.clone());
            for _ in present.len()..SPARE_FILES {
                // Names of an earlier daemon may be in use.
                while present.contains(&self.next.get().to_string()) {
                    self.next.set(self.next.get() + 1);
                }
                let name = self.next.replace(self.next.get() + 1).to_string();
                replace(&self.spare, &name, |temporary| {
                    disk::write_allocated(temporary, &[0; 2 * SPARE_SLOT_BYTES])
                })?;
            }
            sync_dir(&self.spare)?;
            self.changed.borrow_mut().remove(&self.spare);
            Ok(())
        };
        refill().map_err(|error| failed("create spare files of records in", &self.spare, &error))
    }

    /// Renames records whose rename was undone by a power cut, or was not reached by an earlier daemon, to their names.
    /// Called once per kind at a start, before records are read, and again while [`Slots::unmoved`] names a file. `place`
    /// returns the path of a record; `None`: its object no longer exists, and the record is removed. If there is a record at
    /// that path, that one is newer. A damaged record is moved to quarantine; one that cannot be renamed stays in its file.
    ///
    /// # Errors
    /// The directory of the spare files cannot be read.
    pub fn adopt(
        &self,
        kind: Kind,
        place: impl Fn(&Loaded) -> Result<Option<PathBuf>, Damage>,
    ) -> Result<(), Error> {
        let names = self.files().map_err(|error| failed("list", &self.spare, &error))?;
        let is_there = |path: &Path| names.iter().any(|name| path.ends_with(name));
        self.unmoved.borrow_mut().retain(|(of, path), _| *of != kind as u8 || is_there(path));
        for name in names.iter() {
            let path = self.spare.join(name);
            let adopted = (1..ADOPT_TRIES).find_map(|_| self.adopt_file(&path, kind, &place).ok());
            let key = (kind as u8, path.clone());
            match adopted.map_or_else(|| self.adopt_file(&path, kind, &place), Ok) {
                Ok(()) => drop(self.unmoved.borrow_mut().remove(&key)),
                Err(error) => {
                    let text = describe_io(&error);
                    if self.unmoved.borrow_mut().insert(key, error).is_none() {
                        log::error!("cannot move a record from its spare file, will retry"; path = path.display(), error = text);
                    }
                }
            }
        }
        if self.unmoved.borrow().is_empty() {
            self.gone.borrow_mut().clear();
        }
        Ok(())
    }

    /// Why a record that is not at its place may be in a spare file; `None`: it is in none.
    pub fn unmoved(&self) -> Option<String> {
        let unmoved = self.unmoved.borrow();
        let ((_, path), error) = unmoved.first_key_value()?;
        Some(format!("a record cannot be moved from {}: {}", path.display(), describe_io(error)))
    }

    /// The spare files from which a record could not be moved, each with the number of an error, if the kernel gave one.
    pub fn unmoved_files(&self) -> BTreeMap<PathBuf, Option<i32>> {
        let unmoved = self.unmoved.borrow();
        ordered(unmoved.iter().map(|((_, path), error)| (path.clone(), error.raw_os_error())))
    }

    /// Whether a path is that of a spare file.
    pub fn is_spare_file(&self, path: &Path) -> bool {
        path.starts_with(&self.spare)
    }

    /// Moves a spare file to quarantine, whose record will never be moved to its place.
    ///
    /// # Errors
    /// Those of [`super::quarantine()`].
    pub fn give_up(&self, path: &Path, reason: &str) -> Result<(), Error> {
        super::quarantine(&self.root, path, reason)?;
        self.unmoved.borrow_mut().retain(|(_, unmoved), _| unmoved != path);
        Ok(())
    }

    fn adopt_file(
        &self,
        path: &Path,
        kind: Kind,
        place: &impl Fn(&Loaded) -> Result<Option<PathBuf>, Damage>,
    ) -> io::Result<()> {
        let Some(file) = Slotted::open(path)?.filter(|file| !file.is_free()) else { return Ok(()) };
        if file.slots().iter().all(Result::is_err) {
            // A power cut has left it with another size: no record was written to it.
            return disk::remove_file(path);
        }
        // Of the other kind.
        let Ok(loaded) = decode(&file.bytes, kind) else { return Ok(()) };
        let is_gone =
            |target: &Path| self.gone.borrow().iter().any(|directory| target.starts_with(directory));
        match place(&loaded) {
            Ok(Some(target)) if is_gone(&target) => disk::remove_file(path)?,
            Ok(Some(target)) => match disk::inspect(&target) {
                Ok(()) => disk::remove_file(path)?,
                Err(error) if is_absent(&error) => {
                    if let Some(directory) = target.parent() {
                        disk::create_private_dir_all(directory)?;
                    }
                    // An earlier daemon may have been killed before its sync.
                    disk::write_over(path, 0, &[], true)?;
                    disk::rename(path, &target)?;
                }
                Err(error) => return Err(error),
            },
            Ok(None) | Err(Damage::Absent) => disk::remove_file(path)?,
            Err(Damage::Io(error)) => return Err(error),
            Err(Damage::Damaged(reason)) => {
                super::quarantine(&self.root, path, &reason)
                    .map_err(|error| io::Error::other(error.to_string()))?;
            }
        }
        Ok(())
    }
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

/// A record to write.
struct Record<'a> {
    kind: Kind,
    version: u8,
    body: &'a [u8],
}

impl Record<'_> {
    fn bytes(&self) -> usize {
        SLOT_HEADER_BYTES + self.body.len() + CHECKSUM_BYTES
    }

    fn fits(&self, slot: usize) -> bool {
        self.bytes() <= slot
    }

    /// The content of a slot.
    fn slot(&self, sequence: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes());
        bytes.extend_from_slice(SLOT_MAGIC);
        bytes.push(self.kind as u8);
        bytes.push(self.version);
        bytes.extend_from_slice(&(self.body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&sequence.to_le_bytes());
        bytes.extend_from_slice(self.body);
        let checksum = crc32(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// The content of a new file, with space for a body that grows by a quarter.
    fn file(&self) -> Vec<u8> {
        let slot = (self.bytes() + self.body.len() / 4).next_multiple_of(BLOCK_BYTES);
        let mut bytes = self.slot(1);
        bytes.resize(2 * slot, 0);
        bytes
    }
}

/// A valid slot.
struct Slot<'a> {
    kind: u8,
    sequence: u32,
    version: u8,
    body: &'a [u8],
}

/// Verifies a slot; the error is the reason why it is none.
fn parse(slot: &[u8]) -> Result<Slot<'_>, &'static str> {
    let (magic, rest) = slot.split_first_chunk::<4>().ok_or("it is too short")?;
    if magic != SLOT_MAGIC {
        return Err("it does not start with CORS");
    }
    let ([kind, version], rest) = rest.split_first_chunk::<2>().ok_or("it is too short")?;
    let (length, rest) = rest.split_first_chunk::<4>().ok_or("it is too short")?;
    let (sequence, rest) = rest.split_first_chunk::<4>().ok_or("it is too short")?;
    let length = u32::from_le_bytes(*length) as usize;
    let (body, rest) = rest.split_at_checked(length).ok_or("its body is longer than the slot")?;
    let (expected, _) =
        rest.split_first_chunk::<CHECKSUM_BYTES>().ok_or("its body is longer than the slot")?;
    if crc32(&slot[..SLOT_HEADER_BYTES + length]) != u32::from_le_bytes(*expected) {
        return Err("the checksum does not match");
    }
    Ok(Slot { kind: *kind, sequence: u32::from_le_bytes(*sequence), version: *version, body })
}

/// Whether a file has two slots, judging by its first bytes and its size.
pub(super) fn is_slotted(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.len().is_multiple_of(2 * BLOCK_BYTES) && !bytes.starts_with(MAGIC)
}

/// Returns the newer record of a file with two slots.
pub(super) fn decode(bytes: &[u8], kind: Kind) -> Result<Loaded, String> {
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let newer = match (parse(first), parse(second)) {
        (Ok(first), Ok(second)) if second.sequence > first.sequence => second,
        (Ok(first), _) => first,
        (Err(_), Ok(second)) => second,
        (Err(first), Err(second)) => {
            return Err(match first == second {
                true => format!("both slots: {first}"),
                false => format!("first slot: {first}; second slot: {second}"),
            });
        }
    };
    if newer.kind != kind as u8 {
        return Err(format!("kind {} instead of {}", newer.kind, kind as u8));
    }
    Ok(Loaded { version: newer.version, body: newer.body.to_vec() })
}

/// A file with two slots.
#[derive(Debug)]
struct Slotted {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Slotted {
    /// Reads a file; `None` if there is none. A file without slots fits no record.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        // Enough for the largest slots; a longer file fits no record, either.
        let longest = 3 * BODY_BYTES_MAX as u64;
        match disk::read_up_to(path, longest) {
            Ok(bytes) => Ok(Some(Self { path: path.to_owned(), bytes })),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn slots(&self) -> [Result<Slot<'_>, &'static str>; 2] {
        let (first, second) = self.bytes.split_at(self.bytes.len() / 2);
        [parse(first), parse(second)]
    }

    /// Checks that the file is a spare file without a record.
    fn is_free(&self) -> bool {
        self.bytes.len() == 2 * SPARE_SLOT_BYTES && self.slots().iter().all(Result::is_err)
    }

    fn fits(&self, record: &Record<'_>) -> bool {
        is_slotted(&self.bytes) && record.fits(self.bytes.len() / 2) && self.slots().iter().any(Result::is_ok)
    }

    /// Writes a record over the older slot, and makes it durable. After an error the file has its old record.
    fn write(&self, record: &Record<'_>) -> io::Result<()> {
        let (index, sequence) = match self.slots() {
            [Ok(first), Ok(second)] if second.sequence > first.sequence => (0, second.sequence),
            [Ok(first), _] => (1, first.sequence),
            [Err(_), Ok(second)] => (0, second.sequence),
            [Err(_), Err(_)] => (0, 0),
        };
        let offset = (index * self.bytes.len() / 2) as u64;
        // After the largest number the older slot would win: the caller replaces the file.
        let sequence = sequence.checked_add(1).ok_or(io::ErrorKind::InvalidData)?;
        disk::write_over(&self.path, offset, &record.slot(sequence), true)
            // What was written is in the page cache, and the next daemon would read it.
            .inspect_err(|_| self.invalidate(offset))
    }

    /// Makes the slot at `offset` invalid, without a sync.
    fn invalidate(&self, offset: u64) {
        if let Err(error) = disk::write_over(&self.path, offset, &[0; SLOT_HEADER_BYTES], false) {
            log::warn!("cannot undo a failed change of a record"; path = self.path.display(), error = describe_io(&error));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::store::{Damage, load};
    use crate::testdir::TestDir;

    /// A root directory with a directory for records.
    fn root(name: &str) -> (TestDir, PathBuf, Rc<Slots>) {
        let root = TestDir::new(name);
        let dir = root.path().join("pods");
        fs::create_dir(&dir).unwrap();
        let slots = Slots::on(root.path(), true);
        (root, dir, slots)
    }

    fn body(dir: &Path) -> Result<Vec<u8>, Damage> {
        load(dir, "x", Kind::Pod).map(|loaded| loaded.body)
    }

    fn spare_files(root: &TestDir) -> usize {
        fs::read_dir(root.path().join("spare")).unwrap().count()
    }

    #[test]
    fn the_format_of_a_slot_is_unchanged() {
        let record = Record { kind: Kind::Pod, version: 7, body: b"abc" };
        let golden = b"CORS\x02\x07\x03\0\0\0\x05\0\0\0abc\x5a\x68\xa9\x0f";
        assert_eq!(record.slot(5), golden, "{:x?}", record.slot(5));
        let slot = parse(golden).unwrap();
        assert_eq!((slot.kind, slot.version, slot.sequence, slot.body), (2, 7, 5, &b"abc"[..]));
    }

    #[test]
    fn a_change_is_written_over_the_older_slot_of_the_same_file() {
        let (_root, dir, slots) = root("slots-over");
        let mut files = Vec::new();
        for text in [&b"one"[..], b"two", &[7; 3000], b"", b"five"] {
            slots.commit(&dir, "x", Kind::Pod, 3, text).unwrap();
            assert_eq!(body(&dir).unwrap(), text);
            files.push(fs::metadata(dir.join("x")).unwrap().ino());
        }
        assert!(files.iter().all(|file| *file == files[0]), "one file: {files:?}");
        let bytes = fs::read(dir.join("x")).unwrap();
        assert_eq!(bytes.len(), 2 * BLOCK_BYTES);
        let sequences = [parse(&bytes[..BLOCK_BYTES]), parse(&bytes[BLOCK_BYTES..])];
        assert_eq!(sequences.map(|slot| slot.unwrap().sequence), [5, 4]);
    }

    #[test]
    fn a_record_that_outgrows_its_slots_gets_a_larger_file() {
        let (_root, dir, slots) = root("slots-grow");
        for bytes in [10, 5000, 5100, 100_000, BODY_BYTES_MAX, BODY_BYTES_MAX + 1, 20] {
            slots.commit(&dir, "x", Kind::Pod, 3, &vec![9; bytes]).unwrap();
            assert_eq!(body(&dir).unwrap(), vec![9; bytes]);
        }
    }

    #[test]
    fn a_new_record_uses_a_spare_file() {
        let (root, dir, slots) = root("slots-spare");
        slots.refill().unwrap();
        assert_eq!(spare_files(&root), SPARE_FILES);
        slots.commit(&dir, "x", Kind::Pod, 3, b"one").unwrap();
        assert_eq!((spare_files(&root), body(&dir).unwrap()), (SPARE_FILES - 1, b"one".to_vec()));
        slots.commit(&dir, "large", Kind::Pod, 3, &[1; 5000]).unwrap();
        assert_eq!(spare_files(&root), SPARE_FILES - 1, "too large for a spare file");
        slots.refill().unwrap();
        assert_eq!(spare_files(&root), SPARE_FILES);
        // Those of an earlier daemon are used, too.
        Slots::on(root.path(), true).refill().unwrap();
        assert_eq!(spare_files(&root), SPARE_FILES);
    }

    #[test]
    fn a_removal_is_synced_before_the_next_new_record() {
        let (root, dir, slots) = root("slots-removal");
        slots.refill().unwrap();
        for gone in [&dir, &root.path().join("removed-itself")] {
            slots.removed_from(gone);
        }
        assert_eq!(slots.changed.borrow().len(), 2);
        slots.commit(&dir, "x", Kind::Pod, 3, b"one").unwrap();
        assert!(slots.changed.borrow().is_empty() && !slots.is_unsynced.get());
    }

    #[test]
    fn removals_are_synced_together_a_moment_later() {
        let (root, dir, slots) = root("slots-later");
        reactor::run(async {
            slots.removed_from(&dir);
            slots.removed_from(&root.path().join("removed-itself"));
            assert!(slots.is_syncing.get() && slots.changed.borrow().len() == 2);
            while !slots.changed.borrow().is_empty() {
                reactor::sleep(Duration::from_millis(10)).await;
            }
            assert!(!slots.is_syncing.get(), "the next removal plans the next sync");
        });
    }

    #[test]
    fn a_series_of_removals_is_synced_seldom_until_there_is_a_new_record() {
        let (_root, dir, slots) = root("slots-series");
        slots.refill().unwrap();
        reactor::run(async {
            let soon = Duration::from_secs(2);
            let synced = async || {
                while !slots.changed.borrow().is_empty() {
                    reactor::sleep(Duration::from_millis(10)).await;
                }
            };
            slots.removed_from(&dir);
            synced().await;
            slots.removed_from(&dir);
            assert!(reactor::deadline(soon, synced()).await.is_err(), "the second within five seconds waits");
            slots.commit(&dir, "x", Kind::Pod, 3, b"one").unwrap();
            assert!(slots.changed.borrow().is_empty());
            reactor::sleep(REMOVAL_INTERVAL).await;
            slots.commit(&dir, "y", Kind::Pod, 3, b"one").unwrap();
            slots.removed_from(&dir);
            reactor::deadline(soon, synced()).await.expect("the first after a new record");
        });
    }

    /// A symbolic link to itself, which cannot be opened, stands for a disk that fails.
    #[test]
    fn a_removal_whose_sync_failed_is_synced_before_the_next_new_record() {
        let (root, dir, slots) = root("slots-failed");
        slots.refill().unwrap();
        let other = root.path().join("other");
        std::os::unix::fs::symlink(&other, &other).unwrap();
        reactor::run(async {
            slots.removed_from(&other);
            while slots.is_syncing.get() {
                reactor::sleep(Duration::from_millis(10)).await;
            }
        });
        assert_eq!(slots.changed.borrow().len(), 1);
        slots.commit(&dir, "x", Kind::Pod, 3, b"one").unwrap_err();
        fs::remove_file(&other).unwrap();
        fs::create_dir(&other).unwrap();
        slots.commit(&dir, "x", Kind::Pod, 3, b"one").unwrap();
        assert!(slots.changed.borrow().is_empty());
    }

    #[test]
    fn without_ordered_names_no_spare_file_is_used() {
        let (root, dir, slots) = root("slots-unordered");
        slots.refill().unwrap();
        Slots::on(root.path(), false).commit(&dir, "x", Kind::Pod, 3, b"one").unwrap();
        assert_eq!((spare_files(&root), body(&dir).unwrap()), (SPARE_FILES, b"one".to_vec()));
    }

    #[test]
    fn a_new_record_whose_directory_is_missing_leaves_no_spare_file_with_a_record() {
        let (root, dir, slots) = root("slots-missing");
        slots.refill().unwrap();
        let error = slots.commit(&dir.join("none"), "x", Kind::Pod, 3, b"one").unwrap_err();
        assert!(error.to_string().contains("none/x: no such file or directory"), "{error}");
        assert_eq!(spare_files(&root), SPARE_FILES);
        slots.adopt(Kind::Pod, |_| panic!("no record is found")).unwrap();
    }

    #[test]
    fn a_record_whose_rename_was_undone_is_found_in_its_spare_file() {
        let (root, dir, slots) = root("slots-adopt");
        slots.refill().unwrap();
        let undo = |name: &str| {
            slots.commit(&dir, name, Kind::Pod, 3, name.as_bytes()).unwrap();
            fs::rename(dir.join(name), root.path().join("spare").join(format!("of-{name}"))).unwrap();
        };
        for name in ["x", "gone", "newer", "damaged"] {
            undo(name);
        }
        slots.commit(&dir, "newer", Kind::Pod, 3, b"in its place").unwrap();
        fs::write(root.path().join("spare/torn"), b"").unwrap();
        let slots = Slots::on(root.path(), true);
        slots.adopt(Kind::Container, |_| panic!("no container's record is there")).unwrap();
        let place = |loaded: &Loaded| match loaded.body.as_slice() {
            b"gone" => Ok(None),
            b"damaged" => Err(Damage::Damaged("its version is 9".into())),
            name => Ok(Some(dir.join("below").with_file_name(str::from_utf8(name).unwrap()))),
        };
        slots.adopt(Kind::Pod, place).unwrap();
        assert_eq!(body(&dir).unwrap(), b"x");
        assert_eq!(load(&dir, "newer", Kind::Pod).unwrap().body, b"in its place");
        assert!(!dir.join("gone").exists() && !dir.join("damaged").exists());
        assert_eq!(spare_files(&root), SPARE_FILES - 5, "only unused files are left");
        assert_eq!(
            fs::read_dir(root.path().join("quarantine")).unwrap().count(),
            2,
            "the record and its reason"
        );
    }

    #[test]
    fn a_record_whose_directory_was_removed_stays_removed() {
        let (root, dir, slots) = root("slots-removed");
        slots.refill().unwrap();
        slots.commit(&dir, "x", Kind::Pod, 3, b"one").unwrap();
        fs::rename(dir.join("x"), root.path().join("spare/of-x")).unwrap();
        let slots = Slots::on(root.path(), true);
        slots.adopt(Kind::Pod, |_| Err(Damage::Io(io::Error::other("not now")))).unwrap();
        assert!(slots.unmoved().is_some());
        fs::remove_dir_all(&dir).unwrap();
        slots.removed(&dir);
        slots.adopt(Kind::Pod, |_| Ok(Some(dir.join("x")))).unwrap();
        assert!(!dir.exists() && slots.unmoved().is_none());
        assert_eq!(spare_files(&root), SPARE_FILES - 1);
    }

    /// A cut of the power during a write leaves any mixture of old and new sectors in one slot.
    #[test]
    fn a_torn_slot_loses_only_the_last_change() {
        let (_root, dir, slots) = root("slots-torn");
        slots.commit(&dir, "x", Kind::Pod, 3, &[1; 2000]).unwrap();
        slots.commit(&dir, "x", Kind::Pod, 3, &[2; 2000]).unwrap();
        let whole = fs::read(dir.join("x")).unwrap();
        for sector in 0..4 {
            let mut torn = whole.clone();
            torn[BLOCK_BYTES + sector * 512..][..512].fill(0);
            fs::write(dir.join("x"), &torn).unwrap();
            assert_eq!(body(&dir).unwrap(), [1; 2000], "sector {sector}");
            // The next change is written over the torn slot.
            slots.commit(&dir, "x", Kind::Pod, 3, b"next").unwrap();
            assert_eq!(body(&dir).unwrap(), b"next", "sector {sector}");
        }
    }

    #[test]
    fn damaged_files_are_refused_and_replaced() {
        let (_root, dir, slots) = root("slots-damaged");
        for bytes in [vec![0; 2 * BLOCK_BYTES], vec![0xff; 4 * BLOCK_BYTES], b"CORS".to_vec(), Vec::new()] {
            fs::write(dir.join("x"), &bytes).unwrap();
            assert!(matches!(body(&dir), Err(Damage::Damaged(_))), "{} bytes", bytes.len());
            slots.commit(&dir, "x", Kind::Pod, 3, b"new").unwrap();
            assert_eq!(body(&dir).unwrap(), b"new");
        }
        assert!(matches!(load(&dir, "x", Kind::Container), Err(Damage::Damaged(_))), "the wrong kind");
    }

    /// Each flipped bit of the newer slot makes it invalid; no input leads to a panic.
    #[test]
    fn every_flipped_bit_is_detected() {
        let record = Record { kind: Kind::Pod, version: 1, body: b"a small body" };
        let whole = record.slot(1);
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(parse(&flipped).is_err(), "bit {bit}");
        }
        for cut in 0..whole.len() {
            assert!(parse(&whole[..cut]).is_err(), "cut at {cut}");
        }
        assert!(parse(&[whole, vec![0xff; 9]].concat()).is_ok(), "the rest of a slot has any content");
    }

    #[test]
    fn a_file_with_the_largest_sequence_number_is_replaced() {
        let (_root, dir, slots) = root("slots-last");
        let record = Record { kind: Kind::Pod, version: 3, body: b"last" };
        let mut bytes = record.slot(u32::MAX);
        bytes.resize(2 * BLOCK_BYTES, 0);
        fs::write(dir.join("x"), bytes).unwrap();
        slots.commit(&dir, "x", Kind::Pod, 3, b"next").unwrap();
        assert_eq!(body(&dir).unwrap(), b"next");
    }
}
