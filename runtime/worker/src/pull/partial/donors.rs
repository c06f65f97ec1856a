//! The unpacked layers of the node as sources of chunks. Each that was pulled by a table of contents has an index of its chunks.
//!
//! Layers whose blobs had no table have none, and tables of different tools have chunks of different average lengths, of which few are equal.
//! So a file of which more than an eighth was not found by its chunks is looked for by its path in the layers of the same repository, and
//! divided again.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;

use coracle_chunked::{Average, Chunker, Contents, Division, Place, Problem, Wanted, index};
use coracle_job::{Failure, FailureKind};
use coracle_sandbox::describe_io;
use rustix::fs::{Mode, OFlags};

use crate::failure::io_failure;
use crate::report::Report;
use crate::store::{Store, open_in_layer, open_plain};

/// Maximum number of layers in which chunks are looked for.
const LAYERS_MAX: usize = 512;
/// Maximum number of bytes of files that are divided again for one layer, because the pull waits meanwhile: some ten seconds on a board.
const DIVIDED_BYTES_MAX: u64 = 512 << 20;
/// Maximum number of searches of a file in a layer: some seconds on a board.
const SEARCHES_MAX: usize = 1 << 17;
/// Maximum number of files of one path that are divided again: those of two releases.
const FILES_MAX: usize = 2;
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
    pub(super) is_relative: bool,
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

    /// Finds the places of the chunks of `contents` in the layers.
    pub(super) fn find(&self, store: &Store, contents: &Contents, report: &Report) -> Wanted {
        let (mut wanted, layers) = (Wanted::new(contents), self.layers(store));
        let indexed = find_by_indexes(store, layers, &mut wanted);
        // A table cannot make a pull work more than it would to unpack such a layer.
        let bytes = contents.bytes().saturating_mul(FILES_MAX as u64).min(DIVIDED_BYTES_MAX);
        let average = Average::of(contents);
        let (division, searches) = (contents.division(), SEARCHES_MAX);
        Search { layers, indexed, division, average, bytes, searches, found_in: None, report }
            .find(contents, &mut wanted);
        wanted
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

/// Finds the places of chunks in files of the same paths. The limits depend on nothing that other layers of the pull do, so that the same
/// chunks are found when a pull is resumed.
struct Search<'a> {
    layers: &'a [Layer],
    /// Numbers of the layers that have an index, with the average length of their chunks.
    indexed: BTreeMap<u16, Average>,
    division: Division,
    /// The average length of the wanted chunks.
    average: Average,
    /// Number of bytes that may still be read.
    bytes: u64,
    /// Number of searches of a file in a layer that may still be made.
    searches: usize,
    /// Number of the layer with the file that was found last: most files of a directory are in one layer.
    found_in: Option<u16>,
    report: &'a Report,
}

