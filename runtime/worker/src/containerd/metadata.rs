//! The images that containerd's metadata names (`v1/NAMESPACE/images/NAME/{target/digest, labels}` in
//! `ROOT/io.containerd.metadata.v1.bolt/meta.db`; core/metadata/buckets.go of containerd 1.6 to 2.3). The file
//! is read without its lock, also while containerd runs, and again if containerd completed a transaction
//! meanwhile.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_bolt::{Bucket, Entry, Problem, ReadAt, Snapshot};
use coracle_job::{Failure, FailureKind};

use crate::failure::io_failure;
use crate::store::open_plain;

/// Number of attempts to read the file without a transaction in between. Without pulls and starts of pods,
/// containerd writes a few times a minute.
const TRIES: u32 = 20;
/// Pause before the next attempt.
const PAUSE: Duration = Duration::from_millis(100);
/// Label of a pinned image, and its value (containerd's internal/cri/labels, since 1.7.3).
const PINNED: (&[u8], &[u8]) = (b"io.cri-containerd.pinned", b"pinned");
/// Maximum length of a name in bytes; references have at most 255 bytes and a digest.
const NAME_BYTES_MAX: usize = 4096;

/// One image of the metadata. An image of the registry has several names, and so several of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) name: String,
    /// Digest of its manifest or index, not verified to be one.
    pub(super) digest: String,
    pub(super) is_pinned: bool,
}

/// Path of the metadata below containerd's root directory.
pub(super) fn path(root: &Path) -> PathBuf {
    root.join("io.containerd.metadata.v1.bolt/meta.db")
}

/// All images of a namespace.
///
/// # Errors
/// The file cannot be read, is damaged, is written all the time, or lacks the namespace.
pub(super) fn images(root: &Path, namespace: &str) -> Result<Vec<Named>, Failure> {
    let path = path(root);
    let file = open(&path)?;
    let explain = |problem: Problem| match problem {
        Problem::Io(error) => io_failure("read", &path, &error),
        Problem::Damaged(_) => Failure::invalid(format!("{}: {problem}", path.display())),
    };
    for attempt in 0..TRIES {
        if attempt > 0 {
            std::thread::sleep(PAUSE);
        }
        let snapshot = Snapshot::open(&file).map_err(explain)?;
        let found = read(&snapshot, namespace);
        // Pages of an older transaction may have been replaced while they were read, so errors count only then.
        if snapshot.is_current().map_err(explain)? {
            return match found.map_err(explain)? {
                Ok(images) => Ok(images),
                Err(others) => {
                    let text = format!("{}: no namespace {namespace:?}; there is: {others}", path.display());
                    Err(Failure::new(FailureKind::NotFound, text))
                }
            };
        }
    }
    let text = format!("{}: is written all the time: stop containerd and try again", path.display());
    Err(Failure::new(FailureKind::Unavailable, text))
}

fn open(path: &Path) -> Result<File, Failure> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let text =
                format!("open {}: not found: this is not the root directory of a containerd", path.display());
            Err(Failure::new(FailureKind::NotFound, text))
        }
        _ => open_plain(path),
    }
}

/// Reads the images of a snapshot. The inner error has the names of the other namespaces.
fn read<R: ReadAt>(
    snapshot: &Snapshot<'_, R>,
    namespace: &str,
) -> Result<Result<Vec<Named>, String>, Problem> {
    let Some(schema) = snapshot.bucket(&snapshot.root(), b"v1")? else {
        return Err(Problem::Damaged("it has no bucket v1: not the metadata of a containerd".to_owned()));
    };
    let Some(found) = snapshot.bucket(&schema, namespace.as_bytes())? else {
        let namespaces = snapshot.entries(&schema)?;
        let others = namespaces.iter().filter(|(_, entry)| matches!(entry, Entry::Bucket(_)));
        let others: Vec<_> = others.map(|(name, _)| String::from_utf8_lossy(name)).collect();
        return Ok(Err(others.join(", ")));
    };
    let Some(images) = snapshot.bucket(&found, b"images")? else { return Ok(Ok(Vec::new())) };
    let mut named = Vec::new();
    for (name, entry) in snapshot.entries(&images)? {
        let Entry::Bucket(image) = entry else { continue };
        if name.len() > NAME_BYTES_MAX {
            return Err(Problem::Damaged(format!(
                "the name of an image is longer than {NAME_BYTES_MAX} bytes"
            )));
        }
        named.push(one(snapshot, String::from_utf8_lossy(&name).into_owned(), &image)?);
    }
    Ok(Ok(named))
}

fn one<R: ReadAt>(snapshot: &Snapshot<'_, R>, name: String, image: &Bucket) -> Result<Named, Problem> {
    let parts = snapshot.entries(image)?;
    let values = |wanted: &[u8]| match parts.iter().find(|(key, _)| key == wanted) {
        Some((_, Entry::Bucket(bucket))) => snapshot.entries(bucket),
        _ => Ok(Vec::new()),
    };
    let digest = values(b"target")?.into_iter().find_map(|(key, entry)| match entry {
        Entry::Value(value) if key == b"digest" => Some(String::from_utf8_lossy(&value).into_owned()),
        _ => None,
    });
    let is_pin =
        |(key, entry): &(Vec<u8>, Entry)| key == PINNED.0 && *entry == Entry::Value(PINNED.1.to_vec());
    let is_pinned = values(b"labels")?.iter().any(is_pin);
    Ok(Named { name, digest: digest.unwrap_or_default(), is_pinned })
}
