//! Import directories: archives and lists of images for nodes without internet access (CRI 8.2, AIR-1 to
//! AIR-7), and additional stores: images that are shipped unpacked with the system's image, on a file system that is only read. Their images are imported soon after the start or a change, and stay pinned while the file exists.
//!
//! ```text
//! start, change (inotify) ─► scan: names, sizes, times ─► equal to the record? nothing to do
//!                                                      └─► unchanged for 2 s? import in a worker ─► record ─► pins
//! ```
//! A pull at the start waits for the archives that are there ([`Images::arrived_at_start`]).
//! One record stores which file contained which images, so an unchanged file needs one stat(2) and no write.
//! If a directory cannot be read, its files stay pinned, because a medium may be mounted late.
//!
//! The layers of an additional store are used while its index is the one by which they were verified: another medium or version of the
//! system's image is verified first ([`Images::check_store_of`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read, Seek};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind, describe_io};
use coracle_base::{log, reactor};
use coracle_job::{ImportSource, STORE_INDEX};
use coracle_reference::Reference;
use coracle_sandbox::collect;
use coracle_sandbox::hostpath;
use rustix::fs::OFlags;
use smol::channel::Receiver;

use super::credentials::Auth;
use super::import_record::{Bundle, Signature};
use super::index::LayerName;
use super::{ImageId, Images};

/// Maximum number of files of all directories.
const FILES_MAX: usize = 4096;
/// Maximum length of a list in bytes.
const LIST_BYTES_MAX: u64 = 1 << 20;
/// Time for which a file must be unchanged before it is imported, because a file that is being copied changes
/// more often. A file that is read too early is refused as truncated, and imported when it is complete.
const SETTLED_AFTER: Duration = Duration::from_secs(2);
/// Time after the daemon's start until which pulls wait for the archives of the start: enough for some gigabytes on slow
/// flash. A file that changes all the time, or an import that does not end, delays no pull any longer.
const START_LIMIT: Duration = Duration::from_secs(10 * 60);
/// Interval at which a waiting pull looks whether its image has arrived.
const ARRIVAL_CHECK: Duration = Duration::from_secs(1);
/// Interval at which an additional store that is not there is looked for: no event says that it was mounted.
const STORE_CHECK: Duration = Duration::from_secs(10);
/// Delay before a retry after a failure of this node or the network.
const RETRY_AFTER: Duration = Duration::from_secs(10 * 60);
/// The pause before a damaged store is read again is at least this many times as long as the reading took.
const READ_SHARE: u32 = 50;

