//! The unpacked layers of the node as sources of chunks. Each that was pulled by a table of contents has an index of its chunks.
//!
//! Layers whose blobs had no table have none, and tables of different tools have chunks of different average lengths, of which few are equal.
//! So a file of which less than half was found by its chunks is looked for by its path in the layers of the same repository, and divided
//! again.

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;

use coracle_chunked::{Chunker, Contents, Place, Wanted, index};
use coracle_job::{Failure, FailureKind};
use coracle_sandbox::describe_io;
use rustix::fs::{Mode, OFlags};

use crate::failure::io_failure;
use crate::report::Report;
use crate::store::{Store, open_in_layer, open_plain};

/// Maximum number of layers in which chunks are looked for.
const LAYERS_MAX: usize = 512;
/// Maximum number of bytes of files that are divided again for one layer, because the pull waits meanwhile: some seconds on a board.
const DIVIDED_BYTES_MAX: u64 = 512 << 20;
/// Number of bytes as which the search of a file in a layer counts: it takes as long as reading them.
const SEARCH_BYTES: u64 = 4 << 10;
/// Buffer size in bytes for reading files.
const BUFFER_BYTES: usize = 64 << 10;

/// The layers of the node, which are opened when they are needed first.
pub(crate) struct Donors {
    /// Names of layers of images of the same repository, in which most chunks are found. `None`: no pull is partial.
    relatives: Option<Vec<String>>,
    layers: OnceLock<Vec<Layer>>,
}

/// An unpacked layer.
pub(super) struct Layer {
    pub(super) name: String,
    directory: OwnedFd,
    /// Whether the repository that is pulled from has an image with it.
    is_relative: bool,
}

impl Donors {
    pub(crate) fn new(relatives: Option<Vec<String>>) -> Self {
        Self { relatives, layers: OnceLock::new() }
    }

    /// Whether pulls are partial.
    pub(crate) fn are_used(&self) -> bool {
        self.relatives.is_some()
    }

    /// The layers, those of the same repository first. A layer that is removed meanwhile is left out, or its files are not found later.
    pub(super) fn layers(&self, store: &Store) -> &[Layer] {
        self.layers.get_or_init(|| match &self.relatives {
            None => Vec::new(),
            Some(relatives) => open_all(store, relatives),
        })
    }
}

/// Opens the layers of the same repository, and all others with an index.
fn open_all(store: &Store, relatives: &[String]) -> Vec<Layer> {
    let mut names: Vec<(String, bool)> = Vec::new();
    let indexed = fs::read_dir(store.index("")).into_iter().flatten().flatten();
    let others = indexed.filter_map(|entry| entry.file_name().into_string().ok());
    for name in relatives.iter().map(|name| (name.clone(), true)).chain(others.map(|name| (name, false))) {
        if names.iter().all(|(other, _)| *other != name.0) {
            names.push(name);
        }
    }
    let names = names.into_iter().take(LAYERS_MAX);
    names.filter_map(|(name, is_relative)| Layer::open(store, name, is_relative)).collect()
}

impl Layer {
    /// Opens the directory of a layer, if it exists.
    pub(super) fn open(store: &Store, name: String, is_relative: bool) -> Option<Self> {
        // By a link, if the layer is that of an additional store.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(store.present_layer(&name), flags, Mode::empty()).ok()?;
        Some(Self { name, directory, is_relative })
    }
}

/// Finds the places of the chunks of `contents` in these layers.
pub(super) fn find(store: &Store, layers: &[Layer], contents: &Contents, report: &Report) -> Wanted {
    let mut wanted = Wanted::new(contents);
    find_by_indexes(store, layers, &mut wanted);
    let mut reading = Reading { left: DIVIDED_BYTES_MAX, report };
    find_by_paths(layers, contents, &mut wanted, &mut reading);
    wanted
}

/// Divides the files again that have the paths of those of which little was found, in layers of the same repository.
fn find_by_paths(layers: &[Layer], contents: &Contents, wanted: &mut Wanted, reading: &mut Reading<'_>) {
    let relatives: Vec<_> = (0..).zip(layers).filter(|(_, layer)| layer.is_relative).collect();
    for file in contents.files() {
        if reading.left == 0 {
            return;
        }
        if !wanted.lacks(&file) {
            continue;
        }
        let path = coracle_tar::clean(file.path);
        // The upper layers of an image are the last ones, and hide files of those below.
        let opened = relatives.iter().rev().find_map(|(number, layer)| {
            reading.left = reading.left.saturating_sub(SEARCH_BYTES);
            Some((*number, open_in_layer(&layer.directory, &path).ok()?))
        });
        let Some((number, file)) = opened else { continue };
        let mut chunkers = [Chunker::default(), Chunker::short()];
        // Of a file that cannot be read to its end, the first chunks are known.
        let _ = divide(file, &mut chunkers, reading);
        for chunker in chunkers {
            // Without room for more paths, the places so far stay.
            let _ = wanted.hear_file(number, &path, &chunker.finish());
        }
    }
}

