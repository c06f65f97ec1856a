//! The headers of a layer in eStargz, which are in the gzip members of the chunks before them ([`stargz`]): a file that the node has
//! needs them from the outline of an earlier release, and else all of its last chunk from the registry.
//!
//! All headers of a layer are some megabytes, so those that are found are in a file without a name.

use std::cmp::Reverse;
use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use coracle_chunked::outline::{MAGIC, MAGICS};
use coracle_chunked::{Contents, Headers, Problem, stargz};
use coracle_job::{Failure, FailureKind, Layer};
use coracle_sandbox::describe_io;

use super::donors;
use crate::failure::io_failure;
use crate::report::Report;
use crate::store::{Store, open_plain};

/// Maximum number of outlines that are read: those of the layers of some releases, the newest first.
const OUTLINES_MAX: usize = 32;
/// Buffer size in bytes for reading an outline.
const BUFFER_BYTES: usize = 64 << 10;

/// The parts of the layer that are in no chunk.
pub(super) struct Members {
    headers: Headers,
    /// The headers that were found.
    file: File,
    /// The members before the first file, if its headers were not found.
    pub(super) first: Option<Arc<[u8]>>,
    /// The members after the last file: the table.
    pub(super) last: Arc<[u8]>,
    /// For each chunk, whether its member is necessary for the headers after it.
    needed: Vec<bool>,
}

/// The bytes between two files.
pub(super) enum Between {
    /// Headers that were found, of the entries with these numbers.
    Found(std::ops::Range<usize>),
    /// Headers of this number of entries, which are in the member of the chunk before.
    Fetched(usize),
    /// All that remains of the last member.
    Rest,
}

/// Opens the outlines of the layers of the same repository: headers of others would be those that their builders like.
pub(super) fn outlines(store: &Store, donors: &[donors::Layer]) -> Vec<File> {
    let opened = donors.iter().filter(|donor| donor.is_relative).filter_map(|donor| {
        let mut file = open_plain(&store.index(&donor.name)).ok()?;
        let mut magic = [0; MAGIC.len()];
        file.read_exact(&mut magic).ok()?;
        MAGICS.contains(&&magic).then_some(file)
    });
    opened.take(OUTLINES_MAX).collect()
}

/// Reads the headers in an outline; the log has what ends that.
fn read(outline: &File, report: &Report, hear: &mut stargz::Hear<'_>) {
    report.pulse();
    let mut outline = outline;
    let sought = outline.seek(SeekFrom::Start(0)).map_err(Problem::from);
    let outline = BufReader::with_capacity(BUFFER_BYTES, outline);
    // One with damage is removed when it is read as an index.
    if let Err(problem) = sought.and_then(|_| stargz::find(outline, hear)) {
        eprintln!("headers in an outline: {problem}");
    }
}

impl Members {
    /// The parts of `layer` before its headers are found.
    ///
    /// # Errors
    /// The file for these cannot be created.
    pub(super) fn new(
        headers: Headers,
        store: &Store,
        layer: &Layer,
        last: Arc<[u8]>,
    ) -> Result<Self, Failure> {
        let path = store.aside_of_layer(&layer.chain_id, "headers")?;
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
        let file = opened.and_then(|file| std::fs::remove_file(&path).map(|()| file));
        let file = file.map_err(|error| io_failure("create", &path, &error))?;
        Ok(Self { headers, file, first: None, last, needed: Vec::new() })
    }

    /// Finds headers in these outlines, first in the one that has most of the entries: it is that of the release before, and another
    /// layer may have headers of other forms. Those that cannot be read, or not be kept, are not found.
    pub(super) fn find(&mut self, outlines: &[File], contents: &Contents, report: &Report) {
        let mut order: Vec<(Reverse<usize>, usize)> = Vec::new();
        for (outline, number) in outlines.iter().zip(0..) {
            let mut count = 0;
            read(outline, report, &mut |found, _| {
                count += usize::from(self.headers.has(found));
                Ok(())
            });
            if count > 0 {
                order.push((Reverse(count), number));
            }
        }
        order.sort_unstable();
        for (_, number) in order {
            if self.headers.is_complete() {
                break;
            }
            let mut keep = |bytes: &[u8], offset| self.file.write_all_at(bytes, offset);
            read(&outlines[number], report, &mut |found, bytes| self.headers.hear(found, bytes, &mut keep));
        }
        self.needed = self.headers.needed(contents);
    }

    /// Whether the headers before the first file were found.
    pub(super) fn has_first(&self) -> bool {
        self.headers.has_before(0)
    }

    /// Whether the member of chunk `index` is necessary for the headers after it.
    pub(super) fn needs(&self, index: usize) -> bool {
        self.needed.get(index).copied().unwrap_or_default()
    }

    /// The bytes before file `number`; `is_fetched`: the chunk before them is fetched.
    pub(super) fn before(&self, number: usize, is_fetched: bool) -> Between {
        match self.headers.before(number) {
            None => Between::Rest,
            Some(entries) if is_fetched => Between::Fetched(entries.len()),
            Some(entries) => Between::Found(entries),
        }
    }

    /// Reads the headers of an entry that were found.
    pub(super) fn read(&self, entry: usize, headers: &mut Vec<u8>) -> Result<(), Failure> {
        let internal = |why: &str| Failure::new(FailureKind::Internal, format!("headers: {why}"));
        let place = self.headers.place(entry);
        let (offset, length) = place.ok_or_else(|| internal("they were not found"))?;
        headers.resize(length, 0);
        self.file.read_exact_at(headers, offset).map_err(|error| internal(&describe_io(&error)))
    }
}
