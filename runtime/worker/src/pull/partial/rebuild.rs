//! Rebuilds the archive of a layer from chunks of the node's layers and from ranges of its blob, while these are downloaded.
//!
//! ```text
//! download ─► part ─► feed ─► decompress ─┐
//!                   files of the node ────┼─► assemble ─► pipe ─► unpacked as a whole blob would be
//!                   tar-split data ───────┘
//! ```
//! The members of a layer in eStargz contain the headers after a chunk, too ([`super::members`]).
//!
//! The chunks of a neighbour that has the layer unpacked are not compressed, and those of its outline are the layout ([`super::neighbour`]).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use coracle_chunked::split::{self, Piece};
use coracle_chunked::{
    Chunk, Contents, File as Listed, Place, Plan, Problem, Wanted as Chunks, index, outline, stargz,
};
use coracle_job::{Failure, FailureKind, Layer};
use coracle_tar::{BLOCK_BYTES, Event, Parser};
use sha2::{Digest as _, Sha256};

use super::super::blob::{Part, Wanted};
use super::super::follow::{Copied, copy};
use super::super::transfer::Transfer;
use super::donors;
use super::members::{Between, Members};
use crate::failure::{pipe, thread_failure};
use crate::jail::stream::Decompressed;
use crate::unpack::VerifiedLayer;
use coracle_fetch::Arrival;

/// Buffer size in bytes of a copy.
const BUFFER_BYTES: usize = 64 << 10;
/// Stack size in bytes of the threads, whose buffers are on the heap.
const STACK_BYTES: usize = 256 << 10;

/// Ranges of the blob and their part file, which does not exist if there are none.
pub(super) struct Source {
    pub(super) plan: Plan,
    pub(super) part: Option<Part>,
}

/// The reason why no layer was made.
pub(super) enum Stopped {
    /// The chunk of this index does not have its digest.
    Damaged(usize),
    /// The reader of the archive has ended; the reason is its result.
    Closed,
    /// The registry answers requests for ranges with something else.
    Refused(Failure),
    Failed(Failure),
}

/// The bytes of an archive between the contents of files.
pub(super) enum Layout<'a> {
    /// The layout is in compressed tar-split data.
    Split(Arc<[u8]>),
    /// The layout is in an outline.
    Outline(&'a [u8]),
    /// The layout is in the members of chunks, and in outlines of other layers.
    Members(Members),
}

impl Layout<'_> {
    /// Whether chunk `index` has a part of the layout, so that it has to be fetched.
    pub(super) fn needs(&self, index: usize) -> bool {
        matches!(self, Self::Members(members) if members.needs(index))
    }

    /// The layout does not fit the chunks.
    fn disagree(&self, what: &str) -> Stopped {
        let layout = match self {
            Self::Split(_) => "tar-split data",
            Self::Outline(_) => "its outline",
            Self::Members(_) => "its headers",
        };
        Stopped::Failed(Failure::invalid(format!("{layout}: {what}")))
    }
}

/// The chunks that the node does not have, in the order of the archive.
pub(super) enum Fetched<'a> {
    /// Each range is a compressed chunk.
    Compressed(Decompressed),
    Plain {
        from: io::PipeReader,
        /// Set if the download ended before all ranges.
        has_failed: &'a AtomicBool,
    },
}

impl Fetched<'_> {
    fn has_failed(&self) -> bool {
        matches!(self, Self::Plain { has_failed, .. } if has_failed.load(Ordering::Relaxed))
    }

    fn finish(self) -> Result<(), Failure> {
        match self {
            Self::Compressed(from) => from.finish(),
            // The diff ID shows whether there is more.
            Self::Plain { .. } => Ok(()),
        }
    }
}

impl Read for Fetched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Compressed(from) => from.read(buffer),
            Self::Plain { from, .. } => from.read(buffer),
        }
    }
}

/// All that an archive is made from.
pub(super) struct Rebuild<'a> {
    pub(super) contents: &'a Contents,
    /// The places of chunks on the node.
    pub(super) known: &'a Chunks,
    pub(super) donors: &'a [donors::Layer],
    pub(super) layout: &'a Layout<'a>,
}

/// A part file that is being downloaded, as the thread that reads it sees it.
struct Growing<'a> {
    plan: &'a Plan,
    file: File,
    arrival: Arc<Arrival>,
    /// Number of the download's attempt; a partial download is not restarted.
    attempt: u32,
}

