//! A guest from its parts to its last word: a disk with the programs of its architecture, a kernel, a console that is read
//! as it is written.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::initramfs::{Initramfs, modules};

/// Beside the disk and what it is read through: file systems and links of pods.
const MODULES: [&str; 7] = ["virtio_pci", "virtio_blk", "overlay", "veth", "bridge", "tun", "virtio_rng"];

/// The disk, in which every test makes a node of its own.
const DISK_MIB: u32 = 1024;

/// One of the two targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arch {
    X86_64,
    Aarch64,
}

impl Arch {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
        }
    }

    /// As Debian calls it.
    fn debian(self) -> &'static str {
        match self {
            Arch::X86_64 => "amd64",
            Arch::Aarch64 => "arm64",
        }
    }

    /// Machine, CPU and console. Not `max` on arm64: QEMU 7.2 emulates pointer authentication, five times slower; the
    /// Cortex-A53 is the oldest CPU that coracle is for.
    fn machine(self) -> [&'static str; 3] {
        match self {
            Arch::X86_64 => ["q35", "max", "ttyS0"],
            Arch::Aarch64 => ["virt", "cortex-a53", "ttyAMA0"],
        }
    }
}

/// How a suite ended in a guest.
pub(crate) struct Report {
    /// Tests that passed.
    pub(crate) passed: usize,
    /// Names of those that failed.
    pub(crate) failed: Vec<String>,
    /// Exit code of the suite; none where the guest never said it.
    pub(crate) code: Option<i32>,
    /// All it said.
    pub(crate) console: String,
    pub(crate) took: Duration,
}

/// A guest that can be booted.
pub(crate) struct Guest {
    arch: Arch,
    memory_mib: u32,
    folder: PathBuf,
}

