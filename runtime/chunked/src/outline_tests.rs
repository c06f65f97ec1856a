//! Tests of outlines: those that are written here are read again, and any other bytes end with an error within bounded memory.

use std::io::Read as _;

use crate::outline::{self, Content, Part, Reader, Writer};
use crate::{Chunker, Contents, Digest, NEIGHBOUR_EXTENTS_MAX, Plan, Wanted, index};

/// Pseudo-random bytes.
fn noise(length: usize, mut seed: u32) -> Vec<u8> {
    let mut step = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 24) as u8
    };
    (0..length).map(|_| step()).collect()
}

/// A header with a name and a length.
fn header(name: &str, length: usize) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..135].copy_from_slice(format!("{length:011o}").as_bytes());
    block[156] = b'0';
    block[257..263].copy_from_slice(b"ustar\0");
    block
}

/// An archive of these files, and its outline, to which it passes in pieces of this length.
fn archive(files: &[(String, Vec<u8>)], piece: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut archive, mut writer) = (Vec::new(), Writer::new(Vec::new(), u64::MAX));
    let pass = |writer: &mut Writer<Vec<u8>>, bytes: &[u8]| {
        bytes.chunks(piece).for_each(|piece| writer.pass(piece));
    };
    for (name, content) in files {
        let padding = vec![0; content.len().next_multiple_of(512) - content.len()];
        let head = header(name, content.len());
        pass(&mut writer, &head);
        writer.begin(name.as_bytes(), 0, content.len() as u64);
        pass(&mut writer, content);
        writer.end();
        pass(&mut writer, &padding);
        archive.extend([head, content.clone(), padding].concat());
    }
    pass(&mut writer, &[0; 1024]);
    archive.extend([0; 1024]);
    (archive, writer.finish().unwrap())
}

fn files() -> Vec<(String, Vec<u8>)> {
    let file = |number: usize| (format!("app/lib/file-{number}"), noise(number * 37, number as u32));
    let mut files: Vec<_> = (0..200).map(file).collect();
    files.push(("app/large".to_owned(), noise(400_000, 7)));
    let mut holed = noise(10_000, 8);
    holed[2000..7000].fill(0);
    files.push(("app/large-with-zeros".to_owned(), holed));
    files
}

/// The archive that an outline and the files give.
fn rebuilt(outline: &[u8], files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut reader, mut archive) = (Reader::new(outline).unwrap(), Vec::new());
    assert_eq!(reader.last(), None);
    while reader.part().unwrap().is_some() {
        let (before, part) = reader.last().unwrap();
        assert_eq!(before, archive.len() as u64);
        match part {
            Part::Bytes(bytes) => archive.extend(bytes),
            Part::Content(Content { path, offset, size, .. }) => {
                let (_, content) = files.iter().find(|(name, _)| name.as_bytes() == path).unwrap();
                archive.extend(&content[offset as usize..][..size as usize]);
            }
        }
        assert_eq!(reader.position(), archive.len() as u64);
    }
    assert_eq!(reader.last(), None);
    archive
}

#[test]
fn an_archive_is_made_again_from_its_outline_and_its_files() {
    let files = files();
    let (expected, outline) = archive(&files, 1 << 20);
    assert!(rebuilt(&outline, &files) == expected);
    // 512 bytes of a header, a digest of 32 and a path.
    assert!(outline.len() < files.len() * 100, "{} bytes for {} files", outline.len(), files.len());
    for piece in [1, 7, 511, 4096] {
        assert!(archive(&files, piece).1 == outline, "{piece}");
    }
    let (first, last) = (outline.first_chunk().unwrap(), outline.last_chunk().unwrap());
    assert_eq!(outline::archive_bytes(first, last), Some(expected.len() as u64));
    assert_eq!(outline::archive_bytes(b"coridx\0\x01", last), None);
}

#[test]
fn chunks_have_their_places_in_the_archive() {
    let files = files();
    let (archive, outline) = archive(&files, 4096);
    let contents = outline::contents(&outline[..]).unwrap();
    let listed: Vec<_> = contents.files().map(|file| (file.path, file.size)).collect();
    let expected = files.iter().filter(|(_, content)| !content.is_empty());
    let expected: Vec<_> = expected.map(|(name, content)| (name.as_bytes(), content.len() as u64)).collect();
    assert_eq!(listed, expected);
    for chunk in contents.chunks() {
        use sha2::Digest as _;
        let bytes = &archive[chunk.begin as usize..chunk.end as usize];
        assert_eq!(bytes.len() as u64, chunk.size);
        match chunk.is_zeros() {
            true => assert!(bytes.iter().all(|byte| *byte == 0)),
            false => assert_eq!(<Digest>::from(sha2::Sha256::digest(bytes)), chunk.digest),
        }
    }
    assert!(contents.chunks().iter().any(crate::Chunk::is_zeros));
}

