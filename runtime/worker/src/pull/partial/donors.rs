//! The unpacked layers of the node as sources of chunks. Each has an index, which was written when the layer was pulled. Layers of the
//! same repository that have none, because their blobs had no table of contents, are indexed at their first use.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

use coracle_chunked::index::{self, Writer};
use coracle_chunked::{Chunker, Place, Wanted};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};

use crate::failure::io_failure;
use crate::report::Report;
use crate::store::{Store, open_plain};

/// Maximum number of layers in which chunks are looked for.
const LAYERS_MAX: usize = 512;
/// Maximum depth of directories: PATH_MAX has room for so many.
const DEPTH_MAX: usize = 2048;
/// Buffer size in bytes for reading files.
const BUFFER_BYTES: usize = 64 << 10;

/// The layers of the node, which are opened when they are needed first.
pub(crate) struct Donors {
    /// Names of layers of images of the same repository, in which most chunks are found. `None`: no pull is partial.
    relatives: Option<Vec<String>>,
    layers: OnceLock<Vec<Layer>>,
}

/// An unpacked layer with an index.
pub(super) struct Layer {
    pub(super) name: String,
    directory: OwnedFd,
}

impl Donors {
    pub(crate) fn new(relatives: Option<Vec<String>>) -> Self {
        Self { relatives, layers: OnceLock::new() }
    }

    /// Whether pulls are partial.
    pub(crate) fn are_used(&self) -> bool {
        self.relatives.is_some()
    }

    /// The layers with an index, those of the same repository first. A layer that is removed meanwhile is left out, or its files are
    /// not found later.
    pub(super) fn layers(&self, store: &Store, report: &Report) -> &[Layer] {
        self.layers.get_or_init(|| match &self.relatives {
            None => Vec::new(),
            Some(relatives) => open_all(store, relatives, report),
        })
    }
}

fn open_all(store: &Store, relatives: &[String], report: &Report) -> Vec<Layer> {
    let mut names: Vec<String> = Vec::new();
    for name in relatives {
        let has_index = store.index(name).exists() || index_layer(store, name, report).is_ok();
        if has_index && !names.contains(name) {
            names.push(name.clone());
        }
    }
    let all = fs::read_dir(store.index("")).into_iter().flatten().flatten();
    let others = all.filter_map(|entry| entry.file_name().into_string().ok());
    let others: Vec<String> = others.filter(|name| !names.contains(name)).collect();
    names.extend(others);
    let open = |name: String| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, store.layer(&name), flags, Mode::empty()).ok()?;
        Some(Layer { name, directory })
    };
    names.into_iter().take(LAYERS_MAX).filter_map(open).collect()
}

/// Finds the places of the wanted chunks in these layers. An index that cannot be read ends only its own layer.
pub(super) fn find(store: &Store, layers: &[Layer], wanted: &mut Wanted) {
    for (layer, number) in layers.iter().zip(0_u16..) {
        let mut result = Ok(());
        let mut hear = |found: index::Found<'_>| {
            if result.is_ok() {
                result = wanted.hear(number, &found);
            }
        };
        let path = store.index(&layer.name);
        let read = open_plain(&path).and_then(|file| {
            let read = index::read(BufReader::with_capacity(BUFFER_BYTES, file), &mut hear);
            read.map_err(|error| io_failure("read", &path, &error))
        });
        if let Err(failure) = read {
            eprintln!("index of layer {}: {}", layer.name, failure.message);
            // The next pull makes another one.
            discard(&path);
        }
    }
}

/// Removes an index, or what a crash or another program has left in its place.
pub(super) fn discard(index: &Path) {
    let _ = fs::remove_file(index).or_else(|_| fs::remove_dir_all(index));
}

/// Opens the file of a chunk.
///
/// # Errors
/// It does not exist, or is not a regular file.
pub(super) fn open(layers: &[Layer], place: &Place<'_>) -> io::Result<File> {
    let layer = layers.get(usize::from(place.layer)).ok_or(io::ErrorKind::NotFound)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // A table may have any name: it is resolved below the layer, without links.
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let found = openat2(&layer.directory, OsStr::from_bytes(place.path), flags, Mode::empty(), resolve)?;
    match FileType::from_raw_mode(fstat(&found)?.st_mode) {
        // Opened only now: to open a device has effects, also if nothing is read (a watchdog starts).
        FileType::RegularFile => File::open(format!("/proc/self/fd/{}", found.as_raw_fd())),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Writes the index of an unpacked layer by reading all its files.
fn index_layer(store: &Store, name: &str, report: &Report) -> io::Result<()> {
    let (root, path) = (store.layer(name), store.index(name));
    // No other worker has this name; what a killed one left is removed by the daemon.
    let aside = path.with_extension(format!("tmp-{}", std::process::id()));
    let written = (|| {
        let mut writer = Writer::new(BufWriter::new(File::create(&aside)?))?;
        index_directory(&root, &mut Vec::new(), 0, &mut writer, report)?;
        writer.finish().into_inner()?;
        fs::rename(&aside, &path)
    })();
    written.inspect_err(|_| drop(fs::remove_file(&aside)))
}

/// Adds the files of the directory `path` of the layer at `root`.
fn index_directory(
    root: &Path,
    path: &mut Vec<u8>,
    depth: usize,
    writer: &mut Writer<BufWriter<File>>,
    report: &Report,
) -> io::Result<()> {
    if depth > DEPTH_MAX {
        return Ok(());
    }
    for entry in fs::read_dir(root.join(OsStr::from_bytes(path)))? {
        let entry = entry?;
        let (kind, length) = (entry.file_type()?, path.len());
        if length > 0 {
            path.push(b'/');
        }
        path.extend_from_slice(entry.file_name().as_bytes());
        if kind.is_dir() {
            index_directory(root, path, depth + 1, writer, report)?;
        } else if kind.is_file() {
            let chunks = chunks_of(File::open(entry.path())?, report)?;
            if !chunks.is_empty() {
                writer.file(path, &chunks)?;
            }
        }
        path.truncate(length);
    }
    Ok(())
}

fn chunks_of(mut file: File, report: &Report) -> io::Result<Vec<(coracle_chunked::Digest, u64)>> {
    let (mut chunker, mut buffer) = (Chunker::default(), vec![0; BUFFER_BYTES]);
    loop {
        report.pulse();
        match file.read(&mut buffer)? {
            0 => return Ok(chunker.finish()),
            count => chunker.update(&buffer[..count]),
        }
    }
}
