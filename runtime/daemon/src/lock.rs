//! Locks of the root and the state directory, which only one daemon may use: a second one with the same state would
//! disconnect the first one's monitors, one with the same root would kill all pods that it does not know.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_base::error::{Context, Error, Kind};
use coracle_base::reactor;
use coracle_preflight::lock::holder_of;

/// Maximum time for which a lock stays held after its daemon was killed: a child between clone and exec has copies of the
/// daemon's descriptors until it ends.
const LIMIT: Duration = Duration::from_secs(2);

/// Locks both directories, before any pod is accessed; the locks are held until the files are closed. The root directory
/// itself is locked, because it may be read-only, and the file `lock` in the state directory.
///
/// # Errors
/// `FailedPrecondition`, naming the directory and the process that holds its lock.
pub(crate) async fn both(root: &Path, state: &Path) -> Result<[File; 2], Error> {
    let path = state.join("lock");
    let file = File::create(&path).context(|| format!("make {}", path.display()))?;
    let state = lock(file, &path, "state").await?;
    let file = File::open(root).context(|| format!("open {}", root.display()))?;
    Ok([state, lock(file, root, "root").await?])
}

async fn lock(file: File, path: &Path, what: &str) -> Result<File, Error> {
    let end = Instant::now() + LIMIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < end => {
                reactor::sleep(Duration::from_millis(1)).await;
            }
            Err(TryLockError::WouldBlock) => {
                let pid = holder_of(&file).map_or(String::new(), |pid| format!(": process {pid}"));
                let text = format!("{}: another daemon runs on this {what} directory{pid}", path.display());
                return Err(Error::new(Kind::FailedPrecondition, text));
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).context(|| format!("lock {}", path.display()));
            }
        }
    }
}
