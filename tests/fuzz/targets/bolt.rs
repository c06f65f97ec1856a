//! Reads a file of bbolt as the metadata of a containerd: any bytes, with meta pages whose checksums are right, so that the
//! engine reaches what is behind them. The bytes that are read and the depth are limited.
#![no_main]
#![allow(dead_code)]

use std::io;

use coracle_bolt::{Bucket, Entry, ReadAt, Snapshot};

struct Bytes(Vec<u8>);

impl ReadAt for Bytes {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..)).unwrap_or_default();
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

/// Sets the checksum of the meta page at this offset.
fn correct(bytes: &mut [u8], page: usize) {
    let Some(meta) = bytes.get_mut(page + 16..page + 80) else { return };
    let sum = meta[..56].iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    meta[56..].copy_from_slice(&sum.to_le_bytes());
}

fn walk(snapshot: &Snapshot<'_, Bytes>, bucket: &Bucket, depth: u32) {
    let Ok(entries) = snapshot.entries(bucket) else { return };
    for (_, entry) in entries {
        if let Entry::Bucket(inner) = entry {
            if depth < 5 {
                walk(snapshot, &inner, depth + 1);
            }
        }
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut bytes = data.to_vec();
    correct(&mut bytes, 0);
    correct(&mut bytes, 1024);
    let file = Bytes(bytes);
    if let Ok(snapshot) = Snapshot::open(&file) {
        walk(&snapshot, &snapshot.root(), 0);
        assert!(snapshot.is_current().is_ok_and(|is_current| is_current));
    }
});
