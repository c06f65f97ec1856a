//! Pulls a layer from a neighbour that has it unpacked, whatever the compression of its blob: by its outline
//! ([`coracle_chunked::outline`]) this node finds what it has of the layer, and requests the rest as ranges of the uncompressed archive.
//!
//! ```text
//! outline ─► chunks ─► those in layers of the node: donors ──────────────┐
//!               └────► the others: ranges of the neighbour's archive ────┴─► archive ─► unpacked as always ─► the digest is the diff ID
//! ```
//! | the neighbour | this node takes |
//! |---|---|
//! | has the blob, too, or another one has it or downloads it | the layer, if the outline and the ranges are shorter than the blob |
//! | has the layer unpacked only | the layer, however much it has of it itself: otherwise the registry would send it |
//!
//! The neighbour is believed nothing: each chunk has the digest of the outline, and the archive that of the image config. Whatever the
//! neighbour does, the layer is pulled as without it, and the log says why. The ranges pass to the process that unpacks without a part
//! on the disk: they come from the site's network, so that an interrupted pull begins again. Their archive is as long as unverified data may
//! be ([`limits_of`]), because the neighbour may have invented all of it.

use std::io::{PipeWriter, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coracle_chunked::outline::{self, Purpose};
use coracle_chunked::{Chunk, Extent, NEIGHBOUR_EXTENTS_MAX, Plan};
use coracle_job::{Failure, FailureKind, Layer};

use super::super::blob::{Part, Wanted};
use super::super::connection::Connection;
use super::super::document::read_document;
use super::super::follow::limits_of;
use super::super::lock;
use super::super::neighbours::{Peer, Round};
use super::super::sources::GAIN_BYTES_MIN;
use super::super::transfer::Transfer;
use super::rebuild::{Fetched, Layout, Rebuild, Stopped};
use super::{Obstacle, donors, forget};
use crate::failure::{pipe, thread_failure};
use crate::unpack::{TOO_LONG, VerifiedLayer};
use coracle_fetch::{Begin, Get, RequestFailure};
use coracle_site::share::{Answer, State, compared_with, offers};

/// Maximum number of attempts at one neighbour, after each of which files of other layers are left out.
const ATTEMPTS_MAX: u32 = 4;
/// Maximum number of early ends of ranges that are resumed.
const RESUMED_MAX: u32 = 8;
/// Time in which this node does not read, after which the neighbour may have closed the connection (half of its time limit for a write).
const LOCAL_WAIT_MAX: Duration = Duration::from_secs(5);
/// Minimum number of bytes of an archive that a neighbour sends in a second: more than of a blob, because they are uncompressed, and all
/// that came before is lost when it is left.
const RATE_MIN: u32 = 1 << 20;
/// Time in which a neighbour may be slower than [`RATE_MIN`], its requests included.
const SLOW_MAX: Duration = Duration::from_secs(30);
/// Buffer size in bytes of a range.
const BUFFER_BYTES: usize = 64 << 10;
/// Stack size in bytes of the thread that passes chunks to the unpacking thread.
const STACK_BYTES: usize = 256 << 10;

/// The reason why a layer is not pulled from a neighbour.
#[derive(Debug)]
enum Left {
    /// Little would be saved, or this node cannot do it: another neighbour would be no better.
    Here(String),
    /// The neighbour is reachable and does not send the layer now; this is not held against it.
    There(String),
    /// The neighbour failed to send the layer.
    Failed(String),
    /// The neighbour's unpacked layers are not used again in this pull; its blobs may be.
    Unpacked(String),
    /// The neighbour sent bytes that are not those of the layer.
    Wrong(String),
    /// The pull fails.
    Pull(Failure),
}

impl Left {
    /// Counts the failure of the neighbour, if it is one; returns the reason.
    ///
    /// # Errors
    /// The pull fails.
    fn blame(self, peer: &Peer) -> Result<String, Failure> {
        match self {
            Self::Pull(failure) => Err(failure),
            Self::Here(why) | Self::There(why) => Ok(why),
            Self::Failed(why) => {
                peer.count(false);
                Ok(why)
            }
            Self::Unpacked(why) => {
                peer.refuse_unpacked();
                Ok(why)
            }
            Self::Wrong(why) => {
                peer.refuse();
                Ok(why)
            }
        }
    }
}

impl From<RequestFailure> for Left {
    fn from(failed: RequestFailure) -> Self {
        let text = failed.failure.message.clone();
        match failed.failure.kind {
            _ if failed.ends_pull => Self::Pull(failed.failure),
            FailureKind::Invalid => Self::Wrong(text),
            // The layer was removed after the question.
            FailureKind::NotFound => Self::There(text),
            // It serves too many others.
            _ if failed.pause.is_some_and(|pause| !pause.is_zero()) => Self::There(text),
            _ => Self::Failed(text),
        }
    }
}

impl From<Stopped> for Left {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Failed(failure) => match failure.kind {
                // Holes, which are in no chunk, make a right layer longer, too.
                FailureKind::Invalid if failure.message.contains(TOO_LONG) => Self::There(failure.message),
                // The archive of its outline and chunks is not the layer.
                FailureKind::Invalid => Self::Wrong(failure.message),
                // On a full disk, too: what filled it may be an invention of the neighbour.
                _ => Self::Here(failure.message),
            },
            Stopped::Damaged(_) => Self::Wrong("a chunk does not have the digest of its outline".to_owned()),
            Stopped::Closed => Self::Wrong("its archive was not read to the end".to_owned()),
            Stopped::Refused(failure) => Self::Failed(failure.message),
        }
    }
}

