//! Verifies an image in the store, and repairs what can be repaired without a registry.
//!
//! | part | is intact if | is repaired by |
//! |---|---|---|
//! | manifest, config, kept blob of a layer | its digest equals its name | nothing: it is removed, and the image must be pulled again |
//! | unpacked layer with a kept blob | it equals a newly unpacked tree of the blob: names, types, modes, owners, times, extended attributes, hard links, contents | replacing it by the new tree |
//! | unpacked layer without a blob | unknown; it is only checked that every file can be read | nothing |
//! | copies of /etc/passwd and /etc/group | they equal the files in the layers | new copies |
//!
//! A layer that a container uses is verified but not replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use coracle_job::{CheckJob, CheckedParts, Failure, Finding, Layer};
use coracle_manifest::{self as manifest, Document};
use coracle_sandbox::describe_io;
use rustix::io::Errno;

use crate::failure::io_failure;
use crate::import::digest_of_file;
use crate::store::{Store, open_plain};
use crate::{remove_trees, unpack, users};

/// Buffer size in bytes for the comparison of two files.
const BUFFER_BYTES: usize = 64 << 10;
/// Maximum length in bytes of the list of extended attributes and of one value: the kernel's limits.
const XATTR_BYTES_MAX: usize = 64 << 10;
/// Extended attributes that the node's security modules give to files: they are not the image's, and differ between two copies.
const OF_NODE: [&[u8]; 2] = [b"security.selinux", b"security.evm"];

