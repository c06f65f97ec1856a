//! The parser of an archive, which gets its blocks except those of the entries' content. No I/O.

use crate::header::{BLOCK_BYTES, Block, Format, Header, text};
use crate::pax::{Instant, Records, XATTR, integer, records};
use crate::sparse::{self, Map, Pairs, Text};
use crate::{DESCRIPTION_BYTES_MAX, EXTENSION_BYTES_MAX, Entry, Kind, Piece, Problem, TOO_LONG};

const TRUNCATED: Problem = Problem("truncated");
const NO_NUMBER: Problem = Problem("a PAX record is not a number");

/// The result of one block.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Another block is needed.
    More,
    /// An entry. Its stored bytes and their padding follow before the next block.
    Entry(Box<Entry>),
    /// The end of the archive; what follows does not belong to it.
    End,
}

/// The state of the parser between two blocks.
#[derive(Debug, Default)]
pub struct Parser {
    state: State,
    pending: Pending,
    /// Number of bytes since the last entry.
    described: usize,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Header,
    /// After one block of zeros.
    Zeros,
    /// In the body of a header for the next entry.
    Extension {
        flag: u8,
        left: u64,
        body: Vec<u8>,
    },
    /// In the blocks of an old GNU sparse map.
    OldMap {
        entry: Box<Sparse>,
        pairs: Pairs,
        blocks: usize,
    },
    /// In the map at the begin of a body.
    Map {
        entry: Box<Sparse>,
        text: Text,
    },
    End,
}

/// The headers for the next entry.
#[derive(Debug, Default)]
struct Pending {
    records: Records,
    path: Vec<u8>,
    link: Vec<u8>,
}

/// A sparse file before its pieces are known.
#[derive(Debug)]
struct Sparse {
    entry: Entry,
    size: i64,
}

impl Parser {
    /// Parses the next block.
    ///
    /// # Errors
    /// The archive is invalid; the parser cannot be used further.
    pub fn feed(&mut self, block: &Block) -> Result<Event, Problem> {
        self.described += BLOCK_BYTES;
        if self.described > DESCRIPTION_BYTES_MAX {
            return Err(TOO_LONG);
        }
        let is_zero = || block.iter().all(|byte| *byte == 0);
        match std::mem::take(&mut self.state) {
            State::Header if is_zero() => {
                self.state = State::Zeros;
                Ok(Event::More)
            }
            State::Header => self.header(block),
            State::Zeros if is_zero() => {
                self.state = State::End;
                Ok(Event::End)
            }
            State::Zeros => Err(Problem("a header follows a block of zeros")),
            State::Extension { flag, left, body } => self.extension(flag, left, body, block),
            State::OldMap { entry, mut pairs, blocks } => {
                match sparse::add_old(&mut pairs, &block[..505], blocks)? {
                    true => {
                        self.state = State::OldMap { entry, pairs, blocks: blocks + 1 };
                        Ok(Event::More)
                    }
                    false => self.sparse(*entry, &pairs),
                }
            }
            State::Map { mut entry, mut text } => {
                let left = entry.entry.stored.checked_sub(BLOCK_BYTES as u64);
                entry.entry.stored = left.ok_or(Problem("the map of a sparse file is truncated"))?;
                match text.add(block)? {
                    None => {
                        self.state = State::Map { entry, text };
                        Ok(Event::More)
                    }
                    Some(pairs) => self.sparse(*entry, &pairs),
                }
            }
            State::End => {
                self.state = State::End;
                Ok(Event::End)
            }
        }
    }

    /// Whether the archive may end without a further block.
    ///
    /// # Errors
    /// It is truncated.
    pub fn finish(&self) -> Result<(), Problem> {
        match self.state {
            State::Header | State::Zeros | State::End => Ok(()),
            State::Extension { .. } | State::OldMap { .. } | State::Map { .. } => Err(TRUNCATED),
        }
    }

    /// Whether a block of zeros ended the archive.
    pub fn has_end(&self) -> bool {
        matches!(self.state, State::Zeros | State::End)
    }

    fn header(&mut self, block: &Block) -> Result<Event, Problem> {
        let header = Header::decode(block)?;
        let stored = stored(&header)?;
        match header.flag {
            b'x' | b'g' | b'L' | b'K' => {
                if stored > EXTENSION_BYTES_MAX {
                    return Err(TOO_LONG);
                }
                match stored {
                    0 => self.extended(header.flag, &[])?,
                    left => self.state = State::Extension { flag: header.flag, left, body: Vec::new() },
                }
                Ok(Event::More)
            }
            _ => self.entry(header, block),
        }
    }

    fn extension(&mut self, flag: u8, left: u64, mut body: Vec<u8>, block: &Block) -> Result<Event, Problem> {
        let count = usize::try_from(left).map_or(BLOCK_BYTES, |left| left.min(BLOCK_BYTES));
        body.extend_from_slice(&block[..count]);
        match left - count as u64 {
            0 => self.extended(flag, &body)?,
            left => self.state = State::Extension { flag, left, body },
        }
        Ok(Event::More)
    }

