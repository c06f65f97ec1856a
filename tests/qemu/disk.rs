//! The disk of a guest: coracle's programs and test suites for its architecture, busybox, Debian's CNI
//! plugins with their libraries, and in a systemd guest Debian's systemd. It is created by `mke2fs -d`
//! without root.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::target::Arch;

/// Usual size of the disk, a sparse file. Every test creates its node there.
const DISK_MIB: u32 = 1024;

/// Directories that must exist as mount points or for installations.
const FOLDERS: [&str; 14] = [
    "bin",
    "dev",
    "etc",
    "opt",
    "proc",
    "root",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr/lib/cni",
    "var/lib",
    "var/log",
    "var/tmp",
];

/// A directory that is filled and then converted into a disk.
pub(crate) struct Tree {
    arch: Arch,
    folder: PathBuf,
    disk_mib: Cell<u32>,
}

impl Tree {
    /// Creates a file tree with everything that all guests need, and these suites.
    pub(crate) fn new(arch: Arch, folder: PathBuf, suites: &[&str]) -> Tree {
        let tree = Tree { arch, folder, disk_mib: Cell::new(DISK_MIB) };
        for name in FOLDERS {
            fs::create_dir_all(tree.folder.join(name)).expect("a folder");
        }
        tree.copy(&packages(arch.debian()).join("bin/busybox"), "bin/busybox");
        for name in ["coracled", "coracle", "coracle-pod", "probe"] {
            tree.copy(&built(arch, "release").join(name), &format!("opt/{name}"));
        }
        symlink("coracle", tree.folder.join("opt/coracle-worker")).expect("a link");
        for name in suites {
            tree.copy(&suite(arch, name), &format!("opt/{name}"));
        }
        for entry in fs::read_dir(packages(arch.debian()).join("usr/lib/cni")).expect("CNI plugins").flatten()
        {
            tree.copy(&entry.path(), &format!("usr/lib/cni/{}", entry.file_name().display()));
        }
        tree.copy_libc();
        tree.write("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n");
        tree.write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nmessagebus:x:100:100::/:/bin/false\nnobody:x:65534:65534::/:/bin/false\n");
        tree.write("etc/group", "root:x:0:\nmessagebus:x:100:\nnogroup:x:65534:\n");
        tree.write("sbin/guest", include_str!("guest.sh"));
        tree.write("sbin/suite", include_str!("suite.sh"));
        tree
    }

    /// Adds programs that suites need beyond busybox: a registry, iptables for CNI's portmap, AppArmor's
    /// parser (which critest runs with sudo), critest, NRI plugins in Go, nginx for TLS; x86_64.
    pub(crate) fn add_tools(&self) {
        self.copy_packages("tools-amd64");
        for name in [
            "iptables",
            "ip6tables",
            "iptables-save",
            "ip6tables-save",
            "iptables-restore",
            "ip6tables-restore",
        ] {
            let place = self.folder.join("usr/sbin").join(name);
            symlink("xtables-nft-multi", place).expect("a link");
        }
        let tools = packages("").join("..");
        for name in ["critest", "nri-sample", "nri-sample-old"] {
            self.copy(&tools.join("bin").join(name), &format!("opt/tools/bin/{name}"));
        }
        self.write_program("opt/tools/bin/sudo", "#!/bin/sh\nexec \"$@\"\n");
        self.copy(&tools.join("busybox/bin/busybox"), "opt/tools/busybox/bin/busybox");
        let libc = "lib/x86_64-linux-gnu/libresolv.so.2";
        self.copy(&packages("tools-amd64").join(libc), libc);
    }

    /// Sets the size of the disk.
    pub(crate) fn set_disk_mib(&self, mib: u32) {
        self.disk_mib.set(mib);
    }

    /// Architecture of the guest.
    pub(crate) fn arch(&self) -> Arch {
        self.arch
    }

    /// Copies everything that `tests/tools/install` unpacked under this name.
    pub(crate) fn copy_packages(&self, name: &str) {
        let from = format!("{}/.", packages(name).display());
        let copied = Command::new("cp").args(["-a", &from]).arg(&self.folder).status().expect("cp");
        assert!(copied.success(), "copy {from}");
    }

    /// Adds Debian's systemd, D-Bus, dpkg and programs that package scripts need; the unit that starts the
    /// suite; coracle's package, which the suite installs, and crictl, with which its scripts remove pods.
    pub(crate) fn add_systemd(&self) {
        self.copy_packages(&format!("systemd-{}", self.arch.debian()));
        self.write("etc/machine-id", "");
        self.write("var/lib/dpkg/status", "");
        self.add_package();
        let crictl = format!("../edge/crictl-{}", self.arch.debian());
        self.copy(&packages("").join(crictl), "usr/bin/crictl");
        self.add_host_programs();
        self.write("etc/systemd/system/suite.service", include_str!("systemd/suite.service"));
        self.write("etc/systemd/system/default.target", include_str!("systemd/default.target"));
    }

