//! Leases of IP addresses in the file format of the `host-local` plugin, so that both can be used on one
//! node.
//!
//! ```text
//! DIRECTORY/10.1.0.5              CONTAINER\r\nINTERFACE      the address is allocated while the file exists
//! DIRECTORY/last_reserved_ip.0    10.1.0.5                    of the first set: the next search starts after
//! it
//! DIRECTORY/lock                  flock(2) for every change
//! ```
//! Leases are not synced: after a power cut no pod runs, and the pod's record, which was synced before,
//! releases them. A power cut can leave a file that is empty or whose blocks read as NUL bytes (unwritten
//! extents of ext4 and XFS). Files are written under the lock, so such a file belongs to no running process
//! and its address can be allocated again. A file that cannot be read may be a lease of any pod: its address stays
//! allocated, and a release for which it is read fails for the first ten seconds. After them it is ignored, so that no pod stays for ever.
//! Rules: host-local 1.1.1 (plugins/ipam/host-local/backend/disk).

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind, describe_io, failed};
use coracle_base::store::Unread;
use coracle_base::{log, reactor, time};
use coracle_netlink::Network;
use coracle_sandbox::umask;
use nix::fcntl::OFlag;

use super::range::{Range, candidates};

/// Time limit for the lock, which plugins hold for some milliseconds.
const LOCK_LIMIT: Duration = Duration::from_secs(20);
/// Maximum size in bytes of a lease file, which contains an ID and an interface name.
const LEASE_BYTES_MAX: u64 = 4096;
/// Maximum number of files of a directory that are searched for a pod's leases.
const FILES_MAX: usize = 1 << 17;

thread_local! {
    /// The lease files that could not be read by a release.
    static UNREAD: Unread = Unread::default();
}

/// An allocated address and its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    /// The address with the prefix length of its subnet.
    pub(super) address: Network,
    pub(super) gateway: IpAddr,
}

/// The locked leases of one network.
pub(super) struct Leases<'a> {
    directory: &'a Path,
    _lock: File,
}

