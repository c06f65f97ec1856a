//! Installation: `coracle check`, the watchdog of the unit, cross.toml with the real `cross`, reproducible
//! releases, signatures, installation, upgrade and complete removal of packages, the compiled AppArmor profile, the
//! configuration of k3s and kubeadm, and the lines of the workflow of CI.
#![forbid(unsafe_code)]

mod apk;
mod apparmor;
mod check;
mod completions;
mod cross;
mod deb;
mod dist;
mod man;
mod oci;
mod recipes;
mod root;
mod rpm;
mod sbom;
mod setup;
mod signatures;
mod watchdog;
mod workflow;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The directory of the workspace.
pub(crate) fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace")
}

/// A directory of one test, which is removed on drop.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let base = std::env::var("CORACLE_TEST_DIR").unwrap_or("/var/tmp/coracle-tests".into());
        let path = PathBuf::from(base).join(format!("packaging-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file below the directory, and creates its parent directories.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().expect("it is below")).expect("a folder");
        std::fs::write(&path, text).expect("a file");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a command; returns its output on both streams.
#[track_caller]
pub(crate) fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A day in 2026: the time of all files.
pub(crate) const EPOCH: u32 = 1_780_000_000;

/// Builds these formats of a release from the built programs, with this time for all files.
#[track_caller]
pub(crate) fn release(out: &Path, programs: &Path, epoch: u32, formats: &str, triples: &[&str]) {
    let output = run(Command::new(workspace().join("packaging/dist"))
        .arg(out)
        .args(triples)
        .env("CORACLE_FORMATS", formats)
        .env("CORACLE_PROGRAMS", programs)
        .env("SOURCE_DATE_EPOCH", epoch.to_string()));
    assert!(output.status.success(), "{}", said(&output));
}

/// The target of this machine.
pub(crate) fn triple() -> String {
    format!("{}-unknown-linux-musl", std::env::consts::ARCH)
}

/// The package of a release in this format.
#[track_caller]
pub(crate) fn package(folder: &Folder, format: &str, programs: &Path) -> PathBuf {
    let out = folder.path().join("out");
    release(&out, programs, EPOCH, format, &[&triple()]);
    only(&out, format)
}

/// The package of a release, and that of version 9.0.0, which has another default configuration and only stand-ins for
/// the programs.
#[track_caller]
pub(crate) fn packages(folder: &Folder, format: &str, programs: &Path) -> (PathBuf, PathBuf) {
    let (tree, next) = (folder.path().join("tree"), folder.path().join("next"));
    std::fs::create_dir(&next).expect("a folder");
    let script = r##"set -eu
packaging/tree "$1" "$2"
echo "# new default" >>"$2/usr/share/coracle/config.toml"
case $4 in
  deb) packaging/deb/build "$2" 9.0.0 "$1" "$3" ;;
  *) packaging/nfpm "$4" "$2" 9.0.0 "$1" "$3" ;;
esac"##;
    let output = run(Command::new("bash")
        .args(["-c", script, "bash", &triple()])
        .args([&tree, &next])
        .arg(format)
        .current_dir(workspace())
        .env("CORACLE_PROGRAMS", dist::stand_ins(folder, "programs", 0o755))
        .env("SOURCE_DATE_EPOCH", EPOCH.to_string()));
    assert!(output.status.success(), "{}", said(&output));
    (package(folder, format, programs), only(&next, format))
}

/// The file of this kind in a directory.
pub(crate) fn only(folder: &Path, kind: &str) -> PathBuf {
    let mut entries = std::fs::read_dir(folder).expect("a release").flatten().map(|entry| entry.path());
    entries.find(|path| path.extension().is_some_and(|own| own == kind)).expect("a package")
}
