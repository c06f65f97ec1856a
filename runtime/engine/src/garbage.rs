//! Removal of directory trees. A rename to `ROOT/garbage` removes a tree atomically and survives a crash. The
//! content is removed later: small trees by the daemon itself, large ones by a worker, trees of an earlier
//! daemon at the next start. A failed removal is retried until it succeeds.

use std::io::ErrorKind;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, failed};
use coracle_base::{log, reactor};
use coracle_job::Job;
use coracle_sandbox::disk;

use crate::filesystem::is_missing;
use crate::node::Node;
use crate::paths::Paths;

/// Maximum number of entries of a tree that the daemon removes itself: this takes about as long as starting a
/// worker (0.3 ms). The tree of a container without written files is a record and three directories.
const ENTRIES_INLINE_MAX: usize = 32;

/// Delay before the first retry of a worker; each further delay is twice the previous one, up to the maximum.
const PAUSE: Duration = Duration::from_secs(2);
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// Moves `path` into the garbage directory and removes it. A missing path is not an error.
pub(crate) fn discard(node: &Node, path: &Path) -> Result<(), Error> {
    let garbage = node.paths.garbage();
    let Some(name) = path.file_name() else { return Ok(()) };
    let target = garbage.join(name);
    let renamed = match disk::rename(path, &target) {
        Err(error) if error.kind() == ErrorKind::NotFound && !is_missing(path) => {
            // Another program has removed the garbage directory.
            prepare(&node.paths)?;
            disk::rename(path, &target)
        }
        renamed => renamed,
    };
    match renamed {
        Ok(()) => {
            node.host.records.removed(path);
            path.parent().into_iter().for_each(|parent| node.host.records.removed_from(parent));
        }
        // On a read-only file system the error of a rename does not report this: the kernel returns EROFS before it looks up
        // the name.
        Err(_) if is_missing(path) => {
            node.host.records.removed(path);
            return Ok(());
        }
        Err(error) => return Err(failed("rename", path, &error)),
    }
    if count(&target, ENTRIES_INLINE_MAX) < ENTRIES_INLINE_MAX {
        match disk::remove_dir_all(&target) {
            Ok(()) => return Ok(()),
            Err(error) => {
                log::warn!("cannot remove directory tree, will retry"; error = failed("remove", &target, &error));
            }
        }
    }
    sweep(node, vec![target]);
    Ok(())
}

/// Removes the garbage of an earlier daemon.
pub(crate) fn sweep_all(node: &Node) -> Result<(), Error> {
    let garbage = node.paths.garbage();
    let entries = match disk::entries(&garbage) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| failed("list", &garbage, &error))?,
    };
    let paths: Vec<_> = entries.flatten().map(|entry| garbage.join(entry.name)).collect();
    if !paths.is_empty() {
        sweep(node, paths);
    }
    Ok(())
}

/// Creates the garbage directory.
pub(crate) fn prepare(paths: &Paths) -> Result<(), Error> {
    crate::filesystem::make_private_directory(&paths.garbage())
}

/// Removes trees by workers and retries until all are removed; no other code refers to these trees.
fn sweep(node: &Node, paths: Vec<std::path::PathBuf>) {
    let workers = Rc::clone(&node.host.workers);
    reactor::spawn(async move {
        let mut pause = PAUSE;
        while let Err(error) = workers.run(Job::RemoveTrees { paths: paths.clone() }).await {
            log::warn!("cannot remove directory trees, will retry"; error = error, again_s = pause.as_secs());
            reactor::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    })
    .detach();
}

/// Number of entries below `path`, counted up to `limit`.
fn count(path: &Path, limit: usize) -> usize {
    let mut seen = 0;
    let mut directories = vec![path.to_owned()];
    while let Some(directory) = directories.pop() {
        // An unreadable directory counts as above the limit, so that a worker handles and reports it.
        let Ok(entries) = disk::entries(&directory) else { return limit };
        for entry in entries.flatten() {
            seen += 1;
            if seen >= limit {
                return limit;
            }
            if entry.is_dir {
                directories.push(directory.join(entry.name));
            }
        }
    }
    seen
}