#[test]
fn an_outline_is_an_index() {
    let files = files();
    let outline = archive(&files, 4096).1;
    let contents = outline::contents(&outline[..]).unwrap();
    let mut wanted = Wanted::new(&contents);
    let mut heard = Ok(());
    index::read(&outline[..], &mut |found| heard = wanted.hear(0, &found)).unwrap();
    heard.unwrap();
    let is_missing = |index: usize| wanted.place(index).is_none() && !contents.chunks()[index].is_zeros();
    assert_eq!(Plan::new(&contents, NEIGHBOUR_EXTENTS_MAX, is_missing).bytes(), 0);
    let place = wanted.place(contents.chunks().len() - 1).unwrap();
    assert_eq!(place.path, b"app/large-with-zeros");
}

#[test]
fn a_piece_of_a_sparse_file_has_its_offset() {
    let mut writer = Writer::new(Vec::new(), u64::MAX);
    writer.pass(&header("sparse", 20));
    for (offset, content) in [(100, b"0123456789"), (5000, b"abcdefghij")] {
        writer.begin(b"sparse", offset, 10);
        writer.pass(content);
        writer.end();
    }
    writer.pass(&[0; 492]);
    let outline = writer.finish().unwrap();
    let mut heard = Vec::new();
    index::read(&outline[..], &mut |found| heard.push((found.offset, found.size))).unwrap();
    assert_eq!(heard, [(100, 10), (5000, 10)]);
    let contents = outline::contents(&outline[..]).unwrap();
    let places: Vec<_> = contents.chunks().iter().map(|chunk| (chunk.begin, chunk.end)).collect();
    assert_eq!(places, [(512, 522), (522, 532)]);
}

/// Chunks of a byte and of 1024 zeros.
fn many_chunks(count: usize) -> Vec<u8> {
    let pair = [&[1][..], &[0; 1024]].concat();
    pair.repeat(count / 2)
}

#[test]
fn a_file_of_many_chunks_has_several_records() {
    let files = [("many".to_owned(), many_chunks(5000)), ("other".to_owned(), noise(100, 1))];
    let (expected, outline) = archive(&files, 1000);
    assert!(rebuilt(&outline, &files) == expected);
    assert!(archive(&files, usize::MAX).1 == outline, "the pieces do not matter");
    let mut reader = Reader::new(&outline[..]).unwrap();
    let mut counts = Vec::new();
    while let Some(part) = reader.part().unwrap() {
        if let Part::Content(Content { chunks, .. }) = part {
            counts.push(chunks.len());
        }
    }
    assert!(counts.iter().all(|count| *count <= outline::RECORD_CHUNKS_MAX), "{counts:?}");
    assert_eq!(counts.iter().sum::<usize>(), 5001);
    let contents = outline::contents(&outline[..]).unwrap();
    assert_eq!(contents.bytes(), files.iter().map(|(_, content)| content.len() as u64).sum::<u64>());
}

/// A record that would be 4 MiB of memory for each connection.
#[test]
fn a_record_with_too_many_chunks_is_refused() {
    let mut record = outline::MAGIC.to_vec();
    record.extend(b"\x02\0\x01a\0\x81\x08");
    for _ in 0..1025 {
        record.extend([7; 32]);
        record.push(1);
    }
    let mut reader = Reader::new(&record[..]).unwrap();
    assert!(reader.part().is_err_and(|problem| problem.to_string().contains("range")));
}

/// The process that unpacks has 384 MiB of memory.
#[test]
fn an_outline_with_too_many_small_chunks_is_ended_at_once() {
    let mut writer = Writer::new(Vec::new(), u64::MAX);
    writer.begin(b"many", 0, u64::MAX);
    let bytes = many_chunks(1 << 10);
    let passed = (0..4096).find(|_| {
        writer.pass(&bytes);
        !writer.is_made()
    });
    assert!(passed.is_some_and(|passed| passed < 140), "{passed:?}");
    assert!(writer.finish().is_none());
}

