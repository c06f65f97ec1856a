//! Tests of the formats with tables that are written here; that real ones are understood is shown by `tests/images/partial.rs`.

use sha2::Digest as _;

use super::*;
use crate::split::Piece;

/// A chunk in a table: offset, size, and the byte of which its digest consists.
type Part = (u64, u64, u8);

fn hex(byte: u8) -> String {
    format!("sha256:{}", format!("{byte:02x}").repeat(32))
}

/// A file of a table, with the end of its last chunk.
fn file(name: &str, end: u64, parts: &[Part]) -> String {
    let size: u64 = parts.iter().map(|(_, size, _)| size).sum();
    let mut passed = 0;
    let mut rows = Vec::new();
    for (number, (offset, length, byte)) in parts.iter().enumerate() {
        let kind = if *byte == 0 { r#","chunkType":"zeros""# } else { "" };
        let chunk = format!(
            r#""name":"{name}","offset":{offset},"chunkSize":{length},"chunkOffset":{passed},"chunkDigest":"{}"{kind}"#,
            hex(*byte)
        );
        rows.push(match number {
            0 => format!(r#"{{"type":"reg","size":{size},"endOffset":{end},"digest":"{}",{chunk}}}"#, hex(1)),
            _ => format!(r#"{{"type":"chunk",{chunk}}}"#),
        });
        passed += length;
    }
    rows.join(",")
}

fn table(entries: &[String]) -> String {
    let list = entries.join(",");
    format!(r#"{{"version":1,"entries":[{list}],"tarSplitDigest":"{}","other":[{{"a":null}}]}}"#, hex(9))
}

fn read(entries: &[String]) -> Result<toc::Table, Problem> {
    toc::read(table(entries).as_bytes(), 1000)
}

fn two_files() -> [String; 4] {
    [
        r#"{"type":"dir","name":"a/"}"#.to_owned(),
        file("a/one", 300, &[(100, 50, 1), (150, 7, 0), (200, 60, 2)]),
        r#"{"type":"symlink","name":"a/link","linkName":"one"}"#.to_owned(),
        file("a/two", 500, &[(400, 10, 3)]),
    ]
}

#[test]
fn a_table_has_the_chunks_of_its_files() {
    let table = read(&two_files()).unwrap();
    assert_eq!(table.split, [9; 32]);
    assert_eq!(table.contents.bytes(), 127);
    let files: Vec<_> = table.contents.files().map(|file| (file.path, file.size, file.first)).collect();
    assert_eq!(files, [(&b"a/one"[..], 117, 0), (b"a/two", 10, 3)]);
    let chunk = |begin, end, size, byte| Chunk { begin, end, size, digest: [byte; 32] };
    let expected =
        [chunk(100, 150, 50, 1), chunk(150, 200, 7, 0), chunk(200, 300, 60, 2), chunk(400, 500, 10, 3)];
    assert_eq!(table.contents.chunks(), expected);
    assert!(expected[1].is_zeros());
}

#[test]
fn a_file_in_one_piece_has_the_digest_of_the_file() {
    let entry =
        format!(r#"{{"type":"reg","name":"f","size":5,"offset":10,"endOffset":20,"digest":"{}"}}"#, hex(4));
    let table = read(&[entry]).unwrap();
    assert_eq!(table.contents.chunks(), [Chunk { begin: 10, end: 20, size: 5, digest: [4; 32] }]);
}

#[test]
fn a_table_that_contradicts_itself_is_refused() {
    let digest = hex(1);
    let reg = |rest: &str| format!(r#"{{"type":"reg","name":"f","digest":"{digest}",{rest}}}"#);
    let whole = reg(r#""size":5,"offset":10,"endOffset":20"#);
    for (entries, why) in [
        (vec![reg(r#""size":5,"offset":20,"endOffset":20"#)], "out of order"),
        (vec![reg(r#""size":5,"offset":10,"endOffset":1001"#)], "out of order"),
        (vec![whole.clone(), reg(r#""size":5,"offset":19,"endOffset":30"#)], "out of order"),
        (vec![reg(r#""size":5,"offset":10,"endOffset":20,"chunkSize":4"#)], "do not add up"),
        (vec![r#"{"type":"chunk","name":"f","offset":3}"#.to_owned()], "without its file"),
        (
            vec![r#"{"type":"reg","name":"f","size":5,"offset":1,"endOffset":2}"#.to_owned()],
            "without a digest",
        ),
        (vec![file("f", 300, &[(100, 5, 1), (100, 5, 2)])], "out of order"),
        (vec![file("f", 300, &[(100, 5, 1), (300, 5, 2)])], "out of order"),
        (vec![file("f", 300, &[(100, 5, 1), (200, 0, 2)])], "a gap"),
        (
            vec![
                reg(
                    r#""size":18446744073709551615,"offset":1,"endOffset":9,"chunkSize":18446744073709551615"#,
                ),
                format!(
                    r#"{{"type":"chunk","offset":5,"chunkSize":9,"chunkOffset":18446744073709551615,"chunkDigest":"{digest}"}}"#
                ),
            ],
            "do not add up",
        ),
    ] {
        let refused = read(&entries).expect_err(why).to_string();
        assert!(refused.contains(why), "{refused} / {why}");
    }
    for (text, why) in [
        (r#"{"version":2,"entries":[],"tarSplitDigest":"sha256:"}"#, "version 2"),
        (r#"{"version":1,"entries":[]}"#, "no tar-split data"),
        (r#"{"version":1,"entries":[{"type":"reg","name":1}]}"#, "invalid type"),
        ("[", "EOF"),
        ("", "EOF"),
    ] {
        let refused = toc::read(text.as_bytes(), 1000).expect_err(why).to_string();
        assert!(refused.contains(why), "{refused} / {why}");
    }
}

#[test]
fn a_long_value_is_refused_before_it_is_in_memory() {
    let long = "x".repeat(300 << 10);
    for text in [format!(r#"{{"version":1,"entries":[{{"name":"{long}"}}]}}"#), "1".repeat(300 << 10)] {
        let refused = toc::read(text.as_bytes(), 1000).expect_err("too long").to_string();
        assert!(refused.contains("too long"), "{refused}");
    }
    let quotes = format!(r#"{{"version":1,"entries":[{{"name":"{}"}}]}}"#, "\\\"".repeat(150 << 10));
    assert!(toc::read(quotes.as_bytes(), 1000).is_err());
}

#[test]
fn the_annotations_of_a_layer_say_where_its_table_is() {
    let of = |table: &'static str, split: &'static str| {
        let sum = hex(7);
        let value = |name: &str| match name.rsplit('.').next() {
            Some("zstd-chunked") | None => None,
            Some(name) if name.ends_with("manifest-position") => Some(table),
            Some(name) if name.ends_with("tarsplit-position") => Some(split).filter(|text| !text.is_empty()),
            Some(_) => Some(&*sum),
        };
        toc::Location::of(value, 1000)
    };
    let location = of("500:100:300:1", "608:50:99").unwrap();
    assert_eq!(location.table, toc::Position { offset: 500, length: 100, uncompressed: 300 });
    assert_eq!((location.split.end(), location.digest), (658, [7; 32]));
    for (table, split) in [
        ("500:100:300:2", "608:50:99"),
        ("500:100:300", "608:50:99"),
        ("500:100:300:1", ""),
        ("500:100:300:1", "599:50:99"),
        ("950:51:300:1", "1001:1:1"),
        ("18446744073709551615:2:3:1", "608:50:99"),
        ("-5:100:300:1", "608:50:99"),
    ] {
        assert_eq!(of(table, split), None, "{table} {split}");
    }
}

#[test]
fn tar_split_data_gives_the_archive_between_the_files() {
    let text = concat!(
        r#"{"type":2,"payload":"aGVhZA==","position":0}"#,
        "\n",
        r#"{"type":1,"name":"a","size":5,"payload":"AAAAAAAAAAA=","position":1}"#,
        "\n",
        r#"{"type":1,"name_raw":"/w==","payload":null,"position":2}"#,
        "\n",
        r#"{"type":2,"payload":"AA==","position":3}"#,
    );
    let pieces: Result<Vec<_>, _> = split::read(text.as_bytes()).collect();
    let expected = [Piece::Bytes(b"head".to_vec()), Piece::File(5), Piece::Bytes(vec![0])];
    assert_eq!(pieces.unwrap(), expected);
    for bad in [r#"{"type":3}"#, r#"{"type":2,"payload":"?"}"#, r#"{"type":2,"#, r#"{"type":1,"size":-1}"#] {
        assert!(split::read(bad.as_bytes()).next().unwrap().is_err(), "{bad}");
    }
}

#[test]
fn an_index_has_the_chunks_of_the_table() {
    let table = read(&two_files()).unwrap();
    let mut bytes = Vec::new();
    index::write(&table.contents, &mut bytes).unwrap();
    let mut heard = Vec::new();
    index::read(&bytes[..], &mut |found| {
        heard.push((found.path.to_vec(), found.offset, found.size, found.prefix[0]));
    })
    .unwrap();
    let one = b"a/one".to_vec();
    let expected =
        [(one.clone(), 0, 50, 1), (one.clone(), 50, 7, 0), (one, 57, 60, 2), (b"a/two".to_vec(), 0, 10, 3)];
    assert_eq!(heard, expected);
    for length in 0..bytes.len() {
        // Cut between two files it is a shorter index.
        let _ = index::read(&bytes[..length], &mut |_| {});
    }
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0xff;
        let _ = index::read(&damaged[..], &mut |_| {});
    }
}

#[test]
fn chunks_that_the_node_has_are_not_downloaded() {
    let contents = read(&two_files()).unwrap().contents;
    let mut wanted = Wanted::new(&contents);
    let found = |path, offset, size, byte| index::Found { path, offset, size, prefix: [byte; 16] };
    wanted.hear(3, &found(b"old", 9, 60, 2)).unwrap();
    wanted.hear(4, &found(b"older", 0, 60, 2)).unwrap();
    wanted.hear(3, &found(b"old", 80, 11, 3)).unwrap();
    wanted.hear(3, &found(b"old", 80, 10, 7)).unwrap();
    assert_eq!(wanted.place(2), Some(Place { layer: 3, path: b"old", offset: 9 }), "the first one counts");
    assert_eq!((wanted.place(0), wanted.place(1), wanted.place(3)), (None, None, None));
    let is_missing = |index: usize| wanted.place(index).is_none() && !contents.chunks()[index].is_zeros();
    let plan = Plan::new(&contents, REGISTRY_EXTENTS_MAX, is_missing);
    assert_eq!(plan.extents(), [Extent { begin: 100, end: 500 }], "the gap is shorter than a request");
    assert_eq!((plan.position(2), plan.bytes()), (Some(100), 400));
    wanted.forget_file_of(2);
    assert_eq!(wanted.place(2), None);
}

#[test]
fn ranges_far_from_each_other_stay_apart_up_to_their_maximum() {
    let entries: Vec<_> =
        (0..2000).map(|n| file(&format!("f{n}"), n * 100_000 + 50, &[(n * 100_000, 9, 1)])).collect();
    let contents = toc::read(table(&entries).as_bytes(), u64::MAX).unwrap().contents;
    let every = |step: usize| Plan::new(&contents, REGISTRY_EXTENTS_MAX, move |index| index % step == 0);
    let plan = every(10);
    assert_eq!((plan.extents().len(), plan.bytes()), (200, 200 * 50));
    assert_eq!((plan.position(10), plan.position(11)), (Some(50), None));
    assert_eq!(every(2).extents().len(), 1000);
    assert!(every(1).extents().len() <= REGISTRY_EXTENTS_MAX);
    assert_eq!(Plan::new(&contents, REGISTRY_EXTENTS_MAX, |_| false).bytes(), 0);
}

fn chunks(content: &[u8], piece: usize) -> Vec<(Digest, u64)> {
    let mut chunker = Chunker::default();
    content.chunks(piece).for_each(|piece| chunker.update(piece));
    chunker.finish()
}

#[test]
fn chunks_do_not_depend_on_the_pieces_in_which_the_file_is_read() {
    let mut state = 1_u32;
    let mut noise = |length: usize| -> Vec<u8> {
        let step = |state: &mut u32| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (*state >> 24) as u8
        };
        (0..length).map(|_| step(&mut state)).collect()
    };
    let mut content = noise(300_000);
    content.extend([0; 1023]);
    content.extend(noise(1000));
    content.extend([0; 1024]);
    content.extend(noise(200_000));
    content.extend([0; 50_000]);
    let expected = chunks(&content, content.len());
    assert_eq!(expected.iter().map(|(_, size)| size).sum::<u64>(), content.len() as u64);
    assert_eq!(expected.iter().filter(|(digest, _)| *digest == [0; 32]).count(), 2);
    assert!(expected.len() > 5, "{} chunks", expected.len());
    let mut begin = 0;
    for (digest, size) in &expected {
        let part = &content[begin..][..*size as usize];
        begin += part.len();
        match *digest == [0; 32] {
            true => assert!(part.iter().all(|byte| *byte == 0)),
            false => assert_eq!(*digest, <[u8; 32]>::from(sha2::Sha256::digest(part))),
        }
    }
    for piece in [1, 7, 4096] {
        assert_eq!(chunks(&content, piece), expected, "{piece}");
    }
    assert_eq!(chunks(b"", 1), []);
}

#[test]
fn a_changed_byte_changes_one_chunk() {
    let content: Vec<u8> = (0..400_000_u32).map(|n| (n.wrapping_mul(n) >> 7) as u8 | 1).collect();
    let mut changed = content.clone();
    changed.insert(200_000, 5);
    let (before, after) = (chunks(&content, 4096), chunks(&changed, 4096));
    let known = after.iter().filter(|chunk| before.contains(chunk)).count();
    assert!(known + 3 >= after.len(), "{known} of {}", after.len());
}

#[test]
fn the_corpus_of_the_fuzz_target_is_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/chunked");
    let seed = |name: &str| std::fs::read(format!("{folder}/{name}")).unwrap().split_off(1);
    let table = toc::read(&seed("table")[..], u64::MAX).unwrap();
    assert!(table.contents.chunks().iter().any(Chunk::is_zeros));
    let pieces: Result<Vec<_>, _> = split::read(&seed("split")[..]).collect();
    let files = pieces.unwrap().into_iter().filter(|piece| matches!(piece, Piece::File(_))).count();
    assert_eq!(files, table.contents.files().count());
    let mut chunks = 0;
    index::read(&seed("index")[..], &mut |_| chunks += 1).unwrap();
    assert_eq!(chunks, 2);
    assert!(outline::contents(&seed("outline")[..]).is_ok());
    stargz::find(&seed("headers")[..], &mut |_, _| Ok(())).unwrap();
    let (listed, mut archive) = (seed("stargz"), Vec::new());
    coracle_tar::append_file(&mut archive, "stargz.index.json", listed.len() as u64, &listed[..]).unwrap();
    let digest = sha2::Sha256::digest(&listed).into();
    let table = stargz::read(&archive[..], 10_000, &digest, 1 << 20).unwrap();
    assert_eq!((table.headers.parts().1.len(), table.contents.chunks().len()), (3, 5));
    let location = String::from_utf8(seed("location")).unwrap();
    let names = [toc::CHECKSUM, toc::TABLE, toc::SPLIT];
    let annotation = |name: &str| location.lines().nth(names.iter().position(|other| *other == name)?);
    assert_eq!(toc::Location::of(annotation, 1250).unwrap().stored(), 250);
    assert_eq!(toc::Location::of(annotation, 1249), None, "behind the end of the blob");
    // A chunk that would end behind the greatest offset does not count.
    let long = [&index_magic()[..], &[1, b'f', 2], &[7; 16], &[1], &[7; 16], &[0xff; 9], &[1]].concat();
    let mut told = 0;
    index::read(&long[..], &mut |_| told += 1).expect_err("a file that is too long");
    assert_eq!(told, 1);
}

/// The first bytes of an index.
fn index_magic() -> Vec<u8> {
    index::Writer::new(Vec::new()).unwrap().finish()
}

/// All files of a layer may have the same content, and of other layers, too: the time must not grow with the product.
#[test]
fn equal_chunks_take_no_quadratic_time() {
    const COUNT: u64 = 20_000;
    let mut contents = Contents::default();
    for number in 0..COUNT {
        contents.begin(b"f", 5).unwrap();
        contents.push(Chunk { begin: number, end: number + 1, size: 5, digest: [7; 32] }).unwrap();
    }
    let mut wanted = Wanted::new(&contents);
    let begun = std::time::Instant::now();
    for offset in 0..COUNT {
        wanted.hear(0, &index::Found { path: b"a/b", offset, size: 5, prefix: [7; 16] }).unwrap();
        wanted.hear(0, &index::Found { path: b"a/b", offset, size: 6, prefix: [7; 16] }).unwrap();
    }
    assert!((0..COUNT as usize).all(|index| wanted.place(index).is_some_and(|place| place.offset == 0)));
    assert!(begun.elapsed().as_secs() < 4, "{:?}", begun.elapsed());
}

/// A million entries: directories need no memory, and of files there is a limit, as there is of their names.
#[test]
fn a_table_of_a_million_entries_needs_little_memory() {
    let read = |count: u64, entry: &dyn Fn(u64) -> String| {
        let rest = format!(r#"{{"type":"dir"}}],"tarSplitDigest":"{}"}}"#, hex(9));
        let mut text = br#"{"version":1,"entries":["#.to_vec();
        (0..count).for_each(|number| text.extend(entry(number).bytes().chain([b','])));
        toc::read(std::io::Read::chain(&text[..], rest.as_bytes()), u64::MAX)
    };
    let directories = read(1_000_000, &|_| r#"{"type":"dir"}"#.to_owned()).unwrap();
    assert_eq!(directories.contents.chunks().len(), 0);
    let digest = hex(1);
    let file = |number: u64, name: &str| {
        let end = number + 2;
        format!(
            r#"{{"type":"reg","name":"{name}","size":1,"offset":{},"endOffset":{end},"digest":"{digest}"}}"#,
            end - 1
        )
    };
    let refused = read(100_000, &|number| file(number, "f")).unwrap_err().to_string();
    assert_eq!(refused, "more than 65536 chunks");
    let name = "n".repeat(1000);
    let refused = read(10_000, &|number| file(number, &name)).unwrap_err().to_string();
    assert_eq!(refused, "paths of more than 4194304 bytes");
}

/// Each limit of a table alone fits into the memory of a pull, all of them do not.
#[test]
fn the_memory_of_all_parts_of_a_table_is_limited() {
    let contents = |path: &[u8]| {
        let mut contents = Contents::default();
        for number in 0..contents::CHUNKS_MAX as u64 {
            contents.begin(path, 1).unwrap();
            contents.push(Chunk { begin: number, end: number + 1, size: 1, digest: [1; 32] }).unwrap();
        }
        contents
    };
    contents(b"a path of 20 bytes..").check_memory(3 << 20).unwrap();
    let refused = contents(&[b'p'; 64]).check_memory(3 << 20).unwrap_err().to_string();
    assert!(refused.contains("at most 9437184 are used"), "{refused}");
}

#[test]
fn long_tables_wait_for_each_other_and_short_ones_do_not() {
    let room = Room::default();
    let short = [room.take(1 << 20), room.take(1 << 20), room.take(1 << 20)];
    std::thread::scope(|scope| {
        let (sender, taken) = std::sync::mpsc::channel();
        let room = &room;
        scope.spawn(move || {
            let long = room.take(u64::MAX);
            sender.send(()).unwrap();
            drop(long);
        });
        let a_moment = std::time::Duration::from_millis(100);
        taken.recv_timeout(a_moment).expect_err("the memory is in use");
        drop(short);
        taken.recv_timeout(a_moment * 100).expect("the memory is free");
    });
    drop(room.take(u64::MAX));
}

/// The index of any layer can be read again: otherwise the layer would be read for a new one by each pull.
#[test]
fn an_index_is_bounded_and_readable() {
    let chunks = |count| vec![([1; 32], 300); count];
    let mut writer = index::Writer::new(Vec::new()).unwrap();
    writer.file(b"large", &chunks(contents::CHUNKS_MAX + 1)).unwrap();
    for _ in 0..20 {
        writer.file(b"more", &chunks(contents::CHUNKS_MAX)).unwrap();
    }
    let bytes = writer.finish();
    assert!(bytes.len() as u64 <= index::BYTES_MAX, "{}", bytes.len());
    let mut count = 0;
    index::read(&bytes[..], &mut |_| count += 1).unwrap();
    assert!(count > contents::CHUNKS_MAX, "{count}");
    // What is no index ends, too, however long it is.
    let endless = std::io::BufReader::new(std::io::Read::chain(&bytes[..8], std::io::repeat(0)));
    index::read(endless, &mut |_| ()).expect_err("it has no end");
}
