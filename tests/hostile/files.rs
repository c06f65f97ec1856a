//! The runtime's files on the node as an unprivileged local user sees them who knows all names
//! (CVE-2021-41103, and the environments of containers).

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_tests::node::base;
use coracle_tests::pod_fixture::PodFixture;

/// User `nobody` of every distribution.
const NOBODY: u32 = 65_534;

/// The files that user 65534 can access below the node's root, state and run directories: the report of `probe attack walk`.
#[track_caller]
pub(crate) fn as_nobody(fixture: &PodFixture, secret: &str) -> String {
    let mut paths = Vec::new();
    // The log directory belongs to the kubelet, and the test's programs and configuration are not part of the
    // runtime.
    for top in [fixture.node.root().to_owned(), fixture.node.state(), fixture.node.folder().join("run")] {
        list(&top, &mut paths);
    }
    list(Path::new("/run/coracle"), &mut paths);
    assert!(paths.len() > 20, "there is something to look for: {paths:?}");
    // Other users can pass through the parent directories: the defence must not depend on them.
    let folder = fixture.node.folder();
    for place in [base(), folder.to_owned()] {
        let mode = fs::metadata(&place).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o005, 0o005, "{} hides what is tested", place.display());
    }
    let program = folder.join("nobody");
    fs::write(&program, fixture.node.probe()).expect("a program");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let mut child = Command::new(&program)
        .args(["attack", "walk", secret])
        .uid(NOBODY)
        .gid(NOBODY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program runs");
    let mut input = child.stdin.take().expect("a pipe");
    let text: String = paths.iter().map(|path| format!("{}\n", path.display())).collect();
    let feeder = std::thread::spawn(move || input.write_all(text.as_bytes()));
    let output = child.wait_with_output().expect("it ends");
    feeder.join().expect("the thread ends").expect("it reads to the end");
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(report.contains(&format!("saw tried {}", paths.len())), "{report}");
    fs::remove_file(&program).expect("it is ours");
    report
}

/// All paths below a directory, as root sees them.
fn list(top: &Path, paths: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(top) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list(&entry.path(), paths);
        }
        paths.push(entry.path());
    }
}