const ARCHIVES: [&str; 5] = [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst"];
const LISTS: [&str; 1] = [".txt"];
/// File name endings of unsupported compressions: such files are logged and not imported.
const REFUSED: [&str; 4] = [".tar.bz2", ".tbz", ".tar.xz", ".tar.lz4"];

impl Images {
    /// Replaces the import directories.
    pub fn import_from(self: &Rc<Self>, directories: Vec<PathBuf>) {
        self.sources.bundles.directories.replace(directories);
        self.sources.bundles.look_again();
    }

    /// Starts the import task, which runs until the daemon ends.
    pub fn follow_bundles(self: &Rc<Self>) {
        reactor::spawn(follow(Rc::clone(self))).detach();
        let first_round = self.sources.bundles.first_round.0.clone();
        reactor::spawn(async move {
            reactor::sleep(START_LIMIT).await;
            first_round.close();
        })
        .detach();
    }

    /// Waits for the archives that the import directories had at the daemon's start, on behalf of a pull of an image that
    /// is not in the store, and returns the image if it is now there and the policy accepts it. `None` at once after the start, and for an
    /// image that is there. k3s likewise imports its archives before it starts its kubelet, so that a node without a
    /// registry does not try to pull what it is about to have.
    pub async fn arrived_at_start(&self, name: &str) -> Option<ImageId> {
        let find = || self.find(name).ok().flatten().map(|view| view.id);
        let first_round = &self.sources.bundles.first_round.1;
        if first_round.is_closed() || find().is_some() {
            return None;
        }
        log::info!("a pull waits for the import directories"; name = name);
        loop {
            // The channel is closed, without a message, when the first round is over. The image may be there before.
            let is_over = reactor::deadline(ARRIVAL_CHECK, first_round.recv()).await.is_ok();
            let found = find();
            if is_over || found.is_some() {
                return self.accepted_at_start(found?, name).await;
            }
        }
    }

    /// The image, if the policy accepts it by this name: the policy may have been changed since the import, and an image whose record could
    /// not be read at the start was there before it.
    async fn accepted_at_start(&self, id: ImageId, name: &str) -> Option<ImageId> {
        let reference = Reference::parse(name).ok()?;
        let is_accepted = self.is_accepted(&id, &reference).await;
        // It may have been removed meanwhile, and a name may also be the beginning of an ID.
        let text = reference.to_string();
        let has_name = |view: crate::View| {
            view.id == id && view.tags.iter().chain(&view.digests).any(|own| *own == text)
        };
        let is_there = self.find(name).ok().flatten().is_some_and(has_name);
        is_accepted.is_ok_and(|is_accepted| is_accepted && is_there).then_some(id)
    }

    /// Whether the file is unchanged and all its images are still in the store.
    fn has_bundle(&self, path: &str, signature: &Signature) -> bool {
        let known = self.sources.bundles.known.borrow();
        let Some(bundle) = known.get(path) else { return false };
        let index = self.index.borrow();
        let is_there = |id: &String| id.parse().is_ok_and(|id: ImageId| index.get(&id).is_some());
        bundle.is_whole && bundle.signature == *signature && bundle.images.iter().all(is_there)
    }

    /// Imports one file and records its images.
    async fn take_bundle(self: &Rc<Self>, path: &str, signature: Signature) -> Result<(), Error> {
        let begun = Instant::now();
        let is_known =
            self.sources.bundles.known.borrow().get(path).is_some_and(|known| known.signature == signature);
        let source = match store_of(Path::new(path)) {
            Some(store) => Some(ImportSource::Additional(store.to_owned())),
            None => (!has_ending(path, &LISTS)).then(|| ImportSource::Archive(path.into())),
        };
        let (images, result) = match source {
            // A name that has another image since this version of the file was imported stays there.
            Some(source) => {
                let (views, result) = self.import_in_background(source, is_known).await?;
                (views.into_iter().map(|view| view.id.to_string()).collect(), result)
            }
            None => self.pull_list(Path::new(path)).await,
        };
        let is_whole = result.is_ok();
        let count = images.len();
        self.change_bundles(|known| {
            // If a new version of the file cannot be imported, images of the old version stay pinned until it
            // is replaced.
            let before = known.get(path).filter(|_| !is_whole).map(|bundle| bundle.images.clone());
            let mut images = images;
            images.extend(before.into_iter().flatten());
            collect::sort(&mut images);
            images.dedup();
            known.insert(path.to_owned(), Bundle { signature, images, is_whole });
        })?;
        result?;
        log::info!("images imported"; path = path, images = count, ms = begun.elapsed().as_millis());
        Ok(())
    }

    /// Checks that a layer can be used if it is that of an additional store.
    ///
    /// # Errors
    /// The store is not there; it is not verified since its index changed.
    pub(super) fn check_store_of(&self, layer: &LayerName) -> Result<(), Error> {
        let Some(target) = self.disk.link(layer) else { return Ok(()) };
        let index = self.disk.store_of(&target).map(|store| store.join(STORE_INDEX)).unwrap_or_default();
        let why = match signature_of_index(&index) {
            Err(_) => "is not there",
            Ok(_) if !target.is_dir() => "does not have it",
            Ok(signature) => {
                let known = self.sources.bundles.known.borrow();
                if known.get(&*index.to_string_lossy()).is_some_and(|known| known.signature == signature) {
                    return Ok(());
                }
                // No event says that a medium was exchanged.
                self.sources.bundles.look_again();
                "is not verified since it changed"
            }
        };
        Err(Error::new(Kind::FailedPrecondition, format!("layer {layer}: its additional store {why}")))
    }

    /// Pulls the images of a list that are not in the store; tries all of them. Returns the IDs of the list's
    /// images, and the first error.
    async fn pull_list(self: &Rc<Self>, path: &Path) -> (Vec<String>, Result<(), Error>) {
        let tried = |error: Error| error.context(format!("import {}", path.display()));
        let text = match read_list(path) {
            Ok(text) => text,
            Err(error) => return (Vec::new(), Err(tried(error.into()))),
        };
        let (mut images, mut result) = (Vec::new(), Ok(()));
        // Editors of Windows begin a file with a byte order mark.
        let text = text.trim_start_matches('\u{feff}');
        for line in text.lines().map(without_comment).filter(|line| !line.is_empty()) {
            let id = match self.find(line) {
                Ok(Some(view)) => Ok(view.id),
                Ok(None) => self.pull(line, Auth::default()).await,
                Err(error) => Err(error),
            };
            match id {
                Ok(id) => images.push(id.to_string()),
                Err(error) => result = result.and(Err(tried(error))),
            }
        }
        (images, result)
    }

    /// Removes files that no longer exist from the record, so that their images are no longer pinned because
    /// of them.
    fn forget_bundles(&self, look: &Look) {
        let is_gone = |path: &String| {
            let directory = Path::new(path).parent().unwrap_or(Path::new("/"));
            !look.files.contains_key(path) && !look.unreadable.contains(directory)
        };
        if self.sources.bundles.known.borrow().keys().any(is_gone) {
            let changed = self.change_bundles(|known| {
                known.retain(|path, _| {
                    let is_gone = is_gone(path);
                    if is_gone {
                        log::info!("archive or list was removed, its images are no longer pinned"; path = path);
                    }
                    !is_gone
                });
            });
            if let Err(error) = changed {
                log::warn!("cannot write the record of import directories"; error = error);
            }
        }
    }

    /// Changes the record: commits the change before it takes effect.
    fn change_bundles(&self, change: impl FnOnce(&mut BTreeMap<String, Bundle>)) -> Result<(), Error> {
        let mut known = self.sources.bundles.known.borrow().clone();
        change(&mut known);
        if *self.sources.bundles.known.borrow() == known {
            return Ok(());
        }
        self.sources.bundles.commit(&self.disk.images(), known)
    }
}

/// The result of one scan of the directories.
#[derive(Default)]
struct Look {
    /// Files in the order of their paths.
    files: BTreeMap<String, Signature>,
    unreadable: BTreeSet<PathBuf>,
    /// Additional stores that are not there.
    absent: BTreeSet<PathBuf>,
}

fn look(directories: &[PathBuf], stores: &[PathBuf]) -> Look {
    let mut look = Look::default();
    for store in stores {
        let index = store.join(STORE_INDEX);
        match signature_of_index(&index) {
            Ok(signature) => drop(look.files.insert(index.to_string_lossy().into_owned(), signature)),
            Err(_) => {
                look.unreadable.extend(index.parent().map(Path::to_owned));
                look.absent.insert(store.clone());
            }
        }
    }
    for directory in directories {
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    log::warn!("cannot read an import directory, will retry"; path = directory.display(), error = describe_io(&error));
                }
                look.unreadable.insert(directory.clone());
                continue;
            }
        };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_ours = [&ARCHIVES[..], &LISTS, &REFUSED].iter().any(|endings| has_ending(&name, endings));
            if is_ours
                && !name.starts_with('.')
                && look.files.len() < FILES_MAX
                && let Some(signature) = signature(&entry.path())
            {
                look.files.insert(entry.path().to_string_lossy().into_owned(), signature);
            }
        }
    }
    look
}

