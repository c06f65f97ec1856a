//! Full and read-only disks: a tmpfs of a few mebibytes below `--root`; and disks whose flush is slow.

use std::fs;
use std::io::Write as _;
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{
    ListPodSandboxRequest, RemoveContainerRequest, StatusRequest, StopContainerRequest, VersionRequest,
};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{container, exec, host_pod, run};
use coracle_tests::small_disk::SmallDisk;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

pub(crate) fn on(disk: &SmallDisk) -> Node {
    Node::with(Options { root: Some(disk.path().join("root")), ..Options::default() })
}

#[test]
fn new_pods_are_refused_on_a_full_disk_and_old_ones_keep_running() {
    let disk = SmallDisk::new(24);
    let node = on(&disk);
    let image = node.import_probe();
    let pod = host_pod("early");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    disk.fill();
    let refused = node.run_pod_sandbox(run(&host_pod("late"))).expect_err("no room for its record");
    let text = refused.message().to_lowercase();
    assert!(text.contains("space") || text.contains("enospc"), "{refused}");
    let big = coracle_tests::image::Image::probe(&node.probe(), "late");
    node.try_import(&big.oci_archive("localhost/late:1")).expect_err("no room for a layer");
    assert_eq!(node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items.len(), 1);
    assert!(host::is_alive(node.container_pid(&id)));
    fs::remove_file(disk.path().join("filler")).expect("our file");
    let late = node.run_pod(&host_pod("late"));
    node.remove_pod(&late);
    node.stop();
}

#[test]
fn new_pods_are_refused_while_the_root_is_read_only() {
    let disk = SmallDisk::new(24);
    let node = on(&disk);
    disk.read_only(true);
    let refused = node.run_pod_sandbox(run(&host_pod("ro"))).expect_err("nothing can be recorded");
    assert!(refused.message().to_lowercase().contains("read-only"), "{refused}");
    node.version(VersionRequest::default()).expect("the daemon serves");
    assert!(node.rests().is_empty(), "{:?}", node.rests());
    disk.read_only(false);
    let pod_id = node.run_pod(&host_pod("rw"));
    node.remove_pod(&pod_id);
    node.stop();
}

/// A part of a removed container cannot be deleted at first: here because of a mount. Regression:
/// RemoveContainer failed once, and the tree stayed below ROOT/garbage until the next start.
#[test]
fn a_failed_removal_is_retried_until_it_succeeds() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("busy");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["true"], &pod), &pod);
    node.exited(&id);
    let busy = node.root().join("pods").join(&pod_id).join("containers").join(&id).join("busy");
    fs::create_dir(&busy).expect("our folder");
    mount(Some("coracle-test"), &busy, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
    let garbage = node.root().join("garbage");
    let count = || fs::read_dir(&garbage).expect("the directory").count();
    node.remove_container(RemoveContainerRequest { container_id: id.clone() })
        .expect("it is gone for its client");
    assert_eq!(count(), 1);
    umount2(&garbage.join(&id).join("busy"), MntFlags::MNT_DETACH).expect("our mount");
    host::wait_until("the garbage is deleted", || count() == 0);
    node.remove_pod(&pod_id);
    node.stop();
}

/// Regression: the daemon did not start: "set mode of ROOT/images: read-only file system".
#[test]
fn a_daemon_starts_on_a_read_only_root_and_serves_running_pods() {
    let disk = SmallDisk::new(24);
    let mut node = on(&disk);
    let image = node.import_probe();
    let pod = host_pod("ro");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    let other = node.run_container(&pod_id, &container("two", &image, &["sleep", "forever"], &pod), &pod);
    let pid = node.container_pid(&id);
    let writable = |node: &Node| {
        let status = node.status(StatusRequest::default()).expect("status").status.expect("a status");
        let found = status.conditions.into_iter().find(|condition| condition.r#type == "RootWritable");
        found.map(|condition| (condition.status, condition.message)).expect("the condition")
    };
    assert_eq!(writable(&node), (true, String::new()));
    node.kill9();
    disk.read_only(true);
    node.launch();
    let (is_writable, message) = writable(&node);
    assert!(!is_writable && message.contains("read-only"), "{message}");
    assert_eq!(node.container_pid(&id), pid);
    node.exec_sync(exec(&id, &["true"], 5)).expect("exec");
    node.stop_container(StopContainerRequest { container_id: other.clone(), timeout: 0 }).expect("stop");
    let refused = node.run_pod_sandbox(run(&host_pod("late"))).expect_err("nothing can be recorded");
    assert!(refused.message().to_lowercase().contains("read-only"), "{refused}");
    assert!(host::is_alive(pid));
    disk.read_only(false);
    assert!(writable(&node).0);
    node.restart();
    assert_eq!(node.container_pid(&id), pid);
    node.remove_pod(&pod_id);
    node.stop();
}

/// Time of a flush of a slow disk.
const FLUSH: Duration = Duration::from_millis(50);

#[test]
fn a_pod_survives_the_daemon_on_a_disk_with_a_slow_flush() {
    let home = Node::start();
    let disk = FreshDisk::with_slow_flush(home.folder(), 64, FLUSH);
    let root = Some(disk.path().join("root"));
    let mut node = Node::with(Options { root, has_tmpfs_state: true, ..Options::default() });
    let image = node.import_probe();
    let pod = host_pod("slow");
    let (flushes, begin) = (disk.flushes(), Instant::now());
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
    let (flushes, took) = (disk.flushes() - flushes, begin.elapsed());
    // Two records; other flushes may be those of the journal meanwhile.
    assert!(flushes >= 2 && took >= 2 * FLUSH, "{flushes} flushes in {took:?}");
    node.restart();
    node.exec_sync(exec(&id, &["true"], 10)).expect("its container is still running");
    node.remove_pod(&pod_id);
    node.stop();
    drop(disk);
    home.stop();
}

/// The fixture itself: after a failed test, a file on its disk may still be in use.
#[test]
fn a_disk_with_a_slow_flush_goes_while_a_file_on_it_is_open() {
    let home = Node::start();
    let disk = FreshDisk::with_slow_flush(home.folder(), 64, FLUSH);
    let place = disk.path().display().to_string();
    let mut file = fs::File::create(disk.path().join("open")).expect("a file");
    file.write_all(&[1; 4096]).and_then(|()| file.sync_all()).expect("the disk works");
    let backing = |device: &fs::DirEntry| {
        fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default()
    };
    let mut devices = fs::read_dir("/sys/block").expect("block devices").flatten();
    let own = place.trim_end_matches("mount");
    let device = devices.find(|device| backing(device).contains(own)).expect("a loop device");
    drop(disk);
    let left = host::mounts(own);
    assert!(left.is_empty(), "{left:?}");
    let outcome = file.write_all(&[2; 4096]).and_then(|()| file.sync_all());
    assert!(outcome.is_err(), "the disk is gone, and nothing waits for it");
    // The name of its file is another one since that was unmounted.
    let used = backing(&device);
    assert!(!used.is_empty(), "an open file keeps the device");
    drop(file);
    host::wait_until("the loop device is free", || backing(&device) != used);
    home.stop();
}
