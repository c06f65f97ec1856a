//! Unpacks a layer while its blob is being downloaded, so that a pull takes little longer than its download.
//!
//! ```text
//! download ─► part file ─► feed ─► pipe ─► decompress ─► … (jail::pipeline) ─► layers/tmp-…
//!     └─────── arrival ─────┘
//! ```
//! The data passes through the part file and not directly from the download to the pipe: a slow disk or
//! processor must not look like a slow registry, and the part survives the worker. Unverified data is seen by
//! the confined processes only; the layer counts when the digest of the whole blob and the diff ID have been
//! verified. A failure before that says nothing, because the data may be a bad endpoint's: when the blob is
//! verified, it is unpacked again from its file. Unverified data cannot fill the disk ([`unverified_max`]).

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use coracle_job::{Failure, Layer, Limits};

use crate::report::Report;
use crate::store::{Store, open_plain};
use crate::unpack::VerifiedLayer;
use coracle_fetch::{Arrival, Next};

/// Buffer size in bytes of the copy from the part file to the pipe.
const BUFFER_BYTES: usize = 64 << 10;

/// Stack size in bytes of the copying thread, whose buffer is on the heap.
const STACK_BYTES: usize = 64 << 10;

/// Maximum number of bytes to which a blob of `size` bytes may be unpacked before its digest is verified. Layers are
/// compressed to a third or a tenth of their size; one that is compressed further is unpacked after its download.
pub(super) fn unverified_max(size: u64) -> u64 {
    const FACTOR: u64 = 16;
    const BYTES_MIN: u64 = 16 << 20;
    size.saturating_mul(FACTOR).max(BYTES_MIN)
}

/// The limits of a layer that nothing verifies before it is unpacked, and whose blob has `size` bytes.
pub(super) fn limits_of(limits: &Limits, size: u64) -> Limits {
    Limits { layer_bytes_max: limits.layer_bytes_max.min(unverified_max(size)), ..*limits }
}

/// A blob that is being downloaded.
pub(super) struct Growing<'a> {
    /// The part file.
    pub(super) file: &'a File,
    /// Path of the part file, for errors.
    pub(super) path: &'a Path,
    pub(super) arrival: &'a Arrival,
}

impl Growing<'_> {
    /// Unpacks the blob as `layer` while it grows; `None` if the download failed, which is the failure that counts.
    /// `size` is the size of the blob in its manifest.
    ///
    /// # Errors
    /// The verified blob is not the layer, or it cannot be unpacked here.
    pub(super) fn unpack(
        &self,
        store: &Store,
        layer: &Layer,
        size: u64,
        limits: &Limits,
        report: &Report,
    ) -> Result<Option<VerifiedLayer>, Failure> {
        while let Some(attempt) = self.arrival.attempt() {
            let bounded = limits_of(limits, size);
            if let Some(layer) = self.attempt(attempt, store, layer, &bounded, report) {
                return Ok(Some(layer));
            }
            if self.arrival.is_verified(attempt) {
                let blob = open_plain(self.path)?;
                let pulse = &mut |_| report.pulse();
                return VerifiedLayer::unpack(store, layer, limits, blob, pulse).map(Some);
            }
        }
        Ok(None)
    }

    /// Unpacks the data of one attempt of the download; `None` if it cannot be unpacked, or is not the whole verified blob.
    /// The reason is not kept, because a verified blob is unpacked again.
    fn attempt(
        &self,
        attempt: u32,
        store: &Store,
        layer: &Layer,
        limits: &Limits,
        report: &Report,
    ) -> Option<VerifiedLayer> {
        let (from, into) = io::pipe().ok()?;
        std::thread::scope(|scope| {
            let feeder = std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, move || self.feed(attempt, into))
                .ok()?;
            let blob = File::from(OwnedFd::from(from));
            let unpacked = VerifiedLayer::unpack(store, layer, limits, blob, &mut |_| report.pulse()).ok();
            // The pipe is closed now, so the thread ends with its next write, or when the download ends.
            if feeder.join().unwrap_or(false) {
                return unpacked;
            }
            unpacked.into_iter().for_each(VerifiedLayer::discard);
            None
        })
    }

    /// Copies the data of one attempt to the pipe as it is written; returns whether the whole blob was copied and is
    /// verified.
    fn feed(&self, attempt: u32, mut into: io::PipeWriter) -> bool {
        let mut buffer = vec![0; BUFFER_BYTES];
        copy(self.file, self.arrival, attempt, 0..u64::MAX, &mut into, &mut buffer) == Copied::Verified
    }
}

