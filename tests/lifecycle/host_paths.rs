//! Directories of the node with mount namespaces bound below them (`unshare --mount=FILE`, as snapd does below /run): the
//! kernel refuses to attach a copy of such a tree in a container's mount namespace ("too many symbolic links encountered").

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle_tests::cri::proto::{Mount, MountPropagation};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{exec, host_pod, id_mapping, mapped, security, user_namespace};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// FOLDER/a/run/pinN is a mount namespace, FOLDER/a/run/file a file. FOLDER is a mount that shares what is mounted below it.
///
/// A namespace is in the way if its number is below the container's, and each CPU has numbers of its own (Linux 6.18): there
/// is one for each CPU.
struct Pinned {
    folder: PathBuf,
    pins: Vec<PathBuf>,
}

impl Pinned {
    fn new(fixture: &PodFixture) -> Pinned {
        let folder = fixture.node.folder().join("pinned");
        let inner = folder.join("a");
        fs::create_dir_all(inner.join("run")).expect("directories");
        fs::create_dir(folder.join("later")).expect("a directory");
        fs::write(inner.join("run/file"), "beside it\n").expect("a file");
        let mut pinned = Pinned { folder, pins: Vec::new() };
        bind(&pinned.folder, MsFlags::MS_SHARED);
        // The kernel binds no mount namespace where that would be shared.
        bind(&inner, MsFlags::MS_PRIVATE);
        for cpu in 0..std::thread::available_parallelism().expect("it has CPUs").get() {
            let pin = inner.join(format!("run/pin{cpu}"));
            fs::write(&pin, "").expect("a file");
            let unshare = format!("--mount={}", pin.display());
            let words = ["-c", &cpu.to_string(), "unshare", &unshare, "true"];
            let made = Command::new("taskset").args(words).status();
            assert!(made.expect("util-linux has it").success());
            let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
            assert!(mounts.lines().any(|line| line.contains(&pin.display().to_string())), "{mounts}");
            pinned.pins.push(pin);
        }
        pinned
    }

    fn mount(&self) -> Mount {
        Mount {
            host_path: self.folder.display().to_string(),
            container_path: "/volume".into(),
            propagation: MountPropagation::PropagationHostToContainer.into(),
            ..Default::default()
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let folders = ["later", "a", ""].map(|below| self.folder.join(below));
        for mounted in self.pins.iter().chain(&folders) {
            let _ = umount2(mounted, MntFlags::MNT_DETACH); // "later" is not mounted in each test
        }
    }
}

fn bind(folder: &Path, propagation: MsFlags) {
    let none = None::<&str>;
    mount(Some(folder), folder, none, MsFlags::MS_BIND, none).expect("a mount");
    mount(none, folder, none, propagation, none).expect("its propagation");
}

#[track_caller]
fn says(fixture: &PodFixture, container: &str, words: &[&str]) -> String {
    let answer = fixture.node.exec_sync(exec(container, words, 10)).expect("exec");
    assert_eq!(answer.exit_code, 0, "{words:?}: {}", String::from_utf8_lossy(&answer.stderr));
    String::from_utf8_lossy(&answer.stdout).into_owned()
}

#[test]
fn a_directory_above_a_pinned_mount_namespace_is_mounted() {
    let fixture = PodFixture::start();
    let pinned = Pinned::new(&fixture);
    let mut config = fixture.config("above", &["sleep", "forever"]);
    config.mounts = vec![pinned.mount()];
    let container = fixture.run(&config);
    assert_eq!(says(&fixture, &container, &["cat", "/volume/a/run/file"]), "beside it\n");
    let report = says(&fixture, &container, &["see", "mounts"]);
    assert!(report.contains("mounts /volume/a "), "mounts below it are there: {report}");
    // Mounts of the host still arrive.
    let (later, none) = (pinned.folder.join("later"), None::<&str>);
    mount(Some("tmpfs"), &later, Some("tmpfs"), MsFlags::empty(), none).expect("a mount");
    fs::write(later.join("file"), "later\n").expect("a file");
    assert_eq!(says(&fixture, &container, &["cat", "/volume/later/file"]), "later\n");
    // It is the container's own mount namespace again, with nothing of the host but the volume.
    assert!(!report.lines().any(|line| line.starts_with("mounts /var/lib/coracle")), "{report}");
    fixture.node.remove_pod(&fixture.pod_id);
    drop(pinned);
    fixture.node.stop();
}

/// The host's whole tree, as node-exporter and `kubectl debug node/…` mount it.
#[test]
fn the_root_above_a_pinned_mount_namespace_is_mounted_read_only() {
    let fixture = PodFixture::start();
    let pinned = Pinned::new(&fixture);
    let mut config = fixture.config("root", &["sleep", "forever"]);
    config.mounts = vec![Mount {
        host_path: "/".into(),
        container_path: "/host".into(),
        readonly: true,
        ..Default::default()
    }];
    let container = fixture.run(&config);
    let file = format!("/host{}/a/run/file", pinned.folder.display());
    assert_eq!(says(&fixture, &container, &["cat", &file]), "beside it\n");
    let options = says(&fixture, &container, &["see", "mounts"]);
    let options = options.lines().find_map(|line| line.strip_prefix("mounts /host ")).expect("a mount");
    assert!(options.starts_with("ro"), "{options}");
    fixture.node.remove_pod(&fixture.pod_id);
    drop(pinned);
    fixture.node.stop();
}

#[test]
fn in_a_user_namespace_the_owners_are_mapped_all_the_same() {
    let host_id = 300_000;
    let mapping = id_mapping(host_id);
    let fixture = PodFixture::with(mapped(host_pod("mapped"), host_id));
    let pinned = Pinned::new(&fixture);
    let mut config = fixture.config("mapped", &["sleep", "forever"]);
    security(&mut config).namespace_options.as_mut().expect("set").userns_options =
        Some(user_namespace(host_id));
    config.mounts =
        vec![Mount { uid_mappings: vec![mapping], gid_mappings: vec![mapping], ..pinned.mount() }];
    let container = fixture.run(&config);
    assert_eq!(says(&fixture, &container, &["cat", "/volume/a/run/file"]), "beside it\n");
    let about = says(&fixture, &container, &["stat", "/volume/a/run/file"]);
    assert!(about.contains(" 0 0 "), "root's on the node, root's in the container: {about}");
    fixture.node.remove_pod(&fixture.pod_id);
    drop(pinned);
    fixture.node.stop();
}
