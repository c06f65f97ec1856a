//! Writes the table of contents and the tar-split data of a layer, with the fields that containers/storage compares with the
//! archive's headers before it believes a table (`ensureTOCMatchesTarSplit`).

use std::io::{self, Write};

use coracle_chunked::Digest;
use coracle_chunked::toc::kind_name;
use coracle_tar::{Entry, Time};
use data_encoding::{BASE64, HEXLOWER};
use serde::Serialize;

/// A file's content in the blob.
#[derive(Debug, Default)]
pub(crate) struct Content {
    /// SHA-256 digest of the whole file.
    pub(crate) digest: Digest,
    /// The chunks in order.
    pub(crate) chunks: Vec<Part>,
    /// Offset of the first byte of the blob after the file.
    pub(crate) end: u64,
}

/// A chunk of a file.
#[derive(Debug)]
pub(crate) struct Part {
    /// SHA-256 digest of its bytes.
    pub(crate) digest: Digest,
    /// Length in bytes.
    pub(crate) size: u64,
    /// Offset of its frame in the blob.
    pub(crate) offset: u64,
    pub(crate) is_zeros: bool,
}

/// A row of the table (containers/storage 1.65, `minimal.FileMetadata`).
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row<'a> {
    r#type: &'a str,
    name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    link_name: &'a str,
    #[serde(skip_serializing_if = "is_zero")]
    mode: u64,
    #[serde(skip_serializing_if = "is_zero")]
    size: u64,
    #[serde(skip_serializing_if = "is_zero")]
    uid: u64,
    #[serde(skip_serializing_if = "is_zero")]
    gid: u64,
    #[serde(skip_serializing_if = "String::is_empty")]
    modtime: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    accesstime: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    changetime: String,
    #[serde(skip_serializing_if = "is_zero")]
    dev_major: u64,
    #[serde(skip_serializing_if = "is_zero")]
    dev_minor: u64,
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    xattrs: serde_json::Map<String, serde_json::Value>,
    #[serde(skip_serializing_if = "String::is_empty")]
    digest: String,
    #[serde(skip_serializing_if = "is_zero")]
    offset: u64,
    #[serde(skip_serializing_if = "is_zero")]
    end_offset: u64,
    #[serde(flatten)]
    chunk: Chunk,
}

/// The fields of a chunk; absent if the file has only one.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Chunk {
    #[serde(skip_serializing_if = "is_zero")]
    chunk_size: u64,
    #[serde(skip_serializing_if = "is_zero")]
    chunk_offset: u64,
    #[serde(skip_serializing_if = "String::is_empty")]
    chunk_digest: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    chunk_type: &'static str,
}

/// A further chunk of the file before.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Further<'a> {
    r#type: &'a str,
    name: &'a str,
    offset: u64,
    #[serde(flatten)]
    chunk: Chunk,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The rows of a table of contents as JSON.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<u8>,
}

