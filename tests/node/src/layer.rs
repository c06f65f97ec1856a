//! Layers of images, created in memory, valid and malicious ones. Headers are written field by field, because
//! a tar library refuses what an attacker sends.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

/// One entry of a layer.
#[derive(Debug, Clone)]
pub struct Entry {
    path: Vec<u8>,
    link: Vec<u8>,
    kind: u8,
    mode: u32,
    uid: u64,
    gid: u64,
    /// Size in the header; equal to that of the data unless it was changed.
    size: u64,
    device: (u32, u32),
    data: Vec<u8>,
    /// Time of the last modification in seconds since 1970.
    modified: u64,
    /// Records of a PAX header before the entry.
    records: Vec<(String, Vec<u8>)>,
}

impl Entry {
    /// A regular file with mode 0644, owned by root.
    pub fn file(path: &str, data: &[u8]) -> Entry {
        Entry { size: data.len() as u64, data: data.to_vec(), ..Entry::of(b'0', path, "", 0o644) }
    }

    /// An executable file.
    pub fn program(path: &str, data: &[u8]) -> Entry {
        Entry { mode: 0o755, ..Entry::file(path, data) }
    }

    /// A directory with this mode, owned by root.
    pub fn directory(path: &str, mode: u32) -> Entry {
        Entry::of(b'5', path, "", mode)
    }

    /// A symbolic link.
    pub fn symlink(path: &str, target: &str) -> Entry {
        Entry::of(b'2', path, target, 0o777)
    }

    /// A hard link to an earlier entry, or to a path outside of the layer. The file gets the mode of the link, so that programs can
    /// have links.
    pub fn hard_link(path: &str, target: &str) -> Entry {
        Entry::of(b'1', path, target, 0o755)
    }

    /// A block device node.
    pub fn block_device(path: &str, major: u32, minor: u32) -> Entry {
        Entry { device: (major, minor), ..Entry::of(b'4', path, "", 0o666) }
    }

    /// A whiteout of `name` in `folder`; if `name` is `.wh..opq`, the mark of an opaque directory.
    pub fn whiteout(folder: &str, name: &str) -> Entry {
        Entry::file(&format!("{folder}/.wh.{name}"), b"")
    }

    /// Sets the owner and group.
    pub fn owned(self, uid: u64, gid: u64) -> Entry {
        Entry { uid, gid, ..self }
    }

    /// Sets the permission bits.
    pub fn mode(self, mode: u32) -> Entry {
        Entry { mode, ..self }
    }

    /// Sets the size in the header without changing the data.
    pub fn claiming(self, bytes: u64) -> Entry {
        Entry { size: bytes, ..self }
    }

    /// Adds an extended attribute.
    pub fn xattr(mut self, name: &str, value: &[u8]) -> Entry {
        self.records.push((format!("SCHILY.xattr.{name}"), value.to_vec()));
        self
    }

    fn of(kind: u8, path: &str, link: &str, mode: u32) -> Entry {
        Entry {
            path: path.into(),
            link: link.into(),
            kind,
            mode,
            uid: 0,
            gid: 0,
            size: 0,
            device: (0, 0),
            data: Vec::new(),
            modified: 1_700_000_000,
            records: Vec::new(),
        }
    }

    /// The entry with this time of the last modification, in seconds since 1970.
    pub fn modified(self, modified: u64) -> Entry {
        Entry { modified, ..self }
    }