/// An error of the disk is not damage.
#[test]
fn an_error_of_the_input_keeps_its_kind() {
    struct Failing;
    impl std::io::Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::from_raw_os_error(5))
        }
    }
    let outline = archive(&files(), 4096).1;
    let from = std::io::BufReader::new(outline[..100].chain(Failing));
    let read = index::read(from, &mut |_| {});
    assert_eq!(read.unwrap_err().raw_os_error(), Some(5));
    let damaged = [&outline[..50], &[9; 5]].concat();
    let kind = index::read(&damaged[..], &mut |_| {}).unwrap_err().kind();
    assert!(matches!(kind, std::io::ErrorKind::InvalidData | std::io::ErrorKind::UnexpectedEof));
}

#[test]
fn an_outline_that_would_be_too_long_is_not_made() {
    let mut writer = Writer::new(Vec::new(), u64::MAX);
    writer.pass(&noise(5 << 20, 1));
    assert!(writer.finish().is_none());
    let mut writer = Writer::new(Vec::new(), 1000);
    writer.pass(&noise(2000, 1));
    assert!(writer.finish().is_none());
    // Short files: the number of chunks is limited, too.
    let mut writer = Writer::new(Vec::new(), u64::MAX);
    for _ in 0..200_000 {
        writer.begin(b"f", 0, 1);
        writer.pass(b"x");
        writer.end();
    }
    assert!(writer.finish().is_none());
    // The first and the last lengths fit exactly.
    let length = archive(&[], 512).1.len() as u64;
    for (most, is_made) in [(length, true), (length - 1, false)] {
        let mut writer = Writer::new(Vec::new(), most);
        writer.pass(&[0; 1024]);
        assert_eq!(writer.finish().is_some(), is_made, "{most}");
    }
}

/// Nodes send and read what is as long as it may be, and nothing longer.
#[test]
fn an_outline_of_the_greatest_length_is_read() {
    let bytes = noise(outline::BYTES_MAX as usize, 11);
    let outline_of = |count: usize| {
        let mut writer = Writer::new(Vec::new(), u64::MAX);
        writer.pass(&bytes[..count]);
        writer.finish()
    };
    let is_made = |count: &usize| outline_of(*count).is_some();
    // Each byte of the archive adds one at least.
    let (mut made, mut refused) = (0, bytes.len());
    while refused - made > 1 {
        let middle = usize::midpoint(made, refused);
        *(if is_made(&middle) { &mut made } else { &mut refused }) = middle;
    }
    let longest = outline_of(made).unwrap();
    assert_eq!(longest.len() as u64, outline::BYTES_MAX);
    assert!(outline::contents(&longest[..]).is_ok());
    assert_eq!(rebuilt(&longest, &[]), bytes[..made]);
    index::read(&longest[..], &mut |_| ()).unwrap();
    let end = longest.len() - outline::END_BYTES;
    let record = [&[1, 1, 0, 0, 1, 9][..], &[1, 1, 0, 0, 1, 8]].concat();
    let length = (made as u64 + 2).to_le_bytes();
    let longer = [&longest[..end], &record, &[0], &length].concat();
    assert!(outline::contents(&longer[..]).is_err(), "{} bytes", longer.len());
}

/// Number of parts that can be read, and the error.
fn read(bytes: &[u8]) -> (usize, Result<(), String>) {
    let mut reader = match Reader::new(bytes) {
        Ok(reader) => reader,
        Err(problem) => return (0, Err(problem.to_string())),
    };
    let mut count = 0;
    loop {
        match reader.part() {
            Ok(None) => return (count, Ok(())),
            Ok(Some(_)) => count += 1,
            Err(problem) => return (count, Err(problem.to_string())),
        }
    }
}

#[test]
fn a_damaged_outline_ends_with_an_error() {
    let outline = archive(&files()[..20], 4096).1;
    assert!(read(&outline).1.is_ok());
    for length in 0..outline.len() {
        assert!(read(&outline[..length]).1.is_err(), "{length} bytes");
    }
    assert_eq!(read(&[&outline[..], b"x"].concat()).1, Err("data after its end".to_owned()));
    for at in 0..outline.len() {
        let mut damaged = outline.clone();
        damaged[at] ^= 0xff;
        let _ = read(&damaged);
        let _ = outline::contents(&damaged[..]);
    }
}

/// Records after the magic number.
fn with(records: &[&[u8]]) -> Vec<u8> {
    [&outline::MAGIC[..], &records.concat()].concat()
}