impl Table {
    /// Adds an entry of the archive; `mode` is that of its header, with the type if the header has it.
    ///
    /// # Errors
    /// Why a table cannot describe it.
    pub(crate) fn add(&mut self, entry: &Entry, mode: u64, content: &Content) -> Result<(), String> {
        let text =
            |bytes: &'_ [u8]| String::from_utf8(bytes.to_vec()).map_err(|_| "a name that is not UTF-8");
        let (name, link) = (text(&entry.path)?, text(&entry.link)?);
        let mut xattrs = serde_json::Map::new();
        for (key, value) in &entry.xattrs {
            xattrs.insert(text(key)?, BASE64.encode(value).into());
        }
        let kind = kind_name(entry.kind).ok_or("an entry of an unusual type")?;
        let numbers = |number: i64| u64::try_from(number).map_err(|_| "a negative device number");
        let chunk = |index: usize, offset: u64| match content.chunks.get(index) {
            Some(part) if content.chunks.len() > 1 => Chunk {
                chunk_size: part.size,
                chunk_offset: offset,
                chunk_digest: digest_text(&part.digest),
                chunk_type: if part.is_zeros { "zeros" } else { "" },
            },
            _ => Chunk::default(),
        };
        let optional = |time: Option<Time>| time.map(|time| rfc3339(&time)).unwrap_or_default();
        self.push(&Row {
            r#type: kind,
            name: &name,
            link_name: &link,
            mode,
            size: entry.size,
            uid: entry.uid.into(),
            gid: entry.gid.into(),
            modtime: rfc3339(&entry.mtime),
            accesstime: optional(entry.atime),
            changetime: optional(entry.ctime),
            dev_major: numbers(entry.device.0)?,
            dev_minor: numbers(entry.device.1)?,
            xattrs,
            digest: if content.chunks.is_empty() { String::new() } else { digest_text(&content.digest) },
            offset: content.chunks.first().map_or(0, |part| part.offset),
            end_offset: content.end,
            chunk: chunk(0, 0),
        });
        let mut before = 0;
        for (index, part) in content.chunks.iter().enumerate() {
            if index > 0 {
                let chunk = chunk(index, before);
                self.push(&Further { r#type: "chunk", name: &name, offset: part.offset, chunk });
            }
            before += part.size;
        }
        Ok(())
    }

    fn push(&mut self, row: &impl Serialize) {
        if !self.rows.is_empty() {
            self.rows.push(b',');
        }
        // Writing to memory does not fail, and all keys are texts.
        let _ = serde_json::to_writer(&mut self.rows, row);
    }

    /// The whole table; `split` is the digest of the compressed tar-split data.
    pub(crate) fn finish(self, split: &Digest) -> Vec<u8> {
        let end = format!("],\"tarSplitDigest\":\"{}\"}}", digest_text(split));
        [b"{\"version\":1,\"entries\":[", self.rows.as_slice(), end.as_bytes()].concat()
    }
}

/// A digest as documents have it.
pub(crate) fn digest_text(digest: &[u8]) -> String {
    format!("sha256:{}", HEXLOWER.encode(digest))
}

/// A time from 1970 to 2262 in UTC as Go's `time.Time` is written in JSON: RFC 3339, without zeros at the end of a fraction.
fn rfc3339(time: &Time) -> String {
    let text = coracle_wire::timestamp(time.seconds * 1_000_000_000 + i64::from(time.nanoseconds));
    let text = String::from_utf8_lossy(&text).into_owned();
    format!("{}Z", text.trim_end_matches(['Z', '0']).trim_end_matches('.'))
}

/// Writes tar-split data (vbatts/tar-split 0.12, `tar/storage/packer.go`): a line for each part of the archive.
#[derive(Debug)]
pub(crate) struct SplitWriter<W> {
    into: W,
    position: u64,
}

#[derive(Serialize)]
struct SplitEntry<'a> {
    r#type: u8,
    #[serde(skip_serializing_if = "str::is_empty")]
    name: &'a str,
    #[serde(skip_serializing_if = "is_zero")]
    size: u64,
    payload: Option<String>,
    position: u64,
}

impl<W: Write> SplitWriter<W> {
    pub(crate) fn new(into: W) -> Self {
        Self { into, position: 0 }
    }

    /// Adds bytes of the archive that are not the content of a file.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        match bytes.is_empty() {
            true => Ok(()),
            false => self.entry(2, "", 0, bytes),
        }
    }

    /// Adds an entry with its content of `size` bytes, of which the CRC is `crc`.
    pub(crate) fn file(&mut self, name: &str, size: u64, crc: u64) -> io::Result<()> {
        let payload = if size > 0 { &crc.to_be_bytes()[..] } else { &[] };
        self.entry(1, name, size, payload)
    }

    fn entry(&mut self, kind: u8, name: &str, size: u64, payload: &[u8]) -> io::Result<()> {
        let payload = (!payload.is_empty()).then(|| BASE64.encode(payload));
        let entry = SplitEntry { r#type: kind, name, size, payload, position: self.position };
        self.position += 1;
        serde_json::to_writer(&mut self.into, &entry)?;
        self.into.write_all(b"\n")
    }

    pub(crate) fn finish(self) -> W {
        self.into
    }
}

/// CRC-64 of ISO 3309, reflected, by which tar-split checks a file (Go's `crc64.ISO`).
#[derive(Debug)]
pub(crate) struct Crc(u64);

/// The remainder of each byte.
static REMAINDERS: [u64; 256] = remainders();

const fn remainders() -> [u64; 256] {
    const POLYNOMIAL: u64 = 0xd800_0000_0000_0000;
    let mut all = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut sum, mut bit) = (byte as u64, 0);
        while bit < 8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ POLYNOMIAL } else { sum >> 1 };
            bit += 1;
        }
        all[byte] = sum;
        byte += 1;
    }
    all
}

impl Default for Crc {
    fn default() -> Self {
        Self(!0)
    }
}

impl Crc {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        let step = |sum: u64, byte: &u8| REMAINDERS[usize::from(sum as u8 ^ byte)] ^ sum >> 8;
        self.0 = bytes.iter().fold(self.0, step);
    }

    pub(crate) fn finish(&self) -> u64 {
        !self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_go() {
        for (seconds, nanoseconds, expected) in [
            (0, 0, "1970-01-01T00:00:00Z"),
            (951_782_399, 0, "2000-02-28T23:59:59Z"),
            (951_782_400, 500_000_000, "2000-02-29T00:00:00.5Z"),
            (1_709_251_200, 1, "2024-03-01T00:00:00.000000001Z"),
            (4_107_542_400, 0, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(&Time { seconds, nanoseconds }), expected);
        }
    }

    /// The value of the catalogue of CRCs for the text "123456789" (CRC-64/GO-ISO).
    #[test]
    fn the_crc_is_that_of_gos_library() {
        let mut crc = Crc::default();
        crc.update(b"1234");
        crc.update(b"56789");
        assert_eq!(crc.finish(), 0xb909_56c7_75a4_1001);
    }
}
