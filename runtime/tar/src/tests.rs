//! The rules of the table in the crate's header, by archives made byte by byte. What is expected of each was compared with Go
//! 1.26.8's archive/tar, except where the table says that coracle refuses more.

use std::io::{BufReader, Read};

use super::write::header as header_of_file;
use super::*;

const END: [u8; 2 * BLOCK_BYTES] = [0; 2 * BLOCK_BYTES];

/// A header with some fields of others' choice: each is an offset and the bytes there.
fn block(fields: &[(usize, &[u8])]) -> Vec<u8> {
    let mut block = [0; BLOCK_BYTES];
    for (offset, bytes) in [(100, &b"0000644\0"[..]), (257, b"ustar\x0000")].iter().chain(fields) {
        block[*offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block.to_vec()
}

/// An entry of this type with this size in its header, and a body.
fn entry(flag: u8, name: &[u8], size: usize, body: &[u8]) -> Vec<u8> {
    entry_with(&[(0, name), (156, &[flag])], size, body)
}

fn entry_with(fields: &[(usize, &[u8])], size: usize, body: &[u8]) -> Vec<u8> {
    let size = format!("{size:011o}");
    let mut bytes = block(&[fields, &[(124, size.as_bytes())]].concat());
    bytes.extend_from_slice(body);
    bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    bytes
}

fn file(name: &[u8], content: &[u8]) -> Vec<u8> {
    entry(b'0', name, content.len(), content)
}

/// A PAX header of type `flag` with these records.
fn pax_of(flag: u8, records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        let rest = [b" ", key.as_bytes(), b"=", value, b"\n"].concat();
        let length = (rest.len()..).find(|length| *length == rest.len() + length.to_string().len());
        body.extend_from_slice(length.expect("a length").to_string().as_bytes());
        body.extend_from_slice(&rest);
    }
    entry(flag, b"pax", body.len(), &body)
}

fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    pax_of(b'x', records)
}

/// All entries with their contents without holes, or the error.
fn read(archive: &[u8]) -> Result<Vec<(Entry, Vec<u8>)>, String> {
    // A small buffer, so that blocks lie in two of its fillings.
    let mut reader = Reader::new(BufReader::with_capacity(700, archive));
    let mut found = Vec::new();
    while let Some(entry) = reader.next().map_err(|error| error.to_string())? {
        let mut content = vec![0; if entry.size < 1 << 20 { entry.size as usize } else { 0 }];
        for piece in entry.pieces().iter().filter(|_| !content.is_empty()).copied().collect::<Vec<_>>() {
            let range = piece.offset as usize..(piece.offset + piece.length) as usize;
            reader.read_exact(&mut content[range]).map_err(|error| error.to_string())?;
        }
        found.push((entry, content));
    }
    Ok(found)
}

/// The only entry of the archive.
fn one(parts: &[Vec<u8>]) -> Entry {
    let [(entry, _)] = &read(&[&parts.concat()[..], &END].concat()).expect("it is valid")[..] else {
        panic!("one entry: {parts:?}")
    };
    entry.clone()
}

fn refused(parts: &[Vec<u8>]) -> String {
    read(&[&parts.concat()[..], &END].concat()).expect_err("it is refused")
}

