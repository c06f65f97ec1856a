//! Tar archives byte by byte, as many writers make them and as none should. Nothing is shared with the crate `tar` or with
//! coracle's reader, so that a mistake of other programs is not made here, too.

use std::fmt::{self, Display};
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::tree::shown;

/// Block size of tar in bytes.
const BLOCK_BYTES: usize = 512;

/// The variant of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    V7,
    Ustar,
    Gnu,
}

/// One entry of an archive.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) format: Format,
    pub(crate) kind: u8,
    pub(crate) name: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) mode: i64,
    pub(crate) uid: i64,
    pub(crate) gid: i64,
    pub(crate) mtime: i64,
    pub(crate) device: (i64, i64),
    pub(crate) data: Vec<u8>,
    /// The size in the header, if it is not that of the data.
    pub(crate) size: Option<i64>,
    /// Records of a PAX header before the entry.
    pub(crate) records: Vec<(String, Vec<u8>)>,
    /// Records of a global PAX header before the entry.
    pub(crate) global: Vec<(String, Vec<u8>)>,
    /// Names of GNU headers 'L' and 'K' before the entry.
    pub(crate) long_name: Option<Vec<u8>>,
    pub(crate) long_link: Option<Vec<u8>>,
    /// The prefix of a ustar header.
    pub(crate) prefix: Vec<u8>,
    /// Whether numbers are written in base 256.
    pub(crate) has_base256: bool,
    /// Bytes that replace those of the header at an offset.
    pub(crate) patches: Vec<(usize, Vec<u8>)>,
    /// Blocks between the header and the data.
    pub(crate) extension: Vec<u8>,
}

impl Member {
    pub(crate) fn new(kind: u8, name: impl AsRef<[u8]>) -> Member {
        Member {
            format: Format::Ustar,
            kind,
            name: name.as_ref().to_vec(),
            link: Vec::new(),
            mode: if kind == b'5' { 0o755 } else { 0o644 },
            uid: 0,
            gid: 0,
            mtime: 1_700_000_000,
            device: (0, 0),
            data: Vec::new(),
            size: None,
            records: Vec::new(),
            global: Vec::new(),
            long_name: None,
            long_link: None,
            prefix: Vec::new(),
            has_base256: false,
            patches: Vec::new(),
            extension: Vec::new(),
        }
    }

    pub(crate) fn file(name: &str, data: impl AsRef<[u8]>) -> Member {
        Member { data: data.as_ref().to_vec(), ..Member::new(b'0', name) }
    }

    pub(crate) fn directory(name: &str) -> Member {
        Member::new(b'5', name)
    }

    pub(crate) fn symlink(name: &str, target: &str) -> Member {
        Member { link: target.into(), mode: 0o777, ..Member::new(b'2', name) }
    }

    pub(crate) fn hard_link(name: &str, target: &str) -> Member {
        Member { link: target.into(), ..Member::new(b'1', name) }
    }

    pub(crate) fn device(kind: u8, name: &str, major: i64, minor: i64) -> Member {
        Member { device: (major, minor), ..Member::new(kind, name) }
    }

    /// Sets the content.
    pub(crate) fn with(self, data: &[u8]) -> Member {
        Member { data: data.to_vec(), ..self }
    }

    /// Adds a PAX record.
    pub(crate) fn pax(mut self, key: &str, value: impl AsRef<[u8]>) -> Member {
        self.records.push((key.to_owned(), value.as_ref().to_vec()));
        self
    }

    pub(crate) fn mode(self, mode: i64) -> Member {
        Member { mode, ..self }
    }

    pub(crate) fn mtime(self, mtime: i64) -> Member {
        Member { mtime, ..self }
    }

    pub(crate) fn size(self, size: i64) -> Member {
        Member { size: Some(size), ..self }
    }

    pub(crate) fn format(self, format: Format) -> Member {
        Member { format, ..self }
    }

    /// Writes numbers in base 256, as star and GNU tar do with large ones.
    pub(crate) fn base256(self) -> Member {
        Member { has_base256: true, ..self.format(Format::Gnu) }
    }

    fn append(&self, tar: &mut Vec<u8>) {
        let helper = |kind: u8, name: &str, data: Vec<u8>| Member { data, ..Member::new(kind, name) };
        if !self.global.is_empty() {
            helper(b'g', "pax_global_header", records(&self.global)).append(tar);
        }
        for (kind, text) in [(b'L', &self.long_name), (b'K', &self.long_link)] {
            if let Some(text) = text {
                let text = [text.as_slice(), b"\0"].concat();
                helper(kind, "././@LongLink", text).format(Format::Gnu).append(tar);
            }
        }
        if !self.records.is_empty() {
            helper(b'x', "PaxHeaders/x", records(&self.records)).append(tar);
        }
        tar.extend_from_slice(&self.header());
        tar.extend_from_slice(&self.extension);
        tar.extend_from_slice(&self.data);
        tar.resize(tar.len().next_multiple_of(BLOCK_BYTES), 0);
    }

