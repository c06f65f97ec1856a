//! Leases of addresses, in the files of the plugin `host-local`, so that both can take turns on one node.
//!
//! ```text
//!   DIRECTORY/10.1.0.5              CONTAINER\r\nINTERFACE      taken for as long as it is there
//!   DIRECTORY/last_reserved_ip.0    10.1.0.5                    of the first set: where the next search begins
//!   DIRECTORY/lock                  flock(2) around every change
//! ```
//! No lease is synced: it is worth nothing after a power cut, when no pod lives, and the pod's record, which is on disk
//! before, releases it. A power cut can leave a file that is empty, or whose blocks were never written and read as NUL
//! bytes (unwritten extents of ext4 and XFS). Files are written under the lock, so such a file belongs to nobody: its address
//! is given out again. A file that cannot be read may be a lease: its address stays taken, and a release fails.
//! Rules: host-local 1.1.1 (plugins/ipam/host-local/backend/disk).

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind, failed, plain};
use coracle_base::{log, reactor};
use coracle_sandbox::netlink::Network;
use coracle_sandbox::umask;
use nix::fcntl::OFlag;

use super::range::{Range, candidates};

/// How long a plugin may hold the lock: it does so for milliseconds.
const LOCK_LIMIT: Duration = Duration::from_secs(20);
/// A lease is an id and a name.
const LEASE_BYTES_MAX: u64 = 4096;
/// Files of a directory that are looked through for a pod's leases.
const FILES_MAX: usize = 1 << 17;

/// An address that a pod has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    /// With the length of its subnet's prefix.
    pub(super) address: Network,
    pub(super) gateway: IpAddr,
}

/// The leases of one network, locked.
pub(super) struct Leases<'a> {
    directory: &'a Path,
    _lock: File,
}

impl<'a> Leases<'a> {
    /// Waits for the lock. The directory is made.
    pub(super) async fn lock(directory: &'a Path) -> Result<Leases<'a>, Error> {
        let path = directory.join("lock");
        let lock = open_lock(directory, &path)?;
        let end = Instant::now() + LOCK_LIMIT;
        let mut pause = Duration::from_micros(200);
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Leases { directory, _lock: lock }),
                Err(TryLockError::Error(error)) => return Err(failed("lock", &path, &error)),
                Err(TryLockError::WouldBlock) if Instant::now() > end => {
                    let text = format!("{}: held by another program for too long", path.display());
                    return Err(Error::new(Kind::DeadlineExceeded, text));
                }
                Err(TryLockError::WouldBlock) => {
                    reactor::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(20));
                }
            }
        }
    }

    /// Takes an address of each set.
    pub(super) fn take(&self, id: &str, interface: &str, sets: &[Vec<Range>]) -> Result<Vec<Lease>, Error> {
        let _mask = umask::Public::begin();
        let owner = owner(id, interface);
        let mut leases = Vec::new();
        for (index, set) in sets.iter().enumerate() {
            let place = self.directory.join(format!("last_reserved_ip.{index}"));
            // Only where the search begins: any address is as good.
            let last = read(&place).ok().flatten().and_then(|text| text.parse().ok());
            leases.push(self.take_one(&owner, set, last, &place)?);
        }
        Ok(leases)
    }

    fn take_one(
        &self,
        owner: &str,
        set: &[Range],
        last: Option<IpAddr>,
        place: &Path,
    ) -> Result<Lease, Error> {
        for (address, range) in candidates(set, last) {
            let path = self.path(address);
            if write_new(&path, owner).map_err(|error| failed("write", &path, &error))? {
                fs::write(place, address.to_string()).map_err(|error| failed("write", place, &error))?;
                let address = Network { address, prefix: range.subnet.prefix };
                return Ok(Lease { address, gateway: range.gateway });
            }
        }
        let subnets: Vec<_> = set.iter().map(|range| range.subnet.to_string()).collect();
        let text = format!("no address of {} is free in {}", subnets.join(", "), self.directory.display());
        Err(Error::new(Kind::ResourceExhausted, text))
    }

    /// Gives back what a pod has: `known` are its addresses; without them every file is looked at.
    ///
    /// # Errors
    /// A lease could not be read or removed, so the pod may still have an address: the release is to be tried again.
    pub(super) fn release(&self, id: &str, interface: &str, known: &[IpAddr]) -> Result<(), Error> {
        let owner = owner(id, interface);
        let paths = match known {
            [] => self.list().map_err(|error| failed("list", self.directory, &error))?,
            known => known.iter().map(|address| self.path(*address)).collect(),
        };
        // One file that fails keeps none of the others.
        let mut outcome = Ok(());
        for path in paths {
            outcome = outcome.and(release_one(&path, id, &owner));
        }
        outcome
    }

    fn list(&self) -> io::Result<Vec<PathBuf>> {
        Ok(files(self.directory)?.into_iter().map(|(_, path)| path).collect())
    }

    fn path(&self, address: IpAddr) -> PathBuf {
        self.directory.join(address.to_string())
    }
}

