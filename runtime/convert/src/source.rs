//! Reads images from an archive of `docker save` or in OCI format, or from a directory with an OCI layout. Archives may be compressed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coracle_decompress::{Compression, MAGIC_BYTES, decompress};
use coracle_tar::{Kind, Reader};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::convert::{CONFIG, MANIFEST};
use crate::failure::{Context, Failure};
use crate::table::digest_text;

/// Maximum length in bytes of a manifest, index or configuration, as on a node.
const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// Buffer size in bytes for writing the archive of a layer.
const BUFFER_BYTES: usize = 256 << 10;
/// Maximum number of links that lead to each other.
const LINKS_MAX: usize = 4;
/// Annotations with the name of an image in an index.
pub(crate) const NAMES: [&str; 2] = ["io.containerd.image.name", "org.opencontainers.image.ref.name"];

/// Place of the bytes of a file.
#[derive(Clone, Debug)]
enum Place {
    /// A part of the archive: offset and length in bytes.
    Archive(u64, u64),
    /// A file of the directory.
    File(PathBuf),
}

/// The images of an archive or a directory.
pub(crate) struct Source {
    path: PathBuf,
    archive: Option<File>,
    /// Files by their names in the archive or directory; blobs of docker archives by `blobs/sha256/HEX`, too.
    places: BTreeMap<String, Place>,
    /// Documents that docker archives do not have, by digest.
    made: BTreeMap<String, Vec<u8>>,
    /// The descriptors of the images.
    pub(crate) images: Vec<Value>,
}

impl Source {
    /// Opens the archive or directory at `path`.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let name = || path.display();
        let mut source = Self {
            path: path.to_owned(),
            archive: None,
            places: BTreeMap::new(),
            made: BTreeMap::new(),
            images: Vec::new(),
        };
        let about = fs::metadata(path).context(name)?;
        if about.is_dir() {
            source.list_directory(path).context(name)?;
        } else if !about.is_file() {
            return Err(Failure::new(format!("{}: it is neither a file nor a directory", path.display())));
        } else {
            source.list_archive(File::open(path).context(name)?).context(name)?;
        }
        let has = |name: &str| source.places.contains_key(name);
        match (has("index.json"), has("manifest.json")) {
            (true, _) => source.images = list(&source.json("index.json")?, "manifests"),
            (false, true) => source.docker()?,
            (false, false) => {
                return Err(Failure::new(format!(
                    "{}: it contains neither index.json nor manifest.json",
                    path.display()
                )));
            }
        }
        Ok(source)
    }

    fn list_directory(&mut self, path: &Path) -> io::Result<()> {
        let mut folders = vec![path.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    folders.push(entry.path());
                    continue;
                }
                // Build tools link blobs; what is read is verified. Others than files are not opened.
                let is_file = fs::metadata(entry.path()).is_ok_and(|about| about.is_file());
                if is_file && let Ok(name) = entry.path().strip_prefix(path) {
                    self.places.insert(name.display().to_string(), Place::File(entry.path()));
                }
            }
        }
        Ok(())
    }

    fn list_archive(&mut self, mut file: File) -> Result<(), Failure> {
        let mut magic = Vec::new();
        (&file).take(MAGIC_BYTES as u64).read_to_end(&mut magic).context(|| "read")?;
        file.rewind().context(|| "read")?;
        if Compression::of(&magic) != Compression::None {
            let mut plain = aside(&self.path)?;
            let mut from = decompress(&file).context(|| "decompress")?;
            io::copy(&mut from, &mut plain).context(|| "decompress")?;
            drop(from);
            plain.rewind().context(|| "read")?;
            file = plain;
        }
        let mut links = Vec::new();
        {
            let mut reader = Reader::new(BufReader::new(&file));
            while let Some(entry) = reader.next().context(|| "read")? {
                let name = plain_name(&entry.path);
                match entry.kind {
                    Kind::File => {
                        self.places.insert(name, Place::Archive(reader.position(), entry.size));
                    }
                    Kind::HardLink => links.push((name, plain_name(&entry.link))),
                    Kind::Symlink => {
                        // Old versions of docker link equal layers: `../ID/layer.tar`.
                        let folder = Path::new(&name).parent().unwrap_or(Path::new(""));
                        let target = folder.join(String::from_utf8_lossy(&entry.link).into_owned());
                        links.push((name, plain_name(target.display().to_string().as_bytes())));
                    }
                    _ => {}
                }
            }
        }
        // A link may come before its target, or lead to another one.
        for (name, target) in links.iter().cycle().take(links.len() * LINKS_MAX).cloned() {
            if let Some(place) = self.places.get(&target).cloned() {
                self.places.insert(name, place);
            }
        }
        self.archive = Some(file);
        Ok(())
    }

    /// Makes manifests for the images of a docker archive.
    fn docker(&mut self) -> Result<(), Failure> {
        let Value::Array(images) = self.json("manifest.json")? else {
            return Err(Failure::new(format!("{}: manifest.json is not a list", self.path.display())));
        };
        for image in images {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let config = self.stored(&text(&image["Config"]), CONFIG)?;
            let mut layers = Vec::new();
            for layer in list(&image, "Layers") {
                layers.push(self.stored(&text(&layer), "application/vnd.oci.image.layer.v1.tar")?);
            }
            let manifest =
                json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers });
            let manifest = manifest.to_string().into_bytes();
            let digest = digest_text(&Sha256::digest(&manifest));
            let descriptor = json!({ "mediaType": MANIFEST, "digest": digest, "size": manifest.len() });
            self.made.insert(digest, manifest);
            let names = list(&image, "RepoTags");
            for name in &names {
                let mut named = descriptor.clone();
                named["annotations"] = NAMES.iter().map(|key| ((*key).to_owned(), name.clone())).collect();
                self.images.push(named);
            }
            if names.is_empty() {
                self.images.push(descriptor);
            }
        }
        Ok(())
    }

    /// The descriptor of a file of a docker archive, which becomes a blob.
    fn stored(&mut self, name: &str, media_type: &str) -> Result<Value, Failure> {
        let place = self.place(&plain_name(name.as_bytes()))?.clone();
        let mut from = Hashed::new(self.read(&place)?);
        let bytes = io::copy(&mut from, &mut io::sink()).context(|| name)?;
        let digest = from.digest();
        self.places.insert(blob_name(&digest), place);
        Ok(json!({ "mediaType": media_type, "digest": digest, "size": bytes }))
    }

    fn place(&self, name: &str) -> Result<&Place, Failure> {
        let missing = || Failure::new(format!("{}: {name} is missing", self.path.display()));
        self.places.get(name).ok_or_else(missing)
    }

    fn read(&self, place: &Place) -> Result<Box<dyn Read + '_>, Failure> {
        Ok(match (place, &self.archive) {
            (Place::File(path), _) => Box::new(File::open(path).context(|| path.display())?),
            (Place::Archive(offset, bytes), Some(archive)) => {
                Box::new(Part { file: archive, position: *offset, left: *bytes })
            }
            (Place::Archive(..), None) => Box::new(io::empty()),
        })
    }

    fn json(&self, name: &str) -> Result<Value, Failure> {
        let mut bytes = Vec::new();
        let from = self.read(self.place(name)?)?;
        from.take(DOCUMENT_BYTES_MAX).read_to_end(&mut bytes).context(|| name)?;
        serde_json::from_slice(&bytes).context(|| format!("{}: {name}", self.path.display()))
    }

    /// Whether the archive has the blob of a descriptor.
    pub(crate) fn has(&self, digest: &str) -> bool {
        self.made.contains_key(digest) || self.places.contains_key(&blob_name(digest))
    }

    /// Opens a blob.
    pub(crate) fn blob(&self, digest: &str) -> Result<Box<dyn Read + '_>, Failure> {
        match self.made.get(digest) {
            Some(document) => Ok(Box::new(document.as_slice())),
            None => self.read(self.place(&blob_name(digest))?),
        }
    }

    /// Reads a document, and verifies its digest.
    pub(crate) fn document(&self, digest: &str) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        self.blob(digest)?.take(DOCUMENT_BYTES_MAX).read_to_end(&mut bytes).context(|| digest)?;
        let found = digest_text(&Sha256::digest(&bytes));
        match found == digest {
            true => Ok(bytes),
            false => Err(Failure::new(format!("{}: {digest} has the digest {found}", self.path.display()))),
        }
    }

    /// Decompresses a layer to a file without a name, and verifies its diff ID.
    pub(crate) fn layer(&self, digest: &str, diff_id: &str, near: &Path) -> Result<File, Failure> {
        let file = aside(near)?;
        let mut into = BufWriter::with_capacity(BUFFER_BYTES, &file);
        let mut from = Hashed::new(decompress(self.blob(digest)?).context(|| digest)?);
        io::copy(&mut from, &mut into).and_then(|_| into.flush()).context(|| format!("layer {digest}"))?;
        drop(into);
        let found = from.digest();
        match found == diff_id {
            true => Ok(file),
            false => Err(Failure::new(format!("layer {digest} has the diff ID {found} and not {diff_id}"))),
        }
    }
}