    fn header(&self) -> [u8; BLOCK_BYTES] {
        // Offsets of POSIX.1-1988: name, mode, uid, gid, size, mtime, checksum, type, link, magic, names, device, prefix.
        let mut header = [0; BLOCK_BYTES];
        let mut put = |at: usize, length: usize, bytes: &[u8]| {
            let length = length.min(bytes.len());
            header[at..at + length].copy_from_slice(&bytes[..length]);
        };
        let size = self.size.unwrap_or(self.data.len() as i64);
        put(0, 100, &self.name);
        put(100, 8, &self.number(self.mode, 8));
        put(108, 8, &self.number(self.uid, 8));
        put(116, 8, &self.number(self.gid, 8));
        put(124, 12, &self.number(size, 12));
        put(136, 12, &self.number(self.mtime, 12));
        put(156, 1, &[self.kind]);
        put(157, 100, &self.link);
        match self.format {
            Format::V7 => {}
            Format::Ustar => put(257, 8, b"ustar\x0000"),
            Format::Gnu => put(257, 8, b"ustar  \0"),
        }
        if self.format != Format::V7 {
            put(329, 8, &self.number(self.device.0, 8));
            put(337, 8, &self.number(self.device.1, 8));
            put(345, 155, &self.prefix);
        }
        for (at, bytes) in &self.patches {
            put(*at, bytes.len(), bytes);
        }
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        header
    }

    /// A number in octal digits, or in base 256 if it was chosen or is needed.
    fn number(&self, value: i64, width: usize) -> Vec<u8> {
        let octal = format!("{value:0digits$o}\0", digits = width - 1);
        if value >= 0 && octal.len() <= width && !self.has_base256 {
            return octal.into_bytes();
        }
        let sign = if value < 0 { 0xff } else { 0 };
        let mut bytes = vec![sign; width.saturating_sub(8)];
        bytes.extend_from_slice(&value.to_be_bytes());
        bytes[0] |= 0x80;
        bytes
    }
}

/// The body of a PAX header: each record begins with its own length.
fn records(list: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in list {
        let rest = key.len() + value.len() + " =\n".len();
        let mut length = rest;
        while rest + length.to_string().len() != length {
            length = rest + length.to_string().len();
        }
        body.extend_from_slice(format!("{length} {key}=").as_bytes());
        body.extend_from_slice(value);
        body.push(b'\n');
    }
    body
}

/// How an archive ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    TwoBlocks,
    OneBlock,
    Missing,
    /// Padded to this many bytes, as GNU tar pads to 10240.
    Padded(usize),
    /// With bytes after the end.
    Trailing,
}

/// How an archive is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    None,
    Gzip,
    GzipMembers,
    GzipEmptyMember,
    GzipZeros,
    GzipGarbage,
    GzipName,
    Zstd,
    ZstdFrames,
    ZstdSkippableFirst,
    ZstdSkippableLast,
    /// With this window descriptor (RFC 8878, 3.1.1.1.2): the size of the memory that a decoder needs.
    ZstdWindow(u8),
}

impl Packing {
    pub(crate) const ALL: [Packing; 11] = [
        Packing::None,
        Packing::Gzip,
        Packing::GzipMembers,
        Packing::GzipEmptyMember,
        Packing::GzipZeros,
        Packing::GzipGarbage,
        Packing::GzipName,
        Packing::Zstd,
        Packing::ZstdFrames,
        Packing::ZstdSkippableFirst,
        Packing::ZstdSkippableLast,
    ];

    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Packing::None => "application/vnd.oci.image.layer.v1.tar",
            Packing::Zstd
            | Packing::ZstdFrames
            | Packing::ZstdSkippableFirst
            | Packing::ZstdSkippableLast
            | Packing::ZstdWindow(_) => "application/vnd.oci.image.layer.v1.tar+zstd",
            _ => "application/vnd.oci.image.layer.v1.tar+gzip",
        }
    }

    pub(crate) fn pack(self, tar: &[u8]) -> Vec<u8> {
        // Its length is in the four bytes after the magic (RFC 8878, 3.1.2).
        const SKIPPABLE: &[u8] = b"\x53\x2a\x4d\x18\x05\0\0\0hello";
        let (first, second) = tar.split_at(tar.len() / 2);
        match self {
            Packing::None => tar.to_vec(),
            Packing::Gzip => gzip(tar),
            Packing::GzipMembers => [gzip(first), gzip(second)].concat(),
            Packing::GzipEmptyMember => [gzip(b""), gzip(tar), gzip(b"")].concat(),
            Packing::GzipZeros => [gzip(tar), vec![0; 700]].concat(),
            Packing::GzipGarbage => [gzip(tar), b"garbage".to_vec()].concat(),
            Packing::GzipName => {
                let packed = flate2::GzBuilder::new().filename("layer.tar").comment("a comment").extra("xy");
                let mut packed = packed.write(Vec::new(), Compression::fast());
                packed.write_all(tar).expect("memory takes it");
                packed.finish().expect("memory takes it")
            }
            Packing::Zstd => zstd(tar),
            Packing::ZstdFrames => [zstd(first), zstd(second)].concat(),
            Packing::ZstdSkippableFirst => [SKIPPABLE.to_vec(), zstd(tar)].concat(),
            Packing::ZstdSkippableLast => [zstd(tar), SKIPPABLE.to_vec()].concat(),
            Packing::ZstdWindow(descriptor) => zstd_window(tar, descriptor),
        }
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(bytes).expect("memory takes it");
    packed.finish().expect("memory takes it")
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).expect("memory takes it")
}

