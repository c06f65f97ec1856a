//! Writes an archive with an OCI layout.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use coracle_tar::BLOCK_BYTES;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::convert::INDEX;
use crate::failure::{Context, Failure};
use crate::source::{Hashed, blob_name};
use crate::table::digest_text;

/// The archive while it is written, under a temporary name.
pub(crate) struct Archive {
    path: PathBuf,
    aside: PathBuf,
    into: BufWriter<File>,
    digests: BTreeSet<String>,
}

impl Archive {
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        // A link leads to the file that is replaced.
        let path = match fs::canonicalize(path) {
            Ok(path) if path.is_file() => path,
            Ok(path) => return Err(Failure::new(format!("{}: it exists and is no file", path.display()))),
            Err(_) => path.to_owned(),
        };
        // Process IDs repeat in containers.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".partial-{}-{}", std::process::id(), now.as_nanos()));
        let aside = path.with_file_name(name);
        let file = File::create_new(&aside).context(|| aside.display())?;
        let mut archive = Self { path, aside, into: BufWriter::new(file), digests: BTreeSet::new() };
        let layout = br#"{"imageLayoutVersion":"1.0.0"}"#;
        archive.append("oci-layout", layout.len() as u64, &layout[..])?;
        Ok(archive)
    }

    /// Adds a blob once, and verifies it.
    pub(crate) fn blob(&mut self, digest: &str, bytes: u64, from: impl Read) -> Result<(), Failure> {
        if !self.digests.insert(digest.to_owned()) {
            return Ok(());
        }
        let mut from = Hashed::new(from);
        self.append(&blob_name(digest), bytes, &mut from)?;
        let found = from.digest();
        match found == digest {
            true => Ok(()),
            false => Err(Failure::new(format!("{digest}: its content has the digest {found}"))),
        }
    }

    /// Adds a document; returns its digest.
    pub(crate) fn document(&mut self, text: &[u8]) -> Result<String, Failure> {
        let digest = digest_text(&Sha256::digest(text));
        self.blob(&digest, text.len() as u64, text)?;
        Ok(digest)
    }

    /// Adds the index of the images and gives the archive its name.
    pub(crate) fn finish(mut self, images: &[Value]) -> Result<(), Failure> {
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": images }).to_string();
        self.append("index.json", index.len() as u64, index.as_bytes())?;
        let name = || self.path.display().to_string();
        self.into.write_all(&[0; 2 * BLOCK_BYTES]).context(name)?;
        self.into.flush().context(name)?;
        self.into.get_ref().sync_all().context(name)?;
        fs::rename(&self.aside, &self.path).context(name)
    }

    fn append(&mut self, name: &str, bytes: u64, from: impl Read) -> Result<(), Failure> {
        coracle_tar::append_file(&mut self.into, name, bytes, from).context(|| self.path.display())
    }
}

impl Drop for Archive {
    fn drop(&mut self) {
        // After the rename there is no such file.
        let _ = fs::remove_file(&self.aside);
    }
}
