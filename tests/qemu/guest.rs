//! A guest: its disk, its kernel, and its console, which is read continuously.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::disk::{Tree, packages};
use crate::initramfs::{Initramfs, modules};
use crate::target::Arch;

/// The result of a suite in a guest.
#[derive(Default)]
pub(crate) struct Report {
    /// Number of passed tests.
    pub(crate) passed: usize,
    /// Names of failed tests.
    pub(crate) failed: Vec<String>,
    /// Exit code of the suite; `None` if the guest did not report it.
    pub(crate) code: Option<i32>,
    /// The complete output of the console.
    pub(crate) console: String,
    pub(crate) took: Duration,
}

/// The next action after a line of a guest's console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Continue reading.
    Read,
    /// Kill QEMU: the power is cut.
    Cut,
}

/// A guest that can be booted.
pub(crate) struct Guest {
    arch: Arch,
    memory_mib: u32,
    processors: u32,
    folder: PathBuf,
    is_systemd: bool,
    counts_instructions: bool,
}

impl Guest {
    /// Creates a guest: its disk, with these suites, and its initramfs. `name` must be unique in this run.
    #[track_caller]
    pub(crate) fn new(name: &str, arch: Arch, memory_mib: u32, suites: &[&str]) -> Guest {
        Guest::with(name, arch, memory_mib, suites, |_| {})
    }

