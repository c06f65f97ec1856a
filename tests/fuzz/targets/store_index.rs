//! Reads the index of an additional store, as it is in a file of the system: any bytes behind a right header and before a
//! right checksum. An index that was read is written again as the same value.
#![no_main]

use coracle_job::StoreIndex;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = StoreIndex::decode(data);
    let Ok(empty) = StoreIndex::default().encode() else { return };
    let mut bytes = [&empty[..5], data].concat();
    let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    bytes.extend(sum.to_le_bytes());
    let Ok(index) = StoreIndex::decode(&bytes) else { return };
    let again = index.encode().expect("it is in memory");
    assert_eq!(StoreIndex::decode(&again), Ok(index));
});