/// Checks every part of the image; calls `pulse` repeatedly during the check. Returns the findings, and the
/// number of layers that could be read but not compared with a blob.
pub(crate) fn run(
    job: &CheckJob,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Result<(Vec<Finding>, u32), Failure> {
    let store = Store::open(&job.root)?;
    let mut check = Check { job, store, findings: Vec::new(), good: BTreeSet::new(), not_compared: 0 };
    if job.parts == CheckedParts::All {
        for digest in &job.image.blobs {
            pulse(0);
            check.blob(digest)?;
        }
        let blobs = check.layer_blobs();
        for (number, layer) in job.image.layers.iter().enumerate() {
            let blob = blobs.get(number).filter(|digest| check.good.contains(*digest)).cloned();
            check.layer(number, layer, blob, pulse)?;
        }
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
        let mut fresh = match &blob {
            Some(blob) => Some(self.unpack(number, layer, &self.store.blob(blob)?, pulse)?),
            None => None,
        };
        let difference = compare(&path, fresh.as_mut(), pulse);
        let outcome = match (&difference, &fresh) {
            (Some(why), fresh) => {
                self.repair(layer, &path, why, fresh.as_ref().map(|fresh| fresh.directory.as_path()))
            }
            (None, Some(_)) => Ok(()),
            (None, None) => {
                self.not_compared += 1;
                Ok(())
            }
        };
        match fresh {
            Some(fresh) => remove_trees::run(&[fresh.directory]).and(outcome),
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
    ) -> Result<Fresh, Failure> {
        let directory = self.store.new_layer()?;
        let below = self.job.image.layers[..number].iter().rev();
        let below: Vec<PathBuf> =
            below.map(|layer| self.store.layer(&layer.name)).filter(|path| path.is_dir()).collect();
        let unpacked = open_plain(blob)
            .and_then(|blob| unpack::unpack_verified(&directory, blob, layer, &self.job.limits, None, pulse))
            .and_then(|unpacked| {
                unpack::copy_attributes(&directory, &unpacked.implied, &below).map(|_| unpacked.implied)
            });
        match unpacked {
            Ok(implied) => {
                let implied = implied.into_iter().map(|path| PathBuf::from(OsString::from_vec(path)));
                Ok(Fresh { directory, implied: implied.collect(), inodes: BTreeMap::new() })
            }
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

/// A newly unpacked layer, with which another one is compared.
struct Fresh {
    directory: PathBuf,
    /// Directories without an entry in the archive, which have no time.
    implied: BTreeSet<PathBuf>,
    /// The inodes of files with several names: by that of the layer, that of this tree.
    inodes: BTreeMap<u64, u64>,
}

/// Returns the first difference between a layer and the expected tree; without an expected tree, the first
/// file that cannot be read. The trees must not change during the call; symbolic links are not followed.
fn compare(
    found: &Path,
    mut expected: Option<&mut Fresh>,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Option<String> {
    let mut waiting = vec![PathBuf::new()];
    while let Some(below) = waiting.pop() {
        pulse(0);
        let why = match &mut expected {
            Some(expected) => compare_one(found, expected, &below, &mut waiting),
            None => read_one(&found.join(&below), &below, &mut waiting).map(|()| None),
        };
        let why = why.unwrap_or_else(|error| {
            // The host's path is too long, although the path in the image is not.
            (error.raw_os_error() != Some(nix::errno::Errno::ENAMETOOLONG as i32))
                .then(|| describe_io(&error))
        });
        if let Some(why) = why {
            return Some(format!("/{}: {why}", below.display()));
        }
    }
    None
}

/// Reads a file, directory or link to its end.
fn read_one(one: &Path, below: &Path, waiting: &mut Vec<PathBuf>) -> io::Result<()> {
    let about = one.symlink_metadata()?;
    if about.is_dir() {
        waiting.extend(names(one)?.into_iter().map(|name| below.join(name)));
    } else if about.is_symlink() {
        fs::read_link(one)?;
    } else if about.is_file() {
        io::copy(&mut File::open(one)?, &mut io::sink())?;
    }
    Ok(())
}

fn compare_one(
    found: &Path,
    expected: &mut Fresh,
    below: &Path,
    waiting: &mut Vec<PathBuf>,
) -> io::Result<Option<String>> {
    let (one, other) = (found.join(below), expected.directory.join(below));
    let (about, wanted) = (one.symlink_metadata()?, other.symlink_metadata()?);
    if let Some(why) = differs(&about, &wanted) {
        return Ok(Some(why));
    }
    if about.is_dir() {
        let names = names(&one)?;
        if names != self::names(&other)? {
            return Ok(Some("has other entries".to_owned()));
        }
        waiting.extend(names.into_iter().map(|name| below.join(name)));
    } else if about.is_symlink() && fs::read_link(&one)? != fs::read_link(&other)? {
        return Ok(Some("has another link target".to_owned()));
    } else if about.is_file() && !has_same_content(&one, &other)? {
        return Ok(Some("has other content".to_owned()));
    }
    if let Some(name) = differing_xattr(&xattrs(&one)?, &xattrs(&other)?) {
        return Ok(Some(format!("has another extended attribute {}", String::from_utf8_lossy(name))));
    }
    if !about.is_dir() && (about.nlink() > 1 || wanted.nlink() > 1) {
        let inode = *expected.inodes.entry(about.ino()).or_insert(wanted.ino());
        if about.nlink() != wanted.nlink() || inode != wanted.ino() {
            return Ok(Some("has other hard links".to_owned()));
        }
    }
    // Neither the root, nor directories without an entry, nor whiteouts have the time of an entry.
    let is_whiteout = about.file_type().is_char_device() && about.rdev() == 0;
    let has_time = !below.as_os_str().is_empty() && !expected.implied.contains(below) && !is_whiteout;
    let time = |about: &Metadata| (about.mtime(), about.mtime_nsec());
    Ok((has_time && time(&about) != time(&wanted)).then(|| "has another modification time".to_owned()))
}

fn differs(about: &Metadata, wanted: &Metadata) -> Option<String> {
    let of = |about: &Metadata| (about.mode(), about.uid(), about.gid());
    if of(about) != of(wanted) {
        let ((mode, uid, gid), (other, other_uid, other_gid)) = (of(about), of(wanted));
        return Some(format!(
            "mode {mode:o}, owner {uid}:{gid} instead of {other:o}, {other_uid}:{other_gid}"
        ));
    }
    if about.rdev() != wanted.rdev() {
        let number = |about: &Metadata| {
            let device = about.rdev();
            format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device))
        };
        return Some(format!("device {} instead of {}", number(about), number(wanted)));
    }
    let is_shorter = about.is_file() && about.len() != wanted.len();
    is_shorter.then(|| format!("{} bytes instead of {}", about.len(), wanted.len()))
}

/// The name of an attribute that differs.
fn differing_xattr<'a>(one: &'a Xattrs, other: &'a Xattrs) -> Option<&'a [u8]> {
    let mut names = one.keys().chain(other.keys());
    names.find(|name| one.get(*name) != other.get(*name)).map(Vec::as_slice)
}

/// Extended attributes by their names.
type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// The extended attributes of a file that come from its archive, that is, without those that the node sets.
pub(crate) fn xattrs(path: &Path) -> io::Result<Xattrs> {
    let mut names = vec![0; XATTR_BYTES_MAX];
    let length = match rustix::fs::llistxattr(path, &mut names) {
        Err(Errno::NOTSUP) => 0,
        length => length?,
    };
    let names = names[..length].split(|byte| *byte == 0);
    let names = names.filter(|name| !name.is_empty() && !OF_NODE.contains(name));
    let mut found = BTreeMap::new();
    for name in names {
        let mut value = vec![0; XATTR_BYTES_MAX];
        let length = rustix::fs::lgetxattr(path, name, &mut value)?;
        value.truncate(length);
        found.insert(name.to_vec(), value);
    }
    Ok(found)
}

pub(crate) fn names(path: &Path) -> io::Result<BTreeSet<OsString>> {
    fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.file_name())).collect()
}

/// Compares the contents of two files of the same length.
fn has_same_content(one: &Path, other: &Path) -> io::Result<bool> {
    let (mut one, mut other) = (File::open(one)?, File::open(other)?);
    let (mut bytes, mut wanted) = (vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]);
    loop {
        let count = one.read(&mut bytes)?;
        other.read_exact(&mut wanted[..count])?;
        if bytes[..count] != wanted[..count] {
            return Ok(false);
        }
        if count == 0 {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use rustix::fs::XattrFlags;

    use super::*;

    /// Two equal trees, and a change of the first one. Requires root, because of file capabilities.
    fn changed(change: impl FnOnce(&Path)) -> Option<String> {
        let top = Store::open(&std::env::temp_dir().join(format!(
            "coracle-check-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        )))
        .unwrap();
        let (one, other) = (top.new_layer().unwrap(), top.new_layer().unwrap());
        for tree in [&one, &other] {
            fs::create_dir_all(tree.join("d/implied")).unwrap();
            for name in ["file", "second"] {
                fs::write(tree.join(name), b"content").unwrap();
                fs::hard_link(tree.join(name), tree.join("d").join(name)).unwrap();
            }
            symlink("file", tree.join("link")).unwrap();
            let time = ["-h", "-d", "2020-01-01"].map(str::to_owned);
            let paths = ["file", "second", "link", "d"].map(|name| tree.join(name));
            assert!(Command::new("touch").args(time).args(paths).status().unwrap().success());
        }
        File::open(other.join("d/implied")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        change(&one);
        let implied = [PathBuf::from("d/implied")].into();
        let mut fresh = Fresh { directory: other.clone(), implied, inodes: BTreeMap::new() };
        let found = compare(&one, Some(&mut fresh), &mut |_| ());
        fs::remove_dir_all(one.parent().unwrap().parent().unwrap()).unwrap();
        found
    }

    #[test]
    fn every_attribute_is_compared_as_root() {
        assert_eq!(changed(|_| ()), None);
        let set = |path: PathBuf, name: &str, value: &[u8]| {
            rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
        };
        let capability = [1, 0, 0, 2, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let again = |path: &Path| {
            fs::remove_file(path).unwrap();
            fs::write(path, b"content").unwrap();
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_577_836_800);
            File::open(path).unwrap().set_modified(time).unwrap();
        };
        let file_time = |path: PathBuf| {
            let file = File::open(path).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        };
        type Change<'a> = &'a dyn Fn(&Path);
        let cases: [(Change<'_>, &str); 7] = [
            (
                &|tree| set(tree.join("file"), "security.capability", &capability),
                "attribute security.capability",
            ),
            (&|tree| set(tree.join("d"), "trusted.overlay.opaque", b"y"), "attribute trusted.overlay.opaque"),
            (&|tree| set(tree.join("link"), "security.x", b""), "/link: has another extended attribute"),
            (&|tree| file_time(tree.join("second")), "second: has another modification time"),
            (&|tree| file_time(tree.join("d")), "/d: has another modification time"),
            (&|tree| again(&tree.join("file")), "file: has other hard links"),
            (
                &|tree| {
                    fs::rename(tree.join("d/file"), tree.join("x")).unwrap();
                    fs::rename(tree.join("d/second"), tree.join("d/file")).unwrap();
                    fs::rename(tree.join("x"), tree.join("d/second")).unwrap();
                    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_577_836_800);
                    File::open(tree.join("d")).unwrap().set_modified(time).unwrap();
                },
                "has other hard links",
            ),
        ];
        for (change, expected) in cases {
            let found = changed(change).unwrap_or_default();
            assert!(found.contains(expected), "expected {expected:?} in {found:?}");
        }
    }
}
