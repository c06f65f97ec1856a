//! Files of bbolt that are written here byte by byte, whole and damaged. tests/images/take_over.rs reads files that
//! containerd wrote.

use std::cell::RefCell;

use super::*;

impl ReadAt for Vec<u8> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.get(offset..)).unwrap_or_default();
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

const SIZE: usize = 1024;

fn header(page: u64, flags: u16, count: usize, overflow: u32) -> Vec<u8> {
    let count = u16::try_from(count).expect("few elements");
    let numbers =
        [&page.to_le_bytes()[..], &flags.to_le_bytes(), &count.to_le_bytes(), &overflow.to_le_bytes()];
    numbers.concat()
}

fn meta_page(number: u64, root: u64, end: u64, transaction: u64) -> Vec<u8> {
    let mut meta = Vec::new();
    for short in [MAGIC, VERSION, SIZE as u32, 0] {
        meta.extend(short.to_le_bytes());
    }
    for long in [root, 0, 2, end, transaction] {
        meta.extend(long.to_le_bytes());
    }
    meta.extend(fnv_1a(&meta).to_le_bytes());
    let mut page = [header(number, 4, 0, 0), meta].concat();
    page.resize(SIZE, 0);
    page
}

/// A leaf of keys and values; `true`: the value is a bucket.
fn leaf(page: u64, entries: &[(&[u8], bool, Vec<u8>)]) -> Vec<u8> {
    let length: usize =
        HEADER_BYTES + entries.iter().map(|(key, _, value)| 16 + key.len() + value.len()).sum::<usize>();
    let overflow = length.div_ceil(SIZE) - 1;
    let mut bytes = header(page, LEAF, entries.len(), u32::try_from(overflow).expect("few pages"));
    let mut at = entries.len() * ELEMENT_BYTES;
    for (index, (key, is_bucket, value)) in entries.iter().enumerate() {
        for number in [usize::from(*is_bucket), at - index * ELEMENT_BYTES, key.len(), value.len()] {
            bytes.extend(u32::try_from(number).expect("short").to_le_bytes());
        }
        at += key.len() + value.len();
    }
    for (key, _, value) in entries {
        bytes.extend_from_slice(key);
        bytes.extend_from_slice(value);
    }
    bytes
}

fn branch(page: u64, children: &[(&[u8], u64)]) -> Vec<u8> {
    let mut bytes = header(page, BRANCH, children.len(), 0);
    for (key, child) in children {
        bytes.extend(16_u32.to_le_bytes());
        bytes.extend(u32::try_from(key.len()).expect("short").to_le_bytes());
        bytes.extend(child.to_le_bytes());
    }
    children.iter().for_each(|(key, _)| bytes.extend_from_slice(key));
    bytes
}

fn at_page(root: u64) -> Vec<u8> {
    [root.to_le_bytes(), [0; 8]].concat()
}

fn file(pages: Vec<Vec<u8>>) -> Vec<u8> {
    pages
        .into_iter()
        .flat_map(|mut page| {
            page.resize(page.len().next_multiple_of(SIZE), 0);
            page
        })
        .collect()
}

/// A file with a branch, two leaves below it, an inline bucket, a value with overflow, and an older meta page.
fn sample() -> Vec<u8> {
    let inline = [at_page(0), leaf(0, &[(b"inner", false, b"value".to_vec())])].concat();
    file(vec![
        meta_page(0, 3, 9, 7),
        meta_page(1, 2, 9, 6),
        leaf(2, &[(b"old", false, b"state".to_vec())]),
        leaf(3, &[(b"inline", true, inline), (b"tree", true, at_page(4))]),
        branch(4, &[(b"a", 5), (b"m", 6)]),
        leaf(5, &[(b"a", false, b"1".to_vec()), (b"b", false, Vec::new())]),
        leaf(
            6,
            &[
                (b"m", false, vec![9; 2000]),
                (b"z", true, at_page(0).into_iter().chain(leaf(0, &[])).collect()),
            ],
        ),
    ])
}

/// All keys of a file, with the lengths of the values.
fn read(bytes: &Vec<u8>) -> Result<Vec<(String, usize)>, Problem> {
    fn below(
        snapshot: &Snapshot<'_, Vec<u8>>,
        bucket: &Bucket,
        path: &str,
        found: &mut Vec<(String, usize)>,
    ) -> Result<(), Problem> {
        if path.len() > 64 {
            return Err(damaged("a bucket in itself"));
        }
        for (key, entry) in snapshot.entries(bucket)? {
            let path = format!("{path}/{}", String::from_utf8_lossy(&key));
            match entry {
                Entry::Value(value) => found.push((path, value.len())),
                Entry::Bucket(bucket) => below(snapshot, &bucket, &path, found)?,
            }
        }
        Ok(())
    }
    let snapshot = Snapshot::open(bytes)?;
    let mut found = Vec::new();
    below(&snapshot, &snapshot.root(), "", &mut found)?;
    assert!(snapshot.is_current()?);
    Ok(found)
}

#[test]
fn trees_inline_buckets_and_long_values_are_read() {
    let found = read(&sample()).unwrap();
    let expected = [("/inline/inner", 5), ("/tree/a", 1), ("/tree/b", 0), ("/tree/m", 2000)];
    assert_eq!(found, expected.map(|(path, length)| (path.to_owned(), length)));
}

