//! Tests the built program from outside: exit codes, and how it becomes the daemon. Needs no privileges.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use coracle_base::testdir::TestDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_coracle");

/// Runs a program; returns its exit code, its output and its errors.
fn run(program: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// One test, because a program that was just written cannot be executed while another test starts a process.
#[test]
fn commands_end_with_their_exit_code_or_become_the_daemon() {
    mistakes_are_named_with_their_exit_code();
    serve_becomes_the_daemon_beside_it();
}

fn mistakes_are_named_with_their_exit_code() {
    let dir = TestDir::new("command-line");
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "rooot = '/x'\n").unwrap();
    let (code, _, log) = run(Path::new(PROGRAM), &["config", "check", file.to_str().unwrap()]);
    assert_eq!(code, Some(1));
    assert!(log.starts_with("coracle: ") && log.contains("config.toml:1: unknown key"), "{log}");
    let (code, _, log) = run(Path::new(PROGRAM), &["srve"]);
    assert_eq!((code, log.as_str()), (Some(2), "coracle: unknown command `srve`, did you mean `serve`?\n"));
    assert_eq!(run(Path::new(PROGRAM), &["config", "default"]).0, Some(0));
}

/// Units of nodes that are upgraded name `coracle serve`.
fn serve_becomes_the_daemon_beside_it() {
    let dir = TestDir::new("serve");
    let (program, daemon) = (dir.path().join("coracle"), dir.path().join("coracled"));
    std::fs::copy(PROGRAM, &program).unwrap();
    let (code, _, log) = run(&program, &["serve"]);
    let expected = format!("coracle: start the daemon {}: no such file or directory\n", daemon.display());
    assert_eq!((code, log), (Some(1), expected));
    std::fs::write(&daemon, "#!/bin/sh\necho $PPID \"$@\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&daemon, PermissionsExt::from_mode(0o755)).unwrap();
    let (code, out, _) = run(&program, &["serve", "--root", "/r", "--listen=unix:///s"]);
    // The parent of the daemon is that of the command: the process is the same.
    let expected = format!("{} --root /r --listen=unix:///s\n", std::process::id());
    assert_eq!((code, out), (Some(7), expected));
}