/// Name of a blob in an OCI layout.
pub(crate) fn blob_name(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}

/// The members of a list of an object; empty if there is none.
pub(crate) fn list(object: &Value, key: &str) -> Vec<Value> {
    object[key].as_array().cloned().unwrap_or_default()
}

fn plain_name(name: &[u8]) -> String {
    String::from_utf8_lossy(&coracle_tar::clean(name)).into_owned()
}

/// Creates a file without a name in the directory of `near`, which is the one of the result: a directory for temporary files may be
/// in memory.
pub(crate) fn aside(near: &Path) -> Result<File, Failure> {
    /// Number of names that are tried in a directory.
    const NAMES_MAX: u32 = 20;
    let directory = near.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let places = [directory.to_owned(), std::env::temp_dir()];
    for number in 0.. {
        // The second one if the first cannot be written.
        let directory = &places[usize::from(number >= NAMES_MAX)];
        let path = directory.join(format!(".coracle-convert-{}-{number}", std::process::id()));
        match File::options().read(true).write(true).create_new(true).open(&path) {
            Ok(file) => {
                fs::remove_file(&path).context(|| path.display())?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 2 * NAMES_MAX => {}
            Err(_) if number < NAMES_MAX => {}
            Err(error) => return Err(Failure::new(format!("{}: {error}", path.display()))),
        }
    }
    Err(Failure::new("no name for a temporary file is left"))
}

/// A reader that hashes what is read.
pub(crate) struct Hashed<R> {
    from: R,
    hash: Sha256,
}

impl<R> Hashed<R> {
    pub(crate) fn new(from: R) -> Self {
        Self { from, hash: Sha256::new() }
    }

    /// The digest of what was read.
    pub(crate) fn digest(self) -> String {
        digest_text(&self.hash.finalize())
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        self.hash.update(&buffer[..count]);
        Ok(count)
    }
}

/// A part of a file.
struct Part<'a> {
    file: &'a File,
    position: u64,
    left: u64,
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = self.file.read_at(&mut buffer[..most], self.position)?;
        if count == 0 && most > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.position += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}