impl Search<'_> {
    /// Divides the files again that have the paths of those of which much is missing, in layers of the same repository.
    fn find(&mut self, contents: &Contents, wanted: &mut Wanted) {
        if !self.layers.iter().any(|layer| layer.is_relative) {
            return;
        }
        let mut lacking: Vec<(u64, coracle_chunked::File<'_>)> = Vec::new();
        for file in contents.files() {
            let Some(bytes) = wanted.lacking(&file) else { continue };
            match lacking.last_mut() {
                // An outline has several records of a long file.
                Some((sum, last)) if last.path == file.path => *sum = sum.saturating_add(bytes),
                _ => lacking.push((bytes, file)),
            }
        }
        // What is read first saves most.
        lacking.sort_unstable_by_key(|(bytes, file)| (Reverse(*bytes), file.first));
        lacking.iter().for_each(|(_, file)| self.find_file(file, wanted));
    }

    /// Divides the files again that have the path of this file.
    fn find_file(&mut self, file: &coracle_chunked::File<'_>, wanted: &mut Wanted) {
        let (path, layers, mut count) = (coracle_tar::clean(file.path), self.layers, 0);
        // The last one first, then from the layers of the newest image on, those above first, which hide files of those below.
        let found_in = self.found_in;
        let others = (0..layers.len() as u16).filter(|number| Some(*number) != found_in);
        for number in found_in.into_iter().chain(others) {
            let Some(layer) = layers.get(usize::from(number)).filter(|layer| layer.is_relative) else {
                continue;
            };
            let is_limited = self.bytes == 0 || self.searches == 0 || count == FILES_MAX;
            if is_limited || wanted.lacking(file).is_none() {
                return;
            }
            self.report.pulse();
            let indexed = self.indexed.get(&number);
            let is_alike = indexed.is_some_and(|average| average.divides_alike(self.average, file.size));
            if is_alike && self.division == Division::ByContent {
                continue;
            }
            self.searches -= 1;
            let Ok(opened) = open_in_layer(&layer.directory, &path) else { continue };
            count += 1;
            self.found_in = Some(number);
            // Of a file that cannot be read to its end, the first chunks are known.
            let chunkers = match (self.division, file.chunks.first()) {
                (Division::ByLength, Some(first)) => vec![Chunker::of_length(first.size)],
                _ => vec![Chunker::default(), Chunker::short()],
            };
            if self.divide(opened, chunkers, number, &path, wanted).is_err() {
                // There is no room for more paths.
                self.bytes = 0;
            }
        }
    }

    /// Divides a file by each of these chunkers.
    fn divide(
        &mut self,
        file: File,
        chunkers: Vec<Chunker>,
        layer: u16,
        path: &[u8],
        wanted: &mut Wanted,
    ) -> Result<(), Problem> {
        let (mut file, mut buffer) = (file.take(self.bytes), vec![0; BUFFER_BYTES]);
        let mut divided: Vec<(Chunker, u64)> = chunkers.into_iter().map(|chunker| (chunker, 0)).collect();
        loop {
            self.report.pulse();
            let count = file.read(&mut buffer).unwrap_or_default();
            if count == 0 {
                break;
            }
            self.bytes -= count as u64;
            for (chunker, offset) in &mut divided {
                chunker.update(&buffer[..count]);
                *offset = wanted.hear_file(layer, path, *offset, &chunker.take_all())?;
            }
        }
        for (chunker, offset) in divided {
            wanted.hear_file(layer, path, offset, &chunker.finish())?;
        }
        Ok(())
    }
}

/// Finds the places of the wanted chunks by the indexes of these layers; returns the numbers of the layers that have one, with the average
/// length of their chunks. An index that cannot be read ends only its own layer.
fn find_by_indexes(store: &Store, layers: &[Layer], wanted: &mut Wanted) -> BTreeMap<u16, Average> {
    let mut indexed = BTreeMap::new();
    for (layer, number) in layers.iter().zip(0_u16..) {
        let (mut result, mut average) = (Ok(()), Average::default());
        let mut hear = |found: index::Found<'_>| {
            average.add(found.offset, found.size, found.prefix == [0; 16]);
            if result.is_ok() {
                result = wanted.hear(number, &found);
            }
        };
        let path = store.index(&layer.name);
        if matches!(path.symlink_metadata(), Err(error) if error.kind() == ErrorKind::NotFound) {
            continue;
        }
        let read = open_plain(&path).and_then(|file| {
            let read = index::read(BufReader::with_capacity(BUFFER_BYTES, file), &mut hear);
            read.map_err(|error| match error.kind() {
                ErrorKind::InvalidData | ErrorKind::UnexpectedEof => {
                    Failure::invalid(format!("read {}: {}", path.display(), describe_io(&error)))
                }
                _ => io_failure("read", &path, &error),
            })
        });
        match read {
            Ok(()) => drop(indexed.insert(number, average)),
            Err(failure) => {
                eprintln!("index of layer {}: {}", layer.name, failure.message);
                // Any other error may pass, and an outline is not made again.
                if failure.kind == FailureKind::Invalid {
                    discard(&path);
                }
            }
        }
    }
    indexed
}

/// Removes an index with damage, or what a crash or another program has left in its place: files of its layer are found by their paths.
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

#[cfg(test)]
mod tests {
    use coracle_chunked::outline;

    use super::*;