impl Rebuild<'_> {
    /// Downloads the ranges of the last of `sources`, the others are complete, and unpacks the archive meanwhile.
    pub(super) fn layer(
        &self,
        transfer: &Transfer,
        wanted: &Wanted,
        layer: &Layer,
        sources: &mut [Source],
    ) -> Result<VerifiedLayer, Stopped> {
        let mut growing = Vec::new();
        let mut download = None;
        for Source { plan, part } in sources {
            let Some(part) = part else { continue };
            let file = part.handle().map_err(Stopped::Failed)?;
            let arrival = part.arrival();
            let attempt = arrival.attempt().unwrap_or_default();
            growing.push(Growing { plan, file, arrival, attempt });
            download = Some(part);
        }
        std::thread::scope(|scope| {
            let unpacking = std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, || self.unpack(transfer, layer, |into| self.assemble(&growing, into)))
                .map_err(|error| Stopped::Failed(thread_failure("unpacks", &error)))?;
            let mut downloaded = Ok(());
            if let Some(part) = download {
                let completed = part.complete(&transfer.sources, &wanted.blob, &transfer.report);
                part.arrival().end(completed.is_ok());
                downloaded = completed.map_err(|failure| match part.is_range_refused() {
                    true => Stopped::Refused(failure),
                    false => Stopped::Failed(failure),
                });
            }
            let panicked = || Failure::new(FailureKind::Internal, "the thread that unpacks panicked");
            let unpacked = unpacking.join().unwrap_or_else(|_| Err(Stopped::Failed(panicked())));
            match (downloaded, unpacked) {
                (Ok(()), unpacked) => unpacked,
                (Err(stopped), unpacked) => {
                    unpacked.into_iter().for_each(VerifiedLayer::discard);
                    Err(stopped)
                }
            }
        })
    }

    /// Unpacks the archive while a thread writes it.
    pub(super) fn unpack(
        &self,
        transfer: &Transfer,
        layer: &Layer,
        write: impl FnOnce(io::PipeWriter) -> Result<(), Stopped> + Send,
    ) -> Result<VerifiedLayer, Stopped> {
        let (from, into) = pipe().map_err(Stopped::Failed)?;
        std::thread::scope(|scope| {
            let assembling = std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, move || write(into))
                .map_err(|error| Stopped::Failed(thread_failure("assembles an archive", &error)))?;
            let archive = File::from(OwnedFd::from(from));
            let pulse = &mut |_| transfer.report.pulse();
            let unpacked = VerifiedLayer::unpack(&transfer.store, layer, &transfer.limits, archive, pulse);
            let panicked =
                || Failure::new(FailureKind::Internal, "the thread that assembles an archive panicked");
            match (assembling.join().unwrap_or_else(|_| Err(Stopped::Failed(panicked()))), unpacked) {
                (Ok(()), unpacked) => unpacked.map_err(Stopped::Failed),
                (Err(Stopped::Closed), Err(failure)) => Err(Stopped::Failed(failure)),
                (Err(stopped), unpacked) => {
                    unpacked.into_iter().for_each(VerifiedLayer::discard);
                    Err(stopped)
                }
            }
        })
    }

    /// Writes the archive to `into`.
    fn assemble(&self, growing: &[Growing<'_>], into: io::PipeWriter) -> Result<(), Stopped> {
        let (from, compressed) = pipe().map_err(Stopped::Failed)?;
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, move || feed(self.contents, growing, compressed))
                .map_err(|error| Stopped::Failed(thread_failure("reads what is downloaded", &error)))?;
            // Whatever happens here, the pipe is closed, so the thread ends with its next write.
            let chunks = Decompressed::start(OwnedFd::from(from)).map_err(Stopped::Failed)?;
            let is_fetched = |index| fetched(growing, index).is_some();
            self.write(&is_fetched, Fetched::Compressed(chunks), into)
        })
    }

    /// Writes the archive to `into`; `is_fetched` says whether the chunk of an index is among those that are fetched.
    pub(super) fn write(
        &self,
        is_fetched: &dyn Fn(usize) -> bool,
        fetched: Fetched<'_>,
        into: io::PipeWriter,
    ) -> Result<(), Stopped> {
        let buffer = vec![0; BUFFER_BYTES];
        Archive { rebuild: self, is_fetched, fetched, into, open: None, buffer }.write()
    }
}

