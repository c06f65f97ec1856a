//! The table of contents of a blob and its tar-split data: requested from the registry, or read from a blob that was downloaded.

use std::fs::File;
use std::io::{BufWriter, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use coracle_chunked::toc::{self, Location, STORED_BYTES_MAX, Stated, Table};
use coracle_chunked::{
    Contents, Digest, MEMORY_BYTES_MAX, Plan, Problem, REGISTRY_EXTENTS_MAX, Taken, index, stargz,
};
use coracle_job::{Failure, FailureKind, Layer};
use sha2::{Digest as _, Sha256};

use super::super::document::append_document;
use super::super::sources::Need;
use super::super::transfer::Transfer;
use super::members::{self, Members};
use super::rebuild::Layout;
use super::{Obstacle, donors, whole};
use crate::failure::io_failure;
use crate::jail::stream::Decompressed;
use crate::store::{Move, Store, open_plain};
use coracle_fetch::{Begin, Get, Head, RequestFailure};
use coracle_manifest::Descriptor;

/// Length in bytes of a blob in eStargz from which on it may be pulled in part: a shorter one takes less time than the requests.
const STARGZ_BYTES_MIN: u64 = 256 << 10;
/// Maximum number of bytes at the end of a blob that are requested before it is known where the table begins.
const LAST_BYTES_MAX: u64 = 64 << 10;
/// Maximum length in bytes of the members before the first file, whose headers are those of a few directories.
const FIRST_BYTES_MAX: u64 = 256 << 10;
/// Number of bytes of memory that is enough for a short table.
const MEMORY_BYTES_MIN: u64 = 64 << 10;

/// Whether `blob` has a table of contents by which a pull in part may save something.
pub(crate) fn is_listed(blob: &Descriptor) -> bool {
    match blob.contents.as_deref() {
        None => false,
        Some(Stated::Chunked(_)) => true,
        Some(Stated::Stargz(_)) => blob.size >= STARGZ_BYTES_MIN,
    }
}

/// A table of contents that was requested, with what is necessary to rebuild the archive.
pub(super) struct Fetched<'a> {
    pub(super) contents: Contents,
    pub(super) layout: Layout<'static>,
    /// Number of bytes of the blob that were downloaded for it.
    pub(super) stored: u64,
    /// The memory of all of it.
    pub(super) room: Taken<'a>,
}

/// Requests the table of `blob` if `saves` says that the download of so many bytes is worth it.
pub(super) fn fetch<'a>(
    transfer: &'a Transfer,
    blob: &Descriptor,
    layer: &Layer,
    donors: &[donors::Layer],
    saves: &dyn Fn(u64) -> bool,
) -> Result<Fetched<'a>, Obstacle> {
    match blob.contents.as_deref() {
        None => Err(whole("it has no table of contents")),
        Some(Stated::Stargz(digest)) => fetch_stargz(transfer, (blob, digest), layer, donors, saves),
        Some(Stated::Chunked(location)) => {
            location.check().map_err(|problem| whole(&problem.to_string()))?;
            let stored = location.stored();
            if !saves(stored) {
                return Err(whole("most of it is its table of contents"));
            }
            let room = transfer.tables.take(location.memory());
            let (Table { contents, .. }, split) = fetch_split(transfer, blob, location)?;
            contents.check_memory(split.len()).map_err(problem)?;
            Ok(Fetched { contents, layout: Layout::Split(split), stored, room })
        }
    }
}

fn problem(problem: Problem) -> Obstacle {
    whole(&format!("its table: {problem}"))
}

