//! One blob, from the first byte to the last: downloaded into a part that outlives failures, and hashed on the way. The
//! next try, also that of another endpoint, of another worker or after a reboot, goes on where the part ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};
use sha2::{Digest, Sha256};

use super::connection::Connection;
use super::floor::Floor;
use super::manifest::Descriptor;
use super::sources::{GAIN_BYTES_MIN, Need, Sources};
use crate::failure::{failure, invalid, io_failure};
use crate::fetch::{Begin, Body, Trouble};
use crate::image_config::digest_text;
use crate::report::{self, Report};
use crate::store::Store;

/// One read and write.
const BUFFER_BYTES: usize = 64 << 10;

/// Tries at one endpoint while each of them gets on.
const TRIES_MAX: u32 = 5;

/// How often bytes are thrown away because they do not verify or cannot be continued: a peer that plays this game would
/// keep us for ever.
const DISCARDS_MAX: u32 = 8;

/// Bytes that a program writes are on the disk after so long in any case: Linux' `vm.dirty_expire_centisecs`.
pub(super) const WRITTEN_BACK: Duration = Duration::from_secs(30);

/// A blob that is needed.
#[derive(Clone)]
pub(super) struct Wanted {
    pub(super) blob: Descriptor,
    /// Names of the layers it unpacks to.
    pub(super) layers: Vec<String>,
}

/// A blob that is here, whole and verified.
pub(super) enum Fetched {
    /// Under its name in the store.
    Kept(PathBuf),
    /// A part still: nobody else has it meanwhile.
    Part(Part),
    /// No more needed: another worker has unpacked it while this one waited for it.
    Unpacked,
}

/// Downloads the blob where it is not in the store yet.
pub(super) fn fetch(
    sources: &Sources,
    store: &Store,
    wanted: &Wanted,
    report: &Report,
) -> Result<Fetched, Failure> {
    let blob = &wanted.blob;
    let path = store.blob(&blob.digest)?;
    let had = || {
        report.update(|progress| progress.bytes_done += blob.size);
        Ok(Fetched::Kept(path.clone()))
    };
    if path.exists() {
        return had();
    }
    let is_unpacked = || wanted.layers.iter().all(|name| store.layer(name).is_dir());
    let Some(mut part) = Part::open(store.part(&blob.digest)?, blob, &is_unpacked, report)? else {
        return had().map(|_| Fetched::Unpacked);
    };
    if path.exists() {
        // Another pull of the same layer was first; what the lock was on may be a new, empty part.
        if part.offset == 0 {
            let _ = std::fs::remove_file(&part.path);
        }
        return had();
    }
    report.update(|progress| progress.bytes_done += part.offset);
    sources.ask(
        Need::Pull,
        &mut part,
        |part| part.offset,
        |connection, part| part.download(connection, blob, report),
    )?;
    Ok(Fetched::Part(part))
}

/// The beginning of a blob: a file that is locked as long as this lives.
pub(super) struct Part {
    path: PathBuf,
    file: File,
    /// Bytes in it; [`Part::hash`] is over these.
    offset: u64,
    hash: Sha256,
    discards: u32,
    /// When this worker began with it, and whether with its first byte.
    begun: Instant,
    is_all_ours: bool,
}