/// Copies the compressed chunks of all parts to the pipe, in the order of the archive.
fn feed(contents: &Contents, growing: &[Growing<'_>], mut into: io::PipeWriter) {
    let mut buffer = vec![0; BUFFER_BYTES];
    for (index, chunk) in contents.chunks().iter().enumerate() {
        let Some((source, begin)) = fetched(growing, index) else { continue };
        let range = begin..begin + (chunk.end - chunk.begin);
        if copy(&source.file, &source.arrival, source.attempt, range, &mut into, &mut buffer) != Copied::Range
        {
            return;
        }
    }
}

/// The part that has chunk `index`, and the chunk's position in it.
fn fetched<'a, 'b>(growing: &'a [Growing<'b>], index: usize) -> Option<(&'a Growing<'b>, u64)> {
    growing.iter().find_map(|source| Some((source, source.plan.position(index)?)))
}

/// Passes all bytes of `from`; `failed` is the result if it cannot be read.
fn pass(
    from: &mut impl Read,
    into: &mut impl Write,
    buffer: &mut [u8],
    failed: impl Fn() -> Stopped,
) -> Result<(), Stopped> {
    loop {
        let count = from.read(buffer).map_err(|_| failed())?;
        if count == 0 {
            return Ok(());
        }
        into.write_all(&buffer[..count]).map_err(|_| Stopped::Closed)?;
    }
}

/// An archive that is being written.
struct Archive<'a> {
    rebuild: &'a Rebuild<'a>,
    /// Whether the chunk of an index is among those that are fetched.
    is_fetched: &'a dyn Fn(usize) -> bool,
    fetched: Fetched<'a>,
    into: io::PipeWriter,
    /// The file of the node that was read last, with its layer and path.
    open: Option<(u16, Vec<u8>, File)>,
    buffer: Vec<u8>,
}