    /// The repository may have any number of old releases.
    #[test]
    fn files_of_two_layers_are_divided_the_first_of_them_first() {
        let root = std::env::temp_dir().join(format!("coracle-releases-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let store = Store::open(&root).unwrap();
        let bytes = noise(300_000);
        for (name, content) in [("one", &bytes[1..1000]), ("two", &bytes[2..1000]), ("same", &bytes[..])] {
            fs::create_dir_all(store.layer(name)).unwrap();
            fs::write(store.layer(name).join("file"), content).unwrap();
        }
        let contents = contents_of(&[("file", &bytes)]);
        let is_found = |names: [&str; 3]| {
            let donors = Donors::new(Some(names.map(str::to_owned).to_vec()));
            let wanted = donors.find(&store, &contents, &Report::default());
            wanted.lacking(&contents.files().next().unwrap()).is_none()
        };
        assert!(is_found(["same", "one", "two"]) && is_found(["one", "same", "two"]));
        assert!(!is_found(["one", "two", "same"]));
        fs::remove_dir_all(root).unwrap();
    }

    /// Zeros are in no file, so that they say nothing about it.
    #[test]
    fn a_file_of_which_most_are_zeros_is_divided_again() {
        let root = std::env::temp_dir().join(format!("coracle-zeros-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let store = Store::open(&root).unwrap();
        fs::create_dir_all(store.layer("layer")).unwrap();
        let bytes = [vec![0; 3_000_000], noise(400_000)].concat();
        fs::write(store.layer("layer").join("file"), &bytes).unwrap();
        let contents = contents_of(&[("file", &bytes)]);
        let wanted = Donors::new(Some(vec!["layer".to_owned()])).find(&store, &contents, &Report::default());
        let file = contents.files().next().unwrap();
        assert_eq!(wanted.lacking(&file), None);
        assert!((1..contents.chunks().len()).all(|index| wanted.place(index).is_some()));
        fs::remove_dir_all(root).unwrap();
    }

    /// An index that is damaged is removed. After an error of the disk, an outline would not be made again.
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
            writer.begin(path.as_bytes(), 0, bytes.len() as u64);
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
        let contents =
            contents_of(&[("app/short", b"one chunk"), ("absent", &bytes[..500_000]), ("app/large", &bytes)]);
        let files: Vec<_> = contents.files().collect();
        fs::write(layer.join("app/short"), b"one chunk").unwrap();
        // The number of chunks of the large file that are found, and whether that of the short one is.
        let search = |is_relative: bool, is_indexed: bool, bytes: u64, searches: usize| {
            let layers = [Layer::open(&store, "layer".to_owned(), is_relative).unwrap()];
            let (mut wanted, report) = (Wanted::new(&contents), Report::default());
            let mut average = Average::default();
            (0..200).for_each(|_| average.add(1 << 20, 30_000, false));
            let indexed = is_indexed.then_some((0, average)).into_iter().collect();
            let mut search = Search {
                layers: &layers,
                indexed,
                average,
                division: Division::ByContent,
                bytes,
                searches,
                found_in: None,
                report: &report,
            };
            search.find(&contents, &mut wanted);
            let is_found = |index: usize| wanted.place(index).is_some();
            let chunks = files[2].first..files[2].first + files[2].chunks.len();
            (chunks.filter(|index| is_found(*index)).count(), is_found(files[0].first))
        };
        let found = |is_relative, bytes| search(is_relative, false, bytes, usize::MAX);
        let (path, count) = (layer.join("app/large"), files[2].chunks.len());
        assert!(count >= 16, "{count} chunks");
        let mut changed = bytes.clone();
        changed[500_000] ^= 1;
        fs::write(&path, &changed).unwrap();
        assert_eq!(found(true, u64::MAX), (count - 1, true), "all but the changed chunk");
        assert_eq!(found(false, u64::MAX), (0, false), "an image of another repository");
        assert_eq!(search(true, true, u64::MAX, usize::MAX), (0, false), "its index has all chunks");
        assert_eq!(found(true, 0), (0, false), "nothing may be read");
        assert_eq!(search(true, false, u64::MAX, 1), (count - 1, false), "one may be searched");
        let (half, is_found) = found(true, 400_000);
        assert!(half > 0 && half < count - 1 && !is_found, "{half} of {count}: the first bytes");
        let elsewhere = root.join("elsewhere");
        fs::rename(&path, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert_eq!(found(true, u64::MAX), (0, true), "a link");
        fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert_eq!(found(true, u64::MAX), (0, true), "a FIFO");
        fs::remove_file(&path).unwrap();
        // Each byte of the file and each kibibyte of zeros is a chunk.
        fs::write(&path, [&[1][..], &[0; 1024]].concat().repeat(100_000)).unwrap();
        assert_eq!(found(true, u64::MAX), (0, true), "many chunks");
        fs::remove_dir_all(root).unwrap();
    }
}
