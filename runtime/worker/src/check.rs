//! Verifies an image in the store, and repairs what can be repaired without a registry.
//!
//! | part | is intact if | is repaired by |
//! |---|---|---|
//! | manifest, config, kept blob of a layer | its digest equals its name | nothing: it is removed, and the image must be pulled again |
//! | unpacked layer with a kept blob | it equals a newly unpacked tree of the blob | replacing it by the new tree |
//! | unpacked layer without a blob | unknown; it is only checked that every file can be read | nothing |
//! | copies of /etc/passwd and /etc/group | they equal the files in the layers | new copies |
//!
//! A layer that a container uses is verified but not replaced.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use coracle_job::{CheckJob, Failure, Finding, Layer};
use coracle_sandbox::describe_io;

use crate::failure::io_failure;
use crate::import::digest_of_file;
use crate::pull::manifest::{self, Document};
use crate::store::{Store, open_plain};
use crate::{remove_trees, unpack, users};

/// Buffer size in bytes for the comparison of two files.
const BUFFER_BYTES: usize = 64 << 10;

/// Checks every part of the image; calls `pulse` repeatedly during the check. Returns the findings, and the
/// number of layers that could be read but not compared with a blob.
pub(crate) fn run(
    job: &CheckJob,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Result<(Vec<Finding>, u32), Failure> {
    let store = Store::open(&job.root)?;
    let mut check = Check { job, store, findings: Vec::new(), good: BTreeSet::new(), not_compared: 0 };
    for digest in &job.image.blobs {
        pulse(0);
        check.blob(digest)?;
    }
    let blobs = check.layer_blobs();
    for (number, layer) in job.image.layers.iter().enumerate() {
        let blob = blobs.get(number).filter(|digest| check.good.contains(*digest)).cloned();
        check.layer(number, layer, blob, pulse)?;
    }
    check.users()?;
    Ok((check.findings, check.not_compared))
}

struct Check<'a> {
    job: &'a CheckJob,
    store: Store,
    findings: Vec<Finding>,
    /// Digests of blobs that are intact.
    good: BTreeSet<String>,
    /// Number of layers without a blob in which no damage was found.
    not_compared: u32,
}

impl Check<'_> {
    fn found(&mut self, what: String, is_repaired: bool) {
        self.findings.push(Finding { what, is_repaired });
    }

    fn blob(&mut self, digest: &str) -> Result<(), Failure> {
        let path = self.store.blob(digest)?;
        let why = match digest_of_file(&path) {
            Ok(found) if found == digest => {
                self.good.insert(digest.to_owned());
                return Ok(());
            }
            Ok(found) => format!("its content has digest {found}"),
            Err(failure) => failure.message,
        };
        self.found(format!("blob {digest}: {why}"), false);
        if self.job.repair {
            remove_trees::run(&[path])?;
        }
        Ok(())
    }

    /// Digests of the layers' blobs from the image's manifest, lowest first; none if the manifest is damaged.
    fn layer_blobs(&self) -> Vec<String> {
        let image = &self.job.image;
        let parsed =
            self.good.iter().filter_map(|digest| manifest::parse(&self.store.document(digest)?).ok());
        let layers = parsed.filter_map(|document| match document {
            Document::Manifest { config, layers } if config.digest == image.id => Some(layers),
            Document::Manifest { .. } | Document::Index(_) => None,
        });
        let layers = layers.into_iter().find(|layers| layers.len() == image.layers.len());
        layers.into_iter().flatten().map(|layer| layer.digest).collect()
    }

    fn layer(
        &mut self,
        number: usize,
        layer: &Layer,
        blob: Option<String>,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), Failure> {
        let path = self.store.layer(&layer.name);
        let fresh = match &blob {
            Some(blob) => Some(self.unpack(number, layer, &self.store.blob(blob)?, pulse)?),
            None => None,
        };
        let difference = compare(&path, fresh.as_deref(), pulse);
        let outcome = match (&difference, &fresh) {
            (Some(why), fresh) => self.repair(layer, &path, why, fresh.as_deref()),
            (None, Some(_)) => Ok(()),
            (None, None) => {
                self.not_compared += 1;
                Ok(())
            }
        };
        match fresh {
            Some(fresh) => remove_trees::run(&[fresh]).and(outcome),
            None => outcome,
        }
    }

    /// Checks the copies of the user files. Called after the check of the layers, with which they are
    /// compared.
    fn users(&mut self) -> Result<(), Failure> {
        let layers = self.job.image.layers.iter().rev();
        let layers: Vec<PathBuf> = layers.map(|layer| self.store.layer(&layer.name)).collect();
        let id = &self.job.image.id;
        let is_repairable = self.findings.iter().all(|finding| finding.is_repaired);
        let good = is_repairable.then_some(&layers[..]);
        let Some(why) = users::damage(&self.store, id, good)? else { return Ok(()) };
        if self.job.repair && is_repairable {
            users::repair(&self.store, id, &layers)?;
        }
        self.found(format!("names of users: {why}"), self.job.repair && is_repairable);
        Ok(())
    }

    fn unpack(
        &self,
        number: usize,
        layer: &Layer,
        blob: &Path,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<PathBuf, Failure> {
        let directory = self.store.new_layer()?;
        let below = self.job.image.layers[..number].iter().rev();
        let below: Vec<PathBuf> =
            below.map(|layer| self.store.layer(&layer.name)).filter(|path| path.is_dir()).collect();
        let unpacked = open_plain(blob)
            .and_then(|blob| unpack::unpack_verified(&directory, blob, layer, &self.job.limits, pulse))
            .and_then(|implied| unpack::copy_attributes(&directory, &implied, &below));
        match unpacked {
            Ok(()) => Ok(directory),
            Err(failure) => {
                // A second error would hide the first one; the daemon removes such directories when it
                // starts.
                let _ = remove_trees::run(&[directory]);
                Err(self.store.explain(failure))
            }
        }
    }

    fn repair(&mut self, layer: &Layer, path: &Path, why: &str, fresh: Option<&Path>) -> Result<(), Failure> {
        let what = format!("layer {}: {why}", layer.name);
        if !self.job.repair {
            self.found(what, false);
        } else if self.job.in_use.contains(&layer.name) {
            self.found(format!("{what}: in use by a container, which must be removed first"), false);
        } else {
            // Replaced by renames, so that the layer is complete or absent at every moment.
            let aside = self.store.new_layer()?;
            match fs::rename(path, aside.join("broken")) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(io_failure("rename", path, &error));
                }
                Ok(()) | Err(_) => {}
            }
            if let Some(fresh) = fresh {
                self.store.publish(fresh, path)?;
            }
            self.found(what, fresh.is_some());
            remove_trees::run(&[aside])?;
        }
        Ok(())
    }
}

