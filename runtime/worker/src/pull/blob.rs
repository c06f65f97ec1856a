//! Downloads one blob into a part file, which survives failures, and computes its digest. The next attempt,
//! also from another endpoint, by another worker or after a reboot, resumes at the end of the part. What has
//! been written is announced to the thread that unpacks the blob ([`Arrival`]). The part of a pull of what changed
//! ([`super::partial`]) has some ranges of the blob, one after the other.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_chunked::Extent;
use coracle_job::{Failure, FailureKind, Layer, Timeouts};
use sha2::{Digest, Sha256};

use super::connection::Connection;
use super::lock::lock;
use super::neighbours::OWN_RATE_BYTES_MIN;
use super::sources::{GAIN_BYTES_MIN, Need, Sources};
use crate::failure::{Context, io_failure};
use crate::report::Report;
use crate::store::Store;
use coracle_fetch::{AT_ONCE_MAX, Arrival, Begin, Body, Floor, Get, Ranges, RequestFailure, unverified};
use coracle_manifest::{Descriptor, digest_text};
use coracle_site::announcement::{Announcement, Stage};

/// Buffer size in bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// Maximum number of attempts at one endpoint while each attempt makes progress.
const TRIES_MAX: u32 = 5;

/// Maximum number of restarts because data fails verification or cannot be resumed: otherwise an endpoint
/// could delay a pull endlessly.
const DISCARDS_MAX: u32 = 8;

/// Time after which the kernel has written dirty data to the disk: Linux' default `vm.dirty_expire_centisecs`.
pub(super) const WRITTEN_BACK: Duration = Duration::from_secs(30);

/// A blob to be downloaded.
#[derive(Clone)]
pub(super) struct Wanted {
    pub(super) blob: Descriptor,
    /// The missing layers that the blob contains, with their indices in the image.
    pub(super) layers: Vec<(usize, Layer)>,
}

/// The location of a blob.
pub(super) enum Found {
    /// The blob is in the store, under its digest.
    Kept(PathBuf),
    /// A part file, which this worker has locked; [`Part::complete`] downloads the rest.
    Part(Box<Part>),
    /// The blob is no longer needed: another worker unpacked it while this one waited for the lock.
    Unpacked,
}

/// Looks for the blob in the store, and else opens its part file.
pub(super) fn find(store: &Store, wanted: &Wanted, report: &Report) -> Result<Found, Failure> {
    let blob = &wanted.blob;
    let path = store.blob(&blob.digest)?;
    let had = || {
        report.update(|progress| progress.bytes_done += blob.size);
        Ok(Found::Kept(path.clone()))
    };
    // The kept blob of a layer that is pulled again is damaged, or another one.
    let is_kept = || path.exists() && !store.is_remaking();
    if is_kept() {
        return had();
    }
    let is_unpacked = || wanted.layers.iter().all(|(_, layer)| store.layer(&layer.name).is_dir());
    let whole = vec![Extent { begin: 0, end: blob.size }];
    let Some(part) = Part::open(store.part(&blob.digest)?, whole, true, &is_unpacked, report)? else {
        return had().map(|_| Found::Unpacked);
    };
    if is_kept() {
        // Another pull of the same layer completed first; the lock may be on a new, empty part.
        if part.offset == 0 {
            let _ = std::fs::remove_file(&part.path);
        }
        return had();
    }
    report.update(|progress| progress.bytes_done += part.offset);
    Ok(Found::Part(Box::new(part)))
}

/// The result of a request to a neighbour.
pub(super) enum Taken {
    /// The blob is complete and verified.
    All,
    /// A part of the rest was downloaded.
    Some,
    /// The blob is complete and wrong: the bytes of neighbours were discarded. Those that an earlier pull got may have been the wrong
    /// ones.
    Wrong { had_earlier: bool },
}