impl Part {
    /// Waits for other workers that fetch the same blob, and reads what there is; none once it is of no more use.
    fn open(
        path: PathBuf,
        blob: &Descriptor,
        is_unpacked: &dyn Fn() -> bool,
        report: &Report,
    ) -> Result<Option<Self>, Failure> {
        let Some(file) = lock(&path, is_unpacked, report)? else { return Ok(None) };
        let (begun, hash) = (Instant::now(), Sha256::new());
        let mut part = Self { path, file, offset: 0, hash, discards: 0, begun, is_all_ours: false };
        let length = part.file.metadata().map_err(|error| part.broken("stat", &error))?.len();
        if length > blob.size {
            part.restart()?; // another blob's bytes, or a lie
            return Ok(Some(part));
        }
        part.is_all_ours = length == 0;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let count = part.file.read(&mut buffer).map_err(|error| part.broken("read", &error))?;
            if count == 0 {
                return Ok(Some(part));
            }
            part.hash.update(&buffer[..count]);
            part.offset += count as u64;
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it has come so lately that most of it is in memory only: cheap to fetch again, and nothing is written where
    /// it goes now.
    pub(super) fn is_young(&self) -> bool {
        self.is_all_ours && self.begun.elapsed() < WRITTEN_BACK
    }

    /// It is of no more use.
    pub(super) fn remove(self) -> Result<(), Failure> {
        std::fs::remove_file(&self.path).map_err(|error| self.broken("remove", &error))
    }

    fn broken(&self, op: &str, error: &std::io::Error) -> Failure {
        io_failure(op, &self.path, error)
    }

    /// From the first byte again.
    fn restart(&mut self) -> Result<(), Failure> {
        self.file.set_len(0).map_err(|error| self.broken("truncate", &error))?;
        self.file.seek(SeekFrom::Start(0)).map_err(|error| self.broken("seek", &error))?;
        (self.offset, self.hash) = (0, Sha256::new());
        Ok(())
    }

    /// Gets the rest at one endpoint, with more than one request while each of them gets on, and verifies the whole.
    fn download(
        &mut self,
        connection: &Connection,
        blob: &Descriptor,
        report: &Report,
    ) -> Result<(), Trouble> {
        let mut tries = 0;
        loop {
            tries += 1;
            let before = self.offset;
            match self.go_on(connection, blob, report) {
                Ok(()) if self.digest() == blob.digest => return Ok(()),
                // What an earlier worker or another endpoint left is not trusted more than what came now.
                Ok(()) if before > 0 => self.discard(report)?,
                Ok(()) => {
                    let text = format!(
                        "{}: blob {}: its content has digest {}",
                        connection.name(),
                        blob.digest,
                        self.digest()
                    );
                    self.discard(report)?;
                    return Err(invalid(text).into());
                }
                // Cut off, but it got on: from where it stopped.
                Err(trouble)
                    if trouble.pause.is_some()
                        && tries < TRIES_MAX
                        && self.offset >= before.saturating_add(GAIN_BYTES_MIN) => {}
                Err(trouble) => return Err(trouble),
            }
        }
    }

    fn digest(&self) -> String {
        digest_text(&self.hash.clone().finalize())
    }

    fn discard(&mut self, report: &Report) -> Result<(), Failure> {
        self.discards += 1;
        report.update(|progress| progress.bytes_done = progress.bytes_done.saturating_sub(self.offset));
        self.restart()?;
        match self.discards > DISCARDS_MAX {
            true => Err(invalid(format!("begun from its first byte more than {DISCARDS_MAX} times"))),
            false => Ok(()),
        }
    }

    /// One request, from where the part ends.
    fn go_on(&mut self, connection: &Connection, blob: &Descriptor, report: &Report) -> Result<(), Trouble> {
        if self.offset == blob.size {
            return Ok(());
        }
        let what = format!("blobs/{}", blob.digest);
        let (head, body) = match connection.get(&what, "*/*", self.offset) {
            // It will not go on where we stopped (416, or an answer to a range that makes no sense).
            Err(trouble) if self.offset > 0 && trouble.failure.kind == FailureKind::Invalid => {
                self.discard(report)?;
                connection.get(&what, "*/*", 0)?
            }
            answer => answer?,
        };
        match head.begin {
            Begin::Elsewhere if self.offset > 0 => {
                let text =
                    format!("{}: blob {}: another range than was asked", connection.name(), blob.digest);
                self.discard(report)?;
                return Err(invalid(text).into());
            }
            Begin::First if self.offset > 0 => self.discard(report)?, // it sends it all again
            Begin::First | Begin::AsAsked | Begin::Elsewhere => {}
        }
        if let Some(length) = head.length.filter(|length| self.offset.checked_add(*length) != Some(blob.size))
        {
            return Err(invalid(format!(
                "{}: blob {}: {length} bytes from byte {} on do not make the {} of its manifest",
                connection.name(),
                blob.digest,
                self.offset,
                blob.size
            ))
            .into());
        }
        self.append(body, connection, blob, report)
    }

    fn append(
        &mut self,
        mut body: Body,
        connection: &Connection,
        blob: &Descriptor,
        report: &Report,
    ) -> Result<(), Trouble> {
        let mut floor = Floor::new(connection.patience());
        let mut buffer = vec![0; BUFFER_BYTES];
        let name = format!("{}: blob {}", connection.name(), blob.digest);
        let cut_off = |why: String| failure(FailureKind::Unavailable, format!("{name}: {why}"));
        loop {
            let count = body.read(&mut buffer, &name)?;
            if count == 0 {
                break;
            }
            if self.offset + count as u64 > blob.size {
                self.discard(report)?;
                let text =
                    format!("blob {}: longer than the {} bytes of its manifest", blob.digest, blob.size);
                return Err(invalid(format!("{}: {text}", connection.name())).into());
            }
            self.file.write_all(&buffer[..count]).map_err(|error| self.broken("write", &error))?;
            self.hash.update(&buffer[..count]);
            self.offset += count as u64;
            report.update(|progress| {
                progress.bytes_done += count as u64;
                progress.bytes_fetched += count as u64;
            });
            floor.passed(count, Instant::now()).map_err(cut_off)?;
        }
        match self.offset == blob.size {
            true => Ok(()),
            false => Err(cut_off(format!("ended after {} of {} bytes", self.offset, blob.size)).into()),
        }
    }
}

/// Removes the part of a blob whose layers are there, unless somebody is at work with it.
pub(super) fn forget(store: &Store, digest: &str) {
    let Ok(path) = store.part(digest) else { return };
    if File::open(&path).is_ok_and(|file| file.try_lock().is_ok()) {
        // Where that fails the daemon sweeps it.
        let _ = std::fs::remove_file(path);
    }
}

/// The name may have passed to a new file while the lock was waited for. Whoever holds it ends some day: its daemon sees to
/// that.
fn lock(path: &Path, is_unpacked: &dyn Fn() -> bool, report: &Report) -> Result<Option<File>, Failure> {
    loop {
        if is_unpacked() {
            return Ok(None);
        }
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
        let file = file.map_err(|error| io_failure("open", path, &error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(io_failure("lock", path, &error)),
            Err(TryLockError::WouldBlock) => {
                report.pulse();
                std::thread::sleep(report::PAUSE);
                continue;
            }
        }
        let inode =
            |metadata: std::io::Result<std::fs::Metadata>| metadata.map(|metadata| metadata.ino()).ok();
        if inode(file.metadata()) == inode(path.metadata()) {
            return Ok(Some(file));
        }
    }
}