/// The directory of an additional store; `None` if the path is not that of an index.
fn store_of(index: &Path) -> Option<&Path> {
    index.ends_with(STORE_INDEX).then(|| index.parent()?.parent()).flatten()
}

/// Whether the name has one of these endings, in upper or lower case, as k3s compares them.
fn has_ending(name: &str, endings: &[&str]) -> bool {
    let name = name.to_ascii_lowercase();
    endings.iter().any(|ending| name.ends_with(ending))
}

/// Signature of a regular file; links are followed. `None` if there is no regular file.
fn signature(path: &Path) -> Option<Signature> {
    let about = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some(Signature {
        bytes: about.len(),
        inode: about.ino(),
        modified_s: about.mtime(),
        modified_ns: about.mtime_nsec(),
    })
}

/// Signature of the index of an additional store: its checksum, because all files of a system's image may have one time.
fn signature_of_index(path: &Path) -> io::Result<Signature> {
    const SUM_BYTES: i64 = 8;
    // O_NONBLOCK: without it the open of a FIFO would wait for a writer.
    let mut file = fs::File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut sum = [0; SUM_BYTES as usize];
    file.seek(io::SeekFrom::End(-SUM_BYTES))?;
    file.read_exact(&mut sum)?;
    Ok(Signature { bytes: 0, inode: 0, modified_s: i64::from_le_bytes(sum), modified_ns: 0 })
}