impl Archive<'_> {
    fn write(mut self) -> Result<(), Stopped> {
        let rebuild = self.rebuild;
        let mut files = rebuild.contents.files();
        match *rebuild.layout {
            Layout::Split(ref split) => {
                let mut text = Decompressed::of(split.clone()).map_err(Stopped::Failed)?;
                for piece in split::read(&mut text) {
                    match piece.map_err(|problem| rebuild.layout.disagree(&problem.to_string()))? {
                        Piece::Bytes(bytes) => self.bytes(&bytes)?,
                        Piece::File(size) => self.file(files.next(), size)?,
                    }
                }
                text.finish().map_err(Stopped::Failed)?;
            }
            Layout::Outline(bytes) => {
                let wrong = |problem: Problem| rebuild.layout.disagree(&problem.to_string());
                let mut outline = outline::Reader::new(bytes).map_err(wrong)?;
                while let Some(part) = outline.part().map_err(wrong)? {
                    match part {
                        outline::Part::Bytes(bytes) => self.bytes(bytes)?,
                        outline::Part::Content(content) => self.file(files.next(), content.size)?,
                    }
                }
            }
            Layout::Members(ref members) => {
                match &members.first {
                    Some(first) => self.all_of(first)?,
                    None => self.between(members, None, 0)?,
                }
                for (file, next) in files.by_ref().zip(1..) {
                    self.file(Some(file), file.size)?;
                    self.between(members, Some(&file), next)?;
                }
                self.all_of(&members.last)?;
            }
        }
        match files.next() {
            None => self.fetched.finish().map_err(Stopped::Failed),
            Some(_) => Err(rebuild.layout.disagree("fewer files than its table")),
        }
    }

    /// Writes what these members contain.
    fn all_of(&mut self, members: &Arc<[u8]>) -> Result<(), Stopped> {
        let mut bytes = Decompressed::of(members.clone()).map_err(Stopped::Failed)?;
        pass(&mut bytes, &mut self.into, &mut self.buffer, || Stopped::Closed)?;
        bytes.finish().map_err(Stopped::Failed)
    }

    /// Writes the padding of a file, if there is one, and the headers before the next one, which has this number.
    fn between(&mut self, members: &Members, file: Option<&Listed<'_>>, next: usize) -> Result<(), Stopped> {
        let (mut block, padding) = ([0; BLOCK_BYTES], file.map_or(0, |file| stargz::padding(file.size)));
        let last = file.map(|file| file.first + file.chunks.len() - 1);
        // What is fetched may be of an interrupted pull, like the chunk.
        let damaged = || Stopped::Damaged(last.unwrap_or_default());
        match members.before(next, last.is_some_and(self.is_fetched)) {
            Between::Found(entries) => {
                self.bytes(&block[..padding])?;
                let mut headers = Vec::new();
                for entry in entries {
                    members.read(entry, &mut headers).map_err(Stopped::Failed)?;
                    self.bytes(&headers)?;
                }
            }
            Between::Fetched(mut entries) => {
                self.fetched.read_exact(&mut block[..padding]).map_err(|_| damaged())?;
                self.bytes(&block[..padding])?;
                let mut parser = Parser::default();
                while entries > 0 {
                    self.fetched.read_exact(&mut block).map_err(|_| damaged())?;
                    match parser.feed(&block) {
                        Ok(Event::More) => {}
                        Ok(Event::Entry(_)) => entries -= 1,
                        Ok(Event::End) | Err(_) => return Err(damaged()),
                    }
                    self.bytes(&block)?;
                }
            }
            Between::Rest => pass(&mut self.fetched, &mut self.into, &mut self.buffer, damaged)?,
        }
        Ok(())
    }

    /// Writes headers or padding.
    fn bytes(&mut self, bytes: &[u8]) -> Result<(), Stopped> {
        self.into.write_all(bytes).map_err(|_| Stopped::Closed)
    }

    /// Writes the content of the next file of the table, which the layout says has `size` bytes.
    fn file(&mut self, file: Option<Listed<'_>>, size: u64) -> Result<(), Stopped> {
        let file = file.filter(|file| file.size == size);
        let file = file.ok_or_else(|| self.rebuild.layout.disagree("a file that its table does not have"))?;
        for (index, chunk) in (file.first..).zip(file.chunks) {
            self.chunk(index, chunk)?;
        }
        Ok(())
    }

    /// Writes a chunk and verifies it.
    fn chunk(&mut self, index: usize, chunk: &Chunk) -> Result<(), Stopped> {
        let mut hash = Sha256::new();
        let is_fetched = (self.is_fetched)(index);
        let place = self.rebuild.known.place(index);
        let mut left = chunk.size;
        while left > 0 {
            if self.fetched.has_failed() {
                return Err(Stopped::Closed);
            }
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(BUFFER_BYTES);
            let count = match place {
                _ if is_fetched => self.fetched.read(&mut self.buffer[..most]),
                _ if chunk.is_zeros() => {
                    self.buffer[..most].fill(0);
                    Ok(most)
                }
                Some(place) => self.read_file(&place, chunk.size - left, most),
                None => Ok(0),
            };
            // A file that cannot be read, or is shorter, has not the chunk.
            let count = count.ok().filter(|count| *count > 0).ok_or(Stopped::Damaged(index))?;
            hash.update(&self.buffer[..count]);
            self.into.write_all(&self.buffer[..count]).map_err(|_| Stopped::Closed)?;
            left -= count as u64;
        }
        let digest = <[u8; 32]>::from(hash.finalize());
        // A table has no digest of zeros here; the diff ID shows whether they are.
        if chunk.is_zeros() || digest == chunk.digest {
            return Ok(());
        }
        // The file is what its index says: no other content with the same first bytes of the digest can be found.
        match !is_fetched && index::prefix(&digest) == index::prefix(&chunk.digest) {
            true => Err(self.rebuild.layout.disagree("a digest that no content has")),
            false => Err(Stopped::Damaged(index)),
        }
    }

    /// Reads a file of the node at an offset of the chunk.
    fn read_file(&mut self, place: &Place<'_>, offset: u64, most: usize) -> io::Result<usize> {
        let is_open =
            self.open.as_ref().is_some_and(|(layer, path, _)| *layer == place.layer && path == place.path);
        if !is_open {
            let file = donors::open(self.rebuild.donors, place)?;
            self.open = Some((place.layer, place.path.to_vec(), file));
        }
        let (_, _, file) = self.open.as_ref().ok_or(io::ErrorKind::NotFound)?;
        file.read_at(&mut self.buffer[..most], place.offset.saturating_add(offset))
    }
}
