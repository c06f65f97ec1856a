//! `diff`: how many bytes a node with one image downloads for another one, by layer and by file. The plan is computed as by a node's
//! pull: with the same tables, chunks, ranges and rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use coracle_chunked::toc::{self, Location};
use coracle_chunked::{Average, Contents, Plan, REGISTRY_EXTENTS_MAX, Wanted, saves};
use coracle_decompress::decompress;
use serde_json::Value;

use crate::convert::{location, text};
use crate::failure::{Context, Failure};
use crate::layer::{self, Files};
use crate::source::{Source, list};

/// Number of files that are listed.
const FILES_MAX: usize = 20;

/// A platform, of which a value may be absent.
#[derive(Debug, Default)]
pub(crate) struct Platform {
    pub(crate) os: String,
    pub(crate) architecture: String,
    pub(crate) variant: String,
}

/// An image of one platform.
struct Image {
    layers: Vec<Value>,
    diff_ids: Vec<String>,
}

/// A layer of the new image and the bytes of it that are downloaded.
struct Moved {
    digest: String,
    size: u64,
    bytes: u64,
    why: String,
    files: Vec<Missing>,
}

/// A file of which a node has not all.
struct Missing {
    /// Number of bytes of the blob with its missing chunks.
    stored: u64,
    size: u64,
    path: String,
}

/// The download of a layer with a table.
struct Partial {
    bytes: u64,
    why: String,
    files: Vec<Missing>,
}

/// The text about an update from `old` to `new`.
pub(crate) fn run(old: &Path, new: &Path, platform: &Platform) -> Result<String, Failure> {
    let sources = [Source::open(old)?, Source::open(new)?];
    let [old_image, new_image] = [&sources[0], &sources[1]].map(|source| image(source, platform));
    let (old_image, new_image) = (old_image?, new_image?);
    // A node names a layer by its diff ID and those of all layers below.
    let equal =
        old_image.diff_ids.iter().zip(&new_image.diff_ids).take_while(|(old, new)| old == new).count();
    let mut donors =
        Donors { source: &sources[0], image: &old_image, near: new, files: None, archives: BTreeMap::new() };
    let mut rows = Vec::new();
    for (layer, number) in new_image.layers.iter().zip(0..) {
        let (digest, size) = (text(layer, "digest").to_owned(), layer["size"].as_u64().unwrap_or(0));
        let whole = |why: &str| Moved {
            digest: digest.clone(),
            size,
            bytes: size,
            why: why.to_owned(),
            files: Vec::new(),
        };
        rows.push(match location(layer) {
            _ if number < equal => Moved { bytes: 0, ..whole("the node has it") },
            None => whole("it has no table of contents: convert it"),
            Some(location) => {
                match table(&sources[1], &digest, &location) {
                    // As a node does.
                    Err(failure) => whole(&failure.to_string()),
                    Ok(contents) => match partial(&contents, &mut donors, &location, size)? {
                        Some(Partial { bytes, why, files }) => Moved { bytes, files, ..whole(&why) },
                        None => whole("the node has little of it"),
                    },
                }
            }
        });
    }
    Ok(describe(&rows))
}

/// The download of a layer with a table; `None`: the whole blob.
fn partial(
    contents: &Contents,
    donors: &mut Donors<'_>,
    location: &Location,
    size: u64,
) -> Result<Option<Partial>, Failure> {
    let mut wanted = Wanted::new(contents);
    donors.find(&mut wanted)?;
    donors.find_by_paths(contents, &mut wanted)?;
    let is_missing = |index: usize| wanted.place(index).is_none() && !contents.chunks()[index].is_zeros();
    let plan = Plan::new(contents, REGISTRY_EXTENTS_MAX, is_missing);
    let bytes = plan.bytes() + location.stored();
    if !saves(location.stored(), size) || !saves(plan.bytes(), size) {
        return Ok(None);
    }
    let mut files = Vec::new();
    for file in contents.files() {
        let missing = (file.first..).zip(file.chunks).filter(|(index, _)| is_missing(*index));
        let stored: u64 = missing.map(|(_, chunk)| chunk.end - chunk.begin).sum();
        if stored > 0 {
            let path = String::from_utf8_lossy(file.path).into_owned();
            files.push(Missing { stored, size: file.size, path });
        }
    }
    let why = format!("{} ranges, and {} bytes of its table", plan.extents().len(), location.stored());
    Ok(Some(Partial { bytes, why, files }))
}

