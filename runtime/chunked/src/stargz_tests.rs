//! Tests of tables in eStargz and of the headers in outlines.

use coracle_tar::append_file;
use sha2::{Digest as _, Sha256};

use crate::outline::{Purpose, Writer};
use crate::stargz::{Described, find, fit, padding, read, table_offset};
use crate::{Digest, Problem};

const DIGEST: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

fn sha256(bytes: &[u8]) -> Digest {
    Sha256::digest(bytes).into()
}

/// Reads a table with these entries, of a layer whose content ends before byte 1000.
fn table(entries: &str) -> Result<crate::stargz::Table, Problem> {
    let text = format!("{{\"version\": 1, \"entries\": [{}]}}", entries.replace("DIGEST", DIGEST));
    read(&archive("stargz.index.json", &text)[..], 1000, &sha256(text.as_bytes()), 1 << 20)
}

fn archive(name: &str, text: &str) -> Vec<u8> {
    let mut archive = Vec::new();
    append_file(&mut archive, name, text.len() as u64, text.as_bytes()).unwrap();
    archive
}

#[test]
fn the_footer_says_where_the_table_is() {
    let footer = |text: &str| {
        let mut footer = vec![0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 255, 26, 0, b'S', b'G', 22, 0];
        footer.extend(text.as_bytes());
        footer.extend([1, 0, 0, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0]);
        footer
    };
    let good = footer("00000000000003e8STARGZ");
    assert_eq!(table_offset(&good, 2000), Some(1000));
    assert_eq!(table_offset(&good, 1051), None, "no room for the table");
    assert_eq!(table_offset(&good, 50), None);
    assert_eq!(table_offset(&good[1..], 2000), None);
    assert_eq!(table_offset(&[], 2000), None);
    for text in [
        "0000000000000000STARGZ",
        "ffffffffffffffffSTARGZ",
        "00000000000003e8STARGX",
        "-000000000000001STARGZ",
    ] {
        assert_eq!(table_offset(&footer(text), 2000), None, "{text}");
    }
}

#[test]
fn a_chunk_ends_where_the_next_begins() {
    let table = table(
        r#"{"name": "d/", "type": "dir"},
        {"name": "d/a", "type": "reg", "size": 10, "offset": 100, "chunkSize": 6, "chunkDigest": "DIGEST"},
        {"name": "d/a", "type": "chunk", "offset": 200, "chunkOffset": 6, "chunkDigest": "DIGEST"},
        {"name": "d/e", "type": "reg"},
        {"name": "d/b", "type": "reg", "size": 7, "offset": 300, "digest": "DIGEST"},
        {"name": "d/l", "type": "symlink", "linkName": "a"}"#,
    )
    .unwrap();
    let chunks: Vec<_> =
        table.contents.chunks().iter().map(|chunk| (chunk.begin, chunk.end, chunk.size)).collect();
    assert_eq!(chunks, [(100, 200, 6), (200, 300, 4), (300, 1000, 7)]);
    let (entries, ends) = table.headers.parts();
    assert_eq!((entries.len(), ends), (4, &[2, 4][..]));
}

