//! The table of contents of a blob and its tar-split data: requested from the registry, or read from a blob that was downloaded.

use std::fs::File;
use std::io::{BufWriter, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use coracle_chunked::toc::{self, Location, Stated, Table};
use coracle_chunked::{Contents, Digest, Problem, Taken, index};
use coracle_job::{Failure, FailureKind, Layer};
use sha2::{Digest as _, Sha256};

use super::super::document::append_document;
use super::super::sources::Need;
use super::super::transfer::Transfer;
use super::rebuild::Layout;
use super::{Obstacle, donors, members, whole};
use crate::failure::io_failure;
use crate::jail::stream::Decompressed;
use crate::store::{Move, Store, open_plain};
use coracle_fetch::{Begin, Get, Head};
use coracle_manifest::Descriptor;

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
        Some(Stated::Stargz(digest)) => members::fetch(transfer, (blob, digest), layer, donors, saves),
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

pub(super) fn problem(problem: Problem) -> Obstacle {
    whole(&format!("its table: {problem}"))
}

/// Requests a range of `blob`, which is resumed where an answer ends early.
pub(super) fn range(
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
    let mut state = (Vec::new(), false);
    let asked = transfer.sources.ask(
        Need::Pull,
        &mut state,
        |(bytes, _)| bytes.len() as u64,
        |connection, (bytes, is_refused)| {
            let get = get(bytes.len() as u64);
            let is_right = |head: &Head| head.begin == Begin::AsAsked;
            let read = append_document(connection, get, end - start, is_right, bytes);
            read.inspect_err(|failed| *is_refused = failed.is_refusal())
        },
    );
    let (bytes, is_refused) = state;
    transfer.report.update(|progress| progress.bytes_fetched += bytes.len() as u64);
    match asked {
        // Some registries answer every range with an error.
        Err(failure) if is_refused => return Err(Obstacle::refused(failure)),
        asked => asked?,
    };
    if bytes.len() as u64 != end - start {
        let text = format!("{} bytes where {} were requested", bytes.len(), end - start);
        return Err(Failure::invalid(text).into());
    }
    Ok(bytes)
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
