//! The headers of a layer in eStargz, which are in the gzip members of the chunks before them ([`stargz`]): a file that the node has
//! needs them from the outline of an earlier release, and else all of its last chunk from the registry.
//!
//! All headers of a layer are some megabytes, so those that are found are in a file without a name.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use coracle_chunked::outline::{HEADERS_MAGIC, MAGIC};
use coracle_chunked::stargz::{self, Described, Table};
use coracle_chunked::toc::STORED_BYTES_MAX;
use coracle_chunked::{Contents, Digest, Plan, Problem, REGISTRY_EXTENTS_MAX};
use coracle_job::{Failure, FailureKind, Layer};
use coracle_manifest::Descriptor;

use super::super::transfer::Transfer;
use super::rebuild::Layout;
use super::table::{Fetched, problem, range};
use super::{Obstacle, donors, whole};
use crate::failure::io_failure;
use crate::jail::stream::Decompressed;
use crate::report::Report;
use crate::store::{Store, open_plain};

/// Length in bytes of a blob from which on it may be pulled in part: a shorter one takes less time than the requests.
const BLOB_BYTES_MIN: u64 = 256 << 10;
/// Maximum number of bytes at the end of a blob that are requested before it is known where the table begins.
const LAST_BYTES_MAX: u64 = 64 << 10;
/// Maximum length in bytes of the members before the first file, whose headers are those of a few directories.
const FIRST_BYTES_MAX: u64 = 256 << 10;
/// Limits of the number of bytes of memory for a table.
const MEMORY_BYTES_MIN: u64 = 64 << 10;
const MEMORY_BYTES_MAX: u64 = 9 << 20;
/// Maximum number of bytes of all headers that are found: those of 130 000 files.
const FOUND_BYTES_MAX: usize = 64 << 20;
/// Maximum number of bytes of headers that are compared with those of the layer: some seconds on a board.
const COMPARED_BYTES_MAX: usize = 256 << 20;
/// Buffer size in bytes for reading an outline.
const BUFFER_BYTES: usize = 64 << 10;

/// The parts of the layer that are in no chunk.
pub(super) struct Members {
    /// The entries up to the last file, and for each file the number of entries up to it.
    entries: Vec<Described>,
    ends: Vec<u32>,
    /// For each entry, the offset and length in bytes of its headers in the file; the length is 0 if they were not found.
    places: Vec<(u32, u32)>,
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

/// Requests the table of `blob`, and finds the headers of `layer` in outlines; `saves` says whether a download of so many bytes is worth it.
pub(super) fn fetch<'a>(
    transfer: &'a Transfer,
    (blob, digest): (&Descriptor, &Digest),
    layer: &Layer,
    donors: &[donors::Layer],
    saves: &dyn Fn(u64) -> bool,
) -> Result<Fetched<'a>, Obstacle> {
    if blob.size < BLOB_BYTES_MIN {
        return Err(whole("it is short"));
    }
    let outlines = outlines(&transfer.store, donors);
    if outlines.is_empty() {
        return Err(whole("no layer of its repository has headers for it"));
    }
    let check = |bytes| match saves(bytes) {
        true => Ok(()),
        false => Err(whole("the node has few headers of it")),
    };
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
    check(stored)?;
    // Each entry has a digest, which cannot be compressed, so that it is not four times as long in memory.
    let memory = (4 * length).clamp(MEMORY_BYTES_MIN, MEMORY_BYTES_MAX);
    let room = transfer.tables.take(memory + length);
    if offset < begin {
        last.splice(..0, range(transfer, blob, offset..begin)?);
    } else {
        last.drain(..(offset - begin) as usize);
    }
    let last: Arc<[u8]> = last.into();
    let table =
        stargz::read(Decompressed::of(last.clone())?, offset, digest, memory as usize).map_err(problem)?;
    let Table { contents, entries, ends } = table;
    let first = contents.chunks().first().map(|chunk| chunk.begin);
    let first = first.ok_or_else(|| whole("it has no files"))?;
    let file = nameless(&transfer.store, layer)?;
    let places = vec![(0, 0); entries.len()];
    let mut members = Members { entries, ends, places, file, first: None, last, needed: Vec::new() };
    members.find(outlines, &transfer.report);
    members.needed = members.needed(&contents);
    let plan = Plan::new(&contents, REGISTRY_EXTENTS_MAX, |index| members.needs(index));
    check(stored + plan.bytes())?;
    if !members.has_before(0) {
        if first > FIRST_BYTES_MAX {
            return Err(whole(&format!("headers of {first} bytes before its first file")));
        }
        members.first = Some(range(transfer, blob, 0..first)?.into());
        stored += first;
    }
    Ok(Fetched { contents, layout: Layout::Members(members), stored, room })
}