    /// Creates a guest with further files on its disk.
    #[track_caller]
    pub(crate) fn with(
        name: &str,
        arch: Arch,
        memory_mib: u32,
        suites: &[&str],
        add: impl FnOnce(&Tree),
    ) -> Guest {
        let folder =
            std::env::temp_dir().join(format!("coracle-qemu-{name}-{}-{}", arch.name(), std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let guest =
            Guest { arch, memory_mib, processors: 1, folder, is_systemd: false, counts_instructions: false };
        guest.make_initramfs();
        let tree = Tree::new(arch, guest.folder.join("tree"), suites);
        add(&tree);
        tree.pack(&guest.disk());
        guest
    }

    /// Creates a guest that boots with systemd, and has coracle's package for installation and further files on its disk.
    #[track_caller]
    pub(crate) fn systemd(
        name: &str,
        arch: Arch,
        memory_mib: u32,
        suites: &[&str],
        add: impl FnOnce(&Tree),
    ) -> Guest {
        let mut guest = Guest::with(name, arch, memory_mib, suites, |tree| {
            tree.add_systemd();
            add(tree);
        });
        guest.is_systemd = true;
        guest
    }

    /// Lets the guest's clock advance by a nanosecond with each instruction, instead of with the host's time, so that times in
    /// the guest depend little on what else the host does. Emulation is slower with it.
    pub(crate) fn count_instructions(&mut self) {
        self.counts_instructions = true;
    }

    /// Sets the number of processors, which is one otherwise.
    pub(crate) fn set_processors(&mut self, processors: u32) {
        self.processors = processors;
    }

    /// Path of its disk.
    pub(crate) fn disk(&self) -> PathBuf {
        self.folder.join("disk")
    }

    fn kernel(&self) -> PathBuf {
        let boot = packages(self.arch.debian()).join("boot");
        let entries = fs::read_dir(boot).expect("a kernel: tests/tools/install qemu");
        let mut images = entries.flatten().map(|entry| entry.path());
        images.find(|path| path.display().to_string().contains("vmlinuz")).expect("a kernel's image")
    }

    fn make_initramfs(&self) {
        let mut archive = Initramfs::default();
        for name in ["bin", "dev", "proc", "sys", "root", "modules"] {
            archive.directory(name);
        }
        let packages = packages(self.arch.debian());
        archive.program("bin/busybox", &read(&packages.join("bin/busybox")));
        archive.program("init", include_bytes!("init.sh"));
        for (number, path) in modules(&packages.join("lib/modules"), &self.arch.modules()).iter().enumerate()
        {
            archive.program(&format!("modules/{number:02}.ko"), &read(path));
        }
        fs::write(self.folder.join("initramfs"), archive.finish()).expect("a file");
    }

    /// Starts QEMU with `drive` and `words` appended to the kernel's command line.
    fn qemu(&self, drive: &str, words: &str) -> Child {
        // A panic ends it; AppArmor and Yama have Debian's defaults.
        let mut line = format!("{} panic=-1 quiet {words}", self.arch.value("KERNEL_WORDS"));
        if self.is_systemd {
            line += " systemd.show_status=0";
        }
        Command::new(self.arch.value("QEMU"))
            .args(["-M", self.arch.value("MACHINE"), "-accel", "tcg", "-cpu", self.arch.value("CPU")])
            .args(self.counts_instructions.then_some(["-icount", "shift=0"]).into_iter().flatten())
            .args(["-smp", &self.processors.to_string(), "-display", "none"])
            .args(["-nodefaults", "-no-reboot", "-serial", "stdio", "-m", &self.memory_mib.to_string()])
            .args(["-drive", &format!("{drive},format=raw,if=none,id=d")])
            .args(["-device", "virtio-blk-pci,drive=d,logical_block_size=4096,physical_block_size=4096"])
            .args(["-device", "virtio-rng-pci"])
            .arg("-kernel")
            .arg(self.kernel())
            .arg("-initrd")
            .arg(self.folder.join("initramfs"))
            .args(["-append", &line])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("QEMU: tests/tools/install qemu")
    }

    /// Boots the guest and reads its console until it powers off, or until `limit`.
    pub(crate) fn boot(&self, words: &str, limit: Duration) -> Report {
        self.boot_on(&self.drive(), words, limit, |_| Next::Read)
    }

    /// Boots the guest as [`Guest::boot`] does, and prints its console meanwhile.
    pub(crate) fn boot_printing(&self, words: &str, limit: Duration) -> Report {
        self.boot_on(&self.drive(), words, limit, |line| {
            if let Some(line) = line {
                println!("{line}");
            }
            Next::Read
        })
    }

    fn drive(&self) -> String {
        format!("file={},cache=unsafe", self.disk().display())
    }

    /// Boots the guest with another drive; `watch` is called for each line, and with `None` for each tenth of a
    /// second without one.
    pub(crate) fn boot_on(
        &self,
        drive: &str,
        words: &str,
        limit: Duration,
        mut watch: impl FnMut(Option<&str>) -> Next,
    ) -> Report {
        const LOOK: Duration = Duration::from_millis(100);
        let begun = Instant::now();
        let mut qemu = self.qemu(drive, words);
        let lines = lines(qemu.stdout.take().expect("a pipe"));
        let mut report = Report::default();
        let mut next = Next::Read;
        while next == Next::Read && begun.elapsed() < limit {
            match lines.recv_timeout(LOOK) {
                Ok(line) => {
                    report.read(&line);
                    next = watch(Some(&line));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => next = watch(None),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        // It has ended, or must be ended.
        let _ = qemu.kill();
        qemu.wait().expect("it is our child");
        // The remaining output.
        while let Ok(line) = lines.recv() {
            report.read(&line);
            watch(Some(&line));
        }
        report.took = begun.elapsed();
        report
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The lines of a console; the channel ends with it.
fn lines(console: impl std::io::Read + Send + 'static) -> mpsc::Receiver<String> {
    let (said, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(console);
        let mut line = Vec::new();
        while matches!(reader.read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line).replace('\r', "");
            if said.send(text.trim_end().to_owned()).is_err() {
                return;
            }
            line.clear();
        }
    });
    lines
}

impl Report {
    /// Fails with the complete output unless the guest reported success.
    #[track_caller]
    pub(crate) fn expect_good(&self, name: &str) {
        println!("{name}: {} passed in {:?}", self.passed, self.took);
        for line in self.console.lines().filter(|line| line.starts_with("MEASURED ")) {
            println!("{name}: {line}");
        }
        assert!(self.failed.is_empty(), "{name}: {:?}\n{}", self.failed, self.console);
        assert_eq!(self.code, Some(0), "{name}: no good end\n{}", self.console);
    }

    /// Evaluates `test NAME ... FAILED` and `test result: …` of Rust's test harness, and `DONE CODE` of the
    /// guest's script. The number of passed tests is taken from the result, because kernel messages may be
    /// mixed into lines of tests.
    fn read(&mut self, line: &str) {
        if let Some(result) = line.strip_prefix("test result: ") {
            self.passed = result.split(' ').find_map(|word| word.parse().ok()).unwrap_or(0);
        } else if let Some(name) =
            line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.failed.push(name.to_owned());
        } else if let Some(code) = line.strip_prefix("DONE ") {
            self.code = code.parse().ok();
        }
        self.console.push_str(line);
        self.console.push('\n');
    }
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
