//! Makes the blob of a layer in the format zstd:chunked (containers/storage 1.65, `pkg/chunked/compressor`) from its archive, which is
//! not changed: the layer keeps its diff ID, the image its ID, and a node with the same layer in another compression has it already.
//!
//! ```text
//! archive ─► headers and padding ─► a zstd frame ─┐
//!        └─► each chunk of a file ─► a frame ─────┴─► table of contents, tar-split data, footer: skippable frames
//! ```

use std::fs::File;
use std::io::{BufReader, Read, Seek, Write};
use std::os::unix::fs::FileExt;

use coracle_chunked::toc::{self, CRFS, Location};
use coracle_chunked::{Chunker, Digest};
use coracle_tar::{BLOCK_BYTES, Entry, Kind, Reader};
use sha2::{Digest as _, Sha256};
use zstd::zstd_safe::CParameter;

use crate::failure::{Context, Failure};
use crate::table::{Content, Crc, Part, SplitWriter, Table, digest_text};

/// The media type of the blobs.
pub(crate) const MEDIA_TYPE: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
/// First bytes of a frame that decoders skip (RFC 8878, 3.1.2).
const SKIPPABLE_MAGIC: [u8; 4] = [0x50, 0x2a, 0x4d, 0x18];
/// The last bytes of the footer.
const FOOTER_MAGIC: &[u8; 8] = b"GNUlInUx";
/// Data of at most this length in bytes is compressed in memory.
const MEMORY_BYTES_MAX: u64 = 16 << 20;
/// Length in bytes of a segment of tar-split data at the end of an archive, as tar-split has it.
const SEGMENT_BYTES: u64 = 1 << 20;
/// Maximum length in bytes of what follows the last entry: tar-split data has all of it.
const END_BYTES_MAX: u64 = 32 << 20;
/// The last second that a time of the table may have: in the year 2262, up to which archives are read.
const SECONDS_MAX: u64 = i64::MAX as u64 / 1_000_000_000;
/// Minimum level of the compression of a table, and the logarithm of its window, for which a node needs 4 MiB.
const TABLE_LEVEL: i32 = 22;
const TABLE_WINDOW_LOG: u32 = 22;
const BUFFER_BYTES: usize = 64 << 10;

/// A converted layer: its blob and the annotations of its descriptor.
pub(crate) struct Made {
    pub(crate) file: File,
    pub(crate) digest: String,
    pub(crate) bytes: u64,
    /// The annotations with the places of the table and the tar-split data; empty if the layer has no table.
    pub(crate) annotations: Annotations,
    /// The reason why the layer has no table.
    pub(crate) without: Option<String>,
}