#[test]
fn the_newest_valid_meta_page_is_used() {
    let old = [("/old".to_owned(), 5)];
    for at in [16, 20, 24, 32, 56, 64, 72] {
        let mut bytes = sample();
        bytes[at] ^= 1;
        assert_eq!(read(&bytes).unwrap(), old, "byte {at}");
        bytes[SIZE + at] ^= 1;
        let error = read(&bytes).unwrap_err().to_string();
        assert!(error.contains("no valid meta page"), "byte {at}: {error}");
    }
    // The second one is newer.
    let mut bytes = sample();
    bytes.splice(SIZE..2 * SIZE, meta_page(1, 2, 9, 8));
    assert_eq!(read(&bytes).unwrap(), old);
}

#[test]
fn errors_name_the_damage() {
    for (at, bytes, expected) in [
        (3 * SIZE, &99_u64.to_le_bytes()[..], "page 3 has another number"),
        (3 * SIZE + 8, &[16, 0], "flags 0x10 is neither"),
        (3 * SIZE + 10, &[255, 255], "outside of the page"),
        (3 * SIZE + 12, &[8, 0, 0, 0], "page 3 is longer"),
        (3 * SIZE + 20, &[255, 255, 255, 255], "outside of the page"),
        (4 * SIZE + 16 + 8, &4_u64.to_le_bytes(), "a tree is higher"),
        (4 * SIZE + 16 + 8, &1_u64.to_le_bytes(), "page 1 is named"),
        (4 * SIZE + 16 + 8, &9_u64.to_le_bytes(), "page 9 is named"),
        (4 * SIZE + 16 + 8, &6_u64.to_le_bytes(), "out of order"),
    ] {
        let mut damaged = sample();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        let error = read(&damaged).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    for length in [0, 1, SIZE - 1, SIZE, 2 * SIZE, 3 * SIZE, 5 * SIZE, 7 * SIZE] {
        let cut = sample()[..length].to_vec();
        assert!(read(&cut).is_err(), "{length} bytes");
    }
    let other = read(&vec![b'x'; 4 * SIZE]).unwrap_err().to_string();
    assert!(other.contains("not a file of bbolt"), "{other}");
}

/// Finding S3: values that all extend to the end of one page made 2 GiB out of 15 MiB.
#[test]
fn values_that_overlap_are_refused_so_that_no_more_is_made_than_read() {
    let keys: Vec<_> = (0..300_u32).map(u32::to_be_bytes).collect();
    let entries: Vec<_> = keys.iter().map(|key| (&key[..], false, vec![7; 3000])).collect();
    let whole = leaf(2, &entries);
    let with = |leaf: Vec<u8>| file(vec![meta_page(0, 2, 2000, 7), vec![0; SIZE], leaf]);
    let made: usize = read(&with(whole.clone())).unwrap().iter().map(|(_, value)| value).sum();
    assert_eq!(made, 300 * 3000);
    let mut overlapping = whole.clone();
    for index in 0..entries.len() {
        let element = HEADER_BYTES + index * ELEMENT_BYTES;
        let position = u32_at(&whole, element + 4).unwrap() as usize;
        let value = whole.len() - element - position - 4;
        overlapping[element + 12..element + 16].copy_from_slice(&(value as u32).to_le_bytes());
    }
    let error = read(&with(overlapping)).unwrap_err().to_string();
    assert!(error.contains("the key of element 1 overlaps"), "{error}");
    // The first key lies in the table of elements.
    let mut inside = whole;
    inside[HEADER_BYTES + 4..HEADER_BYTES + 8].copy_from_slice(&16_u32.to_le_bytes());
    let error = read(&with(inside)).unwrap_err().to_string();
    assert!(error.contains("the key of element 0 overlaps"), "{error}");
}

/// Damage anywhere ends with an error or with entries, within the limits.
#[test]
fn damaged_files_never_cause_a_panic() {
    let whole = sample();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let (mut read_whole, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = whole.clone();
        for _ in 0..=random(4) {
            // The meta pages are left: behind a wrong checksum nothing else is read.
            let at = 2 * SIZE + random(bytes.len() - 2 * SIZE);
            // Zero and all ones are lengths and page numbers at the limits.
            bytes[at] = [0, 1, 2, 0xff, 0x7f, random(256) as u8][random(6)];
        }
        bytes.truncate(2 * SIZE + random(bytes.len()));
        match read(&bytes) {
            Ok(_) => read_whole += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(read_whole > 1000 && refused > 1000, "{read_whole} read, {refused} refused");
}

#[test]
fn the_corpus_of_the_fuzz_target_causes_no_panic() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/bolt");
    let mut counts = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        counts.extend(read(&std::fs::read(entry.path()).unwrap()).map(|found| found.len()));
    }
    assert!(counts.len() > 1 && counts.iter().all(|count| *count > 3), "the seeds are whole: {counts:?}");
}

/// A transaction that completes while pages are read is noticed, also if it wrote to pages of the snapshot.
#[test]
fn a_transaction_during_the_read_is_detected() {
    struct Written(RefCell<Vec<u8>>);
    impl ReadAt for Written {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            self.0.borrow().read_at(buffer, offset)
        }
    }
    let file = Written(RefCell::new(sample()));
    let snapshot = Snapshot::open(&file).unwrap();
    assert!(snapshot.bucket(&snapshot.root(), b"tree").unwrap().is_some() && snapshot.is_current().unwrap());
    // A transaction in progress, whose meta page is written in part.
    file.0.borrow_mut()[SIZE + 16 + 48] = 9;
    assert!(snapshot.is_current().unwrap());
    file.0.borrow_mut().splice(SIZE..2 * SIZE, meta_page(1, 2, 9, 8));
    assert!(!snapshot.is_current().unwrap());
}