/// A range that ended early.
enum Cut {
    /// The reader of the chunks has ended; the reason is its result.
    Closed,
    /// The answer has begun, but not all of it came.
    Ended(String),
    /// The neighbour is too slow to wait for the rest.
    Slow,
    Failed(RequestFailure),
}

impl From<Cut> for Left {
    fn from(cut: Cut) -> Self {
        match cut {
            // The layer may have been removed there, and this node may have been too slow to read.
            Cut::Ended(why) => Self::There(why),
            Cut::Slow => Self::Unpacked(format!("it sends less than {RATE_MIN} bytes in a second")),
            Cut::Closed => Self::Wrong("its archive was not read to the end".to_owned()),
            Cut::Failed(failed) => failed.into(),
        }
    }
}

impl From<Failure> for Cut {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure.into())
    }
}

/// Length in bytes of the archive of a valid outline.
fn archive_bytes(outline: &[u8]) -> u64 {
    let ends = outline.first_chunk().zip(outline.last_chunk());
    ends.and_then(|(first, last)| outline::archive_bytes(first, last)).unwrap_or(u64::MAX)
}

impl Transfer {
    /// Pulls a layer from a neighbour that has it unpacked, if one of `round` has and that is worth it; `None`: it is pulled otherwise,
    /// and if a neighbour was asked, the answers are used up.
    ///
    /// # Errors
    /// The fetcher has failed.
    pub(in super::super) fn take_unpacked(
        &self,
        part: &mut Part,
        wanted: &Wanted,
        layer: &Layer,
        round: &mut Option<Round>,
    ) -> Result<Option<VerifiedLayer>, Failure> {
        let (Some(Round { answers, .. }), Some((neighbours, connection))) =
            (&round, self.sources.neighbours())
        else {
            return Ok(None);
        };
        let (digest, size) = (&wanted.blob.digest, wanted.blob.size);
        // The layer gets an outline, too, which is its index: with it the next pull finds its chunks.
        let transfer = Self {
            store: self.store.with_outlines(Some(Purpose::Neighbours)),
            limits: limits_of(&self.limits, size),
            ..self.clone()
        };
        let has_blob = |answer: &Answer| answer.state == State::Complete || answer.is_downloading();
        let compared_with = compared_with(answers.iter().any(has_blob), size, part.length());
        let saves = |bytes| compared_with.is_none_or(|size| coracle_chunked::saves(bytes, size));
        let own = neighbours.own_order(digest).unwrap_or_default();
        let mut offers = offers(answers, own, outline::BYTES_MAX);
        offers.retain(|(_, bytes)| saves(*bytes));
        if offers.is_empty() || !self.donors.are_used() {
            return Ok(None);
        }
        // Others need not wait for this node, which does not download the blob, nor while it reads files of its layers.
        part.stop_announcing();
        let donors = self.donors.layers(&self.store);
        if donors.is_empty() && compared_with.is_some() {
            self.announce(part);
            return Ok(None);
        }
        *round = None;
        for (answer, bytes) in offers {
            let peer = &neighbours.peers()[answer.peer];
            if !peer.may_send_unpacked() {
                continue;
            }
            let connection = connection.neighbour(neighbours, peer);
            // The chunks of an outline need some four times its bytes.
            let _room = self.tables.take(bytes.saturating_mul(4));
            let left = match transfer.take_from(&connection, layer, donors, bytes, &saves) {
                Ok((layer, received)) => {
                    let reused = size.saturating_sub(received);
                    eprintln!(
                        "layer {digest}: {received} bytes of {}, which has it unpacked",
                        connection.name()
                    );
                    lock::forget(&self.store, digest);
                    self.report.update(|progress| {
                        progress.bytes_done += size.saturating_sub(part.length());
                        progress.bytes_reused += reused;
                    });
                    return Ok(Some(layer));
                }
                Err(left) => left,
            };
            let is_here = matches!(left, Left::Here(_));
            let why = left.blame(peer)?;
            eprintln!("layer {digest} is not taken from {}, which has it unpacked: {why}", connection.name());
            if is_here {
                break;
            }
        }
        Ok(None)
    }