/// The image of a platform.
fn image(source: &Source, platform: &Platform) -> Result<Image, Failure> {
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    for descriptor in &source.images {
        collect(source, descriptor, platform, &mut seen, &mut found)?;
    }
    // Several names of one image.
    found.dedup_by(|one, other| one.diff_ids == other.diff_ids);
    match found.pop() {
        Some(image) if found.is_empty() => Ok(image),
        Some(_) => Err(Failure::new("it has several images: name one platform by --platform")),
        None => Err(Failure::new(format!("it has no image for {}/{}", platform.os, platform.architecture))),
    }
}

fn collect(
    source: &Source,
    descriptor: &Value,
    platform: &Platform,
    seen: &mut BTreeSet<String>,
    found: &mut Vec<Image>,
) -> Result<(), Failure> {
    let digest = text(descriptor, "digest");
    if !source.has(digest) || !seen.insert(digest.to_owned()) {
        return Ok(());
    }
    let document: Value = serde_json::from_slice(&source.document(digest)?).context(|| digest)?;
    for member in list(&document, "manifests") {
        collect(source, &member, platform, seen, found)?;
    }
    let config = text(&document["config"], "digest");
    if config.is_empty() || !source.has(config) {
        return Ok(());
    }
    let Ok(config) = serde_json::from_slice::<Value>(&source.document(config)?) else { return Ok(()) };
    let is = |key: &str, wanted: &str| wanted.is_empty() || text(&config, key) == wanted;
    let diff_ids = list(&config["rootfs"], "diff_ids");
    let is_it = is("os", &platform.os)
        && is("architecture", &platform.architecture)
        && is("variant", &platform.variant);
    // The platform of attestations is unknown.
    if is_it && !diff_ids.is_empty() && text(&config, "os") != "unknown" {
        let diff_ids = diff_ids.iter().map(|id| id.as_str().unwrap_or_default().to_owned()).collect();
        found.push(Image { layers: list(&document, "layers"), diff_ids });
    }
    Ok(())
}

/// The layers of the image that a node has.
struct Donors<'a> {
    source: &'a Source,
    image: &'a Image,
    /// A place for decompressed archives.
    near: &'a Path,
    /// The chunks of each layer, once they are needed.
    files: Option<Vec<Files>>,
    /// The decompressed archives of layers by their numbers, once they are needed.
    archives: BTreeMap<u16, File>,
}