impl Guest {
    /// Makes its disk and its initramfs.
    #[track_caller]
    pub(crate) fn new(arch: Arch, memory_mib: u32, filters: &str) -> Guest {
        let folder =
            std::env::temp_dir().join(format!("coracle-qemu-{}-{}", arch.name(), std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let guest = Guest { arch, memory_mib, folder };
        guest.make_initramfs();
        guest.make_disk(filters);
        guest
    }

    /// Where Debian's packages for it are unpacked.
    fn packages(&self) -> PathBuf {
        workspace().join("target/tools/guest").join(self.arch.debian())
    }

    fn kernel(&self) -> PathBuf {
        let boot = fs::read_dir(self.packages().join("boot")).expect("a kernel: tests/tools/install qemu");
        let mut images = boot.flatten().map(|entry| entry.path());
        images.find(|path| path.display().to_string().contains("vmlinuz")).expect("a kernel's image")
    }

    fn make_initramfs(&self) {
        let mut archive = Initramfs::default();
        for name in ["bin", "dev", "proc", "sys", "root", "modules"] {
            archive.directory(name);
        }
        archive.program("bin/busybox", &read(&self.packages().join("bin/busybox")));
        archive.program("init", include_bytes!("init.sh"));
        for (number, path) in modules(&self.packages().join("lib/modules"), &MODULES).iter().enumerate() {
            archive.program(&format!("modules/{number:02}.ko"), &read(path));
        }
        fs::write(self.folder.join("initramfs"), archive.finish()).expect("a file");
    }

    fn make_disk(&self, filters: &str) {
        let (tree, programs) = (self.folder.join("tree"), programs(self.arch));
        for name in [
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
            "var/tmp",
        ] {
            fs::create_dir_all(tree.join(name)).expect("a folder");
        }
        copy(&self.packages().join("bin/busybox"), &tree.join("bin/busybox"));
        for name in ["coracle", "coracle-worker", "coracle-pod", "probe"] {
            copy(&programs.join(name), &tree.join("opt").join(name));
        }
        copy(&suite(self.arch), &tree.join("opt/suite"));
        for entry in fs::read_dir(self.packages().join("usr/lib/cni")).expect("CNI plugins").flatten() {
            copy(&entry.path(), &tree.join("usr/lib/cni").join(entry.file_name()));
        }
        self.copy_libc(&tree);
        let text = |name: &str, text: &str| fs::write(tree.join(name), text).expect("a file");
        text("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n");
        text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
        text("etc/group", "root:x:0:\n");
        text("opt/filters", filters);
        fs::write(tree.join("sbin/guest"), include_bytes!("guest.sh")).expect("a file");
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-d"])
            .arg(&tree)
            .arg(self.folder.join("disk"))
            .arg(format!("{DISK_MIB}M"))
            .output()
            .expect("mke2fs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        fs::remove_dir_all(&tree).expect("it is ours");
    }

    /// What Debian's CNI plugins are linked with, at the places that they name.
    fn copy_libc(&self, tree: &Path) {
        let (triple, loader, place) = match self.arch {
            Arch::X86_64 => ("x86_64-linux-gnu", "ld-linux-x86-64.so.2", "lib64"),
            Arch::Aarch64 => ("aarch64-linux-gnu", "ld-linux-aarch64.so.1", "lib"),
        };
        let from = self.packages().join("lib").join(triple);
        let to = tree.join("lib").join(triple);
        fs::create_dir_all(&to).expect("a folder");
        fs::create_dir_all(tree.join(place)).expect("a folder");
        copy(&from.join("libc.so.6"), &to.join("libc.so.6"));
        copy(&from.join(loader), &tree.join(place).join(loader));
    }

    fn qemu(&self) -> Child {
        let [machine, cpu, console] = self.arch.machine();
        let disk =
            format!("file={},format=raw,if=none,id=d,cache=unsafe", self.folder.join("disk").display());
        Command::new(format!("qemu-system-{}", self.arch.name()))
            .args([
                "-M",
                machine,
                "-accel",
                "tcg",
                "-cpu",
                cpu,
                "-smp",
                "1",
                "-display",
                "none",
                "-nodefaults",
            ])
            .args(["-no-reboot", "-serial", "stdio", "-m", &self.memory_mib.to_string()])
            .args(["-drive", &disk, "-device", "virtio-blk-pci,drive=d", "-device", "virtio-rng-pci"])
            .arg("-kernel")
            .arg(self.kernel())
            .arg("-initrd")
            .arg(self.folder.join("initramfs"))
            // A panic ends it; AppArmor and Yama are Debian's defaults.
            .args(["-append", &format!("console={console} panic=-1 quiet")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("QEMU: tests/tools/install qemu")
    }

    /// Boots it, and reads what it says until it has switched itself off; after `limit` it is switched off.
    pub(crate) fn boot(&self, limit: Duration) -> Report {
        let begun = Instant::now();
        let mut qemu = self.qemu();
        let stdout = qemu.stdout.take().expect("a pipe");
        let (said, lines) = mpsc::channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut line = Vec::new();
            while matches!(reader.read_until(b'\n', &mut line), Ok(1..)) {
                let text = String::from_utf8_lossy(&line).replace('\r', "");
                if said.send(text.trim_end().to_owned()).is_err() {
                    return;
                }
                line.clear();
            }
        });
        let mut report = Report {
            passed: 0,
            failed: Vec::new(),
            code: None,
            console: String::new(),
            took: Duration::ZERO,
        };
        while let Ok(line) = lines.recv_timeout(limit.saturating_sub(begun.elapsed())) {
            report.read(&line);
        }
        // It has ended, or must.
        let _ = qemu.kill();
        qemu.wait().expect("it is our child");
        report.took = begun.elapsed();
        report
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Report {
    /// `test NAME ... ok`, as every suite of Rust's writes it, and `DONE CODE` of the guest's own script.
    fn read(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("test ") {
            match rest.rsplit_once(" ... ") {
                Some((_, "ok")) => self.passed += 1,
                Some((name, "FAILED")) => self.failed.push(name.to_owned()),
                Some(_) | None => {}
            }
        } else if let Some(code) = line.strip_prefix("DONE ") {
            self.code = code.parse().ok();
        }
        self.console.push_str(line);
        self.console.push('\n');
    }
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace")
}

/// Where `make guests` leaves the programs of a target.
fn programs(arch: Arch) -> PathBuf {
    workspace().join(format!("target/{}-unknown-linux-musl/release", arch.name()))
}

/// The life-cycle suite, built for the target: the newest, as its name has a number that changes.
fn suite(arch: Arch) -> PathBuf {
    let folder = workspace().join(format!("target/{}-unknown-linux-musl/client/deps", arch.name()));
    let built = fs::read_dir(folder).expect("the suite of this target: make guests").flatten();
    let suites = built.filter(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with("lifecycle-") && !name.contains('.')
    });
    let newest = suites.max_by_key(|entry| entry.metadata().and_then(|about| about.modified()).ok());
    newest.expect("the suite of this target: make guests").path()
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn copy(from: &Path, to: &Path) {
    fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
}
