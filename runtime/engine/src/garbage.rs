//! Trees on their way out. A rename below `ROOT/garbage` makes them disappear at once and survives a crash; what lies
//! there is deleted later, small trees in place, big ones by a worker, and whatever a dead daemon left at the next
//! start. What could not be deleted is tried again until it is.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Error;
use coracle_base::{log, reactor};
use coracle_job::Job;

use crate::Pods;
use crate::paths::Paths;
use coracle_base::error::failed;

/// Up to so many entries are deleted by the daemon itself: about as long as starting a worker takes (0.3 ms).
/// A container that wrote nothing leaves a record and three directories.
const ENTRIES_INLINE_MAX: usize = 32;

/// From one try of a worker to the next: doubled each time, up to the second.
const PAUSE: Duration = Duration::from_secs(2);
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// Moves `path` out of sight and deletes it. A missing path is success.
pub(crate) fn discard(pods: &Rc<Pods>, path: &Path) -> Result<(), Error> {
    let garbage = pods.node.paths.garbage();
    let Some(name) = path.file_name() else { return Ok(()) };
    let target = garbage.join(name);
    match std::fs::rename(path, &target) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("rename", path, &error)),
    }
    if count(&target, ENTRIES_INLINE_MAX) < ENTRIES_INLINE_MAX {
        match std::fs::remove_dir_all(&target) {
            Ok(()) => return Ok(()),
            Err(error) => {
                log::warn!("garbage is not deleted, tried again"; error = failed("remove", &target, &error));
            }
        }
    }
    sweep(pods, vec![target]);
    Ok(())
}

/// What a dead daemon left.
pub(crate) fn sweep_all(pods: &Rc<Pods>) -> Result<(), Error> {
    let garbage = pods.node.paths.garbage();
    let entries = std::fs::read_dir(&garbage).map_err(|error| failed("list", &garbage, &error))?;
    let paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    if !paths.is_empty() {
        sweep(pods, paths);
    }
    Ok(())
}

/// Makes the directory; once, at start.
pub(crate) fn prepare(paths: &Paths) -> Result<(), Error> {
    crate::filesystem::make_private_directory(&paths.garbage())
}

/// Deletes in a worker, again and again until everything is gone: nobody refers to it any more, so nobody else asks.
fn sweep(pods: &Rc<Pods>, paths: Vec<std::path::PathBuf>) {
    let workers = Rc::clone(&pods.node.host.workers);
    reactor::spawn(async move {
        let mut pause = PAUSE;
        while let Err(error) = workers.run(Job::RemoveTrees { paths: paths.clone() }, |_, _| ()).await {
            log::warn!("garbage stays for now"; error = error, again_s = pause.as_secs());
            reactor::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    })
    .detach();
}

/// Entries below `path`, counted no further than `limit`.
fn count(path: &Path, limit: usize) -> usize {
    let mut seen = 0;
    let mut directories = vec![path.to_owned()];
    while let Some(directory) = directories.pop() {
        // An unreadable directory (overlayfs' work is 0000, which root reads) counts as too much: the worker reports.
        let Ok(entries) = std::fs::read_dir(&directory) else { return limit };
        for entry in entries.flatten() {
            seen += 1;
            if seen >= limit {
                return limit;
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                directories.push(entry.path());
            }
        }
    }
    seen
}