#[test]
fn records_that_contradict_their_content_are_refused() {
    let end = |length: u64| [&[0][..], &length.to_le_bytes()].concat();
    // A path without shared bytes, offset 0, one chunk.
    let file = |size: &[u8]| [&[2, 0, 1, b'f', 0, 1][..], &[7; 32], size].concat();
    let huge: &[u8] = &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
    for (records, why) in [
        (vec![vec![3]], "kind 3"),
        (vec![end(1)], "do not add up"),
        (vec![file(&[5]), end(4)], "do not add up"),
        (vec![file(&[0]), end(0)], "without content"),
        (vec![vec![2, 0, 1, b'f', 0, 0], end(0)], "without content"),
        (vec![file(huge), file(&[5]), end(4)], "too long"),
        // Offset and size.
        (vec![[&[2, 0, 1, b'f'][..], huge, &[1], &[7; 32], &[5]].concat()], "too long"),
        // More shared bytes than the path before has, and a path that is too long.
        (vec![vec![2, 1, 1, b'f', 0]], "out of range"),
        (vec![vec![2, 0, 0x81, 0x20]], "out of range"),
        // More than a block; more than is left of it; nothing, for ever.
        (vec![vec![1, 0x81, 0x04, 0, 0, 1]], "out of range"),
        (vec![vec![1, 2, 0, 1, 2]], "out of range"),
        (vec![vec![1, 2, 0, 0, 0, 0, 0]], "without progress"),
        // More chunks than the limit.
        (vec![[&[2, 0, 1, b'f', 0][..], &[0x81, 0x80, 0x08]].concat()], "out of range"),
        (vec![], "fill whole buffer"),
    ] {
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        let refused = read(&with(&records)).1.expect_err(why);
        assert!(refused.contains(why), "{refused} / {why}");
    }
    assert!(read(b"").1.is_err() && read(b"coroln\0\x02").1.unwrap_err().contains("this version"));
}

/// Each entry claims little, and there are too many: memory is bounded by the limits of a table.
#[test]
fn a_million_entries_are_refused() {
    let file = [&[2, 0, 1, b'f', 0, 1][..], &[0; 32], &[1]].concat();
    let many = std::iter::repeat_n(file.as_slice(), 1_000_000);
    let many = with(&many.collect::<Vec<_>>());
    let refused = outline::contents(&many[..]).unwrap_err().to_string();
    assert!(refused.contains("fill whole buffer") || refused.contains("more than"), "{refused}");
    let endless = std::io::BufReader::new(outline::MAGIC.chain(std::io::repeat(1)));
    assert!(outline::contents(endless).is_err());
}

/// A table that claims a long archive of zeros: nothing of that length is made in memory.
#[test]
fn runs_of_zeros_need_no_memory() {
    let size = [0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x40];
    let file = [&[2, 0, 1, b'f', 0, 1][..], &[0; 32], &size].concat();
    let length: u64 = 0x40 << 49;
    let end = [&[0][..], &length.to_le_bytes()].concat();
    let contents: Contents = outline::contents(&with(&[&file, &end])[..]).unwrap();
    assert_eq!(contents.bytes(), length);
    assert_eq!(
        Plan::new(&contents, NEIGHBOUR_EXTENTS_MAX, |index| !contents.chunks()[index].is_zeros()).bytes(),
        0
    );
}

#[test]
fn chunks_are_those_of_a_table() {
    for (length, mut chunker) in [(200_000, Chunker::default()), (300_000, Chunker::short())] {
        let content = noise(length, 3);
        chunker.update(&content);
        let expected = chunker.finish();
        let outline = archive(&[("f".to_owned(), content)], 1000).1;
        let contents = outline::contents(&outline[..]).unwrap();
        let found: Vec<_> = contents.chunks().iter().map(|chunk| (chunk.digest, chunk.size)).collect();
        assert_eq!(found, expected, "{length} bytes");
    }
}

/// The layer is unpacked without an outline, as on a full disk.
#[test]
fn an_output_that_fails_ends_the_outline() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    fn write<W: std::io::Write>(into: W, content: &[u8]) -> Option<W> {
        let mut writer = Writer::new(into, u64::MAX);
        writer.pass(&header("file", content.len()));
        writer.begin(b"file", 0, content.len() as u64);
        writer.pass(content);
        writer.end();
        writer.finish()
    }
    let content = noise(300_000, 4);
    let length = write(Vec::new(), &content).unwrap().len();
    for room in [0, 8, 100, length - 1, length] {
        assert_eq!(write(Full(room), &content).is_some(), room == length, "{room}");
    }
}