/// Requests a range of `blob`, which is resumed where an answer ends early.
fn range(
    transfer: &Transfer,
    blob: &Descriptor,
    Range { start, end }: Range<u64>,
) -> Result<Vec<u8>, Obstacle> {
    let get = |done: u64| Get {
        what: format!("blobs/{}", blob.digest),
        accept: "*/*".to_owned(),
        offset: start + done,
        end: Some(end),
        size: Some(blob.size),
        ..Get::default()
    };
    let length = end - start;
    let mut state = (Vec::new(), false);
    loop {
        let before = state.0.len();
        let asked = transfer.sources.ask(
            Need::Pull,
            &mut state,
            |(bytes, _)| bytes.len() as u64,
            |connection, (bytes, is_refused)| {
                // The last bytes of an answer may come before its failure.
                if bytes.len() as u64 == length {
                    return Ok(());
                }
                let get = get(bytes.len() as u64);
                let is_right = |head: &Head| head.begin == Begin::AsAsked;
                let read = append_document(connection, get, length, is_right, bytes);
                *is_refused = read.as_ref().is_err_and(RequestFailure::is_refusal);
                read.map(drop)
            },
        );
        let (bytes, is_refused) = &mut state;
        transfer.report.update(|progress| progress.bytes_fetched += (bytes.len() - before) as u64);
        match asked {
            // Some registries answer every range with an error.
            Err(failure) if *is_refused => return Err(Obstacle::refused(failure)),
            asked => asked?,
        }
        if bytes.len() as u64 == length {
            return Ok(std::mem::take(bytes));
        }
        // An answer may have less than was requested (RFC 9110, section 15.3.7).
        if bytes.len() == before {
            return Err(Failure::invalid(format!("{before} bytes where {length} were requested")).into());
        }
    }
}

/// Requests the table of a layer in zstd:chunked and its tar-split data, which is returned as it is stored.
fn fetch_split(
    transfer: &Transfer,
    blob: &Descriptor,
    location: &Location,
) -> Result<(Table, Arc<[u8]>), Obstacle> {
    let begin = location.table.offset;
    let mut table = range(transfer, blob, begin..location.split.end())?;
    let split: Arc<[u8]> = table.split_off((location.split.offset - begin) as usize).into();
    table.truncate(location.table.length as usize);
    let table = read(table, location)?;
    verify(&split, &table.split, "its tar-split data")?;
    Ok((table, split))
}

/// Requests the table of `blob`, and finds the headers of `layer` in outlines; `saves` says whether a download of so many bytes is worth it.
fn fetch_stargz<'a>(
    transfer: &'a Transfer,
    (blob, digest): (&Descriptor, &Digest),
    layer: &Layer,
    donors: &[donors::Layer],
    saves: &dyn Fn(u64) -> bool,
) -> Result<Fetched<'a>, Obstacle> {
    let outlines = members::outlines(&transfer.store, donors);
    if outlines.is_empty() {
        return Err(whole("no layer of its repository has headers for it"));
    }
    let begin = blob.size - (blob.size / 32).min(LAST_BYTES_MAX);
    let mut last = range(transfer, blob, begin..blob.size)?;
    let footer = &last[last.len().saturating_sub(stargz::FOOTER_BYTES as usize)..];
    let offset = stargz::table_offset(footer, blob.size);
    let offset = offset.ok_or_else(|| whole("its last bytes do not say where its table is"))?;
    let length = blob.size - offset;
    if length > STORED_BYTES_MAX {
        return Err(whole(&format!(
            "a table of contents of {length} bytes, at most {STORED_BYTES_MAX} are read"
        )));
    }
    let mut stored = length.max(last.len() as u64);
    if !saves(stored) {
        return Err(whole("most of it is its table of contents"));
    }
    // Each entry has a digest, which cannot be compressed, so that it is not four times as long in memory.
    let memory = (4 * length).clamp(MEMORY_BYTES_MIN, MEMORY_BYTES_MAX as u64 - length);
    let room = transfer.tables.take(memory + length);
    if offset < begin {
        last.splice(..0, range(transfer, blob, offset..begin)?);
    } else {
        last.drain(..(offset - begin) as usize);
    }
    let last: Arc<[u8]> = last.into();
    let table =
        stargz::read(Decompressed::of(last.clone())?, offset, digest, memory as usize).map_err(problem)?;
    let stargz::Table { contents, headers } = table;
    let first = contents.chunks().first().map(|chunk| chunk.begin);
    let first = first.ok_or_else(|| whole("it has no files"))?;
    let members = Members::new(headers, &transfer.store, layer, last);
    let mut members = members.map_err(|failure| whole(&failure.message))?;
    members.find(&outlines, &contents, &transfer.report);
    let plan = Plan::new(&contents, REGISTRY_EXTENTS_MAX, |index| members.needs(index));
    if !saves(plan.bytes()) {
        return Err(whole("the node has few headers of it"));
    }
    if !members.has_first() {
        if first > FIRST_BYTES_MAX {
            return Err(whole(&format!("headers of {first} bytes before its first file")));
        }
        members.first = Some(range(transfer, blob, 0..first)?.into());
        stored += first;
    }
    Ok(Fetched { contents, layout: Layout::Members(members), stored, room })
}

