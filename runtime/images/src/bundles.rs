//! Bundles: archives and lists of images that lie in the import directories, for nodes without an uplink (CRI 8.2,
//! AIR-1 to AIR-7). What is in them is in the store soon after the start or a change, and pinned while the file is there.
//!
//! ```text
//!   start, change (inotify) ─► look: names, sizes, times ─► as recorded? nothing to do
//!                                                      └─► settled? import in a worker ─► record ─► pins
//! ```
//! One record remembers which file brought which images, so that an unchanged bundle costs a stat(2) and no write. A
//! directory that cannot be read says nothing about its files: their pins stay (a medium may be mounted late).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind, plain};
use coracle_base::{log, reactor};
use coracle_sandbox::hostpath;
use smol::channel::Receiver;

use super::bundle_record::{Bundle, Signature};
use super::credentials::Auth;
use super::{ImageId, Images};

/// Files of all directories that are looked at.
const FILES_MAX: usize = 4096;
/// Longest list of references, and most of them in it.
const LIST_BYTES_MAX: u64 = 1 << 20;
/// How long a file must have stayed as it is before it is read: who copies writes more often. One that is read too early is
/// cut off, is refused, and comes again when its writer is done.
const SETTLED_AFTER: Duration = Duration::from_secs(2);
/// What failed for reasons of this node or the network is tried again after this.
const RETRY_AFTER: Duration = Duration::from_secs(10 * 60);

const ARCHIVES: [&str; 5] = [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst"];
const LISTS: [&str; 1] = [".txt"];
/// Other tools take these; the files are named in the log instead of being passed over.
const REFUSED: [&str; 4] = [".tar.bz2", ".tbz", ".tar.xz", ".tar.lz4"];

impl Images {
    /// Follows these directories from now on, instead of those before.
    pub fn import_from(self: &Rc<Self>, directories: Vec<PathBuf>) {
        self.bundles.directories.replace(directories);
        // One word that waits is enough.
        let _ = self.bundles.changed.0.try_send(());
    }

    /// Starts the task that imports; it goes on as long as the daemon lives.
    pub fn follow_bundles(self: &Rc<Self>) {
        reactor::spawn(follow(Rc::clone(self))).detach();
    }

    /// Whether the file is known as it is, and all that it brought is still there.
    fn has_bundle(&self, path: &str, signature: &Signature) -> bool {
        let known = self.bundles.known.borrow();
        let Some(bundle) = known.get(path) else { return false };
        let index = self.index.borrow();
        let is_there = |id: &String| id.parse().is_ok_and(|id: ImageId| index.get(&id).is_some());
        bundle.is_whole && bundle.signature == *signature && bundle.images.iter().all(is_there)
    }

    /// Takes one bundle in, and writes down what it brought.
    async fn take_bundle(self: &Rc<Self>, path: &str, signature: Signature) -> Result<(), Error> {
        let begun = Instant::now();
        let (images, result) = match has_ending(path, &LISTS) {
            true => self.pull_list(Path::new(path)).await,
            false => self.import_bundle(Path::new(path)).await,
        };
        let is_whole = result.is_ok();
        let count = images.len();
        self.change_bundles(|known| {
            // What a broken new version did not bring, the old one did: its pins stay until it is replaced.
            let before = known.get(path).filter(|_| !is_whole).map(|bundle| bundle.images.clone());
            let mut images = images;
            images.extend(before.into_iter().flatten());
            images.sort_unstable();
            images.dedup();
            match is_whole || !images.is_empty() {
                true => drop(known.insert(path.to_owned(), Bundle { signature, images, is_whole })),
                false => drop(known.remove(path)),
            }
        })?;
        result?;
        log::info!("bundle imported"; path = path, images = count, ms = begun.elapsed().as_millis());
        Ok(())
    }

    async fn import_bundle(&self, path: &Path) -> (Vec<String>, Result<(), Error>) {
        match self.import_in_background(path).await {
            Ok((views, result)) => (views.into_iter().map(|view| view.id.to_string()).collect(), result),
            Err(error) => (Vec::new(), Err(error)),
        }
    }

    /// What is present stays as it is; what is absent is pulled. Everything is tried.
    async fn pull_list(self: &Rc<Self>, path: &Path) -> (Vec<String>, Result<(), Error>) {
        let tried = |error: Error| error.context(format!("import {}", path.display()));
        let text = match read_list(path) {
            Ok(text) => text,
            Err(error) => return (Vec::new(), Err(tried(error.into()))),
        };
        let (mut images, mut result) = (Vec::new(), Ok(()));
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
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

    /// What is not in the directories any more pins nothing any more.
    fn forget_bundles(&self, look: &Look) {
        let is_gone = |path: &String| {
            let directory = Path::new(path).parent().unwrap_or(Path::new("/"));
            !look.files.contains_key(path) && !look.unreadable.contains(directory)
        };
        if self.bundles.known.borrow().keys().any(is_gone) {
            let changed = self.change_bundles(|known| {
                known.retain(|path, _| {
                    let is_gone = is_gone(path);
                    if is_gone {
                        log::info!("bundle is gone: its images are pinned no more"; path = path);
                    }
                    !is_gone
                });
            });
            if let Err(error) = changed {
                log::warn!("pins of import directories are not written down"; error = error);
            }
        }
    }

    /// Changes what is known of bundles: committed first, then seen.
    fn change_bundles(&self, change: impl FnOnce(&mut BTreeMap<String, Bundle>)) -> Result<(), Error> {
        let mut known = self.bundles.known.borrow().clone();
        change(&mut known);
        if *self.bundles.known.borrow() == known {
            return Ok(());
        }
        self.bundles.commit(&self.disk.images(), known)
    }
}

/// One look at the directories.
#[derive(Default)]
struct Look {
    /// In the order of their names.
    files: BTreeMap<String, Signature>,
    unreadable: BTreeSet<PathBuf>,
}

fn look(directories: &[PathBuf]) -> Look {
    let mut look = Look::default();
    for directory in directories {
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    log::warn!("import directory not read"; path = directory.display(), error = plain(&error));
                }
                look.unreadable.insert(directory.clone());
                continue;
            }
        };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let is_ours = [&ARCHIVES[..], &LISTS, &REFUSED].iter().any(|endings| has_ending(&name, endings));
            let Some(path) = entry.path().to_str().map(str::to_owned) else { continue };
            if is_ours
                && !name.starts_with('.')
                && look.files.len() < FILES_MAX
                && let Some(signature) = signature(&path)
            {
                look.files.insert(path, signature);
            }
        }
    }
    look
}