/// A partly downloaded blob: a file that is locked until the value is dropped.
pub(super) struct Part {
    /// Tells neighbours of the download. The first field, so that it is dropped before the lock on the file.
    announcement: Option<Arc<Announcement>>,
    path: PathBuf,
    file: File,
    ranges: Ranges,
    /// Length of all ranges in bytes.
    size: u64,
    /// Whether the only range is the whole blob, whose digest is then verified.
    is_whole: bool,
    /// Length of the file in bytes; [`Part::hash`] covers these bytes.
    offset: u64,
    hash: Sha256,
    /// Length and hash before the first byte of a neighbour, while there are bytes of neighbours that are not verified.
    trusted: Option<Box<(u64, Sha256)>>,
    /// Whether an earlier pull downloaded a part of the ranges.
    had_earlier: bool,
    /// Number of bytes that the neighbour which is asked has: it sends them at the rate of the site's network.
    sent_fast: u64,
    /// Whether the rest is downloaded from a registry; this is announced to neighbours.
    is_fetching: bool,
    discards: u32,
    /// Whether the last request for the rest of the blob was answered with something else.
    is_range_refused: bool,
    /// Whether a download resumes with the rest of the blob instead of the whole blob.
    resumes: bool,
    /// Time at which this worker started the download.
    begun: Instant,
    /// Whether this worker has downloaded the part from its first byte.
    is_all_ours: bool,
    arrival: Arc<Arrival>,
}