/// Annotations of a layer's descriptor.
pub(crate) type Annotations = Vec<(&'static str, String)>;
/// The paths of the files of a layer, with the digest and size of each chunk.
pub(crate) type Files = Vec<(Vec<u8>, Vec<(Digest, u64)>)>;

/// Whether an archive can have a table of contents.
enum Tabled {
    Yes(Annotations),
    /// No blob was made; the reason.
    No(String),
    /// No blob was made, because nodes do not use such a table; the reason.
    Unused(String),
}

/// Makes the blob of the archive in `archive`; `file` is empty and receives it.
pub(crate) fn make(archive: &File, file: File, level: i32) -> Result<Made, Failure> {
    let mut blob = Blob::new(file, level)?;
    let mut tabled = chunked(archive, &mut blob, Chunker::of_file)?;
    if let Tabled::Unused(_) = tabled {
        // A table of fewer chunks may be used.
        blob = blob.again()?;
        tabled = chunked(archive, &mut blob, |_, _| Chunker::default())?;
    }
    match tabled {
        Tabled::Yes(annotations) => Ok(blob.finish(annotations, None)),
        Tabled::No(why) | Tabled::Unused(why) => {
            let mut blob = blob.again()?;
            let bytes = archive.metadata().context(|| "look at the archive")?.len();
            blob.frame_of(archive, 0, bytes)?;
            Ok(blob.finish(Vec::new(), Some(why)))
        }
    }
}

/// The blob while it is written.
struct Blob {
    file: File,
    hash: Sha256,
    bytes: u64,
    level: i32,
    compressor: zstd::bulk::Compressor<'static>,
}

impl Blob {
    fn new(file: File, level: i32) -> Result<Self, Failure> {
        let compressor = zstd::bulk::Compressor::new(level).context(|| "make a compressor")?;
        Ok(Self { file, hash: Sha256::new(), bytes: 0, level, compressor })
    }

    /// Begins again: the content of the file so far is replaced.
    fn again(self) -> Result<Self, Failure> {
        self.file.set_len(0).context(|| "truncate the blob")?;
        Self::new(self.file, self.level)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.file.write_all_at(bytes, self.bytes).context(|| "write the blob")?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Compresses `bytes` into a separate zstd frame.
    fn frame(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if bytes.is_empty() {
            return Ok(());
        }
        let frame = self.compressor.compress(bytes).context(|| "compress")?;
        self.put(&frame)
    }

    /// Compresses a part of a file into a separate zstd frame.
    fn frame_of(&mut self, from: &File, offset: u64, bytes: u64) -> Result<(), Failure> {
        if bytes <= MEMORY_BYTES_MAX {
            return self.frame(&read_part(from, offset, bytes)?);
        }
        let mut encoder =
            zstd::stream::write::Encoder::new(Vec::new(), self.level).context(|| "make a compressor")?;
        encoder.set_pledged_src_size(Some(bytes)).context(|| "make a compressor")?;
        let mut passed = 0;
        while passed < bytes {
            let part = read_part(from, offset + passed, MEMORY_BYTES_MAX.min(bytes - passed))?;
            encoder.write_all(&part).context(|| "compress")?;
            passed += part.len() as u64;
            self.put(&std::mem::take(encoder.get_mut()))?;
        }
        let rest = encoder.finish().context(|| "compress")?;
        self.put(&rest)
    }

    /// Adds a skippable frame; returns the offset of its content.
    fn skippable(&mut self, content: &[u8]) -> Result<u64, Failure> {
        let length = u32::try_from(content.len()).map_err(|_| Failure::new("a table of more than 4 GiB"))?;
        self.put(&[SKIPPABLE_MAGIC, length.to_le_bytes()].concat())?;
        let offset = self.bytes;
        self.put(content)?;
        Ok(offset)
    }

    fn finish(self, annotations: Annotations, without: Option<String>) -> Made {
        let digest = digest_text(&self.hash.finalize());
        Made { file: self.file, digest, bytes: self.bytes, annotations, without }
    }
}

/// Writes the blob with a table. `chunker` gets the size of a file and the number of chunks before it.
fn chunked(
    archive: &File,
    blob: &mut Blob,
    chunker: impl Fn(u64, usize) -> Chunker,
) -> Result<Tabled, Failure> {
    let length = archive.metadata().context(|| "look at the archive")?.len();
    let mut reader = entries(archive)?;
    let (mut table, mut split) = (Table::default(), SplitWriter::new(Vec::new()));
    let mut names = std::collections::HashSet::new();
    // What is between the contents of files, and the offset of the first byte after what was read.
    let (mut between, mut end, mut count) = (Vec::new(), 0, 0);
    while let Some(entry) = reader.next().context(|| "read the archive")? {
        let begin = reader.position();
        let headers = read_part(archive, end, begin - end)?;
        split.bytes(&headers).context(|| "write tar-split data")?;
        let padding = end.next_multiple_of(BLOCK_BYTES as u64) - end;
        let mode = match look(&entry, headers.get(padding as usize..).unwrap_or_default()) {
            Ok(mode) => mode,
            Err(why) => return Ok(Tabled::No(format!("{}: {why}", String::from_utf8_lossy(&entry.path)))),
        };
        between.extend(headers);
        // Other readers refuse two entries for one path.
        if !names.insert(coracle_tar::clean(&entry.path)) {
            return Ok(Tabled::No(format!("{}: it is there twice", String::from_utf8_lossy(&entry.path))));
        }
        let mut content = Content::default();
        let mut crc = Crc::default();
        if entry.size > 0 {
            blob.frame(&std::mem::take(&mut between))?;
            content = chunks(archive, (begin, entry.size), chunker(entry.size, count), blob, &mut crc)?;
            count += content.chunks.len();
        }
        end = begin + entry.size;
        let name = String::from_utf8_lossy(&entry.path);
        split.file(&name, entry.size, crc.finish()).context(|| "write tar-split data")?;
        if let Err(why) = table.add(&entry, mode, &content) {
            return Ok(Tabled::No(format!("{name}: {why}")));
        }
    }
    // Padding, blocks of zeros, and what follows them.
    let padding = end.next_multiple_of(BLOCK_BYTES as u64) - end;
    let after = read_part(archive, end, (padding + BLOCK_BYTES as u64).min(length - end))?;
    if after.get(padding as usize..).is_some_and(|block| block.iter().any(|byte| *byte != 0)) {
        return Ok(Tabled::No("headers after the last entry".into()));
    }
    if length - end > END_BYTES_MAX {
        return Ok(Tabled::No(format!("{} bytes after the last entry", length - end)));
    }
    while end < length {
        let rest = read_part(archive, end, SEGMENT_BYTES.min(length - end))?;
        end += rest.len() as u64;
        split.bytes(&rest).context(|| "write tar-split data")?;
        blob.frame(&std::mem::take(&mut between))?;
        between = rest;
    }
    blob.frame(&between)?;
    let (annotations, table) = finish(blob, table, &split.finish())?;
    // What nodes cannot use is only longer.
    Ok(match check(&annotations, &table, blob.bytes) {
        Ok(()) => Tabled::Yes(annotations),
        Err(why) => Tabled::Unused(why),
    })
}

/// Reads the table as a node does.
fn check(annotations: &Annotations, table: &[u8], blob_bytes: u64) -> Result<(), String> {
    let annotation =
        |key: &str| annotations.iter().find(|(name, _)| *name == key).map(|(_, value)| value.as_str());
    let location = Location::of(annotation, blob_bytes).ok_or("its table is not found")?;
    location.check().map_err(|problem| problem.to_string())?;
    let read = toc::read(table, location.table.offset);
    let checked = read.and_then(|table| table.contents.check_memory(location.split.length as usize));
    checked.map_err(|problem| problem.to_string())
}

/// Writes the table, the tar-split data and the footer; returns the annotations and the table.
fn finish(blob: &mut Blob, table: Table, split: &[u8]) -> Result<(Annotations, Vec<u8>), Failure> {
    // Each update downloads both.
    let compressor = &mut blob.compressor;
    compressor.set_compression_level(blob.level.max(TABLE_LEVEL)).context(|| "make a compressor")?;
    compressor.set_parameter(CParameter::WindowLog(TABLE_WINDOW_LOG)).context(|| "make a compressor")?;
    let stored_split = compressor.compress(split).context(|| "compress")?;
    let table = table.finish(&Sha256::digest(&stored_split).into());
    let stored_table = compressor.compress(&table).context(|| "compress")?;
    let table_offset = blob.skippable(&stored_table)?;
    let split_offset = blob.skippable(&stored_split)?;
    let (table_bytes, split_bytes) = (stored_table.len() as u64, stored_split.len() as u64);
    let numbers =
        [table_offset, table_bytes, table.len() as u64, CRFS, split_offset, split_bytes, split.len() as u64];
    let footer: Vec<u8> =
        numbers.iter().flat_map(|number| number.to_le_bytes()).chain(*FOOTER_MAGIC).collect();
    blob.skippable(&footer)?;
    let annotations = vec![
        (toc::CHECKSUM, digest_text(&Sha256::digest(&stored_table))),
        (toc::TABLE, format!("{table_offset}:{table_bytes}:{}:{CRFS}", table.len())),
        (toc::SPLIT, format!("{split_offset}:{split_bytes}:{}", split.len())),
    ];
    Ok((annotations, table))
}

/// Adds the frames of a file's content, which begins in the archive at an offset and has a size.
fn chunks(
    archive: &File,
    (begin, size): (u64, u64),
    mut chunker: Chunker,
    blob: &mut Blob,
    crc: &mut Crc,
) -> Result<Content, Failure> {
    let (mut hash, mut passed) = (Sha256::new(), 0);
    while passed < size {
        let part = read_part(archive, begin + passed, (BUFFER_BYTES as u64).min(size - passed))?;
        chunker.update(&part);
        hash.update(&part);
        crc.update(&part);
        passed += part.len() as u64;
    }
    let mut content = Content { digest: hash.finalize().into(), ..Content::default() };
    let mut position = begin;
    for (digest, size) in chunker.finish() {
        let is_zeros = digest == [0; 32];
        let digest = if is_zeros { digest_of_zeros(size) } else { digest };
        content.chunks.push(Part { digest, size, offset: blob.bytes, is_zeros });
        blob.frame_of(archive, position, size)?;
        position += size;
    }
    content.end = blob.bytes;
    Ok(content)
}

fn digest_of_zeros(size: u64) -> Digest {
    static ZEROS: [u8; BUFFER_BYTES] = [0; BUFFER_BYTES];
    let (mut hash, mut left) = (Sha256::new(), size);
    while left > 0 {
        let count = left.min(BUFFER_BYTES as u64);
        hash.update(&ZEROS[..count as usize]);
        left -= count;
    }
    hash.finalize().into()
}

/// The chunks of the files of an archive whose path `is_wanted`, divided by both average lengths, as a node divides a file.
pub(crate) fn files(archive: &File, is_wanted: impl Fn(&[u8]) -> bool) -> Result<Files, Failure> {
    let mut reader = entries(archive)?;
    let (mut files, mut buffer) = (Vec::new(), vec![0; BUFFER_BYTES]);
    while let Some(entry) = reader.next().context(|| "read the archive")? {
        if entry.kind != Kind::File || entry.is_sparse() || !is_wanted(&entry.path) {
            continue;
        }
        let (mut chunkers, mut left) = ([Chunker::default(), Chunker::short()], entry.size);
        while left > 0 {
            let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let count = reader.read(&mut buffer[..most]).context(|| "read the archive")?;
            if count == 0 {
                return Err(Failure::new("the archive ends within a file"));
            }
            chunkers.iter_mut().for_each(|chunker| chunker.update(&buffer[..count]));
            left -= count as u64;
        }
        files.extend(chunkers.into_iter().map(|chunker| (entry.path.clone(), chunker.finish())));
    }
    Ok(files)
}

/// The mode of an entry's header as it is stored. Fails if a table cannot describe the entry, or if other readers of archives see
/// something else. `headers`: the header of the entry, with those that extend it.
fn look(entry: &Entry, headers: &[u8]) -> Result<u64, &'static str> {
    const FLAG: usize = 156;
    const SIZE: std::ops::Range<usize> = 124..136;
    if entry.is_sparse() {
        return Err("a sparse file");
    }
    let (mut rest, mut has_size) = (headers, false);
    while let Some((header, after)) =
        rest.split_at_checked(BLOCK_BYTES).filter(|(_, after)| !after.is_empty())
    {
        let length = number(&header[SIZE]).ok_or("a header of an unusual length")? as usize;
        let body = after.get(..length).ok_or("headers of unusual lengths")?;
        match header[FLAG] {
            // It is an entry of its own for Go's reader.
            b'g' => return Err("a global header before it"),
            b'x' => has_size |= check_records(body)?,
            _ => {}
        }
        rest = after.get(length.next_multiple_of(BLOCK_BYTES)..).ok_or("headers of unusual lengths")?;
    }
    let flag = *rest.get(FLAG).ok_or("headers of unusual lengths")?;
    let has_size = has_size || number(&rest[SIZE]) != Some(0);
    match flag {
        0 | b'0' => {}
        b'1'..=b'6' if has_size => return Err("an entry without content that has a size"),
        b'1'..=b'6' => {}
        _ => return Err("an entry of an unusual type"),
    }
    let fits = |field: &[u8], most: u64| number(field).is_some_and(|number| number <= most);
    // Owner and group, and the time of the last modification.
    if !fits(&rest[108..116], u32::MAX.into()) || !fits(&rest[116..124], u32::MAX.into()) {
        return Err("an owner out of range");
    }
    let is_gnu = &rest[257..265] == b"ustar  \0";
    let is_star = &rest[508..512] == b"tar\0";
    let further: &[std::ops::Range<usize>] = match (is_gnu, is_star) {
        (true, _) => &[345..357, 357..369],
        (false, true) => &[476..488, 488..500],
        (false, false) => &[],
    };
    let is_time = |field: &[u8]| fits(field, SECONDS_MAX);
    if !is_time(&rest[136..148]) || !further.iter().all(|field| is_time(&rest[field.clone()])) {
        return Err("a time before 1970 or after 2262");
    }
    number(&rest[100..108]).ok_or("an unusual mode")
}

/// Checks the records of a PAX header; returns whether one of them is a size.
fn check_records(body: &[u8]) -> Result<bool, &'static str> {
    let records = coracle_tar::records(body).map_err(|_| "an unusual PAX header")?;
    for (key, value) in &records {
        let value = str::from_utf8(value).unwrap_or_default();
        let whole = value.split('.').next().unwrap_or_default();
        match key.as_slice() {
            b"mtime" | b"atime" | b"ctime"
                if !whole.parse().is_ok_and(|seconds: u64| seconds < SECONDS_MAX) =>
            {
                return Err("a time before 1970 or after 2262");
            }
            b"uid" | b"gid" if value.parse::<u32>().is_err() => return Err("an owner out of range"),
            _ => {}
        }
    }
    Ok(records.contains_key(&b"size"[..]))
}

/// The number in a field of a header; `None` if there is none, or if it is negative.
fn number(field: &[u8]) -> Option<u64> {
    coracle_tar::number(field).ok()?.try_into().ok()
}

fn entries(archive: &File) -> Result<Reader<BufReader<&File>>, Failure> {
    let mut from = archive;
    from.rewind().context(|| "read the archive")?;
    Ok(Reader::new(BufReader::with_capacity(BUFFER_BYTES, from)))
}

fn read_part(from: &File, offset: u64, bytes: u64) -> Result<Vec<u8>, Failure> {
    let length = usize::try_from(bytes).map_err(|_| Failure::new("a part that is too long"))?;
    let mut part = vec![0; length];
    from.read_exact_at(&mut part, offset).context(|| "read the archive")?;
    Ok(part)
}
