//! Permissions of the daemon's files (finding 4 in docs/results/0.1.0.md, CVE-2021-41103): other users of the node
//! can neither read environments nor execute programs of containers, while containers, log readers and
//! plugins find the usual modes.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_tests::cri::proto::{KeyValue, Mount};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, security};

/// A user without special permissions.
const NOBODY: u32 = 65_534;

const SECRET: &str = "hunter2-of-the-test";

/// All paths below a directory including itself, as root sees them. Mounts of containers are in other
/// namespaces.
fn everything(top: &Path, found: &mut Vec<PathBuf>) {
    found.push(top.to_owned());
    let Ok(entries) = fs::read_dir(top) else { return };
    for entry in entries.flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => everything(&entry.path(), found),
            _ => found.push(entry.path()),
        }
    }
}

/// The part of `paths` that user 65534 can read or list.
fn readable(paths: &[PathBuf]) -> Vec<PathBuf> {
    let mut child = Command::new("/bin/sh")
        .args(["-c", r#"while IFS= read -r path; do if [ -r "$path" ]; then echo "$path"; fi; done"#])
        .uid(NOBODY)
        .gid(NOBODY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a shell");
    let list: String = paths.iter().map(|path| format!("{}\n", path.display())).collect();
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || stdin.write_all(list.as_bytes()));
    let output = child.wait_with_output().expect("the shell ends");
    writer.join().expect("no panic").expect("the shell reads");
    String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect()
}

/// Fails if user 65534 can read anything of the node except leases and names, or can execute `programs`.
#[track_caller]
fn assert_closed(node: &Node, programs: &[PathBuf]) {
    let mut paths = Vec::new();
    for top in [node.root(), &node.state(), Path::new("/run/netns")] {
        everything(top, &mut paths);
    }
    assert!(paths.len() > 30, "pods are there: {paths:?}");
    let leases = node.root().join("networks");
    for path in readable(&paths) {
        // Names and addresses, which ip-netns(8) and host-local show as well.
        assert!(
            path.starts_with("/run/netns") || path.starts_with(&leases),
            "{} is accessible to other users: {:o}",
            path.display(),
            path.symlink_metadata().expect("it is there").mode()
        );
    }
    let open: Vec<_> = paths.iter().filter(|path| path.starts_with(&leases) && path.is_file()).collect();
    for path in open {
        let text = String::from_utf8_lossy(&fs::read(path).expect("a lease")).into_owned();
        assert!(!text.contains(SECRET), "{}", path.display());
    }
    for program in programs {
        assert_eq!(program.metadata().expect("it is there").mode() & 0o7777, 0o4755);
        let run = Command::new(program).arg("true").uid(NOBODY).gid(NOBODY).status();
        let refused = run.expect_err(&format!("{} runs with its owner's rights", program.display()));
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{}", program.display());
    }
}

/// A set-user-ID program in the writable layer of a container and one in a layer of its image.
fn set_user_id_programs(fixture: &PodFixture, id: &str) -> Vec<PathBuf> {
    let upper =
        fixture.node.root().join("pods").join(&fixture.pod_id).join("containers").join(id).join("upper");
    let mut programs = vec![upper.join("suidp")];
    let layers = fs::read_dir(fixture.node.root().join("layers")).expect("layers").flatten();
    programs.extend(layers.map(|layer| layer.path().join("suidp")));
    for program in &programs {
        fs::write(program, fixture.node.probe()).expect("as the container's root would");
        fs::set_permissions(program, fs::Permissions::from_mode(0o4755)).expect("our file");
    }
    assert!(programs.len() > 1, "the image has a layer");
    programs
}

fn stage_with_secret() -> (PodFixture, String) {
    let node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    let fixture = PodFixture::on(node, bridge_pod("modes"));
    let mut config = fixture.config("secret", &["sleep", "forever"]);
    config.envs.push(KeyValue { key: "SECRET_TOKEN".into(), value: SECRET.into() });
    let id = fixture.run(&config);
    (fixture, id)
}

/// Regression: user 65534 could read every launch record and execute the program below ROOT/pods.
#[test]
fn other_users_read_no_environment_and_run_no_set_user_id_program() {
    let (fixture, id) = stage_with_secret();
    let programs = set_user_id_programs(&fixture, &id);
    assert_closed(&fixture.node, &programs);
    let created = fixture.create(&fixture.config("created", &["true"]));
    let state = fixture.node.state().join("pods").join(&fixture.pod_id);
    for file in [state.join("plans").join(&created), state.join("confinement").join(&id)] {
        assert_eq!(
            file.metadata().expect("a file of a container").mode() & 0o777,
            0o600,
            "{}",
            file.display()
        );
    }
    assert!(!state.join("plans").join(&id).exists(), "the plan of a container that was started");
    fixture.node.stop();
}

/// Directories that an earlier build created with other modes are restricted at the start, before calls are
/// served.
#[test]
fn directories_of_an_earlier_build_are_closed() {
    let (mut fixture, id) = stage_with_secret();
    let programs = set_user_id_programs(&fixture, &id);
    fixture.node.kill9();
    let (root, state) = (fixture.node.root().to_owned(), fixture.node.state());
    fs::create_dir_all(root.join("quarantine")).expect("our folder");
    for path in [root.join("pods"), root.join("garbage"), root.join("quarantine"), state.join("pods")] {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("our folder");
    }
    fixture.node.launch();
    assert_closed(&fixture.node, &programs);
    fixture.node.stop();
}

/// The umask of the daemon affects neither containers nor files that log readers and plugins use. Fails if
/// one place relies on the umask.
#[test]
fn shared_files_have_the_usual_modes() {
    let node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    let fixture = PodFixture::on(node, bridge_pod("usual"));
    let volume = fixture.node.folder().join("made/by/the/daemon");
    let logs = fixture.node.folder().join("logs/fixture/deep");
    let as_nobody = |words: &[&str]| {
        fixture.output(words, |config| {
            security(config).run_as_user = Some(coracle_tests::cri::proto::Int64Value { value: 1234 });
            config.log_path = format!("deep/{}.log", config.metadata.as_ref().expect("set").name);
            config.working_dir = "/made/on/the/way".into();
            config.mounts.push(Mount {
                container_path: "/volume".into(),
                host_path: volume.display().to_string(),
                ..Default::default()
            });
        })
    };
    for (path, mode) in [
        ("/", "40755"),
        ("/volume", "40755"),
        ("/made/on/the", "40755"),
        ("/etc/hosts", "100644"),
        ("/etc/hostname", "100644"),
        ("/etc/resolv.conf", "100644"),
        ("/dev/null", "20666"),
        ("/dev/shm", "41777"),
    ] {
        assert_eq!(as_nobody(&["stat", path]).split(' ').next(), Some(mode), "{path}");
    }
    assert!(as_nobody(&["cat", "/etc/resolv.conf"]).contains("192.0.2.53"));
    assert!(as_nobody(&["cat", "/proc/self/status"]).contains("Umask:\t0022"));
    assert!(!as_nobody(&["ls", "/sys/fs/cgroup"]).is_empty());
    let mode = |path: &Path| path.symlink_metadata().expect("it is there").mode() & 0o777;
    assert_eq!(mode(&volume), 0o755);
    assert_eq!(mode(volume.parent().expect("made, too")), 0o755);
    assert_eq!(mode(&logs), 0o755);
    let log = fs::read_dir(&logs).expect("logs").flatten().next().expect("a log").path();
    assert_eq!(mode(&log), 0o640);
    assert_eq!(mode(&fixture.node.socket()), 0o660);
    assert_eq!(mode(fixture.node.socket().parent().expect("a folder")), 0o710);
    assert_eq!(mode(fixture.node.root()), 0o711);
    assert_eq!(mode(&fixture.node.state()), 0o711);
    fixture.node.stop();
}
