//! Unpacks an untrusted layer archive: any entries, PAX records, sparse maps, order and compression. Only the layer's own directory
//! may change, and the limits must hold. Runs as root like the worker, in a temporary directory.
#![no_main]
#![allow(dead_code)]

#[path = "../../../runtime/worker/src/failure.rs"]
mod failure;
#[path = "../../../runtime/worker/src/store.rs"]
mod store;
#[path = "../../../runtime/worker/src/unpack/mod.rs"]
mod unpack;

/// Replaces the worker's confinement by none, so that the effect of a defect can be detected.
mod jail {
    pub(crate) mod confined {
        use coracle_job::{Failure, Limits};

        pub(crate) fn unpack(
            directory: &std::path::Path,
            blob: std::fs::File,
            limits: &Limits,
            is_lowest: bool,
            _: Option<(&std::fs::File, coracle_chunked::outline::Purpose)>,
            _: &mut (dyn FnMut(u64) + Send),
        ) -> Result<(crate::unpack::Unpacked, String), Failure> {
            Ok((crate::unpack::unpack_to(directory, blob, limits, is_lowest, None, &mut |_| {})?, String::new()))
        }
    }
}

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use coracle_job::Limits;
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits { layer_bytes_max: 4 << 20, layer_entries_max: 256, layers_max: 1 };
const BLOCK_BYTES: usize = 512;

/// `SCRATCH/layer`, and next to it a file that must not change.
fn scratch() -> &'static PathBuf {
    static SCRATCH: OnceLock<PathBuf> = OnceLock::new();
    SCRATCH.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("coracle-fuzz/{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a scratch directory");
        std::fs::write(path.join("outside"), b"outside").expect("a file");
        path
    })
}

/// Corrects the checksum of every header: otherwise only the checksum would be tested.
fn seal(archive: &mut [u8]) {
    let mut at = 0;
    while at + BLOCK_BYTES <= archive.len() {
        let header = &mut archive[at..at + BLOCK_BYTES];
        if header.iter().all(|byte| *byte == 0) {
            return;
        }
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let digits: String = header[124..136].iter().map(|byte| char::from(*byte)).collect();
        let size = usize::from_str_radix(digits.trim_matches(['\0', ' ']), 8).unwrap_or(0);
        at = at.saturating_add(BLOCK_BYTES).saturating_add(size.saturating_add(BLOCK_BYTES - 1) & !(BLOCK_BYTES - 1));
    }
}

fuzz_target!(|bytes: &[u8]| {
    let [packing, archive @ ..] = bytes else { return };
    let mut archive = archive.to_vec();
    seal(&mut archive);
    let blob = match packing % 8 {
        0 => zstd::encode_all(&archive[..], 1).expect("memory takes it"),
        _ => archive,
    };
    let scratch = scratch();
    let layer = scratch.join("layer");
    std::fs::create_dir(&layer).expect("a new directory");
    // Attributes of links are set from within the layer directory, and the fuzz engine uses relative paths.
    let here = std::env::current_dir().expect("it exists");
    // Refused or unpacked: both are correct.
    let _ = unpack::unpack_to(&layer, &blob[..], &LIMITS, packing & 8 != 0, None, &mut |_| {});
    std::env::set_current_dir(&here).expect("it is still there");
    let mut names: Vec<_> = std::fs::read_dir(scratch).expect("it lists").flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    assert_eq!(names, ["layer", "outside"]);
    let outside = scratch.join("outside");
    let about = outside.symlink_metadata().expect("it is there");
    assert_eq!((about.nlink(), about.mode() & 0o7777, about.uid(), about.len()), (1, 0o644, 0, 7));
    coracle_trees::remove::run(&[layer]).expect("it goes");
});