#[test]
fn an_extended_record_has_the_length_that_it_states() {
    let capability = [1, 0, 0, 2, 0x0a, 0, 0, 0, 0, 0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let sly = b"x\n22 path=etc/.wh.passwd\n";
    let found = one(&[
        pax(&[
            ("SCHILY.xattr.security.capability", &capability),
            ("comment", sly),
            ("SCHILY.xattr.user.empty", b""),
            ("SCHILY.xattr.user.equals", b"a=b"),
            ("LIBARCHIVE.xattr.user.other", b"eA"),
            ("linkpath", b"two\nlines"),
        ]),
        file(b"name", b""),
    ]);
    let xattrs: Vec<(&[u8], &[u8])> =
        found.xattrs.iter().map(|(name, value)| (&name[..], &value[..])).collect();
    let expected: [(&[u8], &[u8]); 3] =
        [(b"security.capability", &capability), (b"user.empty", b""), (b"user.equals", b"a=b")];
    assert_eq!(
        (xattrs, found.path, found.link),
        (expected.to_vec(), b"name".to_vec(), b"two\nlines".to_vec())
    );
    for body in [
        &b"9 path=a"[..],
        b"11 path=a\n",
        b"8 path=a\n",
        b"5 =a\n",
        b"7 path\n",
        b"-9 path=a\n",
        b"9path=ab\n",
        b"11 path=a\0b\n",
        b"99999999999999999999 a=b\n",
        b"4 a\n",
        b"\n",
    ] {
        let error = refused(&[entry(b'x', b"pax", body.len(), body), file(b"name", b"")]);
        assert!(error.contains("PAX record") && error.contains("at byte 512"), "{body:?}: {error}");
    }
}

#[test]
fn the_last_header_and_the_last_record_count() {
    let path = |parts: &[Vec<u8>]| String::from_utf8(one(parts).path).expect("a name");
    let name = file(b"name", b"");
    assert_eq!(path(&[pax(&[("path", b"a"), ("path", b"b")]), name.clone()]), "b");
    assert_eq!(path(&[pax(&[("path", b"a"), ("path", b"")]), name.clone()]), "name");
    assert_eq!(path(&[pax(&[("path", b"a")]), pax(&[("mtime", b"1")]), name.clone()]), "name");
    let long = entry(b'L', b"././@LongLink", 5, b"long\0");
    assert_eq!(path(&[long.clone(), pax(&[("path", b"a")]), name.clone()]), "long");
    assert_eq!(path(&[long, entry(b'L', b"././@LongLink", 7, b"new\0old"), name.clone()]), "new");
    let global = pax_of(b'g', &[("path", b"g"), ("comment", b"commit")]);
    assert_eq!(path(&[global.clone(), name.clone()]), "name");
    assert_eq!(path(&[pax(&[("path", b"a")]), global, name]), "name", "as in Go");
    let long = entry(b'K', b"././@LongLink", 6, b"target");
    assert_eq!(one(&[long, entry(b'2', b"l", 0, b"")]).link, b"target");
}

#[test]
fn numbers_and_times_of_extended_headers_are_parsed() {
    let records: [(&str, &[u8]); 5] = [
        ("uid", b"4294967297"),
        ("gid", b"-1"),
        ("mtime", b"12345678901.123456789987"),
        ("atime", b"-0.5"),
        ("size", b"+3"),
    ];
    let found = one(&[pax(&records), entry(b'0', b"name", 0, b"abc")]);
    assert_eq!((found.uid, found.gid, found.size), (1, u32::MAX, 3));
    let mtime = |value: &[u8]| one(&[pax(&[("mtime", value)]), file(b"a", b"")]).mtime;
    let time = |seconds, nanoseconds| Time { seconds, nanoseconds };
    assert_eq!(found.atime, Some(time(0, 0)));
    for (value, expected) in [
        (&b"12345678.5"[..], time(12_345_678, 500_000_000)),
        (b"-1.5", time(0, 0)),
        (b"9223372036.854775807", time(9_223_372_036, 854_775_807)),
        (b"9223372036.854775808", time(0, 0)),
        (b"7.", time(7, 0)),
    ] {
        assert_eq!(mtime(value), expected, "{value:?}");
    }
    for (key, value) in [
        ("uid", &b"x"[..]),
        ("size", b"1.5"),
        ("mtime", b".5"),
        ("atime", b"1.x"),
        ("gid", b"99999999999999999999"),
    ] {
        assert!(refused(&[pax(&[(key, value)]), file(b"a", b"")]).contains("not a number"), "{key}");
    }
    let uid = |bytes: &[u8]| read(&block(&[(0, b"a"), (108, bytes)])).map(|found| found[0].0.uid);
    for (bytes, expected) in [
        (&b"\0\0 17 \0"[..], Ok(15)),
        (b"        ", Ok(0)),
        (&[0x80, 0, 0, 0, 0, 1, 0, 0], Ok(65536)),
        (&[0xff; 8], Ok(u32::MAX)),
        (b"0000018\0", Err(())),
        (b"+000017\0", Err(())),
        (b"17 \x0017 ", Err(())),
    ] {
        assert_eq!(uid(bytes).map_err(drop), expected, "{bytes:?}");
    }
    let size = [0x80, 0, 0, 0, 0xff, 0, 0, 0, 0, 0, 0, 0];
    assert!(read(&block(&[(124, &size)])).unwrap_err().contains("too large"));
    assert!(refused(&[block(&[(124, &[0xff; 12])])]).contains("negative"));
}

#[test]
fn only_files_have_a_body() {
    let next = file(b"next", b"content");
    for flag in b'1'..=b'6' {
        let archive = [entry(flag, b"first", 1024, b""), next.clone(), END.to_vec()].concat();
        let found = read(&archive).expect("it is valid");
        assert_eq!((found.len(), found[0].0.size, &found[1].1[..]), (2, 0, &b"content"[..]), "{flag}");
    }
    for flag in [b'7', b'D', b'Z'] {
        let archive = [entry(flag, b"first", 600, &[1; 600]), next.clone(), END.to_vec()].concat();
        assert_eq!(read(&archive).expect("it is valid")[1].0.path, b"next", "{flag}");
    }
    let v7 = |name: &[u8], size, body: &[u8]| entry_with(&[(0, name), (257, &[0; 8])], size, body);
    assert_eq!(one(&[v7(b"folder/", 1024, b"")]).kind, Kind::Directory);
    assert_eq!(one(&[v7(b"file", 1, b"x")]).kind, Kind::File);
    assert_eq!(one(&[pax(&[("path", b"folder/")]), v7(b"file", 0, b"")]).kind, Kind::Directory);
    assert_eq!(one(&[entry(b'0', b"file/", 1, b"x")]).kind, Kind::File, "as in Go");
}

#[test]
fn long_names_are_read_as_in_each_header_format() {
    let path = |fields: &[(usize, &[u8])]| one(&[block(&[&[(0, &b"name"[..])], fields].concat())]).path;
    let long = [b'p'; 155];
    assert_eq!(path(&[(345, &long)]), [&long[..], b"/name"].concat());
    assert_eq!(path(&[(345, b"star"), (476, b"1"), (488, b"1"), (508, b"tar\0")]), b"star/name");
    assert_eq!(path(&[(257, b"ustar  \0"), (345, b"00000000001")]), b"name", "a time");
    assert_eq!(path(&[(257, b"ustar  \0"), (345, b"old/go")]), b"old/go/name");
    assert_eq!(path(&[(257, b"ustar \0\0"), (345, b"prefix")]), b"name", "v7");
    let mut signed = block(&[(0, b"\xff\xfe")]);
    let sum = signed.iter().enumerate().map(|(at, byte)| match at {
        148..156 => 32,
        _ => i64::from(byte.cast_signed()),
    });
    let sum: i64 = sum.sum();
    signed[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    assert_eq!(one(&[signed.clone()]).path, b"\xff\xfe");
    signed[0] = 0;
    assert!(refused(&[signed]).contains("checksum"));
}

#[test]
fn the_end_is_two_blocks_of_zeros_or_the_end_of_the_input() {
    let whole = [file(b"a", &[7; 600]), END.to_vec()].concat();
    let zeros = [&[0; BLOCK_BYTES][..], &file(b"b", b"")].concat();
    assert!(read(&[whole.clone(), zeros.clone()].concat()).is_ok(), "after the end");
    assert!(read(&zeros).unwrap_err().contains("block of zeros"));
    for (length, expected) in
        [(0, Some(0)), (1, None), (512, None), (1111, None), (1112, Some(1)), (2048, Some(1))]
    {
        assert_eq!(read(&whole[..length]).ok().map(|found| found.len()), expected, "{length}");
    }
    let mut reader = Reader::new(&whole[..1536]);
    while reader.next().expect("it is valid").is_some() {}
    assert!(!reader.has_end() && reader.position() == 1536);
    let cut = [pax(&[("path", b"a")]), file(b"a", b"")].concat();
    assert!(read(&cut[..600]).is_err() && read(&cut[..1024]).is_ok());
}

/// Headers of a sparse file of 5000 bytes with the pieces `ab` at 0, `cd` at 4096, and a hole at its end.
fn sparse_forms() -> Vec<(&'static str, Vec<u8>)> {
    let stored = |records: &[(&str, &[u8])], body: &[u8]| {
        [pax(records), entry(b'0', b"GNUSparseFile.0/name", body.len(), body)].concat()
    };
    let mut map = b"3\n0\n2\n4096\n2\n5000\n0\n".to_vec();
    map.resize(BLOCK_BYTES, 0);
    map.extend_from_slice(b"abcd");
    let pair = |offset: usize, length: usize| format!("{offset:011o}\0{length:011o}\0").into_bytes();
    let old = [pair(0, 2), pair(4096, 2), pair(5000, 0)].concat();
    let fields: [(usize, &[u8]); 5] =
        [(0, b"name"), (156, b"S"), (257, b"ustar  \0"), (386, &old), (483, b"00000011610")];
    let many: Vec<u8> = (0..25).flat_map(|at| pair(at, usize::from(at < 2))).collect();
    let extended: [(usize, &[u8]); 6] = [
        (0, b"many"),
        (156, b"S"),
        (257, b"ustar  \0"),
        (386, &many[..96]),
        (482, &[1]),
        (483, b"00000000100"),
    ];
    let mut more = many[96..].to_vec();
    more.resize(BLOCK_BYTES, 0);
    vec![
        ("old", entry_with(&fields, 4, b"abcd")),
        ("old, with a block", [entry_with(&extended, 2, b""), more, entry_body(b"xy")].concat()),
        (
            "0.0",
            stored(
                &[
                    ("GNU.sparse.size", b"5000"),
                    ("GNU.sparse.numblocks", b"3"),
                    ("GNU.sparse.offset", b"0"),
                    ("GNU.sparse.numbytes", b"2"),
                    ("GNU.sparse.offset", b"4096"),
                    ("GNU.sparse.numbytes", b"2"),
                    ("GNU.sparse.offset", b"5000"),
                    ("GNU.sparse.numbytes", b"0"),
                    ("path", b"name"),
                ],
                b"abcd",
            ),
        ),
        (
            "0.1",
            stored(
                &[
                    ("GNU.sparse.size", b"5000"),
                    ("GNU.sparse.numblocks", b"3"),
                    ("GNU.sparse.map", b"0,2,4096,2,5000,0"),
                    ("GNU.sparse.name", b"name"),
                ],
                b"abcd",
            ),
        ),
        (
            "1.0",
            stored(
                &[
                    ("GNU.sparse.major", b"1"),
                    ("GNU.sparse.minor", b"0"),
                    ("GNU.sparse.name", b"name"),
                    ("GNU.sparse.realsize", b"5000"),
                ],
                &map,
            ),
        ),
    ]
}

fn entry_body(content: &[u8]) -> Vec<u8> {
    let mut body = content.to_vec();
    body.resize(BLOCK_BYTES, 0);
    body
}

#[test]
fn sparse_files_of_all_formats_are_read() {
    for (form, archive) in sparse_forms() {
        let archive = [archive, file(b"next", b"n"), END.to_vec()].concat();
        let found = read(&archive).unwrap_or_else(|error| panic!("{form}: {error}"));
        let (entry, content) = &found[0];
        assert!(entry.is_sparse() && entry.kind == Kind::File, "{form}: {entry:?}");
        assert_eq!(found[1].1, b"n", "{form}");
        let (name, size, parts) = match form {
            "old, with a block" => ("many", 64, [(0, "x"), (1, "y")]),
            _ => ("name", 5000, [(0, "ab"), (4096, "cd")]),
        };
        let mut expected = vec![0; size];
        for (offset, bytes) in parts {
            expected[offset..offset + bytes.len()].copy_from_slice(bytes.as_bytes());
        }
        assert!(entry.path == name.as_bytes() && *content == expected, "{form}: {entry:?}");
    }
}

#[test]
fn malformed_sparse_files_are_refused() {
    let with = |records: &[(&str, &[u8])]| refused(&[pax(records), file(b"name", b"abcd")]);
    let map = |map: &[u8], size: &[u8]| {
        let pairs = (map.split(|byte| *byte == b',').count() / 2).to_string();
        let records =
            [("GNU.sparse.map", map), ("GNU.sparse.numblocks", pairs.as_bytes()), ("GNU.sparse.size", size)];
        with(&records)
    };
    for (error, expected) in [
        (map(b"0,3,2,1", b"9"), "malformed"),
        (map(b"5,1,0,3", b"9"), "malformed"),
        (map(b"0,4", b"3"), "malformed"),
        (map(b"0,4", b"-1"), "malformed"),
        (map(b"9223372036854775807,4", b"9223372036854775807"), "malformed"),
        (map(b"0,3", b"9"), "more or fewer"),
        (map(b"0,5", b"9"), "more or fewer"),
        (map(b"0,x", b"9"), "malformed"),
        (with(&[("GNU.sparse.map", b"0,4"), ("GNU.sparse.numblocks", b"2")]), "malformed"),
        (with(&[("GNU.sparse.major", b"2"), ("GNU.sparse.minor", b"0")]), "unknown version"),
        (with(&[("GNU.sparse.size", b"9")]), "without a map"),
        (with(&[("GNU.sparse.new", b"9")]), "unknown record"),
        (with(&[("GNU.sparse.offset", b"0"), ("GNU.sparse.offset", b"0")]), "malformed"),
        (with(&[("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0")]), "truncated"),
    ] {
        assert!(error.contains(expected), "expected {expected:?} in {error:?}");
    }
    let records: [(&str, &[u8]); 2] = [("GNU.sparse.map", b"0,0"), ("GNU.sparse.numblocks", b"1")];
    assert!(refused(&[pax(&records), entry(b'5', b"d", 0, b"")]).contains("not a file"));
    assert!(refused(&[entry(b'S', b"posix", 0, b"")]).contains("format"));
}

#[test]
fn metadata_is_limited() {
    let long = vec![b'n'; EXTENSION_BYTES_MAX as usize + 1];
    assert!(refused(&[entry(b'L', b"long", long.len(), &long)]).contains("metadata of an entry is too long"));
    let name = entry(b'L', b"long", long.len() - 1, &long[1..]);
    assert_eq!(one(&[name.clone(), file(b"a", b"")]).path, &long[1..]);
    assert!(refused(&vec![name; 4]).contains("metadata of an entry is too long"));
    let lines = vec![b'\n'; MAP_BYTES_MAX + BLOCK_BYTES];
    let map = [b"9999999".as_slice(), &lines].concat();
    let records: [(&str, &[u8]); 2] = [("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0")];
    assert!(refused(&[pax(&records), file(b"a", &map)]).contains("map of a sparse file is too long"));
}

#[test]
fn written_headers_are_read() {
    for size in [0, 5, (8 << 30) - 1, 8 << 30, 1 << 40] {
        let header = header_of_file("blobs/sha256/x", size).expect("a short name");
        let found = Reader::new(&header[..]).next().expect("it is valid").expect("an entry");
        assert_eq!(
            (&found.path[..], found.size, found.mode, found.kind),
            (&b"blobs/sha256/x"[..], size, 0o644, Kind::File)
        );
    }
    assert!(header_of_file(&"n".repeat(100), 0).is_some() && header_of_file(&"n".repeat(101), 0).is_none());
}
