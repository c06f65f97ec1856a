//! The headers of a layer in eStargz, which are in the gzip members of the chunks before them ([`stargz`]): a file that the node has
//! needs them from the outline of another layer, and else all of its last chunk from the registry.
//!
//! All headers of a layer are some megabytes, so those that are found are in a file without a name.

use std::fs::{File, OpenOptions};
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use coracle_chunked::stargz::{self, Headers, Key};
use coracle_chunked::{Contents, Problem};
use coracle_job::{Failure, FailureKind, Layer};

use super::donors;
use crate::failure::io_failure;
use crate::report::Report;
use crate::store::{Store, open_plain};

/// Maximum number of bytes of all headers that are found: those of 50 000 files.
const BYTES_MAX: u64 = 64 << 20;
/// Buffer size in bytes for reading an outline.
const BUFFER_BYTES: usize = 64 << 10;

/// The parts of the layer that are in no chunk.
pub(super) struct Members {
    /// The headers before each file.
    headers: Vec<Headers>,
    /// The members before the first file, and those after the last one: its table.
    pub(super) first: Arc<[u8]>,
    pub(super) last: Arc<[u8]>,
    /// Offset and length in bytes of the headers before each file, which were found.
    places: Vec<Option<(u64, u32)>>,
    file: Option<File>,
    /// For each chunk, whether its member is necessary for the headers after it.
    needed: Vec<bool>,
}

/// The bytes between two files.
pub(super) enum Between<'a> {
    /// Headers that were found.
    Found(&'a File, u64, u32),
    /// Headers of this number of entries, which are in the member of the chunk before.
    Fetched(u32),
    /// All that remains of the last member.
    Rest,
}

impl Members {
    pub(super) fn new(headers: Vec<Headers>, first: Arc<[u8]>, last: Arc<[u8]>) -> Self {
        let places = vec![None; headers.len()];
        Self { headers, first, last, places, file: None, needed: Vec::new() }
    }

    /// Finds headers in the outlines of these layers.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(super) fn find(
        &mut self,
        store: &Store,
        layer: &Layer,
        contents: &Contents,
        donors: &[donors::Layer],
        report: &Report,
    ) -> Result<(), Failure> {
        let path = store.aside_of_layer(&layer.chain_id, "headers")?;
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
        let file = opened.and_then(|file| std::fs::remove_file(&path).map(|()| file));
        let file = file.map_err(|error| io_failure("create", &path, &error))?;
        // Those before the first file are downloaded.
        let numbers = 1..self.headers.len();
        let mut order: Vec<(Key, usize)> = numbers.map(|number| (self.headers[number].key, number)).collect();
        order.sort_unstable();
        let (mut left, mut end) = (order.len(), 0_u64);
        for donor in donors {
            report.pulse();
            if left == 0 {
                break;
            }
            let mut keep = |found: &Headers, bytes: &[u8]| {
                let first = order.partition_point(|(key, _)| *key < found.key);
                for (_, number) in order[first..].iter().take_while(|(key, _)| *key == found.key) {
                    if self.places[*number].is_some() {
                        break;
                    }
                    if end + bytes.len() as u64 > BYTES_MAX {
                        return Err(Problem::from(std::io::Error::from(std::io::ErrorKind::FileTooLarge)));
                    }
                    file.write_all_at(bytes, end)?;
                    self.places[*number] = Some((end, bytes.len() as u32));
                    (end, left) = (end + bytes.len() as u64, left - 1);
                }
                Ok(())
            };
            let Ok(outline) = open_plain(&store.index(&donor.name)) else { continue };
            // An index is no outline; one with damage is removed by whom it helps to find chunks.
            let _ = stargz::find(BufReader::with_capacity(BUFFER_BYTES, outline), &mut keep);
        }
        self.file = Some(file);
        self.needed = vec![false; contents.chunks().len()];
        for (file, next) in contents.files().zip(1..) {
            let is_found = self.places.get(next).copied().flatten().is_some();
            self.needed[file.first + file.chunks.len() - 1] = !is_found;
        }
        Ok(())
    }

    /// Whether the member of chunk `index` is necessary for the headers after it.
    pub(super) fn needs(&self, index: usize) -> bool {
        self.needed.get(index).copied().unwrap_or_default()
    }

    /// The bytes before file `number`; `is_fetched`: the chunk before them is fetched.
    pub(super) fn before(&self, number: usize, is_fetched: bool) -> Result<Between<'_>, Failure> {
        let missing = || Failure::new(FailureKind::Internal, "headers of its archive were not found");
        match (self.headers.get(number), self.places.get(number).copied().flatten()) {
            (None, _) => Ok(Between::Rest),
            (Some(headers), _) if is_fetched => Ok(Between::Fetched(headers.entries)),
            (_, Some((offset, length))) => {
                Ok(Between::Found(self.file.as_ref().ok_or_else(missing)?, offset, length))
            }
            (_, None) => Err(missing()),
        }
    }
}