/// Writes the index of a layer whose blob is in the file at `path`; returns the move that publishes it. Without an index the layer
/// is only no donor, so a failure is logged.
pub(crate) fn keep_index_of(
    transfer: &Transfer,
    blob: &Descriptor,
    path: &std::path::Path,
    layer: &Layer,
) -> Option<Move> {
    // One in eStargz has an outline in its place.
    let Stated::Chunked(location) = blob.contents.as_deref()? else { return None };
    let (mut room, store) = (None, &transfer.store);
    let mut contents = || -> Result<Contents, Failure> {
        location.check().map_err(|problem| Failure::invalid(problem.to_string()))?;
        room = Some(transfer.tables.take(location.memory()));
        let file = open_plain(path)?;
        let mut bytes = vec![0; location.table.length as usize];
        let read_all = file.read_exact_at(&mut bytes, location.table.offset);
        read_all.map_err(|error| io_failure("read", path, &error))?;
        let contents = read(bytes, location)?.contents;
        let checked = contents.check_memory(location.split.length as usize);
        checked.map_err(|problem| Failure::invalid(format!("its table: {problem}")))?;
        Ok(contents)
    };
    match contents() {
        Ok(contents) => keep_index(store, blob, layer, &contents),
        Err(failure) => {
            eprintln!("layer {} gets no index: {}", blob.digest, failure.message);
            None
        }
    }
}

/// Writes the index of a layer under a temporary name; returns the move that publishes it.
pub(super) fn keep_index(
    store: &Store,
    blob: &Descriptor,
    layer: &Layer,
    contents: &Contents,
) -> Option<Move> {
    let written = store.aside(&blob.digest).and_then(|path| {
        let file = File::create(&path).and_then(|file| index::write(contents, BufWriter::new(file)));
        file.map(|()| path.clone()).map_err(|error| io_failure("write", &path, &error))
    });
    match written {
        Ok(path) => Some((path, store.place_of_index(&layer.name))),
        Err(failure) => {
            eprintln!("layer {} gets no index: {}", blob.digest, failure.message);
            None
        }
    }
}

/// Verifies and reads a table.
fn read(bytes: Vec<u8>, location: &Location) -> Result<Table, Failure> {
    verify(&bytes, &location.digest, "its table of contents")?;
    let wrong = |problem: Problem| Failure::invalid(format!("table of contents: {problem}"));
    let text = Decompressed::of(bytes)?;
    // Its memory was taken for this length.
    toc::read(text.take(location.table.uncompressed), location.table.offset).map_err(wrong)
}

fn verify(bytes: &[u8], digest: &Digest, what: &str) -> Result<(), Failure> {
    match <Digest>::from(Sha256::digest(bytes)) == *digest {
        true => Ok(()),
        false => Err(Failure::new(
            FailureKind::Invalid,
            format!("{what} does not have the digest that is stated for it"),
        )),
    }
}