impl Part {
    /// Waits for other workers that download the same blob, and reads the existing part; `None` if the blob
    /// is no longer needed.
    pub(super) fn open(
        path: PathBuf,
        extents: Vec<Extent>,
        is_whole: bool,
        is_unpacked: &dyn Fn() -> bool,
        report: &Report,
    ) -> Result<Option<Self>, Failure> {
        let Some(file) = lock(&path, is_unpacked, report)? else { return Ok(None) };
        let size = extents.iter().map(Extent::length).fold(0, u64::saturating_add);
        let mut part = Self {
            announcement: None,
            path,
            file,
            ranges: Ranges::new(extents.iter().map(|extent| extent.begin..extent.end).collect()),
            size,
            is_whole,
            offset: 0,
            hash: Sha256::new(),
            trusted: None,
            had_earlier: false,
            sent_fast: 0,
            is_fetching: false,
            discards: 0,
            is_range_refused: false,
            resumes: true,
            begun: Instant::now(),
            is_all_ours: false,
            arrival: Arc::default(),
        };
        let length = part.file.metadata().map_err(|error| part.broken("stat", &error))?.len();
        if length > size {
            unverified::forget(&part.file);
            part.restart()?; // data of another blob, or damaged
            return Ok(Some(part));
        }
        part.is_all_ours = length == 0;
        let mut buffer = vec![0; BUFFER_BYTES];
        let trusted = unverified::marked(&part.file, length);
        loop {
            if trusted == Some(part.offset) {
                part.trusted = Some(Box::new((part.offset, part.hash.clone())));
                part.had_earlier = true;
            }
            let most = match trusted.map(|trusted| trusted.saturating_sub(part.offset)) {
                None | Some(0) => BUFFER_BYTES,
                Some(left) => usize::try_from(left).unwrap_or(BUFFER_BYTES).min(BUFFER_BYTES),
            };
            let count = part.file.read(&mut buffer[..most]).map_err(|error| part.broken("read", &error))?;
            if count == 0 {
                part.arrival.wrote(part.offset);
                return Ok(Some(part));
            }
            part.hash.update(&buffer[..count]);
            part.offset += count as u64;
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of bytes that are in the file.
    pub(super) fn length(&self) -> u64 {
        self.offset
    }

    /// Whether all bytes are in the file.
    pub(super) fn is_complete(&self) -> bool {
        self.offset == self.size
    }

    /// Whether this worker has downloaded the part from its first byte.
    pub(super) fn is_all_ours(&self) -> bool {
        self.is_all_ours
    }

    /// Whether the last request for a range was answered with another range or the whole blob.
    pub(super) fn is_range_refused(&self) -> bool {
        self.is_range_refused
    }

    /// The progress of the writes, for the thread that unpacks the blob meanwhile.
    pub(super) fn arrival(&self) -> Arc<Arrival> {
        self.arrival.clone()
    }

    /// The progress of the writes from now on, after an end of the download that was not the last one.
    pub(super) fn new_arrival(&mut self) -> Arc<Arrival> {
        self.arrival = Arc::default();
        self.arrival.wrote(self.offset);
        self.arrival()
    }

    /// Another handle of the file, which shares the position with the download.
    pub(super) fn handle(&self) -> Result<File, Failure> {
        self.file.try_clone().map_err(|error| self.broken("open", &error))
    }

    /// Announces the download from `registry` to neighbours.
    pub(super) fn announce(&mut self, registry: &str) {
        // Without a moment in which neighbours hear nothing.
        let is_said = |announcement: &Arc<Announcement>| announcement.waiting(self.size, registry);
        if !self.announcement.as_ref().is_some_and(is_said) {
            self.announcement = Announcement::new(&self.path, self.size, registry).map(Arc::new);
        }
    }

    /// Announces that the layer is pulled in part, without the blob.
    pub(super) fn announce_change(&self) {
        if let Some(announcement) = &self.announcement {
            announcement.changing(0);
        }
    }

    /// Announces what this part of some ranges gets as the progress of `whole`, the part of the blob.
    pub(super) fn announce_with(&mut self, whole: &Self) {
        self.announcement.clone_from(&whole.announcement);
    }

    /// Whether the download is announced.
    pub(super) fn is_announced(&self) -> bool {
        self.announcement.is_some()
    }

    /// Ends the announcement, because the blob is not downloaded now.
    pub(super) fn stop_announcing(&mut self) {
        self.announcement = None;
    }

    /// Notes that the bytes from here on are those of neighbours, also for a pull that resumes this one.
    fn distrust(&mut self) {
        if self.trusted.is_none() {
            self.trusted = Some(Box::new((self.offset, self.hash.clone())));
            unverified::mark(&self.file, self.offset);
        }
    }

    /// Clears the record of bytes from neighbours, which have been verified or discarded.
    fn trust(&mut self) -> Option<Box<(u64, Sha256)>> {
        self.had_earlier = false;
        let trusted = self.trusted.take();
        if trusted.is_some() {
            unverified::forget(&self.file);
        }
        trusted
    }

    /// Whether the part has bytes of neighbours that are not verified.
    pub(super) fn has_unverified(&self) -> bool {
        self.trusted.is_some()
    }

    /// Announces whether the rest of the blob is downloaded from a registry, whatever neighbours have answered before.
    pub(super) fn set_fetching(&mut self, is_fetching: bool) {
        self.is_range_refused = false;
        self.is_fetching = is_fetching;
        self.announce_stage();
    }

    fn announce_stage(&self) {
        if let Some(announcement) = self.announcement.as_ref().filter(|_| self.is_whole) {
            announcement.set(match (self.is_fetching, &self.trusted) {
                (false, _) => Stage::Waiting,
                (true, None) => Stage::Fetching,
                (true, Some(_)) => Stage::Resuming,
            });
        }
    }

    /// Downloads the rest of the blob, from any endpoint or else from the URLs of its descriptor, and verifies
    /// the digest.
    pub(super) fn complete(
        &mut self,
        sources: &Sources,
        blob: &Descriptor,
        report: &Report,
    ) -> Result<(), Failure> {
        match self.complete_from(sources, blob, report) {
            Err(absent) if absent.kind == FailureKind::NotFound && !blob.urls.is_empty() => {
                // The author of the manifest chooses these hosts, which could be slow on purpose: others do not follow.
                if let Some(announcement) = self.announcement.take() {
                    announcement.set(Stage::Waiting);
                }
                let elsewhere = self.complete_from(&sources.elsewhere(&blob.urls), blob, report);
                elsewhere.context(|| absent.message)
            }
            completed => completed,
        }
    }

    fn complete_from(
        &mut self,
        sources: &Sources,
        blob: &Descriptor,
        report: &Report,
    ) -> Result<(), Failure> {
        let completed = sources.ask(
            Need::Pull,
            self,
            |part| part.offset,
            |connection, part| part.download(connection, blob, report),
        );
        match completed {
            // Some registries answer a range with an error, whatever its offset: the whole blob once. The part is
            // discarded when that is answered.
            Err(_) if self.is_range_refused && self.is_whole => {
                self.resumes = false;
                sources.once(Need::Pull, |connection| self.download(connection, blob, report))
            }
            completed => completed,
        }
    }

    /// Whether the blob was downloaded so recently that most of it has not been written to disk: it is cheap to
    /// download again, and its removal avoids the write.
    pub(super) fn is_young(&self) -> bool {
        self.is_all_ours && self.begun.elapsed() < WRITTEN_BACK
    }

    /// Removes the part when it is no longer needed.
    pub(super) fn remove(self) -> Result<(), Failure> {
        std::fs::remove_file(&self.path).map_err(|error| self.broken("remove", &error))
    }

    fn broken(&self, op: &str, error: &std::io::Error) -> Failure {
        io_failure(op, &self.path, error)
    }

    /// Restarts the download: after the bytes before the first one of a neighbour, if there are unverified ones of neighbours, which
    /// are more likely to be wrong; otherwise with the first byte.
    fn restart(&mut self) -> Result<(), Failure> {
        let (length, hash) = self.trust().map_or_else(|| (0, Sha256::new()), |trusted| *trusted);
        self.arrival.restart();
        self.file.set_len(length).map_err(|error| self.broken("truncate", &error))?;
        self.file.seek(SeekFrom::Start(length)).map_err(|error| self.broken("seek", &error))?;
        (self.offset, self.hash) = (length, hash);
        self.arrival.wrote(length);
        self.announce_stage();
        Ok(())
    }

    /// Downloads the rest of the ranges from one endpoint, with several requests while each makes progress, and
    /// verifies the digest of a whole blob.
    fn download(
        &mut self,
        connection: &Connection,
        blob: &Descriptor,
        report: &Report,
    ) -> Result<(), RequestFailure> {
        let mut tries = 0;
        self.ranges.forget();
        loop {
            tries += 1;
            let before = self.offset;
            match self.go_on(connection, blob, report) {
                Ok(()) if self.offset < self.size => tries = 0, // the next range
                Ok(()) if !self.is_whole || self.digest() == blob.digest => {
                    self.trust();
                    return Ok(());
                }
                // If data of an earlier worker or another endpoint is included, that may be the wrong part:
                // start again.
                Ok(()) if before > 0 => self.discard(report)?,
                Ok(()) => {
                    let text = format!(
                        "{}: blob {}: its content has digest {}",
                        connection.name(),
                        blob.digest,
                        self.digest()
                    );
                    self.discard(report)?;
                    return Err(Failure::invalid(text).into());
                }
                Err(failed) => {
                    self.ranges.forget();
                    let has_gained = self.offset >= before.saturating_add(GAIN_BYTES_MIN);
                    // Interrupted after progress: resume.
                    if failed.pause.is_none() || tries >= TRIES_MAX || !has_gained {
                        return Err(failed);
                    }
                }
            }
        }
    }

    /// Makes one request to a neighbour, which has the first `sent_fast` bytes of the blob. Bytes of neighbours with another digest are
    /// discarded.
    pub(super) fn take(
        &mut self,
        connection: &Connection,
        blob: &Descriptor,
        sent_fast: u64,
        report: &Report,
    ) -> Result<Taken, RequestFailure> {
        self.sent_fast = sent_fast;
        self.go_on(connection, blob, report)?;
        if !self.is_complete() {
            return Ok(Taken::Some);
        }
        let digest = self.digest();
        if digest == blob.digest {
            self.trust();
            return Ok(Taken::All);
        }
        eprintln!("{}: blob {}: its content has digest {digest}", connection.name(), blob.digest);
        let had_earlier = self.had_earlier;
        // Not counted: what neighbours do must not end the pull.
        self.drop_unverified(report)?;
        Ok(Taken::Wrong { had_earlier })
    }

    fn digest(&self) -> String {
        digest_text(&self.hash.clone().finalize())
    }

    /// Restarts the download and subtracts the discarded bytes from the progress.
    fn drop_unverified(&mut self, report: &Report) -> Result<(), Failure> {
        let before = self.offset;
        self.restart()?;
        let dropped = before.saturating_sub(self.offset);
        report.update(|progress| progress.bytes_done = progress.bytes_done.saturating_sub(dropped));
        Ok(())
    }

    fn discard(&mut self, report: &Report) -> Result<(), Failure> {
        self.discards += 1;
        self.drop_unverified(report)?;
        match self.discards > DISCARDS_MAX {
            true => Err(Failure::invalid(format!("restarted more than {DISCARDS_MAX} times"))),
            false => Ok(()),
        }
    }

    /// Makes one request for the rest of a range.
    fn go_on(
        &mut self,
        connection: &Connection,
        blob: &Descriptor,
        report: &Report,
    ) -> Result<(), RequestFailure> {
        if self.is_complete() {
            return Ok(());
        }
        let rest = self.ranges.rest(self.offset);
        let get = Get {
            what: format!("blobs/{}", blob.digest),
            accept: "*/*".to_owned(),
            // Whether the registry answers ranges says nothing about neighbours, which do.
            offset: if self.resumes || connection.is_neighbour() { rest.start } else { 0 },
            end: (!self.is_whole).then_some(rest.end),
            size: Some(blob.size),
            ..Get::default()
        };
        let is_range = get.offset > 0 || get.end.is_some();
        let (head, body) = self.ranges.get(get, |get| connection.get(get)).inspect_err(|failed| {
            self.is_range_refused = is_range && failed.is_refusal();
        })?;
        let end = head.length.map(|length| rest.start.saturating_add(length));
        let is_rest = head.begin == Begin::AsAsked && end.is_none_or(|end| end == rest.end);
        self.is_range_refused = is_range && head.begin != Begin::First && !is_rest;
        let refused = |what| Failure::invalid(format!("{}: blob {}: {what}", connection.name(), blob.digest));
        match head.begin {
            Begin::Elsewhere if is_range => return Err(refused("an unexpected range").into()),
            Begin::First if !self.is_whole => {
                return Err(refused("the whole blob in place of a range").into());
            }
            Begin::AsAsked if is_range => {}
            // What a neighbour does is no reason to discard data.
            _ if self.offset > 0 && connection.is_neighbour() => {
                return Err(refused("the whole blob in place of a range").into());
            }
            // The endpoint sends the whole blob.
            _ if self.offset > 0 => {
                self.trust();
                self.discard(report)?;
            }
            Begin::First | Begin::AsAsked | Begin::Elsewhere => {}
        }
        // A range may end before the blob does (RFC 9110, section 15.3.7); the rest is requested then.
        let rest = self.ranges.rest(self.offset);
        let fits = |length: u64| match rest.start.saturating_add(length) {
            end if rest.start > 0 || !self.is_whole => end <= rest.end && length > 0,
            end => end == rest.end,
        };
        if let Some(length) = head.length.filter(|length| !fits(*length)) {
            return Err(Failure::invalid(format!(
                "{}: blob {}: {length} bytes from offset {} do not add up to the {} bytes of its manifest",
                connection.name(),
                blob.digest,
                rest.start,
                rest.end
            ))
            .into());
        }
        self.append(body, connection, blob, report)
    }

    /// Adds the body to the file, up to the end of its range.
    fn append(
        &mut self,
        mut body: Body,
        connection: &Connection,
        blob: &Descriptor,
        report: &Report,
    ) -> Result<(), RequestFailure> {
        let timeouts = connection.timeouts();
        let mut is_fast = connection.is_neighbour() && self.offset < self.sent_fast;
        let least = if is_fast { OWN_RATE_BYTES_MIN } else { 0 };
        // Several ranges share the line.
        let share = if self.is_whole { 1 } else { AT_ONCE_MAX };
        let rate_bytes_min = (timeouts.rate_bytes_min / share).max(least);
        let mut floor = Floor::new(&Timeouts { rate_bytes_min, ..*timeouts });
        let mut buffer = vec![0; BUFFER_BYTES];
        let name = format!("{}: blob {}", connection.name(), blob.digest);
        let cut_off = |why: String| Failure::new(FailureKind::Unavailable, format!("{name}: {why}"));
        let rest = self.ranges.rest(self.offset);
        let end = self.offset + (rest.end - rest.start);
        loop {
            self.ranges.ask(end - self.offset, |get| connection.ask(get));
            let count = body.read(&mut buffer, &name)?;
            if count == 0 {
                break;
            }
            if connection.is_neighbour() {
                self.distrust();
            }
            if self.offset + count as u64 > end {
                if self.is_whole && !connection.is_neighbour() {
                    self.discard(report)?;
                }
                let text = format!("{name}: longer than the {end} bytes of its manifest");
                return Err(Failure::invalid(text).into());
            }
            self.file.write_all(&buffer[..count]).map_err(|error| self.broken("write", &error))?;
            self.hash.update(&buffer[..count]);
            self.offset += count as u64;
            report.update(|progress| {
                progress.bytes_done += count as u64;
                progress.bytes_fetched += count as u64;
                if connection.is_neighbour() {
                    progress.bytes_from_neighbours += count as u64;
                }
            });
            self.arrival.wrote(self.offset);
            if let Some(announcement) = self.announcement.as_ref().filter(|_| !self.is_whole) {
                announcement.changing(self.offset);
            }
            if is_fast && self.offset >= self.sent_fast {
                // From here on the neighbour is no faster than its uplink.
                (is_fast, floor) = (false, Floor::new(timeouts));
            }
            if self.offset < end {
                floor.passed(count, Instant::now()).map_err(cut_off)?;
            }
        }
        let ended = || cut_off(format!("ended after {} of {end} bytes", self.offset));
        (self.offset == end).then_some(()).ok_or_else(|| ended().into())
    }
}
