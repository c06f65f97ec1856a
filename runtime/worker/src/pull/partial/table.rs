//! The table of contents of a blob and its tar-split data: requested from the registry, or read from a blob that was downloaded.

use std::fs::File;
use std::io::{BufWriter, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use coracle_chunked::toc::{self, Location, Table};
use coracle_chunked::{Contents, Digest, Problem, index};
use coracle_job::{Failure, FailureKind, Layer};
use sha2::{Digest as _, Sha256};

use super::super::document::read_document;
use super::super::sources::Need;
use super::super::transfer::Transfer;
use super::Obstacle;
use crate::failure::io_failure;
use crate::jail::stream::Decompressed;
use crate::store::{Move, Store, open_plain};
use coracle_fetch::{Begin, Get};
use coracle_manifest::{DOCUMENT_BYTES_MAX, Descriptor};

/// Requests the table of `blob` and its tar-split data, which is returned as it is stored.
pub(super) fn fetch(
    transfer: &Transfer,
    blob: &Descriptor,
    location: &Location,
) -> Result<(Table, Arc<[u8]>), Obstacle> {
    let (begin, end) = (location.table.offset, location.split.end());
    let get = Get {
        what: format!("blobs/{}", blob.digest),
        accept: "*/*".to_owned(),
        offset: begin,
        end: Some(end),
        size: Some(blob.size),
        ..Get::default()
    };
    let mut is_refused = false;
    let asked = transfer.sources.ask(
        Need::Pull,
        &mut is_refused,
        |_| 0,
        |connection, is_refused| {
            let read = read_document(connection, get.clone(), DOCUMENT_BYTES_MAX, |head| {
                head.begin == Begin::AsAsked
            });
            read.inspect_err(|failed| *is_refused = failed.is_refusal())
        },
    );
    let (_, mut table) = match asked {
        // Some registries answer every range with an error.
        Err(failure) if is_refused => return Err(Obstacle::refused(failure)),
        asked => asked?,
    };
    transfer.report.update(|progress| progress.bytes_fetched += table.len() as u64);
    if table.len() as u64 != end - begin {
        let text = format!("{} bytes where {} were requested", table.len(), end - begin);
        return Err(Failure::invalid(text).into());
    }
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
    blob.contents.as_ref()?;
    let (mut room, store) = (None, &transfer.store);
    let mut contents = || -> Result<Contents, Failure> {
        let location = location(blob)?;
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

/// The location of the table of `blob`.
///
/// # Errors
/// There is none, or the table or the tar-split data is too long.
pub(super) fn location(blob: &Descriptor) -> Result<&Location, Failure> {
    let location = blob.contents.as_ref().ok_or_else(|| Failure::invalid("it has no table of contents"))?;
    location.check().map_err(|problem| Failure::invalid(problem.to_string()))?;
    Ok(location)
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