fn has_ending(name: &str, endings: &[&str]) -> bool {
    endings.iter().any(|ending| name.ends_with(ending))
}

/// Of a regular file, links followed; `None` for anything else.
fn signature(path: &str) -> Option<Signature> {
    let about = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some(Signature {
        bytes: about.len(),
        inode: about.ino(),
        modified_s: about.mtime(),
        modified_ns: about.mtime_nsec(),
    })
}

fn read_list(path: &Path) -> io::Result<String> {
    let bytes = hostpath::read(path, LIST_BYTES_MAX).map_err(|error| io::Error::other(error.to_string()))?;
    String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Why a file is left alone until it changes, or for a while.
struct Refusal {
    signature: Signature,
    /// `None`: until it changes.
    again: Option<Instant>,
}

async fn follow(images: Rc<Images>) {
    let mut seen: BTreeMap<String, (Signature, Instant)> = BTreeMap::new();
    let mut refused: BTreeMap<String, Refusal> = BTreeMap::new();
    loop {
        // A word that has come until now is of these; at the start there is one, and letting go of what is armed takes the
        // kernel 7 ms (inotify waits for a grace period).
        let _ = images.bundles.changed.1.try_recv();
        let directories = images.bundles.directories.borrow().clone();
        // Before the look: a change in between is not missed.
        let armed = reactor::arm(&directories);
        let look = look(&directories);
        images.forget_bundles(&look);
        seen.retain(|path, _| look.files.contains_key(path));
        refused.retain(|path, refusal| {
            look.files.get(path) == Some(&refusal.signature)
                && refusal.again.is_none_or(|again| again > Instant::now())
        });
        let mut pause = None;
        for (path, signature) in look.files {
            if images.has_bundle(&path, &signature) || refused.contains_key(&path) {
                continue;
            }
            let now = Instant::now();
            let since = seen.entry(path.clone()).or_insert((signature, now));
            if since.0 != signature {
                *since = (signature, now);
            }
            if since.1.elapsed() < SETTLED_AFTER {
                pause = Some(SETTLED_AFTER);
            } else if let Err(refusal) = take(&images, &path, signature).await {
                refused.insert(path, refusal);
            }
        }
        let retry = refused.values().filter_map(|refusal| refusal.again).min();
        pause = pause.or(retry.map(|at| at.saturating_duration_since(Instant::now())));
        if let Err(error) = &armed {
            log::warn!("import directories are not watched"; error = plain(error));
            pause = pause.or(Some(RETRY_AFTER));
        }
        wait(armed.ok(), &images.bundles.changed.1, pause).await;
    }
}

async fn take(images: &Rc<Images>, path: &str, signature: Signature) -> Result<(), Refusal> {
    let taken = match has_ending(path, &REFUSED) {
        true => {
            let text = format!("import {path}: this compression is not supported: plain, gzip or zstd");
            Err(Error::new(Kind::InvalidArgument, text))
        }
        false => images.take_bundle(path, signature).await,
    };
    taken.map_err(|error| {
        log::warn!("bundle not imported"; error = error);
        let is_its_own = matches!(error.kind(), Kind::InvalidArgument) && !has_ending(path, &LISTS);
        Refusal { signature, again: (!is_its_own).then(|| Instant::now() + RETRY_AFTER) }
    })
}

/// Until something changes, other directories are set, or a pause is over.
async fn wait(armed: Option<reactor::Watched>, changed: &Receiver<()>, pause: Option<Duration>) {
    let change = async {
        match &armed {
            // An error is a reason to look as well.
            Some(armed) => drop(armed.readable().await),
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
        // It cannot be closed: `Bundles` holds a sender.
        let _ = changed.recv().await;
    };
    smol::future::or(change, smol::future::or(over, other)).await;
}