impl Donors<'_> {
    /// Finds the places of chunks by the tables of the layers.
    fn find(&mut self, wanted: &mut Wanted) -> Result<(), Failure> {
        let files = match self.files.take() {
            None => self.read()?,
            Some(files) => files,
        };
        for (files, number) in self.files.insert(files).iter().zip(0_u16..) {
            for (path, chunks) in files {
                // The paths are too long: the rest of the layer is not found, as on a node.
                let _ = wanted.hear_file(number, path, 0, chunks);
            }
        }
        Ok(())
    }

    /// Finds the places of chunks in files of the same path in the uppermost layer that a node would divide again.
    fn find_by_paths(&mut self, contents: &Contents, wanted: &mut Wanted) -> Result<(), Failure> {
        let average = Average::of(contents);
        let lacking = contents.files().filter(|file| wanted.lacking(file).is_some());
        let mut sizes: BTreeMap<Vec<u8>, u64> =
            lacking.map(|file| (coracle_tar::clean(file.path), file.size)).collect();
        let layers: Vec<_> = (0_u16..).zip(self.image.layers.iter().zip(&self.image.diff_ids)).collect();
        for (number, (layer, diff_id)) in layers.into_iter().rev() {
            // A layer without a table has no chunks here.
            let files = self.files.iter().flatten().nth(number.into()).filter(|files| !files.is_empty());
            let of_layer = files.map(average_of);
            let is_searched =
                |size: u64| of_layer.is_none_or(|of_layer| !of_layer.divides_alike(average, size));
            if !sizes.values().any(|size| is_searched(*size)) {
                continue;
            }
            let archive = match self.archives.remove(&number) {
                Some(archive) => archive,
                None => self.source.layer(text(layer, "digest"), diff_id, self.near)?,
            };
            let files = layer::files(&archive, |path| {
                sizes.get(&coracle_tar::clean(path)).is_some_and(|size| is_searched(*size))
            })?;
            for (path, chunks) in &files {
                let _ = wanted.hear_file(number, path, 0, chunks);
                sizes.remove(&coracle_tar::clean(path));
            }
            self.archives.insert(number, archive);
        }
        Ok(())
    }

    /// The chunks of all layers; those of a layer without a table are not known.
    fn read(&self) -> Result<Vec<Files>, Failure> {
        let mut all = Vec::new();
        for layer in &self.image.layers {
            let digest = text(layer, "digest");
            all.push(match location(layer) {
                Some(location) if location.check().is_ok() => {
                    let contents = table(self.source, digest, &location)?;
                    let chunks = |file: coracle_chunked::File<'_>| {
                        let chunks = file.chunks.iter().map(|chunk| (chunk.digest, chunk.size)).collect();
                        (file.path.to_vec(), chunks)
                    };
                    contents.files().map(chunks).collect()
                }
                _ => Files::new(),
            });
        }
        Ok(all)
    }
}

/// The average length of the chunks of long files.
fn average_of(files: &Files) -> Average {
    let mut average = Average::default();
    for (_, chunks) in files {
        average.add_file(chunks.iter().map(|(digest, size)| (*size, *digest == [0; 32])));
    }
    average
}

/// Reads the table of a layer.
fn table(source: &Source, digest: &str, location: &Location) -> Result<Contents, Failure> {
    location.check().context(|| "pulled whole")?;
    let mut blob = source.blob(digest)?;
    std::io::copy(&mut blob.by_ref().take(location.table.offset), &mut std::io::sink()).context(|| digest)?;
    let from = decompress(blob.take(location.table.length)).context(|| digest)?;
    Ok(toc::read(from, location.table.offset).context(|| format!("table of {digest}"))?.contents)
}

fn describe(rows: &[Moved]) -> String {
    let mut lines = String::from("layer                 size in bytes   downloaded   how\n");
    for row in rows {
        let digest: String = row.digest.chars().take(19).collect();
        let _ = writeln!(lines, "{digest:<19} {:>15} {:>12}   {}", row.size, row.bytes, row.why);
    }
    let (size, bytes) = rows.iter().fold((0, 0), |sum, row| (sum.0 + row.size, sum.1 + row.bytes));
    let part = if size > 0 { bytes as f64 * 100.0 / size as f64 } else { 0.0 };
    let _ = writeln!(lines, "{:<19} {size:>15} {bytes:>12}   {part:.1} %", "all");
    let mut files: Vec<_> = rows.iter().flat_map(|row| &row.files).collect();
    files.sort_by(|one, other| other.stored.cmp(&one.stored).then_with(|| one.path.cmp(&other.path)));
    if !files.is_empty() {
        lines.push_str("\n  downloaded   file size   file\n");
    }
    for Missing { stored, size, path } in files.iter().take(FILES_MAX) {
        let _ = writeln!(lines, "{stored:>12} {size:>11}   {path}");
    }
    if let Some(more) = files.len().checked_sub(FILES_MAX).filter(|more| *more > 0) {
        let _ = writeln!(lines, "and {more} more files");
    }
    lines
}
