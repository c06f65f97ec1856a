//! Which directories have verifiers, and the end of the process that runs them.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;

use super::{Candidate, Descriptor, PROGRAMS_MAX, Verifiers, programs};

/// An empty directory with mode 0755.
fn directory(name: &str) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("coracle-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
    directory
}

fn add(directory: &Path, name: &str, mode: u32) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path
}

fn mistake(directory: &Path) -> String {
    programs(directory).expect_err("a mistake")
}

#[test]
fn a_directory_that_others_may_change_or_that_judges_nothing_is_refused_as_root() {
    let dir = directory("verifiers");
    assert!(mistake(&dir.join("absent")).ends_with("absent: no such file or directory"), "absent");
    assert!(mistake(&dir).contains("has no program"), "empty");
    let first = add(&dir, "b", 0o755);
    let second = add(&dir, "a", 0o700);
    assert_eq!(programs(&dir).unwrap(), [second.clone(), first.clone()], "by name");
    symlink("/bin/sh", dir.join("c")).unwrap();
    assert_eq!(programs(&dir).unwrap().len(), 3, "a link to a program of the system");

    fs::set_permissions(&first, Permissions::from_mode(0o775)).unwrap();
    assert!(mistake(&dir).contains("b: it must be owned by root"), "its group may write");
    fs::set_permissions(&first, Permissions::from_mode(0o755)).unwrap();
    chown(&first, Some(1000), None).unwrap();
    assert!(mistake(&dir).contains("b: it must be owned by root"), "of another user");
    chown(&first, Some(0), None).unwrap();
    fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
    assert!(mistake(&dir).contains("it must be owned by root"), "a directory that all users may write");
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();

    let below = dir.with_extension("below");
    fs::create_dir_all(below.join("programs")).unwrap();
    add(&below.join("programs"), "e", 0o755);
    fs::set_permissions(&below, Permissions::from_mode(0o777)).unwrap();
    assert!(mistake(&below.join("programs")).contains("below: image verifiers are below it"), "above");
    symlink(below.join("programs/e"), dir.join("e")).unwrap();
    assert!(mistake(&dir).contains("below: image verifiers are below it"), "above the target of a link");
    fs::remove_file(dir.join("e")).unwrap();
    fs::set_permissions(&below, Permissions::from_mode(0o1777)).unwrap();
    assert!(programs(&below.join("programs")).is_ok(), "with the sticky bit");
    chown(&below, Some(1000), None).unwrap();
    assert!(mistake(&below.join("programs")).contains("below: image verifiers are below it"), "of a user");
    fs::remove_dir_all(below).unwrap();

    let text = add(&dir, "README", 0o644);
    assert!(mistake(&dir).contains("README: it is no executable file"), "a text");
    fs::remove_file(text).unwrap();
    fs::create_dir(dir.join("d")).unwrap();
    assert!(mistake(&dir).contains("d: it is no executable file"), "a directory");
    fs::remove_dir(dir.join("d")).unwrap();
    (0..PROGRAMS_MAX).for_each(|number| drop(add(&dir, &number.to_string(), 0o755)));
    assert!(mistake(&dir).contains("it has more than 64 entries"), "too many");
    fs::remove_dir_all(dir).unwrap();
}

/// The process of the verifiers may be blocked by a directory on a network.
#[test]
fn a_process_that_gives_no_verdict_ends_at_the_time_limit() {
    let (stdin, stdout) = (Stdio::piped(), Stdio::piped());
    let mut child = Command::new("sleep").arg("600").stdin(stdin).stdout(stdout).spawn().unwrap();
    let (question, verdict) = (child.stdin.take(), child.stdout.take().unwrap());
    let pid = Pid::from_raw(child.id().cast_signed());
    let verifiers = Verifiers { child, question, verdict, limit: Duration::from_millis(100) };
    let descriptor = Descriptor { media_type: String::new(), digest: String::new(), size: 0 };
    let refused = verifiers.ask(&Candidate { name: "app:1".to_owned(), descriptor }, &|| {}).unwrap_err();
    assert!(refused.message.ends_with("no verdict within 0 s"), "{}", refused.message);
    assert_eq!(kill(pid, None), Err(Errno::ESRCH), "it has been killed and reaped");
}