/// Opens the outlines of the layers of the same repository: headers of others would be those that their builders like.
fn outlines(store: &Store, donors: &[donors::Layer]) -> Vec<File> {
    let opened = donors.iter().filter(|donor| donor.is_relative).filter_map(|donor| {
        let mut file = open_plain(&store.index(&donor.name)).ok()?;
        let mut magic = [0; MAGIC.len()];
        file.read_exact(&mut magic).ok()?;
        file.seek(SeekFrom::Start(0)).ok()?;
        [MAGIC, HEADERS_MAGIC].contains(&&magic).then_some(file)
    });
    opened.collect()
}

/// Creates a file without a name in the store.
fn nameless(store: &Store, layer: &Layer) -> Result<File, Failure> {
    let path = store.aside_of_layer(&layer.chain_id, "headers")?;
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
    let file = opened.and_then(|file| std::fs::remove_file(&path).map(|()| file));
    file.map_err(|error| io_failure("create", &path, &error))
}

impl Members {
    /// Finds headers in these outlines. Those that cannot be read, or not be kept, are not found.
    fn find(&mut self, outlines: Vec<File>, report: &Report) {
        let Self { entries, places, file, .. } = self;
        let mut order: Vec<u32> = (0..entries.len() as u32).collect();
        order.sort_unstable_by_key(|number| (entries[*number as usize].key, *number));
        let (mut end, mut compared, mut headers) = (0, 0, Vec::new());
        for outline in outlines {
            report.pulse();
            let mut keep = |found: &Described, bytes: &[u8]| {
                let key = |number: &&u32| entries[**number as usize].key;
                let first = order.partition_point(|number| key(&number) < found.key);
                for number in order[first..].iter().take_while(|number| key(number) == found.key) {
                    let number = *number as usize;
                    compared += bytes.len();
                    if compared > COMPARED_BYTES_MAX || end + bytes.len() > FOUND_BYTES_MAX {
                        return Err(Problem::from(std::io::Error::from(std::io::ErrorKind::FileTooLarge)));
                    }
                    headers.clear();
                    headers.extend_from_slice(bytes);
                    if places[number].1 == 0 && stargz::fit(&mut headers, found, &entries[number]) {
                        file.write_all_at(&headers, end as u64)?;
                        places[number] = (end as u32, headers.len() as u32);
                        end += headers.len();
                    }
                }
                Ok(())
            };
            // One with damage is removed when it is read as an index.
            let _ = stargz::find(BufReader::with_capacity(BUFFER_BYTES, outline), &mut keep);
        }
    }

    /// For each chunk, whether its member is necessary: it is the last one of a file before headers that were not found.
    fn needed(&self, contents: &Contents) -> Vec<bool> {
        let mut needed = vec![false; contents.chunks().len()];
        for (file, next) in contents.files().zip(1..) {
            needed[file.first + file.chunks.len() - 1] = !self.has_before(next);
        }
        needed
    }

    /// Whether the member of chunk `index` is necessary for the headers after it.
    pub(super) fn needs(&self, index: usize) -> bool {
        self.needed.get(index).copied().unwrap_or_default()
    }

    /// The numbers of the entries after file `number - 1` up to file `number`, if there is such a file.
    fn entries_before(&self, number: usize) -> Option<std::ops::Range<usize>> {
        let end = *self.ends.get(number)? as usize;
        let begin = number.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        Some(begin..end)
    }

    /// Whether all headers between two files were found.
    fn has_before(&self, number: usize) -> bool {
        let is_found = |entries: std::ops::Range<usize>| self.places[entries].iter().all(|place| place.1 > 0);
        self.entries_before(number).is_some_and(is_found)
    }

    /// The bytes before file `number`; `is_fetched`: the chunk before them is fetched.
    pub(super) fn before(&self, number: usize, is_fetched: bool) -> Between {
        match self.entries_before(number) {
            None => Between::Rest,
            Some(entries) if is_fetched => Between::Fetched(entries.len()),
            Some(entries) => Between::Found(entries),
        }
    }

    /// Reads the headers of an entry that were found.
    pub(super) fn read(&self, entry: usize, headers: &mut Vec<u8>) -> Result<(), Failure> {
        let internal = |why: &str| Failure::new(FailureKind::Internal, format!("headers: {why}"));
        let place = self.places.get(entry).filter(|place| place.1 > 0);
        let (offset, length) = place.ok_or_else(|| internal("they were not found"))?;
        headers.resize(*length as usize, 0);
        let read = self.file.read_exact_at(headers, u64::from(*offset));
        read.map_err(|error| internal(&coracle_sandbox::describe_io(&error)))
    }
}
