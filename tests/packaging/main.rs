//! Installation: `coracle check`, the watchdog of the unit, cross.toml with the real `cross`, reproducible
//! releases, complete removal of the package, the compiled AppArmor profile, the configuration of k3s and kubeadm.
#![forbid(unsafe_code)]

mod apparmor;
mod check;
mod completions;
mod cross;
mod deb;
mod dist;
mod setup;
mod watchdog;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The workspace.
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

    /// Writes a file below it, and creates its parent directories.
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

/// Builds a release for the host's architecture from the built programs, with this time for all files.
#[track_caller]
pub(crate) fn release(out: &Path, programs: &Path, epoch: u32) {
    let triple = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let output = run(Command::new(workspace().join("packaging/dist"))
        .arg(out)
        .arg(triple)
        .env("CORACLE_PROGRAMS", programs)
        .env("SOURCE_DATE_EPOCH", epoch.to_string()));
    assert!(output.status.success(), "{}", said(&output));
}
