//! The unpacked layers of the node as sources of chunks. Each has an index, which was written when the layer was pulled. Layers of the
//! same repository that have none, because their blobs had no table of contents, are indexed at their first use.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

use coracle_chunked::index::{self, Writer};
use coracle_chunked::{Chunker, Place, Wanted};
use coracle_job::{Failure, FailureKind};
use coracle_sandbox::describe_io;
use rustix::fs::{Mode, OFlags};

use crate::failure::io_failure;
use crate::report::Report;
use crate::store::{Store, open_in_layer, open_plain};

/// Maximum number of layers in which chunks are looked for.
const LAYERS_MAX: usize = 512;
/// Maximum depth of directories: PATH_MAX has room for so many.
const DEPTH_MAX: usize = 2048;
/// Maximum number of bytes of files that one pull reads to index layers, because it waits meanwhile: some seconds on a board. Later pulls
/// index the other layers, and of a longer layer the first files are indexed.
const INDEXED_BYTES_MAX: u64 = 512 << 20;
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
            Some(relatives) => open_all(store, relatives, INDEXED_BYTES_MAX, report),
        })
    }
}

/// Opens the layers; reads at most `bytes_max` bytes of those without an index.
fn open_all(store: &Store, relatives: &[String], bytes_max: u64, report: &Report) -> Vec<Layer> {
    let mut names: Vec<String> = Vec::new();
    let mut reading = Reading { left: bytes_max, is_first: true, report };
    for name in relatives {
        let has_index = store.index(name).exists() || index_layer(store, name, &mut reading).is_ok();
        if has_index && !names.contains(name) {
            names.push(name.clone());
        }
    }
    let all = fs::read_dir(store.index("")).into_iter().flatten().flatten();
    let others = all.filter_map(|entry| entry.file_name().into_string().ok());
    let others: Vec<String> = others.filter(|name| !names.contains(name)).collect();
    names.extend(others);
    names.into_iter().take(LAYERS_MAX).filter_map(|name| Layer::open(store, name)).collect()
}

impl Layer {
    /// Opens the directory of a layer, if it exists.
    pub(super) fn open(store: &Store, name: String) -> Option<Self> {
        // By a link, if the layer is that of an additional store.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(store.present_layer(&name), flags, Mode::empty()).ok()?;
        Some(Self { name, directory })
    }
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
            read.map_err(|error| match error.kind() {
                ErrorKind::InvalidData | ErrorKind::UnexpectedEof => {
                    Failure::invalid(format!("read {}: {}", path.display(), describe_io(&error)))
                }
                _ => io_failure("read", &path, &error),
            })
        });
        if let Err(failure) = read {
            eprintln!("index of layer {}: {}", layer.name, failure.message);
            // Any other error may pass, and an outline is not made again.
            if failure.kind == FailureKind::Invalid {
                discard(&path);
            }
        }
    }
}

/// Removes an index with damage, or what a crash or another program has left in its place; the next pull makes another one.
fn discard(index: &Path) {
    let _ = fs::remove_file(index).or_else(|_| fs::remove_dir_all(index));
}

/// Opens the file of a chunk.
///
/// # Errors
/// It does not exist, or is not a regular file.
pub(super) fn open(layers: &[Layer], place: &Place<'_>) -> io::Result<File> {
    let layer = layers.get(usize::from(place.layer)).ok_or(ErrorKind::NotFound)?;
    // A table may have any name, as an archive may.
    open_in_layer(&layer.directory, &coracle_tar::clean(place.path))
}

/// The limit of a pull that indexes layers.
struct Reading<'a> {
    /// Number of bytes.
    left: u64,
    /// Whether no layer has been indexed.
    is_first: bool,
    report: &'a Report,
}

/// Writes the index of an unpacked layer by reading its files.
///
/// # Errors
/// Too little of it may be read.
fn index_layer(store: &Store, name: &str, reading: &mut Reading<'_>) -> io::Result<()> {
    if reading.left == 0 {
        return Err(ErrorKind::FileTooLarge.into());
    }
    let (root, path) = (store.present_layer(name), store.index(name));
    // No other worker has this name; what a killed one left is removed by the daemon.
    let aside = path.with_extension(format!("tmp-{}", std::process::id()));
    let written = (|| {
        let mut writer = Writer::new(BufWriter::new(File::create(&aside)?))?;
        index_directory(&root, &mut Vec::new(), 0, &mut writer, reading)?;
        writer.finish().into_inner()?;
        match reading.left == 0 && !reading.is_first {
            // The next pull begins with it.
            true => Err(ErrorKind::FileTooLarge.into()),
            false => fs::rename(&aside, &path),
        }
    })();
    reading.is_first = false;
    written.inspect_err(|_| drop(fs::remove_file(&aside)))
}

