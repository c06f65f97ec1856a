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
//! be ([`unverified_max`]), because the neighbour may have invented all of it.

use std::io::{PipeWriter, Write};
use std::time::{Duration, Instant};

use coracle_chunked::{Chunk, Extent, Plan, Wanted as Chunks, outline};
use coracle_job::{Failure, FailureKind, Layer, Limits};

use super::super::blob::{self, Part, Wanted};
use super::super::connection::Connection;
use super::super::document::read_document;
use super::super::floor::Floor;
use super::super::follow::unverified_max;
use super::super::neighbours::{Answer, Round, State};
use super::super::sources::GAIN_BYTES_MIN;
use super::super::transfer::Transfer;
use super::rebuild::{Fetched, Layout, Rebuild, Stopped};
use super::{Obstacle, donors, forget};
use crate::failure::{pipe, thread_failure};
use crate::unpack::{TOO_LONG, VerifiedLayer};
use coracle_fetch::{Begin, Get, RequestFailure};

/// Maximum number of neighbours that are tried for one layer.
const NEIGHBOURS_MAX: usize = 2;
/// Maximum number of attempts at one neighbour, after each of which files of other layers are left out.
const ATTEMPTS_MAX: u32 = 4;
/// Maximum number of early ends of ranges that are resumed.
const RESUMED_MAX: u32 = 8;
/// Buffer size in bytes of a range.
const BUFFER_BYTES: usize = 64 << 10;
/// Stack size in bytes of the thread that waits for the one which unpacks.
const STACK_BYTES: usize = 256 << 10;

/// The reason why a layer is not pulled from a neighbour.
#[derive(Debug)]
enum Left {
    /// Little would be saved, or this node cannot do it.
    Unused(String),
    /// The neighbour could not send it now.
    Failed(String),
    /// The neighbour sent something else.
    Wrong(String),
    /// The pull fails.
    Pull(Failure),
}

impl From<RequestFailure> for Left {
    fn from(failed: RequestFailure) -> Self {
        let text = failed.failure.message.clone();
        match failed.failure.kind {
            _ if failed.ends_pull => Self::Pull(failed.failure),
            FailureKind::Invalid => Self::Wrong(text),
            // It serves too many others.
            _ if failed.pause.is_some_and(|pause| !pause.is_zero()) => Self::Unused(text),
            _ => Self::Failed(text),
        }
    }
}

impl From<Stopped> for Left {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Failed(failure) => match failure.kind {
                // Holes, which are in no chunk, make a right layer longer, too.
                FailureKind::Invalid if failure.message.contains(TOO_LONG) => Self::Unused(failure.message),
                // The archive of its outline and chunks is not the layer.
                FailureKind::Invalid => Self::Wrong(failure.message),
                // On a full disk, too: what filled it may be an invention of the neighbour.
                _ => Self::Unused(failure.message),
            },
            Stopped::Damaged(_) => Self::Wrong("a chunk does not have the digest of its outline".to_owned()),
            Stopped::Closed => Self::Wrong("its archive was not read to the end".to_owned()),
            Stopped::Refused(why) => Self::Failed(why),
        }
    }
}

/// A range that ended early.
enum Cut {
    /// The reader of the chunks has ended, and knows the reason.
    Closed,
    Failed(RequestFailure),
}

impl From<Failure> for Cut {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure.into())
    }
}

/// The offers in the answers of neighbours, in an order that is another one on each node.
fn offers(answers: &[Answer], own: u64) -> Vec<(Answer, u64)> {
    let fits = |bytes: &u64| (1..=outline::BYTES_MAX).contains(bytes);
    let offer = |answer: &Answer| Some((*answer, answer.outline.filter(fits)?));
    let mut offers: Vec<_> = answers.iter().filter_map(offer).collect();
    offers.sort_by_key(|(answer, _)| answer.order ^ own);
    offers.truncate(NEIGHBOURS_MAX);
    offers
}