#[test]
fn tables_that_contradict_themselves_are_refused() {
    let file =
        r#"{"name": "a", "type": "reg", "size": 10, "offset": 100, "chunkSize": 6, "chunkDigest": "DIGEST"}"#;
    for (entries, why) in [
        (file.to_owned(), "do not add up"),
        (format!(r#"{file}, {{"name": "b", "type": "dir"}}"#), "do not add up"),
        (
            format!(
                r#"{file}, {{"type": "chunk", "offset": 99, "chunkOffset": 6, "chunkDigest": "DIGEST"}}"#
            ),
            "out of order",
        ),
        (
            format!(
                r#"{file}, {{"type": "chunk", "offset": 200, "chunkOffset": 5, "chunkDigest": "DIGEST"}}"#
            ),
            "out of order",
        ),
        (
            format!(
                r#"{file}, {{"type": "chunk", "offset": 200, "chunkOffset": 6, "chunkSize": 5, "chunkDigest": "DIGEST"}}"#
            ),
            "too long",
        ),
        (format!(r#"{file}, {{"type": "chunk", "offset": 200, "chunkOffset": 6}}"#), "without a digest"),
        (
            format!(
                r#"{file}, {{"type": "chunk", "offset": 1000, "chunkOffset": 6, "chunkDigest": "DIGEST"}}"#
            ),
            "out of order",
        ),
        (file.replace("100", "0"), "out of order"),
        (file.replace("100", "1001"), "out of order"),
        (file.replace(": 6", ": 11"), "too long"),
        (file.replace(": 6", ": 6, \"innerOffset\": 1"), "several chunks"),
        (file.replace("reg", "sparse"), "unknown type"),
        (file.replace("10,", "-10,"), "invalid value"),
        (
            r#"{"type": "chunk", "offset": 200, "chunkOffset": 0, "chunkDigest": "DIGEST"}"#.to_owned(),
            "out of order",
        ),
    ] {
        let problem = table(&entries).map(drop).unwrap_err();
        assert!(problem.to_string().contains(why), "{entries}: {problem}");
    }
}

#[test]
fn only_a_table_with_the_stated_digest_is_read() {
    let text = r#"{"version": 1, "entries": []}"#;
    let problem = |archive: &[u8], text: &str| {
        read(archive, 1000, &sha256(text.as_bytes()), 1 << 20)
            .map(drop)
            .map_err(|problem| problem.to_string())
    };
    assert_eq!(problem(&archive("stargz.index.json", text), text), Ok(()));
    assert!(problem(&archive("stargz.index.json", text), "other").unwrap_err().contains("digest"));
    assert!(problem(&archive("index.json", text), text).unwrap_err().contains("place"));
    assert!(problem(&[], text).unwrap_err().contains("place"));
    assert!(problem(&archive("stargz.index.json", text)[..520], text).unwrap_err().contains("truncated"));
    let later = text.replace('1', "2");
    assert!(problem(&archive("stargz.index.json", &later), &later).unwrap_err().contains("version 2"));
}

/// A table needs no more memory than was taken for it.
#[test]
fn a_table_that_needs_more_memory_is_refused() {
    let row = r#"{"name": "d", "type": "dir"}"#;
    let text = format!("{{\"version\": 1, \"entries\": [{}]}}", [row; 1000].join(","));
    let (archive, digest) = (archive("stargz.index.json", &text), sha256(text.as_bytes()));
    read(&archive[..], 1000, &digest, 44_000).unwrap();
    let problem = read(&archive[..], 1000, &digest, 43_999).map(drop).unwrap_err();
    assert!(problem.to_string().contains("memory"), "{problem}");
}

/// The headers of `a` and `b` are those that a table describes, wherever the content of `a` is.
#[test]
fn headers_in_an_outline_are_those_of_a_table() {
    let mut archive = Vec::new();
    append_file(&mut archive, "a", 700, &[7; 700][..]).unwrap();
    let end = archive.len();
    append_file(&mut archive, "b", 3, &b"abc"[..]).unwrap();
    let described = coracle_tar::Reader::new(&archive[end..]).next().unwrap().unwrap();
    let (mode, modified) = (described.mode, described.mtime);
    assert_eq!(modified.seconds, 0, "so that the table has no time");
    let table = table(&format!(
        r#"{{"name": "a", "type": "reg", "mode": {mode}, "size": 700, "offset": 100, "digest": "DIGEST"}},
        {{"name": "b", "type": "reg", "mode": {mode}, "size": 3, "offset": 200, "digest": "DIGEST"}}"#
    ))
    .unwrap();
    for (purpose, is_in_tree) in
        [(Purpose::Neighbours, true), (Purpose::Neighbours, false), (Purpose::Headers, true)]
    {
        let mut outline = Writer::with_purpose(Vec::new(), u64::MAX, purpose);
        outline.pass(&archive[..512]);
        if is_in_tree {
            outline.begin(b"a", 0, 700);
            outline.pass(&archive[512..1212]);
            outline.end();
            outline.pass(&archive[1212..]);
        } else {
            outline.pass(&archive[512..]);
        }
        let outline = outline.finish().unwrap();
        let mut found: Vec<(Described, Vec<u8>)> = Vec::new();
        find(&outline[..], &mut |described, bytes| {
            found.push((*described, bytes.to_vec()));
            Ok(())
        })
        .unwrap();
        let described: Vec<Described> = found.iter().map(|(described, _)| *described).collect();
        assert_eq!(described, table.headers.parts().0);
        assert_eq!(found[1].1, archive[end..end + 512], "{is_in_tree}");
        for cut in 0..outline.len() {
            let _ = find(&outline[..cut], &mut |_, _| Ok(()));
        }
    }
    assert_eq!((padding(700), padding(512), padding(1), padding(0)), (324, 0, 511, 0));
}

/// Headers with another time and size are those that a builder writes for these.
#[test]
fn headers_are_changed_to_another_time_and_size() {
    let header = |size: u64, time: u64, change: &dyn Fn(&mut tar::Header)| {
        let mut header = tar::Header::new_ustar();
        header.set_path("a/file").unwrap();
        header.set_mode(0o644);
        header.set_size(size);
        header.set_mtime(time);
        change(&mut header);
        header.set_cksum();
        header.as_bytes().to_vec()
    };
    let plain = |size, time| header(size, time, &|_| ());
    let described = |size, time| Described { key: [0; 16], time, size };
    let (old, new) = (described(700, 1_700_000_000), described(8_000_000_000, 1_800_000_001));
    let mut bytes = plain(700, 1_700_000_000);
    assert!(fit(&mut bytes, &old, &new));
    assert!(bytes == plain(8_000_000_000, 1_800_000_001));
    // After the headers of a long name.
    let mut long = [&plain(100, 0)[..], b"100 path=long\n", &[0; 498], &plain(700, 1_700_000_000)].concat();
    assert!(fit(&mut long, &old, &new) && long.ends_with(&plain(8_000_000_000, 1_800_000_001)));
    for (why, mut headers, wanted) in [
        ("a record has the time", [&b"20 mtime=1.5\n"[..], &[0; 499], &plain(700, 0)].concat(), new),
        ("a record has the size", [&b"20 size=700\n"[..], &[0; 500], &plain(700, 0)].concat(), new),
        ("a size in base 256", plain(700, 0), described(1 << 33, 0)),
        ("a time before 1970", plain(700, 0), described(700, -1)),
        (
            "a time in base 256",
            header(700, 0, &|header| header.as_mut_bytes()[136] = 0x80),
            described(700, 1),
        ),
        (
            "a size in blanks",
            header(700, 0, &|header| header.as_mut_bytes()[124..130].fill(b' ')),
            described(7, 0),
        ),
        (
            "a checksum of other digits",
            {
                let mut bytes = plain(700, 0);
                bytes[148] = b' ';
                bytes
            },
            described(700, 5),
        ),
        ("no header", vec![0; 511], described(700, 5)),
    ] {
        assert!(!fit(&mut headers, &described(700, 0), &wanted), "{why}");
    }
    let mut unchanged = vec![1, 2, 3];
    assert!(fit(&mut unchanged, &old, &old) && unchanged == [1, 2, 3]);
}