/// A frame of blocks that are not compressed, without the length of the content (RFC 8878, 3.1.1).
fn zstd_window(bytes: &[u8], descriptor: u8) -> Vec<u8> {
    const BLOCK_BYTES_MAX: usize = 128 << 10;
    let mut frame = b"\x28\xb5\x2f\xfd\0".to_vec();
    frame.push(descriptor);
    let mut blocks = bytes.chunks(BLOCK_BYTES_MAX).peekable();
    while let Some(block) = blocks.next() {
        let is_last = blocks.peek().is_none();
        let header = (block.len() as u32) << 3 | u32::from(is_last);
        frame.extend_from_slice(&header.to_le_bytes()[..3]);
        frame.extend_from_slice(block);
    }
    frame
}

/// A layer as a list of entries, with the end and the compression of its archive.
#[derive(Debug, Clone)]
pub(crate) struct Archive {
    pub(crate) members: Vec<Member>,
    pub(crate) end: End,
    pub(crate) packing: Packing,
    /// The bytes of a program, in place of all that but the compression.
    pub(crate) written: Option<Vec<u8>>,
}

impl Archive {
    pub(crate) fn of(members: Vec<Member>) -> Archive {
        Archive { members, end: End::TwoBlocks, packing: Packing::None, written: None }
    }

    /// The bytes that a program has written, as a layer.
    pub(crate) fn written(bytes: Vec<u8>) -> Archive {
        Archive { written: Some(bytes), ..Archive::of(Vec::new()) }
    }

    /// The uncompressed bytes.
    pub(crate) fn tar(&self) -> Vec<u8> {
        if let Some(bytes) = &self.written {
            return bytes.clone();
        }
        let mut tar = Vec::new();
        for member in &self.members {
            member.append(&mut tar);
        }
        let blocks = |tar: &mut Vec<u8>, count: usize| tar.resize(tar.len() + count * BLOCK_BYTES, 0);
        match self.end {
            End::TwoBlocks => blocks(&mut tar, 2),
            End::OneBlock => blocks(&mut tar, 1),
            End::Missing => {}
            End::Padded(bytes) => tar.resize((tar.len() + 2 * BLOCK_BYTES).next_multiple_of(bytes), 0),
            End::Trailing => {
                blocks(&mut tar, 2);
                tar.extend_from_slice(b"bytes after the end of the archive");
            }
        }
        tar
    }
}

impl Display for Member {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = Member::new(self.kind, "");
        write!(out, "{}:{}", shown(&[self.kind]), shown(&self.name))?;
        let texts =
            [("->", Some(&self.link)), (" L:", self.long_name.as_ref()), (" K:", self.long_link.as_ref())];
        for (mark, text) in texts {
            if let Some(text) = text.filter(|text| !text.is_empty()) {
                write!(out, "{mark}{}", shown(text))?;
            }
        }
        if !self.prefix.is_empty() {
            write!(out, " prefix={}", shown(&self.prefix))?;
        }
        if self.format != plain.format {
            write!(out, " {:?}", self.format)?;
        }
        if self.has_base256 {
            write!(out, " base256")?;
        }
        let numbers = [
            ("uid", self.uid, plain.uid),
            ("gid", self.gid, plain.gid),
            ("mtime", self.mtime, plain.mtime),
            ("major", self.device.0, 0),
            ("minor", self.device.1, 0),
        ];
        if self.mode != plain.mode {
            write!(out, " mode={:o}", self.mode)?;
        }
        for (name, value, _) in numbers.iter().filter(|(_, value, usual)| value != usual) {
            write!(out, " {name}={value}")?;
        }
        if !self.data.is_empty() {
            write!(out, " data={}", self.data.len())?;
        }
        if let Some(size) = self.size {
            write!(out, " size={size}")?;
        }
        for (kind, list) in [("", &self.records), ("global ", &self.global)] {
            for (key, value) in list {
                write!(out, " {kind}[{key}={}]", shown(value))?;
            }
        }
        for (at, bytes) in &self.patches {
            write!(out, " @{at}={}", shown(bytes))?;
        }
        Ok(())
    }
}

impl Display for Archive {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.packing != Packing::None {
            write!(out, "{:?} ", self.packing)?;
        }
        if self.end != End::TwoBlocks {
            write!(out, "{:?} ", self.end)?;
        }
        let members: Vec<String> = self.members.iter().map(Member::to_string).collect();
        write!(out, "[{}]", members.join("; "))
    }
}