    /// Builds coracle's package and archive as a release does, from the programs that all guests use.
    fn add_package(&self) {
        let out = self.folder.with_extension("release");
        let made = Command::new(workspace().join("packaging/dist"))
            .arg(&out)
            .arg(self.arch.triple())
            .env("CORACLE_FORMATS", "deb tar")
            .output()
            .expect("packaging/dist");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let files: Vec<_> =
            fs::read_dir(&out).expect("a release").flatten().map(|entry| entry.path()).collect();
        for (kind, to) in [("deb", "opt/coracle.deb"), ("gz", "opt/coracle.tar.gz")] {
            let found = files.iter().find(|path| path.extension().is_some_and(|found| found == kind));
            self.copy(found.unwrap_or_else(|| panic!("no .{kind}: {files:?}")), to);
        }
        fs::remove_dir_all(out).expect("it is ours");
    }

    /// Adds what lines of the pages need of a machine with systemd: gzip for tar, a kernel module that can be loaded, and
    /// the identity that systemd compares with that of an extension.
    fn add_host_programs(&self) {
        for name in ["bin/gzip", "sbin/modprobe"] {
            symlink("/bin/busybox", self.folder.join(name)).expect("a link");
        }
        const MODULE: &str = "kernel/net/bridge/br_netfilter.ko";
        let modules = packages(self.arch.debian()).join("lib/modules");
        let release = fs::read_dir(&modules).expect("a kernel: tests/tools/install qemu").flatten().next();
        let release = release.expect("a kernel's modules").file_name().display().to_string();
        self.copy(&modules.join(&release).join(MODULE), &format!("lib/modules/{release}/{MODULE}"));
        // What it depends on is loaded at the boot.
        self.write(&format!("lib/modules/{release}/modules.dep"), format!("{MODULE}:\n"));
        self.write("etc/os-release", "ID=debian\nVERSION_ID=12\n");
    }

    /// Writes a file.
    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.folder.join(name);
        fs::create_dir_all(path.parent().expect("a file is in a folder")).expect("a folder");
        fs::write(path, content).expect("a file of the disk");
    }

    /// Writes an executable script.
    pub(crate) fn write_program(&self, name: &str, content: &str) {
        self.write(name, content);
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(self.folder.join(name), mode).expect("our file");
    }

    /// Path of a file before the disk is created.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Content of a file.
    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.folder.join(name)).expect("a file of the disk")
    }

    /// Copies a file or program.
    pub(crate) fn copy(&self, from: &Path, name: &str) {
        let to = self.folder.join(name);
        fs::create_dir_all(to.parent().expect("a file is in a folder")).expect("a folder");
        fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }

    /// Creates the disk, completely initialised: later initialisation by the kernel would cause writes that a
    /// power cut could lose.
    pub(crate) fn pack(self, disk: &Path) {
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-d"])
            .arg(&self.folder)
            .arg(disk)
            .arg(format!("{}M", self.disk_mib.get()))
            .output()
            .expect("mke2fs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        fs::remove_dir_all(&self.folder).expect("it is ours");
    }

    /// Copies the libraries of Debian's CNI plugins to their paths.
    fn copy_libc(&self) {
        let (triple, loader, place) = match self.arch {
            Arch::X86_64 => ("x86_64-linux-gnu", "ld-linux-x86-64.so.2", "lib64"),
            Arch::Aarch64 => ("aarch64-linux-gnu", "ld-linux-aarch64.so.1", "lib"),
            Arch::Armv7 => ("arm-linux-gnueabihf", "ld-linux-armhf.so.3", "lib"),
        };
        let from = packages(self.arch.debian()).join("lib").join(triple);
        self.copy(&from.join("libc.so.6"), &format!("lib/{triple}/libc.so.6"));
        self.copy(&from.join(loader), &format!("{place}/{loader}"));
    }
}

/// Directory to which `tests/tools/install qemu` unpacked Debian's packages.
pub(crate) fn packages(name: &str) -> PathBuf {
    workspace().join("target/tools/guest").join(name)
}

pub(crate) fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace")
}

/// Directory to which `make guests`, or `make second`, builds for a target with a profile.
pub(crate) fn built(arch: Arch, profile: &str) -> PathBuf {
    let target = if Arch::ALL.contains(&arch) { "target" } else { "target/second" };
    workspace().join(target).join(arch.triple()).join(profile)
}

/// The newest build of a suite for the target, whose file name contains a hash.
fn suite(arch: Arch, suite: &str) -> PathBuf {
    let folder = built(arch, "client/deps");
    let entries = fs::read_dir(folder).expect("the suites of this target: make guests").flatten();
    let suites = entries.filter(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.strip_prefix(suite).is_some_and(|rest| rest.starts_with('-')) && !name.contains('.')
    });
    let newest = suites.max_by_key(|entry| entry.metadata().and_then(|about| about.modified()).ok());
    newest.unwrap_or_else(|| panic!("the suite {suite} of this target: make guests")).path()
}
