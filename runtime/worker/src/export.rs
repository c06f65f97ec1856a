//! Exports images as a tar archive with an OCI layout, from kept blobs. `coracle image import`, an import
//! directory and other tools can import the archive. Blobs are not compressed again, so all digests are
//! preserved.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use coracle_job::{ExportJob, ExportedImage, Failure};
use coracle_manifest::{self as manifest, Document, MANIFEST, digest_text};
use coracle_tar::BLOCK_BYTES;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::failure::{Context, io_failure};
use crate::fifo;
use crate::store::{Store, open_plain};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Writes the archive under a temporary name and renames it when it is complete.
pub(crate) fn run(job: &ExportJob, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Failure> {
    let store = Store::open(&job.root)?;
    if fs::metadata(&job.output).is_ok_and(|about| about.file_type().is_fifo()) {
        // A process reads it while it is written.
        let open = || fifo::open_to_write(&job.output);
        return write(job, &store, (&job.output, open), progress).map(drop);
    }
    let aside = job.output.with_extension(format!("partial-{}", std::process::id()));
    let written = write(job, &store, (&aside, || File::create_new(&aside)), progress)
        .and_then(|file| file.sync_all().map_err(|error| io_failure("write", &aside, &error)))
        .and_then(|()| fs::rename(&aside, &job.output).map_err(|error| io_failure("rename", &aside, &error)));
    if written.is_err() {
        // A second error would hide the first one.
        let _ = fs::remove_file(&aside);
    }
    written
}

/// Writes the archive; returns the complete file, which is not synced yet.
fn write(
    job: &ExportJob,
    store: &Store,
    (path, open): (&Path, impl FnOnce() -> io::Result<File>),
    progress: &mut dyn FnMut(u64, u64),
) -> Result<File, Failure> {
    let (mut manifests, mut blobs) = (Vec::new(), BTreeSet::new());
    for exported in &job.images {
        let found =
            describe(store, exported, &mut blobs).context(|| format!("image {}", exported.image.id))?;
        manifests.extend(found);
    }
    let failed = |error: &io::Error| io_failure("write", path, error);
    // Only now: what cannot be exported leaves no file, and keeps no reader waiting for its end.
    let mut archive = open().map_err(|error| failed(&error))?;
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests }).to_string();
    for (name, text) in [("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#), ("index.json", &index)] {
        coracle_tar::append_file(&mut archive, name, text.len() as u64, text.as_bytes())
            .map_err(|error| failed(&error))?;
    }
    let (mut done, total) = (0, blobs.len() as u64);
    for digest in &blobs {
        let blob = open_plain(&store.blob(digest)?)?;
        let bytes = blob.metadata().map_or(0, |about| about.len());
        let mut hashed = Hashed { inner: blob, hash: Sha256::new(), pulse: &mut || progress(done, total) };
        coracle_tar::append_file(
            &mut archive,
            &format!("blobs/{}", digest.replace(':', "/")),
            bytes,
            &mut hashed,
        )
        .map_err(|error| failed(&error))?;
        let found = digest_text(&hashed.hash.finalize());
        if found != *digest {
            return Err(Failure::invalid(format!(
                "blob {digest}: its content has digest {found}: check the images"
            )));
        }
        done += 1;
    }
    archive.write_all(&[0; 2 * BLOCK_BYTES]).map_err(|error| failed(&error))?;
    Ok(archive)
}

/// Adds the blobs of one image to `blobs`; returns the descriptors for the index, one for each name of the
/// image.
fn describe(
    store: &Store,
    exported: &ExportedImage,
    blobs: &mut BTreeSet<String>,
) -> Result<Vec<Value>, Failure> {
    let image = &exported.image;
    let mut documents = Vec::new();
    for digest in &image.blobs {
        let Some(bytes) = store.document(digest)? else { continue };
        if let Ok(document) = manifest::parse(&bytes) {
            documents.push((digest, bytes, document));
        }
    }
    let own = documents.iter().find_map(|(digest, _, document)| match document {
        Document::Manifest { config, layers } if config.digest == image.id => Some((*digest, layers)),
        Document::Manifest { .. } | Document::Index(_) => None,
    });
    let Some((digest, layers)) = own else {
        return Err(Failure::invalid(
            "its layers were not kept when it was imported: set keep_blobs = true, remove the image and import it again",
        ));
    };
    for layer in layers {
        if !store.blob(&layer.digest)?.is_file() {
            let text = format!(
                "its compressed layer {} was not kept: set keep_blobs = true and partial_pulls = false, remove the image and pull \
                 or import it again",
                layer.digest
            );
            return Err(Failure::invalid(text));
        }
        blobs.insert(layer.digest.clone());
    }
    blobs.extend(image.blobs.iter().cloned());
    // The document of the pulled name: if it was an index, the index is referenced, so that the digest is
    // preserved.
    let top = documents.iter().find(|(_, _, document)| match document {
        Document::Index(manifests) => manifests.iter().any(|manifest| manifest.digest == *digest),
        Document::Manifest { .. } => false,
    });
    let top = top.or_else(|| documents.iter().find(|(own, _, _)| *own == digest));
    let Some((digest, bytes, document)) = top else { return Ok(Vec::new()) };
    let usual = if matches!(document, Document::Index(_)) { INDEX } else { MANIFEST };
    let said = serde_json::from_slice::<Value>(bytes).ok();
    let kind = said.as_ref().and_then(|json| json.get("mediaType")?.as_str()).unwrap_or(usual);
    let one = |name: Option<&String>| {
        let mut descriptor = json!({ "mediaType": kind, "digest": digest, "size": bytes.len() });
        if let Some(name) = name {
            descriptor["annotations"] =
                json!({ "io.containerd.image.name": name, "org.opencontainers.image.ref.name": name });
        }
        descriptor
    };
    Ok(match exported.names.is_empty() {
        true => vec![one(None)],
        false => exported.names.iter().map(|name| one(Some(name))).collect(),
    })
}

/// A reader that computes the digest of the bytes that are read.
struct Hashed<'a> {
    inner: File,
    hash: Sha256,
    /// Called before each read: a blob may take longer than a worker may be silent.
    pulse: &'a mut dyn FnMut(),
}

impl Read for &mut Hashed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (self.pulse)();
        let count = self.inner.read(buffer)?;
        self.hash.update(&buffer[..count]);
        Ok(count)
    }
}