/// The limits of a layer that nothing verifies before it is unpacked, and whose blob has `size` bytes.
fn limits_of(limits: &Limits, size: u64) -> Limits {
    Limits { layer_bytes_max: limits.layer_bytes_max.min(unverified_max(size)), ..*limits }
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
            store: self.store.with_outlines(true),
            limits: limits_of(&self.limits, size),
            ..self.clone()
        };
        let has_blob = |answer: &Answer| answer.state == State::Complete || answer.is_downloading();
        let compared_with = answers.iter().any(has_blob).then_some(size);
        let saves = |bytes| compared_with.is_none_or(|size| coracle_chunked::saves(bytes, size));
        let mut offers = offers(answers, neighbours.own_order(digest).unwrap_or_default());
        offers.retain(|(_, bytes)| saves(*bytes));
        if offers.is_empty() || !self.donors.are_used() {
            return Ok(None);
        }
        let donors = self.donors.layers(&self.store, &self.report);
        if donors.is_empty() && compared_with.is_some() {
            return Ok(None);
        }
        // Others need not wait for this node, which does not download the blob.
        part.stop_announcing();
        *round = None;
        for (answer, _) in offers {
            let peer = &neighbours.peers()[answer.peer];
            let connection = connection.neighbour(neighbours, peer);
            let why = match transfer.take_from(&connection, layer, donors, &saves) {
                Ok((layer, received)) => {
                    let reused = size.saturating_sub(received);
                    eprintln!(
                        "layer {digest}: {received} bytes of {}, which has it unpacked",
                        connection.name()
                    );
                    blob::forget(&self.store, digest);
                    self.report.update(|progress| {
                        progress.bytes_done += size.saturating_sub(part.length());
                        progress.bytes_reused += reused;
                    });
                    return Ok(Some(layer));
                }
                Err(Left::Pull(failure)) => return Err(failure),
                Err(Left::Unused(why)) => why,
                Err(Left::Failed(why)) => {
                    peer.count(false);
                    why
                }
                Err(Left::Wrong(why)) => {
                    peer.refuse();
                    why
                }
            };
            eprintln!("layer {digest} is not taken from {}, which has it unpacked: {why}", connection.name());
        }
        Ok(None)
    }

    /// Pulls a layer from one neighbour; returns also the number of bytes that it has sent.
    fn take_from(
        &self,
        connection: &Connection,
        layer: &Layer,
        donors: &[donors::Layer],
        saves: &dyn Fn(u64) -> bool,
    ) -> Result<(VerifiedLayer, u64), Left> {
        let outline = self.outline(connection, layer)?;
        let contents = outline::contents(&outline[..]);
        let contents = contents.map_err(|problem| Left::Wrong(format!("its outline: {problem}")))?;
        if archive_bytes(&outline) > self.limits.layer_bytes_max {
            return Err(Left::Unused("it is too long for what is not verified yet".to_owned()));
        }
        let mut known = Chunks::new(&contents);
        donors::find(&self.store, donors, &mut known);
        for attempt in 1..=ATTEMPTS_MAX {
            let chunks = contents.chunks();
            let is_missing = |index: usize| known.place(index).is_none() && !chunks[index].is_zeros();
            let plan = Plan::new(&contents, is_missing);
            let bytes = plan.bytes().saturating_add(outline.len() as u64);
            if !saves(bytes) {
                return Err(Left::Unused("this node has little of it".to_owned()));
            }
            let layout = Layout::Outline(&outline);
            let rebuild = Rebuild { contents: &contents, known: &known, donors, layout };
            match self.rebuilt(connection, layer, &rebuild, &plan) {
                Ok(Ok(layer)) => return Ok((layer, bytes)),
                Ok(Err(Stopped::Damaged(index))) if plan.position(index).is_none() => {
                    let is_whole_layer = attempt >= ATTEMPTS_MAX / 2;
                    forget(&mut known, donors, index, is_whole_layer).map_err(|obstacle| match obstacle {
                        Obstacle::Whole(why) => Left::Wrong(why),
                        Obstacle::Pull(failure) => Left::Pull(failure),
                    })?;
                }
                Ok(Err(stopped)) => return Err(stopped.into()),
                Err(failed) => return Err(failed.into()),
            }
        }
        Err(Left::Unused("too many files of the node's layers are not what they were".to_owned()))
    }

    /// Requests the outline of a layer.
    fn outline(&self, connection: &Connection, layer: &Layer) -> Result<Vec<u8>, RequestFailure> {
        let what = format!("outlines/{}", layer.chain_id);
        let get = Get { what, accept: "*/*".to_owned(), ..Get::default() };
        let (_, bytes) = read_document(connection, get, |head| head.begin == Begin::First)?;
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
    ) -> Result<Result<VerifiedLayer, Stopped>, RequestFailure> {
        let (from, into) = match pipe() {
            Ok(ends) => ends,
            Err(failure) => return Ok(Err(Stopped::Failed(failure))),
        };
        let is_fetched = |index: usize| plan.position(index).is_some();
        let write = |archive| rebuild.write(&is_fetched, Fetched::Plain(from), archive);
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
            let panicked = || Failure::new(FailureKind::Internal, "the thread that unpacks panicked");
            let unpacked = unpacking.join().unwrap_or_else(|_| Err(Stopped::Failed(panicked())));
            match passed {
                Ok(()) | Err(Cut::Closed) => Ok(unpacked),
                Err(Cut::Failed(failed)) => {
                    unpacked.into_iter().for_each(VerifiedLayer::discard);
                    Err(failed)
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
                match self.pass_range(connection, layer, extent.end, &mut passing) {
                    Err(Cut::Failed(failed))
                        if failed.pause.is_some()
                            && resumed < RESUMED_MAX
                            && passing.position >= before.saturating_add(GAIN_BYTES_MIN) =>
                    {
                        resumed += 1;
                    }
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
        let (head, mut body) = connection.get(get).map_err(Cut::Failed)?;
        if head.begin != Begin::AsAsked || head.length != Some(end - offset) {
            return Err(Failure::invalid(format!("{name}: not the range that was requested")).into());
        }
        let cut_off = |why: String| Failure::new(FailureKind::Unavailable, format!("{name}: {why}"));
        let mut floor = Floor::new(connection.timeouts());
        // The time of the neighbour, without that in which this node unpacks what was sent.
        let (begun, mut waited) = (Instant::now(), Duration::ZERO);
        let mut buffer = vec![0; BUFFER_BYTES];
        while passing.position < end {
            let asked = Instant::now();
            let count = body.read(&mut buffer, &name).map_err(Cut::Failed)?;
            waited += asked.elapsed();
            if count == 0 {
                return Err(cut_off(format!("ended before byte {end}")).into());
            }
            if count as u64 > end - passing.position {
                return Err(Failure::invalid(format!("{name}: longer than the requested range")).into());
            }
            self.count_received(count);
            passing.pass(&buffer[..count])?;
            floor.passed(count, begun + waited).map_err(cut_off)?;
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

/// The chunks of ranges that pass to the process which unpacks.
struct Passing<C: Iterator<Item = Chunk>> {
    /// The chunks that have not passed, in order.
    chunks: std::iter::Peekable<C>,
    /// Offset in the archive of the next byte.
    position: u64,
    into: PipeWriter,
}

impl<C: Iterator<Item = Chunk>> Passing<C> {
    fn new(chunks: C, into: PipeWriter) -> Self {
        Self { chunks: chunks.peekable(), position: 0, into }
    }

    /// Passes those of the next bytes of the archive that are in chunks.
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
mod tests {
    use std::io::Read;

    use super::*;

    fn chunk(begin: u64, end: u64) -> Chunk {
        Chunk { begin, end, size: end - begin, digest: [1; 32] }
    }

    #[test]
    fn the_bytes_of_chunks_pass_whatever_the_pieces() {
        let archive: Vec<u8> = (0..100).collect();
        let chunks = [chunk(3, 10), chunk(10, 11), chunk(20, 50), chunk(60, 61), chunk(90, 100)];
        // The second range begins with its first chunk, as each does.
        let ranges = [3..61_usize, 90..100];
        for piece in [1, 2, 7, 30, 100] {
            let (mut from, into) = pipe().unwrap();
            let mut passing = Passing::new(chunks.into_iter(), into);
            for range in &ranges {
                passing.position = range.start as u64;
                for bytes in archive[range.clone()].chunks(piece) {
                    assert!(passing.pass(bytes).is_ok());
                }
            }
            drop(passing);
            let mut passed = Vec::new();
            from.read_to_end(&mut passed).unwrap();
            let expected = chunks.map(|chunk| archive[chunk.begin as usize..chunk.end as usize].to_vec());
            assert_eq!(passed, expected.concat(), "{piece}");
        }
    }

    /// An archive of two files, of which the second one has two chunks, and its outline.
    fn archive() -> (Vec<u8>, Vec<u8>) {
        let mut large: Vec<u8> = (0..3000_u32).map(|number| (number % 251) as u8 + 1).collect();
        large[1000..2100].fill(0);
        let mut writer = outline::Writer::new(Vec::new(), u64::MAX);
        let mut archive = Vec::new();
        for (path, content) in [(&b"small"[..], &b"hello"[..]), (b"large", &large)] {
            let (header, padding) = (vec![path[0]; 512], vec![0; 512 - content.len() % 512]);
            writer.pass(&header);
            writer.begin(path, 0);
            writer.pass(content);
            writer.end();
            writer.pass(&padding);
            archive.extend([&header, content, &padding].concat());
        }
        (archive, writer.finish().unwrap())
    }

    /// The archive that is made with an outline and these bytes of a neighbour, of which `send` says how many are sent.
    fn made(outline: &[u8], of_neighbour: &[u8], send: usize) -> Result<Vec<u8>, Stopped> {
        let contents = outline::contents(outline).unwrap();
        let known = Chunks::new(&contents);
        let plan = Plan::new(&contents, |index| !contents.chunks()[index].is_zeros());
        let is_fetched = |index: usize| plan.position(index).is_some();
        let layout = Layout::Outline(outline);
        let rebuild = Rebuild { contents: &contents, known: &known, donors: &[], layout };
        let (from, into) = pipe().unwrap();
        let (mut archive, made) = pipe().unwrap();
        let chunks = contents.chunks().iter().enumerate().filter(|(index, _)| is_fetched(*index));
        let mut passing = Passing::new(chunks.map(|(_, chunk)| *chunk), into);
        std::thread::scope(|scope| {
            let read = scope.spawn(move || {
                let mut bytes = Vec::new();
                archive.read_to_end(&mut bytes).map(|_| bytes).unwrap()
            });
            let written = scope.spawn(|| rebuild.write(&is_fetched, Fetched::Plain(from), made));
            for extent in plan.extents() {
                passing.position = extent.begin;
                let _ = passing.pass(&of_neighbour[extent.begin as usize..send.min(extent.end as usize)]);
            }
            drop(passing);
            written.join().unwrap().map(|()| read.join().unwrap())
        })
    }

    #[test]
    fn an_archive_is_made_of_what_a_neighbour_sends_and_wrong_chunks_are_found() {
        let (archive, outline) = archive();
        assert!(made(&outline, &archive, archive.len()).is_ok_and(|made| made == archive));
        let content = 512 + 5 + 507 + 512;
        for (about, at, damaged) in [
            ("the first file", 514, 0),
            ("the first chunk", content + 9, 1),
            ("the last chunk", content + 2500, 3),
        ] {
            let mut wrong = archive.clone();
            wrong[at] ^= 1;
            let stopped = made(&outline, &wrong, wrong.len());
            assert!(matches!(stopped, Err(Stopped::Damaged(index)) if index == damaged), "{about}");
        }
        // Headers are not those of the neighbour.
        let mut same = archive.clone();
        same[content - 100] ^= 1;
        assert!(made(&outline, &same, same.len()).is_ok_and(|made| made == archive));
        let early = made(&outline, &archive, content + 2500);
        assert!(matches!(early, Err(Stopped::Damaged(3))), "an early end");
    }

    #[test]
    fn an_outline_of_another_archive_gives_another_archive() {
        let (archive, outline) = archive();
        let mut other = outline.clone();
        let header = outline.windows(2).position(|bytes| bytes == b"ss").unwrap();
        other[header] = b'x';
        let made = made(&other, &archive, archive.len());
        assert!(made.is_ok_and(|made| made != archive), "the diff ID shows it");
    }

    #[test]
    fn a_reader_that_has_ended_ends_the_ranges() {
        let (from, into) = pipe().unwrap();
        let mut passing = Passing::new([chunk(0, 5)].into_iter(), into);
        drop(from);
        assert!(matches!(passing.pass(b"12345"), Err(Cut::Closed)));
    }

    #[test]
    fn only_outlines_of_a_possible_length_are_offers() {
        let answer = |peer, order, outline| Answer { peer, state: State::Nothing, order, outline };
        let answers = [
            answer(0, 7, None),
            answer(1, 6, Some(0)),
            answer(2, 5, Some(outline::BYTES_MAX + 1)),
            answer(3, 4, Some(9)),
            answer(4, 3, Some(outline::BYTES_MAX)),
            answer(5, 2, Some(8)),
        ];
        let peers = |own| offers(&answers, own).iter().map(|(answer, _)| answer.peer).collect::<Vec<_>>();
        assert_eq!(peers(0), [5, 4]);
        assert_eq!(peers(4), [3, 5], "another node begins with another neighbour");
    }

    /// A hundred bytes would fill the disk with zeros.
    #[test]
    fn an_outline_of_an_archive_that_is_too_long_for_its_blob_is_not_used() {
        let mut writer = outline::Writer::new(Vec::new(), u64::MAX);
        writer.begin(b"zeros", 0);
        for _ in 0..(17 << 20) / 65_536 {
            writer.pass(&[0; 65_536]);
        }
        let outline = writer.finish().unwrap();
        assert!(outline.len() < 100);
        let max = |size| limits_of(&Limits::default(), size).layer_bytes_max;
        assert_eq!(archive_bytes(&outline), 17 << 20);
        assert!(archive_bytes(&outline) > max(1 << 10));
        assert!(archive_bytes(&outline) <= max(2 << 20));
        assert_eq!(max(u64::MAX), Limits::default().layer_bytes_max);
        assert_eq!(archive_bytes(b"short"), u64::MAX);
        let failure = Failure::invalid(format!("entry \"hole\": {TOO_LONG}"));
        assert!(matches!(Left::from(Stopped::Failed(failure)), Left::Unused(_)), "of a sparse file");
    }

    #[test]
    fn a_neighbour_is_blamed_for_what_it_sent_only() {
        let failed = |kind| RequestFailure::from(Failure::new(kind, "x"));
        let busy = RequestFailure { pause: Some(Duration::from_secs(1)), ..failed(FailureKind::Unavailable) };
        let stopped = |kind| Left::from(Stopped::Failed(Failure::new(kind, "x")));
        assert!(matches!(Left::from(failed(FailureKind::Invalid)), Left::Wrong(_)));
        assert!(matches!(Left::from(failed(FailureKind::NotFound)), Left::Failed(_)));
        assert!(matches!(Left::from(failed(FailureKind::Unavailable)), Left::Failed(_)));
        assert!(matches!(Left::from(busy), Left::Unused(_)));
        assert!(matches!(stopped(FailureKind::Invalid), Left::Wrong(_)), "the diff ID");
        assert!(matches!(stopped(FailureKind::NoSpace), Left::Unused(_)), "what it sent may have filled it");
        assert!(matches!(stopped(FailureKind::Internal), Left::Unused(_)));
        assert!(matches!(Left::from(Stopped::Damaged(3)), Left::Wrong(_)));
        let lost = RequestFailure { ends_pull: true, ..failed(FailureKind::Unavailable) };
        assert!(matches!(Left::from(lost), Left::Pull(_)));
    }
}