/// Finds the places of the wanted chunks by the indexes of these layers. An index that cannot be read ends only its own layer.
fn find_by_indexes(store: &Store, layers: &[Layer], wanted: &mut Wanted) {
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

/// The limit of a pull that divides files again.
struct Reading<'a> {
    /// Number of bytes.
    left: u64,
    report: &'a Report,
}

/// Passes a file, or its first bytes, to these chunkers, until one has more chunks than are used.
fn divide(file: File, chunkers: &mut [Chunker], reading: &mut Reading<'_>) -> io::Result<()> {
    let (mut file, mut buffer) = (file.take(reading.left), vec![0; BUFFER_BYTES]);
    loop {
        reading.report.pulse();
        let count = file.read(&mut buffer)?;
        if count == 0 || chunkers.iter().any(Chunker::is_full) {
            return Ok(());
        }
        chunkers.iter_mut().for_each(|chunker| chunker.update(&buffer[..count]));
        reading.left -= count as u64;
    }
}

#[cfg(test)]
mod tests {
    use coracle_chunked::outline;

    use super::*;

    /// An index that is damaged is removed, so that the next pull makes another one. After an error of the disk, an outline would not
    /// be made again.
    #[test]
    fn only_an_index_with_damage_is_removed() {
        let root = std::env::temp_dir().join(format!("coracle-index-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let store = Store::open(&root).unwrap();
        fs::create_dir_all(store.layer("layer")).unwrap();
        let layers = [Layer::open(&store, "layer".to_owned(), true).unwrap()];
        let path = store.index("layer");
        let contents = Contents::default();
        let find = || find_by_indexes(&store, &layers, &mut Wanted::new(&contents));
        let whole = index::Writer::new(Vec::new()).unwrap().finish();
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

    /// The contents of a layer with these files.
    fn contents_of(files: &[(&str, &[u8])]) -> Contents {
        let mut writer = outline::Writer::new(Vec::new(), u64::MAX);
        for (path, bytes) in files {
            writer.pass(&[1; 512]);
            writer.begin(path.as_bytes(), 0);
            writer.pass(bytes);
            writer.end();
            writer.pass(&vec![0; bytes.len().next_multiple_of(512) - bytes.len()]);
        }
        outline::contents(&writer.finish().unwrap()[..]).unwrap()
    }

    /// Bytes without a pattern (xorshift).
    fn noise(count: usize) -> Vec<u8> {
        let mut state = 7_u64;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        };
        (0..count).map(next).collect()
    }

    /// Each image chooses what is at a path, and each search is limited.
    #[test]
    fn a_file_is_divided_again_only_if_it_is_one_and_within_the_limit() {
        let root = std::env::temp_dir().join(format!("coracle-dividing-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let store = Store::open(&root).unwrap();
        let layer = store.layer("layer");
        fs::create_dir_all(layer.join("app")).unwrap();
        let bytes = noise(1_000_000);
        let contents = contents_of(&[("app/large", &bytes), ("app/short", b"one chunk"), ("absent", &bytes)]);
        let files: Vec<_> = contents.files().collect();
        fs::write(layer.join("app/short"), b"one chunk").unwrap();
        // The number of chunks of the large file that are found, and whether that of the short one is.
        let found = |is_relative: bool, left: u64| {
            let layers = [Layer::open(&store, "layer".to_owned(), is_relative).unwrap()];
            let (mut wanted, report) = (Wanted::new(&contents), Report::default());
            find_by_paths(&layers, &contents, &mut wanted, &mut Reading { left, report: &report });
            let is_found = |index: usize| wanted.place(index).is_some();
            let chunks = files[0].first..files[0].first + files[0].chunks.len();
            (chunks.filter(|index| is_found(*index)).count(), is_found(files[1].first))
        };
        let (path, count) = (layer.join("app/large"), files[0].chunks.len());
        assert!(count > 8, "{count} chunks");
        let mut changed = bytes.clone();
        changed[500_000] ^= 1;
        fs::write(&path, &changed).unwrap();
        assert_eq!(found(true, u64::MAX), (count - 1, true), "all but the changed chunk");
        assert_eq!(found(false, u64::MAX), (0, false), "an image of another repository");
        assert_eq!(found(true, SEARCH_BYTES), (0, false), "nothing may be read");
        let (half, is_found) = found(true, SEARCH_BYTES + 400_000);
        assert!(half > 0 && half < count - 1 && !is_found, "{half} of {count}: the first bytes");
        let elsewhere = root.join("elsewhere");
        fs::rename(&path, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert_eq!(found(true, u64::MAX), (0, true), "a link");
        fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert_eq!(found(true, u64::MAX), (0, true), "a FIFO");
        fs::remove_file(&path).unwrap();
        // Each byte of the file and each kibibyte of zeros is a chunk: more than are used.
        fs::write(&path, [&[1][..], &[0; 1024]].concat().repeat(100_000)).unwrap();
        assert_eq!(found(true, u64::MAX), (0, true), "many chunks");
        fs::remove_dir_all(root).unwrap();
    }
}
