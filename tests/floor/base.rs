//! The objects that exist as long as the floor runs, and that coracle's daemon has, too: a mount namespace with
//! few mounts, parents of cgroups, an image's layer, a bridge. All have names of their own, so floors and tests
//! can run side by side; [`Base`] removes them when it is dropped, also after a failure.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use crate::cgroups::Cgroups;
use crate::netlink::{Batch, Socket};
use crate::{Outcome, failed};

/// The content of `/etc/marker` in the layer.
pub(crate) const MARKER: &str = "floor";
/// Mounts that a pod's mount namespace keeps, like the base mount namespace of coracle, besides the root.
const KEPT: [&str; 3] = ["/proc", "/sys", "/dev"];

/// The objects of a run.
#[derive(Debug)]
pub(crate) struct Base {
    /// The directory of all files.
    pub(crate) folder: PathBuf,
    /// Hierarchies and this run's parent.
    pub(crate) cgroups: Cgroups,
    /// Name of the bridge, of the nftables table, and beginning of the names of links.
    pub(crate) name: String,
    /// The bridge's interface index.
    pub(crate) bridge: u32,
    /// The bridge's address.
    pub(crate) gateway: Ipv4Addr,
    /// A socket for links.
    pub(crate) route: Socket,
    /// A socket for nftables.
    pub(crate) nftables: Socket,
}

impl Base {
    /// Creates everything below `folder`, which must not exist, with `probe` as the program of the layer.
    ///
    /// # Errors
    /// The first failure; everything is removed.
    pub(crate) fn new(folder: &Path, probe: &Path) -> Outcome<Base> {
        let pid = std::process::id();
        private_mounts(folder)?;
        let (tens, ones) = (pid / 50 % 250, pid % 50);
        let base = Base {
            folder: folder.to_owned(),
            cgroups: Cgroups::new(format!("coracle-test-floor-{pid}"))?,
            name: format!("ct{}bf", pid % 1_000_000),
            bridge: 0,
            gateway: Ipv4Addr::new(10, 200 + ones as u8, tens as u8, 1),
            route: Socket::route()?,
            nftables: Socket::nftables()?,
        };
        make_layer(&base.folder.join("layer"), probe).map_err(|error| failed("make the layer", error))?;
        base.with_bridge()
    }

    fn with_bridge(mut self) -> Outcome<Base> {
        let mut batch = Batch::default();
        batch.add_bridge(&self.name);
        self.route.run("make the bridge", batch.acknowledge())?;
        self.bridge = nix::net::if_::if_nametoindex(self.name.as_str())
            .map_err(|errno| failed("find the bridge", errno))?;
        let mut batch = Batch::default();
        batch.add_address(self.bridge, self.gateway);
        self.route.run("set the bridge's address", batch.acknowledge())?;
        Ok(self)
    }

    /// The address of the pod.
    pub(crate) fn address(&self) -> Ipv4Addr {
        let [a, b, c, _] = self.gateway.octets();
        Ipv4Addr::new(a, b, c, 2)
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        // As far as possible: after a failure objects may be missing.
        self.cgroups.sweep();
        let _ = self.nftables.run("remove the table", Batch::remove_table(&self.name));
        let links = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
        let links = links.map(|entry| entry.file_name().to_string_lossy().into_owned());
        for link in links.filter(|link| link.starts_with(&self.name)) {
            let mut batch = Batch::default();
            batch.remove_link(&link);
            let _ = self.route.run("remove a link", batch.acknowledge());
        }
        // A network namespace remains mounted after a failure.
        for point in mount_points().unwrap_or_default().iter().rev() {
            if point.starts_with(&self.folder) {
                let _ = umount2(point, MntFlags::MNT_DETACH);
            }
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Enters a mount namespace of this process, whose mounts no other one sees, with the mounts that pods need.
fn private_mounts(folder: &Path) -> Outcome<()> {
    unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| failed("make a mount namespace", errno))?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(|errno| failed("make mounts private", errno))?;
    let is_kept = |point: &Path| {
        folder.starts_with(point)
            || KEPT.iter().any(|kept| point == Path::new(kept))
            || point.starts_with("/sys/fs/cgroup")
    };
    for point in mount_points()?.iter().rev().filter(|point| !is_kept(point)) {
        umount2(point, MntFlags::MNT_DETACH)
            .map_err(|errno| failed(&format!("unmount {}", point.display()), errno))?;
    }
    Ok(())
}

/// Mount points of this process's mount namespace.
fn mount_points() -> Outcome<Vec<PathBuf>> {
    let text = fs::read_to_string("/proc/self/mountinfo").map_err(|error| failed("read mountinfo", error))?;
    Ok(text.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from).collect())
}

/// Creates the layer: the unpacked files of the tests' image.
fn make_layer(layer: &Path, probe: &Path) -> std::io::Result<()> {
    for directory in ["etc", "home", "root", "tmp"] {
        fs::create_dir_all(layer.join(directory))?;
    }
    fs::write(layer.join("etc/passwd"), "root:x:0:0:root:/root:/probe\n")?;
    fs::write(layer.join("etc/marker"), MARKER)?;
    fs::copy(probe, layer.join("probe")).map(drop)
}