/// The part of a line before `#`, which no reference contains.
fn without_comment(line: &str) -> &str {
    line.split_once('#').map_or(line, |(name, _)| name).trim()
}

fn read_list(path: &Path) -> io::Result<String> {
    let bytes = hostpath::read(path, LIST_BYTES_MAX).map_err(|error| io::Error::other(error.to_string()))?;
    String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// A failed import, and how long it is not retried.
struct Refusal {
    signature: Signature,
    /// The generation of the image policy: another one may accept the images.
    policy: u64,
    /// Time of the next attempt; `None`: not before the file changes.
    again: Option<Instant>,
}

async fn follow(images: Rc<Images>) {
    let mut seen: BTreeMap<String, (Signature, Instant)> = BTreeMap::new();
    let mut refused: BTreeMap<String, Refusal> = BTreeMap::new();
    let mut absent = BTreeSet::new();
    // Watches end after the next ones have begun, so that those of a directory that stays are not made again.
    let mut armed;
    loop {
        // Consumes a pending notification, which is about these directories; there is always one at the start.
        let _ = images.sources.bundles.changed.1.try_recv();
        let directories = images.sources.bundles.directories.borrow().clone();
        // Before the scan, so that no change in between is missed.
        let watched: Vec<PathBuf> = directories.iter().chain(images.disk.stores()).cloned().collect();
        armed = reactor::arm(&watched);
        let look = look(&directories, images.disk.stores());
        for store in look.absent.difference(&absent) {
            log::warn!("an additional store is missing, will retry"; path = store.display());
        }
        absent.clone_from(&look.absent);
        images.forget_bundles(&look);
        seen.retain(|path, _| look.files.contains_key(path));
        let policy = images.sources.policy.generation();
        refused.retain(|path, refusal| {
            refusal.policy == policy
                && look.files.get(path) == Some(&refusal.signature)
                && refusal.again.is_none_or(|again| again > Instant::now())
        });
        // Additional stores first: what they have is not unpacked. Archives before lists: they need no network, and pulls wait for them.
        let is_store = |(path, _): &(String, Signature)| store_of(Path::new(path)).is_some();
        let (stores, files): (Vec<_>, Vec<_>) = look.files.into_iter().partition(is_store);
        let is_list = |(path, _): &(String, Signature)| has_ending(path, &LISTS);
        let (lists, archives): (Vec<_>, Vec<_>) = files.into_iter().partition(is_list);
        let first = stores.into_iter().chain(archives).collect();
        let mut pause = take_settled(&images, first, &mut seen, &mut refused).await;
        if pause.is_none() {
            images.sources.bundles.first_round.0.close();
        }
        pause = pause.or(take_settled(&images, lists, &mut seen, &mut refused).await);
        let retry = refused.values().filter_map(|refusal| refusal.again).min();
        pause = pause.or(retry.map(|at| at.saturating_duration_since(Instant::now())));
        pause = pause.into_iter().chain((!absent.is_empty()).then_some(STORE_CHECK)).min();
        if let Err(error) = &armed {
            log::warn!("cannot watch import directories, checked at intervals"; error = describe_io(error));
            pause = pause.or(Some(RETRY_AFTER));
        }
        wait(armed.as_ref().ok(), &images.sources.bundles.changed.1, pause).await;
    }
}

/// Imports the files that have not changed for a while and are not imported. Returns when to look again, if some have
/// changed since.
async fn take_settled(
    images: &Rc<Images>,
    files: Vec<(String, Signature)>,
    seen: &mut BTreeMap<String, (Signature, Instant)>,
    refused: &mut BTreeMap<String, Refusal>,
) -> Option<Duration> {
    let mut pause = None;
    for (path, signature) in files {
        if images.has_bundle(&path, &signature) || refused.contains_key(&path) {
            continue;
        }
        let now = Instant::now();
        let since = seen.entry(path.clone()).or_insert((signature, now));
        if since.0 != signature {
            *since = (signature, now);
        }
        // The index of a store is written last.
        if since.1.elapsed() < SETTLED_AFTER && store_of(Path::new(&path)).is_none() {
            pause = Some(SETTLED_AFTER);
        } else if let Err(refusal) = take(images, &path, signature).await {
            refused.insert(path, refusal);
        }
    }
    pause
}

async fn take(images: &Rc<Images>, path: &str, signature: Signature) -> Result<(), Refusal> {
    let begun = Instant::now();
    let refused = |why| Err(Error::new(Kind::InvalidArgument, format!("import {path}: {why}")));
    // By which it is judged at the earliest: a change during the import is noticed.
    let policy = images.sources.policy.generation();
    let taken = match has_ending(path, &REFUSED) {
        true => refused("unsupported compression; supported: none, gzip, zstd"),
        // What is not UTF-8 was replaced by this character, so the file cannot be found by its path.
        false if path.contains(char::REPLACEMENT_CHARACTER) => {
            refused("the name is not UTF-8: rename the file")
        }
        false => images.take_bundle(path, signature).await,
    };
    taken.map_err(|error| {
        log::warn!("images not imported"; error = error);
        let (is_refused, is_list) = (super::policy_state::is_refusal(&error), has_ending(path, &LISTS));
        let is_invalid = error.kind() == Kind::InvalidArgument && !is_list;
        let is_of_store = store_of(Path::new(path)).is_some();
        // Of an archive that is invalid, or what the policy refused: the next attempt, which reads all of it, would end like this one.
        let is_final = is_refused && !is_list || is_invalid && !is_of_store;
        // A store may still be copied, or its medium may have failed to read once.
        let pause = if is_invalid { RETRY_AFTER.max(begun.elapsed() * READ_SHARE) } else { RETRY_AFTER };
        Refusal { signature, policy, again: (!is_final).then(|| Instant::now() + pause) }
    })
}

/// Waits for a change of a directory, for new directories in the configuration, or until `pause` has passed.
async fn wait(armed: Option<&reactor::Changes>, changed: &Receiver<()>, pause: Option<Duration>) {
    let change = async {
        match armed {
            Some(armed) => {
                if let Err(error) = armed.next().await {
                    log::warn!("cannot read changes of import directories, will scan them"; error = describe_io(&error));
                    reactor::sleep(SETTLED_AFTER).await;
                }
            }
            None => std::future::pending().await,
        }
    };
    let over = async {
        match pause {
            Some(pause) => reactor::sleep(pause).await,
            None => std::future::pending().await,
        }
    };
    let other = async {
        // It cannot be closed, because `Bundles` has a sender.
        let _ = changed.recv().await;
    };
    smol::future::or(change, smol::future::or(over, other)).await;
}

#[cfg(test)]
mod tests {
    use super::{FILES_MAX, LIST_BYTES_MAX, look, read_list};
    use coracle_base::testdir::TestDir;

    #[test]
    fn long_lists_and_too_many_files_are_not_read() {
        let directory = TestDir::new("import-bounds");
        let list = directory.path().join("list.txt");
        let text = "#".repeat(LIST_BYTES_MAX as usize);
        std::fs::write(&list, &text).unwrap();
        assert!(read_list(&list).unwrap() == text);
        std::fs::write(&list, text + "#").unwrap();
        assert!(read_list(&list).unwrap_err().to_string().ends_with("has more than 1048576 bytes"));
        for number in 0..FILES_MAX {
            std::fs::write(directory.path().join(format!("{number}.txt")), "").unwrap();
        }
        assert_eq!(look(&[directory.path().to_owned()], &[]).files.len(), FILES_MAX);
    }
}