    /// Pulls a layer from one neighbour, whose outline has `offered` bytes; returns also the number of bytes that it has sent.
    fn take_from(
        &self,
        connection: &Connection,
        layer: &Layer,
        donors: &[donors::Layer],
        offered: u64,
        saves: &dyn Fn(u64) -> bool,
    ) -> Result<(VerifiedLayer, u64), Left> {
        let outline = self.outline(connection, layer, offered)?;
        // Its disk may have damaged it.
        let contents = outline::contents(&outline[..])
            .map_err(|problem| Left::Unpacked(format!("its outline: {problem}")))?;
        // The layer has too many files or chunks, from whichever neighbour.
        contents
            .check_memory(outline.len())
            .map_err(|problem| Left::Here(format!("its outline: {problem}")))?;
        if archive_bytes(&outline) > self.limits.layer_bytes_max {
            return Err(Left::There("it is too long for what is not verified yet".to_owned()));
        }
        let mut known = self.donors.find(&self.store, &contents, &self.report);
        for attempt in 1..=ATTEMPTS_MAX {
            let chunks = contents.chunks();
            let is_missing = |index: usize| known.place(index).is_none() && !chunks[index].is_zeros();
            let plan = Plan::new(&contents, NEIGHBOUR_EXTENTS_MAX, is_missing);
            let bytes = plan.bytes().saturating_add(outline.len() as u64);
            if !saves(bytes) {
                return Err(Left::Here("this node has little of it".to_owned()));
            }
            let layout = Layout::Outline(&outline);
            let rebuild = Rebuild { contents: &contents, known: &known, donors, layout: &layout };
            match self.rebuilt(connection, layer, &rebuild, &plan) {
                Ok(Ok(layer)) => return Ok((layer, bytes)),
                Ok(Err(Stopped::Damaged(index))) if plan.position(index).is_none() => {
                    let is_whole_layer = attempt >= ATTEMPTS_MAX / 2;
                    forget(&mut known, donors, index, is_whole_layer).map_err(|obstacle| match obstacle {
                        Obstacle::Whole(why) | Obstacle::Unavailable(why) => Left::Wrong(why),
                        Obstacle::Pull(failure) => Left::Pull(failure),
                    })?;
                }
                Ok(Err(stopped)) => return Err(stopped.into()),
                Err(failed) => return Err(failed.into()),
            }
        }
        Err(Left::Here("too many files of the node's layers are not what they were".to_owned()))
    }