impl<'a> Leases<'a> {
    /// Acquires the lock; creates the directory if missing.
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
                    let text = format!("lock {}: another program held it for too long", path.display());
                    return Err(Error::new(Kind::DeadlineExceeded, text));
                }
                Err(TryLockError::WouldBlock) => {
                    reactor::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(20));
                }
            }
        }
    }

    /// Allocates one address of each set; writes the lease files.
    pub(super) fn take(&self, id: &str, interface: &str, sets: &[Vec<Range>]) -> Result<Vec<Lease>, Error> {
        let _mask = umask::Public::begin();
        let owner = owner(id, interface);
        let mut leases = Vec::new();
        for (index, set) in sets.iter().enumerate() {
            let place = self.directory.join(format!("last_reserved_ip.{index}"));
            // An error is ignored: the value only determines where the search starts.
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

    /// Releases the addresses of a pod: those in `known`; if it is empty, those that a search of all files
    /// finds.
    ///
    /// # Errors
    /// A lease could not be read or removed, so the pod may still have an address; the caller must retry.
    pub(super) fn release(&self, id: &str, interface: &str, known: &[IpAddr]) -> Result<(), Error> {
        let owner = owner(id, interface);
        let paths = match known {
            [] => self.list().map_err(|error| failed("list", self.directory, &error))?,
            known => known.iter().map(|address| self.path(*address)).collect(),
        };
        // An error with one file does not prevent the release of the others.
        let mut outcome = Ok(());
        for path in paths {
            outcome = outcome.and(release_one(&path, id, &owner));
        }
        outcome
    }

    /// Whether no address is allocated; false if that cannot be found out.
    pub(super) fn is_empty(&self) -> bool {
        files(self.directory).is_ok_and(|found| found.is_empty())
    }

    fn list(&self) -> io::Result<Vec<PathBuf>> {
        Ok(files(self.directory)?.into_iter().map(|(_, path)| path).collect())
    }

    fn path(&self, address: IpAddr) -> PathBuf {
        self.directory.join(address.to_string())
    }
}

/// Releases all leases of a container in this directory, for all interfaces, and returns the released addresses. For a
/// container whose record is lost.
///
/// # Errors
/// In the result: a lease may remain; the caller must retry.
pub(super) async fn release_all(directory: &Path, id: &str) -> (Vec<IpAddr>, Result<(), Error>) {
    let (mut held, mut outcome) = (Vec::new(), Ok(()));
    let listed = match files(directory) {
        Ok(listed) => listed,
        Err(error) => return (Vec::new(), Err(failed("list", directory, &error))),
    };
    for (address, path) in listed {
        match read_unless_lasting(&path) {
            Ok(text) => {
                let text = text.unwrap_or_default();
                let rest = text.strip_prefix(id).filter(|rest| rest.is_empty() || rest.starts_with('\r'));
                held.extend(rest.map(|interface| (address, interface.trim().to_owned())));
            }
            // It does not prevent the release of the others.
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    if held.is_empty() {
        return (Vec::new(), outcome);
    }
    // The lock is not acquired for a directory without leases of the container, because that would create the
    // lock file.
    let leases = match Leases::lock(directory).await {
        Ok(leases) => leases,
        Err(error) => return (Vec::new(), Err(error)),
    };
    let mut released = Vec::new();
    for (address, interface) in held {
        match leases.release(id, &interface, &[address]) {
            Ok(()) => released.push(address),
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    (released, outcome)
}

/// IDs of the containers that have leases in this directory, except of leases that cannot be read.
///
/// # Errors
/// The directory cannot be listed.
pub(super) fn holders(directory: &Path) -> Result<Vec<String>, Error> {
    let listed = files(directory).map_err(|error| failed("list", directory, &error))?;
    let holder = |(_, path): &(IpAddr, PathBuf)| {
        let read = read(path).inspect_err(|error| {
            log::warn!("cannot read the lease of a pod"; path = path.display(), error = describe_io(error));
        });
        Some(read.ok()??.split('\r').next().unwrap_or_default().to_owned())
    };
    Ok(listed.iter().filter_map(holder).collect())
}

/// Whether addresses are allocated in this directory, which may not exist.
///
/// # Errors
/// The directory cannot be listed.
pub(super) fn is_in_use(directory: &Path) -> Result<bool, Error> {
    match files(directory) {
        Err(error) if is_absent(&error) => Ok(false),
        found => Ok(!found.map_err(|error| failed("list", directory, &error))?.is_empty()),
    }
}

/// Whether the error means that there are no leases; after any other error this is unknown.
pub(super) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// The files of a directory whose names are addresses.
fn files(directory: &Path) -> io::Result<Vec<(IpAddr, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)?.take(FILES_MAX) {
        let entry = entry?;
        let address = entry.file_name().to_str().and_then(|name| name.parse().ok());
        found.extend(address.map(|address| (address, entry.path())));
    }
    Ok(found)
}

/// Opens the lock file; creates the directory if missing. The file modes are those of host-local.
fn open_lock(directory: &Path, path: &Path) -> Result<File, Error> {
    let _mask = umask::Public::begin();
    coracle_sandbox::disk::create_all(fs::DirBuilder::new().recursive(true), directory)
        .map_err(|error| failed("make directory", directory, &error))?;
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).create(true).truncate(false).mode(0o644).open(path);
    opened.map_err(|error| failed("open", path, &error))
}

/// Content of a lease file, which identifies its owner.
fn owner(id: &str, interface: &str) -> String {
    format!("{id}\r\n{interface}")
}

/// Removes a file if it is the pod's lease, or a lease file that was damaged by a power cut.
fn release_one(path: &Path, id: &str, owner: &str) -> Result<(), Error> {
    let Some(text) = read_unless_lasting(path)? else { return Ok(()) };
    // Older plugins did not write the interface.
    if text != owner && text != id && !is_torn(&text) {
        return Ok(());
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path, &error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Reads a lease file for a release; `None` if it does not exist, or could not be read for too long.
fn read_unless_lasting(path: &Path) -> Result<Option<String>, Error> {
    let read = read(path);
    UNREAD.with(|unread| match &read {
        Err(error) if unread.has_lasted(path, error, true, time::now()) => {
            log::warn!("cannot read lease, its address stays allocated"; path = path.display(), error = describe_io(error));
            Ok(None)
        }
        Err(error) => Err(failed("read", path, error)),
        Ok(_) => {
            unread.forget(path);
            Ok(read.ok().flatten())
        }
    })
}

/// Trimmed content of a small file; `None` if the file does not exist. For other than regular files, and for
/// invalid UTF-8, the content is `?`: such files are neither leases nor the result of a power cut.
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

/// Whether the content is that of a lease file after a power cut. IDs and interface names have no NUL bytes.
fn is_torn(text: &str) -> bool {
    text.is_empty() || text.contains('\0')
}

/// Creates a file, or replaces the content of a file that was damaged by a power cut. Returns false if the
/// file may be a lease.
fn write_new(path: &Path, text: &str) -> io::Result<bool> {
    let mut file = match OpenOptions::new().write(true).create_new(true).mode(0o644).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            match read(path) {
                Ok(Some(held)) if is_torn(&held) => {}
                Ok(_) => return Ok(false),
                Err(error) => {
                    log::warn!("cannot read lease, its address stays allocated"; path = path.display(), error = describe_io(&error));
                    return Ok(false);
                }
            }
            OpenOptions::new().write(true).truncate(true).open(path)?
        }
        opened => opened?,
    };
    let written = file.write_all(text.as_bytes());
    if written.is_err() {
        // The first error is returned.
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
    fn lease_files_have_the_format_of_host_local() {
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
            // From a power cut, and from an older plugin.
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
            assert!(held("fd00::3"), "the release of a known address does not affect others");
            leases.release("three", "eth0", &[]).unwrap();
            assert!(!held("10.1.0.5") && !held("fd00::4"));
        });
    }

    #[test]
    fn all_leases_of_a_container_are_released_by_its_id() {
        let folder = Folder::new("lease-all");
        let sets = [set("10.1.0.0/29"), set("fd00::/64")];
        reactor::run(async {
            let leases = Leases::lock(&folder.0).await.unwrap();
            leases.take("one", "eth0", &sets).unwrap();
            leases.take("one", "net1", &sets).unwrap();
            leases.take("one2", "eth0", &sets).unwrap();
            fs::write(folder.0.join("10.1.0.6"), "one").unwrap();
            drop(leases);
            let (mut released, outcome) = release_all(&folder.0, "one").await;
            outcome.unwrap();
            released.sort();
            assert_eq!(
                released,
                ["10.1.0.2", "10.1.0.3", "10.1.0.6", "fd00::2", "fd00::3"]
                    .map(|text| text.parse::<IpAddr>().unwrap())
            );
            assert_eq!(files(&folder.0).unwrap().len(), 2, "the leases of one2");
            assert!(release_all(&folder.0.join("none"), "one").await.1.is_err());
        });
    }

    #[test]
    fn a_full_range_is_an_error_and_released_addresses_are_reused() {
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

    /// Regression: files of NUL bytes counted as leases, and allocation failed with "no address is free".
    #[test]
    fn addresses_of_lease_files_damaged_by_a_power_cut_are_reused() {
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
                "no address is allocated twice"
            );
            // The record may name the address of the damaged lease, or no address.
            for known in [vec!["10.1.0.3".parse().unwrap()], vec![]] {
                fs::write(folder.0.join("10.1.0.3"), [0; 67]).unwrap();
                leases.release("other", "eth0", &known).unwrap();
                assert!(!folder.0.join("10.1.0.3").exists(), "{known:?}");
            }
            assert_eq!(held(2), "pod0\r\neth0");
        });
    }

    /// Regression: the release succeeded although the lease remained.
    #[test]
    fn the_release_of_an_unreadable_lease_fails_and_its_address_stays_allocated() {
        let folder = Folder::new("lease-unread");
        let sets = [set("10.1.0.0/29")];
        reactor::run(async {
            let leases = Leases::lock(&folder.0).await.unwrap();
            taken(&leases, "one", &sets).unwrap();
            taken(&leases, "one", &sets).unwrap();
            let (path, aside) = (folder.0.join("10.1.0.2"), folder.0.join("aside"));
            fs::rename(&path, &aside).unwrap();
            // A symbolic link to itself: ELOOP.
            std::os::unix::fs::symlink(&path, &path).unwrap();
            for known in [vec!["10.1.0.2".parse().unwrap()], vec![]] {
                let refused = leases.release("one", "eth0", &known).unwrap_err();
                assert!(refused.message().starts_with(&format!("read {}: ", path.display())), "{refused}");
            }
            assert!(!folder.0.join("10.1.0.3").exists(), "the other lease is released");
            fs::write(folder.0.join("last_reserved_ip.0"), "10.1.0.6").unwrap();
            assert_eq!(taken(&leases, "two", &sets).unwrap()[0], "10.1.0.3/29 10.1.0.1");
            fs::remove_file(&path).unwrap();
            fs::rename(&aside, &path).unwrap();
            leases.release("one", "eth0", &["10.1.0.2".parse().unwrap()]).unwrap();
            assert!(!path.exists());
            // A directory is no lease and no temporary error: it neither fails the release nor blocks other
            // pods.
            fs::create_dir(&path).unwrap();
            let pipe = folder.0.join("10.1.0.4");
            nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
            leases.release("one", "eth0", &[]).unwrap();
            assert!(path.is_dir() && pipe.exists());
        });
    }

    /// Regression: such a file of one pod failed the release of every pod whose addresses are not recorded, without an end, no lease
    /// without a pod was released, and another daemon took the network for unused.
    #[test]
    fn a_lease_that_can_never_be_read_keeps_no_pod_from_its_release() {
        let folder = Folder::new("lease-never");
        let sets = [set("10.1.0.0/29")];
        reactor::run(async {
            let leases = Leases::lock(&folder.0).await.unwrap();
            for id in ["one", "two", "three"] {
                taken(&leases, id, &sets).unwrap();
            }
            drop(leases);
            let path = folder.0.join("10.1.0.2");
            fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink(&path, &path).unwrap();
            let mut holders = holders(&folder.0).unwrap();
            holders.sort();
            assert_eq!(holders, ["three", "two"]);
            assert!(is_in_use(&folder.0).unwrap() && !is_in_use(&folder.0.join("none")).unwrap());
            let (released, outcome) = release_all(&folder.0, "two").await;
            assert_eq!(released, ["10.1.0.3".parse::<IpAddr>().unwrap()]);
            assert!(outcome.unwrap_err().message().starts_with("read "), "the file may be its lease, too");
            // Ten seconds later.
            let error = fs::read(&path).unwrap_err();
            UNREAD.with(|unread| {
                unread.forget(&path);
                unread.has_lasted(&path, &error, true, Instant::now() - Duration::from_secs(11));
            });
            let leases = Leases::lock(&folder.0).await.unwrap();
            leases.release("three", "eth0", &[]).unwrap();
            leases.release("one", "eth0", &["10.1.0.2".parse().unwrap()]).unwrap();
            drop(leases);
            assert!(release_all(&folder.0, "two").await.1.is_ok());
            assert!(path.is_symlink() && is_in_use(&folder.0).unwrap(), "the address stays allocated");
            fs::remove_file(&path).unwrap();
            assert!(!is_in_use(&folder.0).unwrap());
        });
    }

    #[test]
    fn lock_waits_until_another_process_releases_it() {
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