    /// Appends the entry to an archive that has no end yet.
    pub fn append(&self, tar: &mut Vec<u8>) {
        let mut header = tar::Header::new_gnu();
        let raw = header.as_gnu_mut().expect("made as GNU");
        let mut records: Vec<(&str, &[u8])> =
            self.records.iter().map(|(key, value)| (key.as_str(), value.as_slice())).collect();
        for (field, key, text) in
            [(&mut raw.name, "path", &self.path), (&mut raw.linkname, "linkpath", &self.link)]
        {
            match field.get_mut(..text.len()) {
                Some(field) => field.copy_from_slice(text),
                None => records.push((key, text)),
            }
        }
        if !records.is_empty() {
            let mut builder = tar::Builder::new(&mut *tar);
            builder.append_pax_extensions(records).expect("memory takes it");
            // Without the end of an archive.
            let length = builder.get_ref().len();
            drop(builder);
            tar.truncate(length);
        }
        raw.typeflag = [self.kind];
        header.set_mode(self.mode);
        header.set_uid(self.uid);
        header.set_gid(self.gid);
        header.set_size(self.size);
        header.set_mtime(self.modified);
        header.set_device_major(self.device.0).expect("GNU headers hold a major number");
        header.set_device_minor(self.device.1).expect("GNU headers hold a minor number");
        header.set_cksum();
        tar.extend_from_slice(header.as_bytes());
        tar.extend_from_slice(&self.data);
        tar.resize(tar.len().next_multiple_of(BLOCK_BYTES), 0);
    }
}

/// Block size of tar in bytes.
const BLOCK_BYTES: usize = 512;

/// Compression of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not compressed.
    Plain,
    /// Compressed with gzip.
    Gzip,
    /// Compressed with zstd: by another program, or by `coracle_tests::layer`, which has the library.
    Zstd,
}

/// A layer's blob, and the digest of its uncompressed content.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Content of the blob.
    pub blob: Vec<u8>,
    /// Digest `sha256:…` of the uncompressed tar archive.
    pub diff_id: String,
    /// Compression of the blob.
    pub compression: Compression,
    /// Annotations of the blob's descriptor, as JSON; null: none.
    pub annotations: serde_json::Value,
}

impl Layer {
    /// Creates a layer with these entries, in this order; `coracle_tests::layer::packed` does it with zstd, too.
    pub fn new(entries: &[Entry], compression: Compression) -> Layer {
        let mut tar = Vec::new();
        for entry in entries {
            entry.append(&mut tar);
        }
        tar.resize(tar.len() + 2 * BLOCK_BYTES, 0);
        let annotations = serde_json::Value::Null;
        Layer { blob: pack(&tar, compression), diff_id: digest(&tar), compression, annotations }
    }

    /// Creates a layer with a table of contents in the format zstd:chunked, by the library of containers/storage.
    pub fn chunked(entries: &[Entry]) -> Layer {
        Layer::chunked_archive(Layer::new(entries, Compression::Plain).blob)
    }

    /// Creates a layer like [`Layer::chunked`] of an archive. Small ones are made once: many tests have the same, and compressing it
    /// would be half of their work.
    pub fn chunked_archive(archive: Vec<u8>) -> Layer {
        static MADE: Mutex<BTreeMap<String, Layer>> = Mutex::new(BTreeMap::new());
        let (diff_id, is_small) = (digest(&archive), archive.len() <= 16 << 20);
        let made = || MADE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(layer) = made().get(&diff_id) {
            return layer.clone();
        }
        let (blob, annotations) = with_table(&["zstd:chunked"], archive);
        let layer = Layer { blob, diff_id: diff_id.clone(), compression: Compression::Zstd, annotations };
        if is_small {
            made().insert(diff_id, layer.clone());
        }
        layer
    }

    /// Creates a layer in the format eStargz, by the library of stargz-snapshotter. It adds its own files to the archive.
    pub fn estargz(entries: &[Entry]) -> Layer {
        Layer::estargz_with(entries, &[])
    }

    /// [`Layer::estargz`] with options of the program `chunked`.
    pub fn estargz_with(entries: &[Entry], options: &[&str]) -> Layer {
        Layer::estargz_archive(Layer::new(entries, Compression::Plain).blob, options)
    }

    /// [`Layer::estargz_with`] of an archive.
    pub fn estargz_archive(archive: Vec<u8>, options: &[&str]) -> Layer {
        let (blob, annotations) = with_table(&[&["estargz"], options].concat(), archive);
        let diff_id = annotations["diff-id"].as_str().expect("its digest").to_owned();
        Layer { blob, diff_id, compression: Compression::Gzip, annotations }
    }