    /// Requests the outline of a layer. Memory was taken for the `offered` bytes, so no more are read.
    fn outline(
        &self,
        connection: &Connection,
        layer: &Layer,
        offered: u64,
    ) -> Result<Vec<u8>, RequestFailure> {
        let what = format!("outlines/{}", layer.chain_id);
        let get = Get { what, accept: "*/*".to_owned(), ..Get::default() };
        let (_, bytes) = read_document(connection, get, offered, |head| head.begin == Begin::First)?;
        self.count_received(bytes.len());
        Ok(bytes)
    }

    /// Requests the ranges of `plan`, and unpacks the archive meanwhile.
    fn rebuilt(
        &self,
        connection: &Connection,
        layer: &Layer,
        rebuild: &Rebuild<'_>,
        plan: &Plan,
    ) -> Result<Result<VerifiedLayer, Stopped>, Cut> {
        let (from, into) = match pipe() {
            Ok(ends) => ends,
            Err(failure) => return Ok(Err(Stopped::Failed(failure))),
        };
        let is_fetched = |index: usize| plan.position(index).is_some();
        let has_failed = &AtomicBool::new(false);
        let write = |archive| rebuild.write(&is_fetched, Fetched::Plain { from, has_failed }, archive);
        std::thread::scope(|scope| {
            let unpacking = std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, move || rebuild.unpack(self, layer, write));
            let unpacking = match unpacking {
                Ok(unpacking) => unpacking,
                Err(error) => return Ok(Err(Stopped::Failed(thread_failure("unpacks", &error)))),
            };
            let chunks = rebuild.contents.chunks().iter().enumerate();
            let chunks = chunks.filter(|(index, _)| is_fetched(*index)).map(|(_, chunk)| *chunk);
            let passed = self.pass_all(connection, layer, plan.extents(), Passing::new(chunks, into));
            // No more of the node's own files is read for nothing.
            has_failed.store(passed.is_err(), Ordering::Relaxed);
            let panicked = || Failure::new(FailureKind::Internal, "the thread that unpacks panicked");
            let unpacked = unpacking.join().unwrap_or_else(|_| Err(Stopped::Failed(panicked())));
            match passed {
                Ok(()) | Err(Cut::Closed) => Ok(unpacked),
                Err(cut) => {
                    unpacked.into_iter().for_each(VerifiedLayer::discard);
                    Err(cut)
                }
            }
        })
    }

    /// Requests the ranges one after the other; one that ends early is resumed.
    fn pass_all(
        &self,
        connection: &Connection,
        layer: &Layer,
        extents: &[Extent],
        mut passing: Passing<impl Iterator<Item = Chunk>>,
    ) -> Result<(), Cut> {
        let mut resumed = 0;
        for extent in extents {
            passing.position = extent.begin;
            while passing.position < extent.end {
                let before = passing.position;
                passing.local = Duration::ZERO;
                match self.pass_range(connection, layer, extent.end, &mut passing) {
                    Err(Cut::Ended(_)) if passing.is_resumed(before, &mut resumed) => {}
                    passed => passed?,
                }
            }
        }
        Ok(())
    }

    /// Requests the bytes of the archive up to `end`.
    fn pass_range(
        &self,
        connection: &Connection,
        layer: &Layer,
        end: u64,
        passing: &mut Passing<impl Iterator<Item = Chunk>>,
    ) -> Result<(), Cut> {
        let what = format!("archives/{}", layer.chain_id);
        let name = format!("{}: {what}", connection.name());
        let offset = passing.position;
        let get = Get { what, accept: "*/*".to_owned(), offset, end: Some(end), ..Get::default() };
        let asked = Instant::now();
        let (head, mut body) = connection.get(get).map_err(Cut::Failed)?;
        passing.waited_for(asked.elapsed(), 0)?;
        if head.begin != Begin::AsAsked || head.length != Some(end - offset) {
            return Err(Failure::invalid(format!("{name}: not the range that was requested")).into());
        }
        let mut buffer = vec![0; BUFFER_BYTES];
        while passing.position < end {
            let asked = Instant::now();
            let count = body.read(&mut buffer, &name).map_err(cut_of_body)?;
            // Without the time in which this node unpacks what was sent.
            passing.waited_for(asked.elapsed(), count)?;
            if count == 0 {
                return Err(Cut::Ended(format!("{name}: ended before byte {end}")));
            }
            if count as u64 > end - passing.position {
                return Err(Failure::invalid(format!("{name}: longer than the requested range")).into());
            }
            self.count_received(count);
            let begun_to_pass = Instant::now();
            passing.pass(&buffer[..count])?;
            passing.local += begun_to_pass.elapsed();
        }
        Ok(())
    }

    fn count_received(&self, count: usize) {
        self.report.update(|progress| {
            progress.bytes_fetched += count as u64;
            progress.bytes_from_neighbours += count as u64;
        });
    }
}