    /// Uses the complete body of a header for the next entry.
    fn extended(&mut self, flag: u8, body: &[u8]) -> Result<(), Problem> {
        match flag {
            b'x' => self.pending.records = records(body)?,
            b'L' => self.pending.path = text(body).to_vec(),
            b'K' => self.pending.link = text(body).to_vec(),
            _ => {
                records(body)?;
                self.pending = Pending::default();
            }
        }
        Ok(())
    }

    fn entry(&mut self, mut header: Header, block: &Block) -> Result<Event, Problem> {
        let Pending { records, path, link } = std::mem::take(&mut self.pending);
        let xattrs = merge(&mut header, &records)?;
        if !path.is_empty() {
            header.path = path;
        }
        if !link.is_empty() {
            header.link = link;
        }
        if header.flag == 0 {
            header.flag = if header.path.ends_with(b"/") { b'5' } else { b'0' };
        }
        let stored = stored(&header)?;
        let kind = kind_of(header.flag);
        let map = match header.flag {
            b'S' => None,
            _ => sparse::of_records(&records)?,
        };
        if map.is_some() {
            if kind != Kind::File {
                return Err(Problem("an entry that is not a file is sparse"));
            }
            if let Some(name) = sparse::value(&records, "name") {
                header.path = name.to_vec();
            }
            if let Some(size) = sparse::value(&records, "size").or(sparse::value(&records, "realsize")) {
                header.size = integer(size).ok_or(NO_NUMBER)?;
            }
        }
        let is_old = header.flag == b'S';
        let (size, format) = (header.size, header.format);
        let entry = new_entry(header, kind, stored, xattrs);
        match map {
            Some(Map::Records(pairs)) => self.sparse(Sparse { entry, size }, &pairs),
            Some(Map::Body) => {
                self.state = State::Map { entry: Box::new(Sparse { entry, size }), text: Text::default() };
                Ok(Event::More)
            }
            None if is_old => self.old_sparse(entry, format, block),
            None => Ok(self.done(entry)),
        }
    }

    fn old_sparse(&mut self, entry: Entry, format: Format, block: &Block) -> Result<Event, Problem> {
        if format != Format::Gnu {
            return Err(Problem("a sparse file in a format other than GNU tar's"));
        }
        let entry = Sparse { entry, size: crate::header::number(&block[483..495])? };
        let mut pairs = Pairs::new();
        match sparse::add_old(&mut pairs, &block[386..483], 0)? {
            true => {
                self.state = State::OldMap { entry: Box::new(entry), pairs, blocks: 1 };
                Ok(Event::More)
            }
            false => self.sparse(entry, &pairs),
        }
    }

    fn sparse(&mut self, Sparse { mut entry, size }: Sparse, pairs: &Pairs) -> Result<Event, Problem> {
        let pieces = sparse::pieces(pairs, size, entry.stored)?;
        entry.size = size.unsigned_abs();
        entry.sparse = Some(pieces);
        Ok(self.done(entry))
    }

    fn done(&mut self, entry: Entry) -> Event {
        self.described = 0;
        Event::Entry(Box::new(entry))
    }
}

/// Replaces fields of the header by records; returns the extended attributes.
fn merge(header: &mut Header, records: &Records) -> Result<Vec<crate::Xattr>, Problem> {
    let mut xattrs = Vec::new();
    for (key, value) in records {
        if let Some(name) = key.strip_prefix(XATTR) {
            xattrs.push((name.to_vec(), value.clone()));
            continue;
        }
        if value.is_empty() {
            continue;
        }
        let number = || integer(value).ok_or(NO_NUMBER);
        let time = || Instant::decode(value).ok_or(NO_NUMBER);
        match key.as_slice() {
            b"path" => header.path.clone_from(value),
            b"linkpath" => header.link.clone_from(value),
            b"size" => header.size = number()?,
            b"uid" => header.uid = number()?,
            b"gid" => header.gid = number()?,
            b"mtime" => header.mtime = time()?.bounded(),
            b"atime" => header.atime = Some(time()?.bounded()),
            b"ctime" => header.ctime = Some(time()?.bounded()),
            _ => {}
        }
    }
    Ok(xattrs)
}

fn new_entry(header: Header, kind: Kind, stored: u64, xattrs: Vec<crate::Xattr>) -> Entry {
    Entry {
        kind,
        path: header.path,
        link: header.link,
        mode: (header.mode & 0o7777) as u32,
        uid: header.uid as u32,
        gid: header.gid as u32,
        mtime: header.mtime,
        atime: header.atime,
        ctime: header.ctime,
        device: header.device,
        size: stored,
        xattrs,
        stored,
        whole: [Piece { offset: 0, length: stored }],
        sparse: None,
    }
}

/// Number of bytes of the body.
fn stored(header: &Header) -> Result<u64, Problem> {
    match header.flag {
        b'1'..=b'6' => Ok(0),
        _ => u64::try_from(header.size).map_err(|_| Problem("the size of an entry is negative")),
    }
}

fn kind_of(flag: u8) -> Kind {
    match flag {
        // POSIX: a reader may treat contiguous files as regular ones.
        b'0' | b'7' | b'S' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Symlink,
        b'3' => Kind::Char,
        b'4' => Kind::Block,
        b'5' => Kind::Directory,
        b'6' => Kind::Fifo,
        flag => Kind::Unknown(flag),
    }
}