    /// A gzip bomb: one file with `mebibytes` MiB of zeros, compressed to about a thousandth.
    pub fn bomb(mebibytes: u64) -> Layer {
        const MIB: usize = 1 << 20;
        let mut header = Vec::new();
        Entry::file("bomb", b"").claiming(mebibytes * MIB as u64).append(&mut header);
        let mut hash = Sha256::new();
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        let mut feed = |bytes: &[u8]| {
            hash.update(bytes);
            packed.write_all(bytes).expect("memory takes it");
        };
        feed(&header);
        let zeros = vec![0; MIB];
        for _ in 0..mebibytes {
            feed(&zeros);
        }
        feed(&[0; 2 * BLOCK_BYTES]);
        let blob = packed.finish().expect("memory takes it");
        let (diff_id, annotations) = (hex_digest(&hash.finalize()), serde_json::Value::Null);
        Layer { blob, diff_id, compression: Compression::Gzip, annotations }
    }

    /// Truncates the blob to `bytes`; the digests are those of the truncated blob and of the complete tar.
    pub fn truncated(mut self, bytes: usize) -> Layer {
        self.blob.truncate(bytes);
        self
    }

    /// The OCI media type for this compression.
    pub fn media_type(&self) -> &'static str {
        match self.compression {
            Compression::Plain => "application/vnd.oci.image.layer.v1.tar",
            Compression::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Compression::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }
}

/// Compresses an archive with a table of contents in this format; returns the blob and the annotations of its descriptor.
fn with_table(arguments: &[&str], archive: Vec<u8>) -> (Vec<u8>, serde_json::Value) {
    use std::process::{Command, Stdio};
    let mut program = Command::new("chunked");
    let program = program.args(arguments).stdin(Stdio::piped());
    let mut child = program
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("chunked: {error}; `tests/tools/install go-chunked` makes it"));
    let mut input = child.stdin.take().expect("a pipe");
    let passing = std::thread::spawn(move || input.write_all(&archive));
    let output = child.wait_with_output().expect("it ends");
    passing.join().expect("no panic").expect("it reads the archive");
    let annotations = serde_json::from_slice(&output.stderr)
        .unwrap_or_else(|_| panic!("chunked: {}", String::from_utf8_lossy(&output.stderr)));
    (output.stdout, annotations)
}

/// A tar archive whose only file has a PAX header with one record of this many bytes.
pub fn pax_of(bytes: usize) -> Vec<u8> {
    let mut record = format!("{bytes} comment=").into_bytes();
    record.resize(bytes - 1, b'x');
    record.push(b'\n');
    let mut tar = Vec::new();
    Entry { data: record, size: bytes as u64, ..Entry::of(b'x', "pax", "", 0o644) }.append(&mut tar);
    Entry::file("file", b"content").append(&mut tar);
    tar.resize(tar.len() + 2 * BLOCK_BYTES, 0);
    tar
}

/// Compresses bytes, but not with zstd: see [`Compression::Zstd`].
pub fn pack(bytes: &[u8], compression: Compression) -> Vec<u8> {
    match compression {
        Compression::Plain => bytes.to_vec(),
        Compression::Gzip => {
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            packed.write_all(bytes).expect("memory takes it");
            packed.finish().expect("memory takes it")
        }
        Compression::Zstd => panic!("coracle_tests::layer packs it"),
    }
}

/// Pseudorandom bytes, which are not compressed.
pub fn noise(bytes: usize, mut seed: u64) -> Vec<u8> {
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 56) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

/// The digest `sha256:HEX` of bytes.
pub fn digest(bytes: &[u8]) -> String {
    hex_digest(&Sha256::digest(bytes))
}

fn hex_digest(hash: &[u8]) -> String {
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}