/// The reason why [`copy`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copied {
    /// All bytes of the range were copied.
    Range,
    /// All bytes up to the end of the part were copied, and the download has ended well.
    Verified,
    /// The data is void, or cannot be read or written.
    Nothing,
}

/// Copies a range of a part file to a pipe as it is written by this attempt of the download.
pub(super) fn copy(
    file: &File,
    arrival: &Arrival,
    attempt: u32,
    range: Range<u64>,
    into: &mut io::PipeWriter,
    buffer: &mut [u8],
) -> Copied {
    let mut position = range.start;
    while position < range.end {
        let until = match arrival.next(attempt, position) {
            Next::Upto(until) => until.min(range.end),
            Next::Verified => return Copied::Verified,
            Next::Void => return Copied::Nothing,
        };
        let wanted = usize::try_from(until - position).unwrap_or(usize::MAX).min(buffer.len());
        match file.read_at(&mut buffer[..wanted], position) {
            Ok(count) if count > 0 && into.write_all(&buffer[..count]).is_ok() => position += count as u64,
            _ => return Copied::Nothing,
        }
    }
    Copied::Range
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;
    use std::thread::{scope, yield_now};

    use coracle_job::FailureKind;

    use super::*;
    use coracle_manifest::digest_of;

    /// A store, and a part file that a test writes.
    struct Download {
        root: PathBuf,
        store: Store,
        part: File,
        path: PathBuf,
        arrival: Arrival,
    }

    impl Download {
        fn new(about: &str) -> Self {
            assert!(rustix::process::geteuid().is_root(), "unpacking changes owners: run as root");
            let root = std::env::temp_dir().join(format!("coracle-follow-{about}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            let store = Store::open(&root).unwrap();
            let path = root.join("part");
            let part =
                File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
            Self { root, store, part, path, arrival: Arrival::default() }
        }

        fn write(&self, bytes: &[u8]) {
            let length = self.part.metadata().unwrap().len();
            self.part.write_all_at(bytes, length).unwrap();
            self.arrival.wrote(length + bytes.len() as u64);
        }

        fn restart(&self) {
            self.arrival.restart();
            self.part.set_len(0).unwrap();
        }

        /// Unpacks as the layer of this archive, which is not compressed, while `download` runs.
        fn unpack(
            &self,
            archive: &[u8],
            download: impl FnOnce(&Self),
        ) -> Result<Option<VerifiedLayer>, Failure> {
            self.unpack_sized(archive, archive.len() as u64, download)
        }

        /// Unpacks as the layer of this archive, from a blob of `size` bytes, while `download` runs.
        fn unpack_sized(
            &self,
            archive: &[u8],
            size: u64,
            download: impl FnOnce(&Self),
        ) -> Result<Option<VerifiedLayer>, Failure> {
            let diff_id = digest_of(archive);
            let layer = Layer { diff_id: diff_id.clone(), chain_id: diff_id, name: "layer".into() };
            let (limits, report) = (Limits::default(), Report::default());
            let (file, path, arrival) = (&self.part, &*self.path, &self.arrival);
            let (growing, store) = (Growing { file, path, arrival }, &self.store);
            scope(|scope| {
                let unpacking = scope.spawn(|| growing.unpack(store, &layer, size, &limits, &report));
                download(self);
                unpacking.join().unwrap()
            })
        }

        /// Number of directories of layers, complete or not.
        fn directories(&self) -> usize {
            std::fs::read_dir(self.root.join("layers")).unwrap().count()
        }
    }

    impl Drop for Download {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.root);
        }
    }

    fn archive(content: &[u8]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, "file", content).unwrap();
        builder.into_inner().unwrap()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn a_blob_in_pieces_of_any_size_is_the_layer_as_root() {
        let content: Vec<u8> = (0..300_000_u32).flat_map(|n| n.to_le_bytes()).collect();
        let archive = archive(&content);
        for (blob, piece) in [(archive.clone(), 70_001), (gzip(&archive), 9_973), (archive.clone(), 1 << 30)]
        {
            let download = Download::new("pieces");
            let unpacked = download.unpack(&archive, |download| {
                for piece in blob.chunks(piece) {
                    download.write(piece);
                    yield_now();
                }
                download.arrival.end(true);
            });
            let layer = unpacked.unwrap().expect("the download succeeded");
            layer.discard();
            assert_eq!(download.directories(), 0);
        }
    }

    #[test]
    fn data_before_a_restart_is_not_in_the_layer_as_root() {
        let (wrong, archive) = (archive(&[1; 200_000]), archive(&[2; 100_000]));
        let download = Download::new("restart");
        let unpacked = download.unpack(&archive, |download| {
            download.write(&wrong[..150_000]);
            download.restart();
            // All of another archive, whose digest is not right.
            download.write(&wrong);
            download.restart();
            archive.chunks(1000).for_each(|piece| download.write(piece));
            download.arrival.end(true);
        });
        assert!(unpacked.unwrap().is_some());
        assert_eq!(download.directories(), 1, "nothing is left of the attempts before");
    }

    #[test]
    fn a_failed_download_leaves_nothing_as_root() {
        let archive = archive(&[1; 200_000]);
        for bytes in [0, 512, 100_000, archive.len()] {
            let download = Download::new("failed");
            let unpacked = download.unpack(&archive, |download| {
                download.write(&archive[..bytes]);
                download.arrival.end(false);
            });
            assert!(matches!(unpacked, Ok(None)), "{bytes}");
            assert_eq!(download.directories(), 0, "{bytes}");
        }
    }

    #[test]
    fn a_bad_archive_is_an_error_only_if_its_blob_is_verified_as_root() {
        let (bad, good) = (vec![7; 200_000], archive(&[2; 1000]));
        let download = Download::new("bad");
        let unpacked = download.unpack(&good, |download| {
            download.write(&bad);
            download.restart();
            download.write(&good);
            download.arrival.end(true);
        });
        assert!(unpacked.unwrap().is_some(), "the bad data came from a registry that sends wrong data");

        let download = Download::new("verified");
        let unpacked = download.unpack(&good, |download| {
            download.write(&bad);
            download.arrival.end(true);
        });
        let failure = unpacked.err().expect("the verified blob is not an archive");
        assert_eq!(failure.kind, FailureKind::Invalid, "{failure:?}");
        assert_eq!(download.directories(), 0);
    }

    #[test]
    fn a_blob_that_is_compressed_too_well_is_unpacked_when_it_is_verified_as_root() {
        let archive = archive(&vec![0; 40 << 20]);
        let blob = gzip(&archive);
        assert!(unverified_max(blob.len() as u64) < archive.len() as u64);
        let download = Download::new("dense");
        let unpacked = download.unpack_sized(&archive, blob.len() as u64, |download| {
            download.write(&blob);
            download.arrival.end(true);
        });
        assert!(unpacked.unwrap().is_some());
        assert_eq!(download.directories(), 1);

        let download = Download::new("bomb");
        let unpacked = download.unpack_sized(&archive, blob.len() as u64, |download| {
            download.write(&blob);
            download.arrival.end(false);
        });
        assert!(matches!(unpacked, Ok(None)));
        assert_eq!(download.directories(), 0);
    }

    #[test]
    fn a_failure_of_this_node_is_found_again_when_the_blob_is_verified_as_root() {
        let archive = archive(&[1; 200_000]);
        let download = Download::new("refused");
        std::fs::remove_dir(download.root.join("layers")).unwrap();
        let unpacked = download.unpack(&archive, |download| {
            download.write(&archive);
            download.arrival.end(true);
        });
        assert!(unpacked.err().expect("there is no directory").message.contains("layers"));
    }
}