/// A failure to read the body of an answer.
fn cut_of_body(failed: RequestFailure) -> Cut {
    match failed.ends_pull || failed.failure.kind == FailureKind::Invalid {
        true => Cut::Failed(failed),
        false => Cut::Ended(failed.failure.message),
    }
}

/// The chunks of ranges that pass to the process which unpacks.
struct Passing<C: Iterator<Item = Chunk>> {
    /// The chunks that have not passed, in order.
    chunks: std::iter::Peekable<C>,
    /// Offset in the archive of the next byte.
    position: u64,
    into: PipeWriter,
    /// Time for which this node has not read the range, because it unpacked.
    local: Duration,
    /// Time for which the neighbour may still be slower than [`RATE_MIN`].
    left: Duration,
}

impl<C: Iterator<Item = Chunk>> Passing<C> {
    fn new(chunks: C, into: PipeWriter) -> Self {
        Self { chunks: chunks.peekable(), position: 0, into, local: Duration::ZERO, left: SLOW_MAX }
    }

    /// Counts the time in which the neighbour sent `bytes`.
    fn waited_for(&mut self, time: Duration, bytes: usize) -> Result<(), Cut> {
        let earned = Duration::from_secs_f64(bytes as f64 / f64::from(RATE_MIN));
        self.left = (self.left + earned).checked_sub(time).ok_or(Cut::Slow)?.min(SLOW_MAX);
        Ok(())
    }

    /// Whether a range that ended early, and began at `before`, is resumed; `resumed` counts how often that was the neighbour's doing.
    fn is_resumed(&self, before: u64, resumed: &mut u32) -> bool {
        let has_gained = self.position >= before.saturating_add(GAIN_BYTES_MIN);
        if has_gained && self.local < LOCAL_WAIT_MAX {
            *resumed += 1;
        }
        has_gained && *resumed <= RESUMED_MAX
    }

    /// Passes the next bytes of the archive to the chunks that contain them.
    fn pass(&mut self, bytes: &[u8]) -> Result<(), Cut> {
        let begin = self.position;
        self.position += bytes.len() as u64;
        while let Some(chunk) = self.chunks.peek().filter(|chunk| chunk.begin < self.position) {
            let (from, to) = (chunk.begin.max(begin), chunk.end.min(self.position));
            let (is_over, inside) = (chunk.end <= self.position, from - begin..to.max(from) - begin);
            let inside = &bytes[inside.start as usize..inside.end as usize];
            self.into.write_all(inside).map_err(|_| Cut::Closed)?;
            if !is_over {
                break;
            }
            self.chunks.next();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