/// Gives back every lease of a container in this directory, whichever interface it is for, and says which addresses it had.
/// For a container of which only the id is known.
///
/// # Errors
/// A lease may be left: to be tried again.
pub(super) async fn release_all(directory: &Path, id: &str) -> Result<Vec<IpAddr>, Error> {
    let listed = files(directory).map_err(|error| failed("list", directory, &error))?;
    let mut held = Vec::new();
    for (address, path) in listed {
        let text = read(&path).map_err(|error| failed("read", &path, &error))?.unwrap_or_default();
        if let Some(interface) =
            text.strip_prefix(id).filter(|rest| rest.is_empty() || rest.starts_with('\r'))
        {
            held.push((address, interface.trim().to_owned()));
        }
    }
    if held.is_empty() {
        return Ok(Vec::new());
    }
    // Not taken for a directory that has nothing of the container: its file would be made.
    let leases = Leases::lock(directory).await?;
    for (address, interface) in &held {
        leases.release(id, interface, &[*address])?;
    }
    Ok(held.into_iter().map(|(address, _)| address).collect())
}

/// The files of a directory that are named by an address.
fn files(directory: &Path) -> io::Result<Vec<(IpAddr, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)?.take(FILES_MAX) {
        let entry = entry?;
        let address = entry.file_name().to_str().and_then(|name| name.parse().ok());
        found.extend(address.map(|address| (address, entry.path())));
    }
    Ok(found)
}

/// Makes the directory where it is missing. Its files have the modes that host-local gives them.
fn open_lock(directory: &Path, path: &Path) -> Result<File, Error> {
    let _mask = umask::Public::begin();
    fs::create_dir_all(directory).map_err(|error| failed("make directory", directory, &error))?;
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).create(true).truncate(false).mode(0o644).open(path);
    opened.map_err(|error| failed("open", path, &error))
}

/// What a lease's file holds.
fn owner(id: &str, interface: &str) -> String {
    format!("{id}\r\n{interface}")
}