/// Adds the files of the directory `path` of the layer at `root`.
fn index_directory(
    root: &Path,
    path: &mut Vec<u8>,
    depth: usize,
    writer: &mut Writer<BufWriter<File>>,
    reading: &mut Reading<'_>,
) -> io::Result<()> {
    if depth > DEPTH_MAX {
        return Ok(());
    }
    // What cannot be read, or has too long a path, is no reason to leave out the rest of the layer, nor to read it again.
    let entries = match fs::read_dir(root.join(OsStr::from_bytes(path))) {
        Err(error) if depth == 0 => return Err(error),
        entries => entries.into_iter().flatten().flatten(),
    };
    for entry in entries {
        let (Ok(kind), length) = (entry.file_type(), path.len()) else { continue };
        if length > 0 {
            path.push(b'/');
        }
        path.extend_from_slice(entry.file_name().as_bytes());
        if kind.is_dir() {
            index_directory(root, path, depth + 1, writer, reading)?;
        } else if kind.is_file() && reading.left > 0 {
            let chunks = File::open(entry.path()).and_then(|file| chunks_of(file, reading));
            if let Some(chunks) = chunks.ok().filter(|chunks| !chunks.is_empty()) {
                writer.file(path, &chunks)?;
            }
        }
        path.truncate(length);
    }
    Ok(())
}

/// The chunks of a file, or of its first bytes.
fn chunks_of(file: File, reading: &mut Reading<'_>) -> io::Result<Vec<(coracle_chunked::Digest, u64)>> {
    let (mut chunker, mut buffer) = (Chunker::default(), vec![0; BUFFER_BYTES]);
    let mut file = file.take(reading.left);
    loop {
        reading.report.pulse();
        match file.read(&mut buffer)? {
            0 => return Ok(chunker.finish()),
            count => {
                chunker.update(&buffer[..count]);
                reading.left -= count as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pull waits for the layers that it indexes.
    #[test]
    fn a_pull_reads_no_more_than_its_limit_to_index_layers() {
        let root = std::env::temp_dir().join(format!("coracle-indexing-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let store = Store::open(&root).unwrap();
        let names = ["one", "two", "long"].map(str::to_owned);
        for (name, count) in names.iter().zip([4, 4, 90_u8]) {
            fs::create_dir_all(store.layer(name)).unwrap();
            for number in 0..count {
                fs::write(store.layer(name).join(number.to_string()), [number + 1; 100]).unwrap();
            }
        }
        let indexed = || {
            let opened = open_all(&store, &names, 600, &Report::default());
            let opened: Vec<String> = opened.into_iter().map(|layer| layer.name).collect();
            assert!(fs::read_dir(store.index("")).unwrap().count() == opened.len(), "nothing else is left");
            opened
        };
        assert_eq!(indexed(), ["one"], "the second one is too long for the rest");
        assert_eq!(indexed(), ["one", "two"]);
        assert_eq!(indexed(), names);
        let mut bytes = 0;
        let file = File::open(store.index("long")).unwrap();
        index::read(BufReader::new(file), &mut |found| bytes += found.size).unwrap();
        assert_eq!(bytes, 600, "the first files of the long one");
        fs::remove_dir_all(root).unwrap();
    }

    /// A layer of which something cannot be read would otherwise be read again by each pull, and those after it would get no index.
    #[test]
    fn what_cannot_be_read_is_left_out_of_an_index() {
        let root = std::env::temp_dir().join(format!("coracle-deep-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let store = Store::open(&root).unwrap();
        fs::create_dir_all(store.layer("deep")).unwrap();
        fs::write(store.layer("deep").join("file"), [1; 100]).unwrap();
        let name = "x".repeat(250);
        let mut directory = File::open(store.layer("deep")).unwrap();
        for _ in 0..20 {
            rustix::fs::mkdirat(&directory, &name, Mode::RWXU).unwrap();
            let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
            directory = rustix::fs::openat(&directory, &name, flags, Mode::empty()).unwrap().into();
        }
        let opened = open_all(&store, &["deep".to_owned()], 600, &Report::default());
        assert_eq!(opened.len(), 1, "its path is longer than PATH_MAX");
        let (mut bytes, file) = (0, File::open(store.index("deep")).unwrap());
        index::read(BufReader::new(file), &mut |found| bytes += found.size).unwrap();
        assert_eq!(bytes, 100, "the file that can be read");
        fs::remove_dir_all(root).unwrap();
    }

    /// An index that is damaged is removed, so that the next pull makes another one. After an error of the disk, an outline would not
    /// be made again.
    #[test]
    fn only_an_index_with_damage_is_removed() {
        let root = std::env::temp_dir().join(format!("coracle-index-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let store = Store::open(&root).unwrap();
        fs::create_dir_all(store.layer("layer")).unwrap();
        let layers = [Layer::open(&store, "layer".to_owned()).unwrap()];
        let path = store.index("layer");
        let contents = coracle_chunked::Contents::default();
        let find = || find(&store, &layers, &mut Wanted::new(&contents));
        let whole = Writer::new(Vec::new()).unwrap().finish();
        for (about, bytes, is_kept) in [
            ("whole", &whole[..], true),
            ("cut off", &whole[..5], false),
            ("another version", b"coridx\0\x09", false),
            ("a path that is cut off", &[&whole[..], &[9, 1]].concat(), false),
        ] {
            fs::write(&path, bytes).unwrap();
            find();
            assert_eq!(path.exists(), is_kept, "{about}");
        }
        let _ = fs::remove_file(&path);
        fs::create_dir(&path).unwrap();
        find();
        assert!(!path.exists(), "a directory");
        std::os::unix::fs::symlink(&path, &path).unwrap();
        find();
        assert!(path.symlink_metadata().is_err(), "a link");
        // A socket cannot be opened, as no file can with too many open ones.
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        find();
        assert!(path.symlink_metadata().is_ok(), "an error that is not damage");
        fs::remove_dir_all(root).unwrap();
    }
}