/// Returns the first difference between a layer and the expected tree; without an expected tree, the first
/// file that cannot be read. The trees must not change during the call; symbolic links are not followed.
fn compare(found: &Path, expected: Option<&Path>, pulse: &mut (dyn FnMut(u64) + Send)) -> Option<String> {
    let mut waiting = vec![PathBuf::new()];
    while let Some(below) = waiting.pop() {
        pulse(0);
        if let Some(why) = compare_one(found, expected, &below, &mut waiting).unwrap_or_else(|error| {
            // The host's path is too long, although the path in the image is not.
            (error.raw_os_error() != Some(nix::errno::Errno::ENAMETOOLONG as i32))
                .then(|| describe_io(&error))
        }) {
            return Some(format!("/{}: {why}", below.display()));
        }
    }
    None
}

fn compare_one(
    found: &Path,
    expected: Option<&Path>,
    below: &Path,
    waiting: &mut Vec<PathBuf>,
) -> io::Result<Option<String>> {
    let (one, other) = (found.join(below), expected.map(|path| path.join(below)));
    let about = one.symlink_metadata()?;
    let wanted = match &other {
        Some(other) => other.symlink_metadata()?,
        None => about.clone(),
    };
    if let Some(why) = differs(&about, &wanted) {
        return Ok(Some(why));
    }
    if about.is_dir() {
        let names = names(&one)?;
        if let Some(other) = &other
            && names != self::names(other)?
        {
            return Ok(Some("has other entries".to_owned()));
        }
        let is_opaque = |path: &Path| users::is_opaque(path);
        if other.as_ref().is_some_and(|other| is_opaque(other) != is_opaque(&one)) {
            return Ok(Some("has other overlayfs whiteout attributes".to_owned()));
        }
        waiting.extend(names.into_iter().map(|name| below.join(name)));
    } else if about.is_symlink() {
        let target = fs::read_link(&one)?;
        if other.map(fs::read_link).transpose()?.is_some_and(|other| other != target) {
            return Ok(Some("has another link target".to_owned()));
        }
    } else if about.is_file() && !same_content(&one, other.as_deref())? {
        return Ok(Some("has other content".to_owned()));
    }
    Ok(None)
}

fn differs(about: &Metadata, wanted: &Metadata) -> Option<String> {
    let of = |about: &Metadata| (about.mode(), about.uid(), about.gid(), about.rdev());
    let size = |about: &Metadata| if about.is_file() { about.len() } else { 0 };
    if of(about) != of(wanted) {
        return Some(format!(
            "mode {:o}, owner {}:{} instead of {:o}, {}:{}",
            about.mode(),
            about.uid(),
            about.gid(),
            wanted.mode(),
            wanted.uid(),
            wanted.gid()
        ));
    }
    let (found, wanted) = (size(about), size(wanted));
    (found != wanted).then(|| format!("{found} bytes instead of {wanted}"))
}

fn names(path: &Path) -> io::Result<BTreeSet<std::ffi::OsString>> {
    fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.file_name())).collect()
}

/// Compares the contents of two files; without a second file, only reads the first one to its end.
fn same_content(one: &Path, other: Option<&Path>) -> io::Result<bool> {
    let (mut one, mut other) = (File::open(one)?, other.map(File::open).transpose()?);
    let (mut bytes, mut wanted) = (vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]);
    loop {
        let count = one.read(&mut bytes)?;
        if let Some(other) = &mut other {
            // Both have the same length, which was compared before.
            other.read_exact(&mut wanted[..count])?;
            if bytes[..count] != wanted[..count] {
                return Ok(false);
            }
        }
        if count == 0 {
            return Ok(true);
        }
    }
}