/// Removes a file that is a pod's lease, or that a power cut left without contents.
fn release_one(path: &Path, id: &str, owner: &str) -> Result<(), Error> {
    let Some(text) = read(path).map_err(|error| failed("read", path, &error))? else { return Ok(()) };
    // Older plugins left out the interface.
    if text != owner && text != id && !is_torn(&text) {
        return Ok(());
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path, &error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Contents of a small file, without space around. `None`: there is no file of this name. What is no regular file, or no
/// UTF-8, is nobody's lease and nothing that a power cut leaves: its contents are `?`.
fn read(path: &Path) -> io::Result<Option<String>> {
    let opened = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path);
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    if !file.metadata()?.is_file() {
        return Ok(Some("?".to_owned()));
    }
    let mut bytes = Vec::new();
    file.take(LEASE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(Some(String::from_utf8(bytes).map_or_else(|_| "?".to_owned(), |text| text.trim().to_owned())))
}

/// Whether a file's contents are what a power cut leaves of a lease, not a lease. No id and no name of an interface has a
/// NUL byte.
fn is_torn(text: &str) -> bool {
    text.is_empty() || text.contains('\0')
}

/// Makes a file, or fills one that a power cut left without its contents. False: there is one that may be a lease.
fn write_new(path: &Path, text: &str) -> io::Result<bool> {
    let mut file = match OpenOptions::new().write(true).create_new(true).mode(0o644).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            match read(path) {
                Ok(Some(held)) if is_torn(&held) => {}
                Ok(_) => return Ok(false),
                Err(error) => {
                    log::warn!("a lease cannot be read: its address stays taken"; path = path.display(), error = plain(&error));
                    return Ok(false);
                }
            }
            OpenOptions::new().write(true).truncate(true).open(path)?
        }
        opened => opened?,
    };
    let written = file.write_all(text.as_bytes());
    if written.is_err() {
        // The first error is the answer.
        let _ = fs::remove_file(path);
    }
    written.map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Folder;

    fn set(subnet: &str) -> Vec<Range> {
        vec![Range::new(subnet.parse().unwrap(), None, None, None).unwrap()]
    }

    fn taken(leases: &Leases<'_>, id: &str, sets: &[Vec<Range>]) -> Result<Vec<String>, String> {
        let taken = leases.take(id, "eth0", sets).map_err(|error| error.message().to_owned())?;
        Ok(taken.iter().map(|lease| format!("{} {}", lease.address, lease.gateway)).collect())
    }

    #[test]
    fn leases_are_host_locals_files() {
        let folder = Folder::new("lease");
        let directory = folder.0.join("pods");
        let sets = [set("10.1.0.0/29"), set("fd00::/64")];
        reactor::run(async {
            let leases = Leases::lock(&directory).await.unwrap();
            let first = taken(&leases, "one", &sets).unwrap();
            assert_eq!(first, ["10.1.0.2/29 10.1.0.1", "fd00::2/64 fd00::1"]);
            assert_eq!(fs::read_to_string(directory.join("10.1.0.2")).unwrap(), "one\r\neth0");
            assert_eq!(fs::read_to_string(directory.join("fd00::2")).unwrap(), "one\r\neth0");
            assert_eq!(fs::read_to_string(directory.join("last_reserved_ip.0")).unwrap(), "10.1.0.2");
            assert_eq!(fs::read_to_string(directory.join("last_reserved_ip.1")).unwrap(), "fd00::2");
            // Left by a power cut, and by an older plugin.
            fs::write(directory.join("10.1.0.3"), "").unwrap();
            fs::write(directory.join("10.1.0.4"), "old").unwrap();
            assert_eq!(taken(&leases, "two", &sets).unwrap()[0], "10.1.0.3/29 10.1.0.1");
            assert_eq!(taken(&leases, "three", &sets).unwrap()[0], "10.1.0.5/29 10.1.0.1");
            leases.release("two", "eth0", &["10.1.0.3".parse().unwrap()]).unwrap();
            leases.release("two", "eth0", &["10.1.0.2".parse().unwrap()]).unwrap();
            leases.release("three", "eth1", &[]).unwrap();
            leases.release("old", "eth0", &[]).unwrap();
            let held = |name: &str| directory.join(name).exists();
            assert_eq!(
                [held("10.1.0.2"), held("10.1.0.3"), held("10.1.0.4"), held("10.1.0.5")],
                [true, false, false, true]
            );
            assert!(held("fd00::3"), "release of a known address looks at no other");
            leases.release("three", "eth0", &[]).unwrap();
            assert!(!held("10.1.0.5") && !held("fd00::4"));
        });
    }

    #[test]
    fn all_leases_of_a_container_are_found_by_its_id() {
        let folder = Folder::new("lease-all");
        let sets = [set("10.1.0.0/29"), set("fd00::/64")];
        reactor::run(async {
            let leases = Leases::lock(&folder.0).await.unwrap();
            leases.take("one", "eth0", &sets).unwrap();
            leases.take("one", "net1", &sets).unwrap();
            leases.take("one2", "eth0", &sets).unwrap();
            fs::write(folder.0.join("10.1.0.6"), "one").unwrap();
            drop(leases);
            let mut released = release_all(&folder.0, "one").await.unwrap();
            released.sort();
            assert_eq!(
                released,
                ["10.1.0.2", "10.1.0.3", "10.1.0.6", "fd00::2", "fd00::3"]
                    .map(|text| text.parse::<IpAddr>().unwrap())
            );
            assert_eq!(files(&folder.0).unwrap().len(), 2, "those of one2");
            assert!(release_all(&folder.0.join("none"), "one").await.is_err());
        });
    }

    #[test]
    fn a_full_range_is_said_and_what_was_taken_is_found_again() {
        let folder = Folder::new("lease-full");
        let sets = [set("10.1.0.0/30"), set("10.2.0.0/30")];
        reactor::run(async {
            let leases = Leases::lock(&folder.0).await.unwrap();
            fs::write(folder.0.join("10.2.0.2"), "other").unwrap();
            let refused = taken(&leases, "one", &sets).unwrap_err();
            assert_eq!(refused, format!("no address of 10.2.0.0/30 is free in {}", folder.0.display()));
            leases.release("one", "eth0", &[]).unwrap();
            fs::remove_file(folder.0.join("10.2.0.2")).unwrap();
            assert_eq!(
                taken(&leases, "one", &sets).unwrap(),
                ["10.1.0.2/30 10.1.0.1", "10.2.0.2/30 10.2.0.1"]
            );
        });
    }

    /// Without the fix the files of NUL bytes are taken for leases: "no address is free", for ever.
    #[test]
    fn what_a_power_cut_leaves_of_leases_is_given_out_again() {
        let folder = Folder::new("lease-torn");
        let sets = [set("10.1.0.0/29")];
        let owner = owner(&"a".repeat(64), "eth0");
        let mut half = owner.clone().into_bytes();
        half[32..].fill(0);
        let torn = [vec![0; owner.len()], half, Vec::new(), vec![0; 4096], vec![0; 8192]];
        reactor::run(async {
            let leases = Leases::lock(&folder.0).await.unwrap();
            for (number, bytes) in torn.iter().enumerate() {
                fs::write(folder.0.join(format!("10.1.0.{}", number + 2)), bytes).unwrap();
            }
            let held = |number: usize| fs::read_to_string(folder.0.join(format!("10.1.0.{number}"))).unwrap();
            for number in 0..torn.len() {
                taken(&leases, &format!("pod{number}"), &sets).unwrap();
                assert_eq!(held(number + 2), format!("pod{number}\r\neth0"));
            }
            assert!(
                taken(&leases, "late", &sets).unwrap_err().starts_with("no address of"),
                "none is taken twice"
            );
            // A record names the address whose lease is torn, or nothing is known of it.
            for known in [vec!["10.1.0.3".parse().unwrap()], vec![]] {
                fs::write(folder.0.join("10.1.0.3"), [0; 67]).unwrap();
                leases.release("other", "eth0", &known).unwrap();
                assert!(!folder.0.join("10.1.0.3").exists(), "{known:?}");
            }
            assert_eq!(held(2), "pod0\r\neth0");
        });
    }

    /// Without the fix the release succeeds, and the lease is left for ever.
    #[test]
    fn a_lease_that_cannot_be_read_fails_its_release_and_is_never_taken() {
        let folder = Folder::new("lease-unread");
        let sets = [set("10.1.0.0/29")];
        reactor::run(async {
            let leases = Leases::lock(&folder.0).await.unwrap();
            taken(&leases, "one", &sets).unwrap();
            taken(&leases, "one", &sets).unwrap();
            let (path, aside) = (folder.0.join("10.1.0.2"), folder.0.join("aside"));
            fs::rename(&path, &aside).unwrap();
            // A link to itself: ELOOP.
            std::os::unix::fs::symlink(&path, &path).unwrap();
            for known in [vec!["10.1.0.2".parse().unwrap()], vec![]] {
                let refused = leases.release("one", "eth0", &known).unwrap_err();
                assert!(refused.message().starts_with(&format!("read {}: ", path.display())), "{refused}");
            }
            assert!(!folder.0.join("10.1.0.3").exists(), "the other lease is released all the same");
            fs::write(folder.0.join("last_reserved_ip.0"), "10.1.0.6").unwrap();
            assert_eq!(taken(&leases, "two", &sets).unwrap()[0], "10.1.0.3/29 10.1.0.1");
            fs::remove_file(&path).unwrap();
            fs::rename(&aside, &path).unwrap();
            leases.release("one", "eth0", &["10.1.0.2".parse().unwrap()]).unwrap();
            assert!(!path.exists());
            // Neither a lease nor something that passes: it fails no release, and blocks nobody.
            fs::create_dir(&path).unwrap();
            let pipe = folder.0.join("10.1.0.4");
            nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
            leases.release("one", "eth0", &[]).unwrap();
            assert!(path.is_dir() && pipe.exists());
        });
    }

    #[test]
    fn a_lock_that_is_held_is_waited_for() {
        let folder = Folder::new("lease-lock");
        reactor::run(async {
            let held = Leases::lock(&folder.0).await.unwrap();
            let waiting = reactor::deadline(Duration::from_millis(20), Leases::lock(&folder.0)).await;
            assert!(waiting.is_err(), "held");
            drop(held);
            assert!(Leases::lock(&folder.0).await.is_ok());
        });
    }
}
