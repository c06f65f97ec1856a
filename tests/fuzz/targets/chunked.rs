//! Reads a table of contents, tar-split data, the index or the outline of a layer, the annotations with the place of a table, a table in
//! eStargz or the headers in an outline, as the first byte says: any bytes. What is read keeps the promises that a pull relies on: chunks in order and within the blob, sizes that add
//! up, ranges that contain what is missing.
#![no_main]

use coracle_chunked::{Contents, Plan, REGISTRY_EXTENTS_MAX, Wanted, index, outline, split, stargz, toc};
use sha2::{Digest as _, Sha256};

/// Length in bytes of the content of the blob.
const END: u64 = 1 << 40;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 7 {
        0 => table(data),
        1 => split::read(data).take_while(Result::is_ok).for_each(drop),
        3 => drop(outline::contents(data).map(|contents| check(&contents))),
        4 => location(data),
        5 => listed(data),
        6 => drop(stargz::find(data, &mut |found, bytes| {
            assert!(!bytes.is_empty() && bytes.len() % 512 == 0);
            let mut headers = bytes.to_vec();
            let wanted = stargz::Described { time: found.size as i64, size: found.time as u64, ..*found };
            stargz::fit(&mut headers, found, &wanted);
            assert!(headers.len() == bytes.len());
            Ok(())
        })),
        _ => drop(index::read(data, &mut |found| assert!(found.offset.checked_add(found.size).is_some()))),
    }
});

/// A line for each annotation.
fn location(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut lines = text.lines();
    let [checksum, table, split] = [(); 3].map(|()| lines.next());
    let annotation = |name: &str| match name {
        toc::CHECKSUM => checksum,
        toc::TABLE => table,
        toc::SPLIT => split,
        _ => None,
    };
    let Some(location) = toc::Location::of(annotation, END) else { return };
    assert!(location.table.end() <= location.split.offset && location.split.end() <= END);
    if location.check().is_ok() {
        assert!(location.stored() <= toc::STORED_BYTES_MAX);
    }
}

fn table(data: &[u8]) {
    let Ok(table) = toc::read(data, END) else { return };
    assert!(table.contents.chunks().last().is_none_or(|chunk| chunk.end <= END));
    check(&table.contents);
}

/// A table in eStargz, whose digest is always right, and the footer.
fn listed(data: &[u8]) {
    if let Some(offset) = stargz::table_offset(data, END) {
        assert!(offset > 0 && offset < END);
    }
    let mut archive = Vec::new();
    coracle_tar::append_file(&mut archive, "stargz.index.json", data.len() as u64, data)
        .expect("memory takes it");
    const MEMORY_MAX: usize = 1 << 20;
    let Ok(table) = stargz::read(&archive[..], END, &Sha256::digest(data).into(), MEMORY_MAX) else { return };
    let files = table.contents.files().count();
    assert!((0..files).all(|number| table.headers.before(number).is_some_and(|entries| !entries.is_empty())));
    assert!(table.headers.before(files).is_none());
    assert!(table.contents.chunks().last().is_none_or(|chunk| chunk.end == END));
    check(&table.contents);
}

fn check(contents: &Contents) {
    let (mut end, mut chunks) = (0, 0);
    for file in contents.files() {
        assert_eq!(file.first, chunks);
        assert_eq!(
            file.chunks.iter().map(|chunk| u128::from(chunk.size)).sum::<u128>(),
            u128::from(file.size)
        );
        for chunk in file.chunks {
            assert!(chunk.begin >= end && chunk.begin < chunk.end && chunk.size > 0);
            end = chunk.end;
        }
        chunks += file.chunks.len();
    }
    let mut bytes = Vec::new();
    index::write(contents, &mut bytes).expect("memory takes it");
    let mut wanted = Wanted::new(contents);
    let mut number = 0;
    index::read(&bytes[..], &mut |found| {
        number += 1;
        if number % 2 == 0 {
            drop(wanted.hear(number as u16, &found));
        }
    })
    .expect("an index that was just written");
    let is_missing = |index: usize| wanted.place(index).is_none();
    let plan = Plan::new(contents, REGISTRY_EXTENTS_MAX, is_missing);
    for index in 0..contents.chunks().len() {
        assert!(!is_missing(index) || plan.position(index).is_some_and(|position| position < plan.bytes()));
    }
    wanted.forget_file_of(0);
}
