//! Containers that use up what the node has a fixed number of: inodes of a file system, and processes.

use std::fs;
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{
    ContainerState, ListPodSandboxRequest, RemoveContainerRequest, StopContainerRequest, VersionRequest,
};
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{container, exec, host_pod, run};
use coracle_tests::small_disk::SmallDisk;

use crate::{Rights, armed, restarted, says, shared, wait_for_line};

/// The inodes of the small file system below `--root`.
const INODES: &str = "size=64m,nr_inodes=2000";
/// Time for a stop in addition to the grace period.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// More than a worker needs for the removal of a tree, beside other work.
const REMOVAL_LIMIT: Duration = Duration::from_secs(120);

fn free_inodes(disk: &SmallDisk) -> u64 {
    nix::sys::statvfs::statvfs(disk.path()).expect("it is mounted").files_free()
}

/// A container creates files in its writable layer until its file system, which is that of all pods, has no inodes left.
#[test]
fn used_up_inodes_stop_neither_the_daemon_nor_other_pods() {
    let disk = SmallDisk::with(INODES);
    let options = Options { root: Some(disk.path().join("root")), ..Options::default() };
    let fixture = PodFixture::on(Node::with(options), host_pod("attacked"));
    let [other, stopped] =
        ["other", "stopped"].map(|name| fixture.run(&fixture.config(name, &["sleep", "forever"])));
    let mut pod = host_pod("attacker");
    pod.log_directory = fixture.node.log_directory("attacker");
    let attacker_pod = fixture.node.run_pod(&pod);
    let before = free_inodes(&disk);
    let mut config = container("attacker", &fixture.image, &["attack", "inodes", "/tmp/many"], &pod);
    Rights::Default.give(&mut config);
    let attacker = fixture.node.run_container(&attacker_pod, &config, &pod);
    wait_for_line(&fixture, &attacker, "saw inodes ");
    assert_eq!(free_inodes(&disk), 0);
    // Nothing new can be made; all that is there continues, also with the next daemon.
    let fixture = restarted(fixture);
    let refused = fixture.node.run_pod_sandbox(run(&host_pod("late"))).expect_err("no inode for its record");
    assert!(refused.message().to_lowercase().contains("space"), "{refused}");
    assert_eq!(says(&fixture, &other, &["print", "fine"]), "fine\n");
    let listed = fixture.node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("a list").items;
    assert_eq!(listed.len(), 2);
    let stop = |id: &str| {
        let begin = Instant::now();
        let request = StopContainerRequest { container_id: id.into(), timeout: 0 };
        fixture.node.stop_container(request).expect("a stop");
        assert!(begin.elapsed() < STOP_LIMIT * host::slowness(), "{:?}", begin.elapsed());
        assert_eq!(fixture.node.container(id).state(), ContainerState::ContainerExited);
        fixture.node.remove_container(RemoveContainerRequest { container_id: id.into() }).expect("a removal");
    };
    stop(&stopped);
    stop(&attacker);
    // A worker of the lowest priority removes the files.
    let is_free = || (free_inodes(&disk) >= before).then_some(());
    host::wait_within(REMOVAL_LIMIT, is_free).expect("the inodes are free again");
    fixture.node.remove_pod(&attacker_pod);
    let late = fixture.node.run_pod(&host_pod("late"));
    fixture.node.remove_pod(&late);
    assert_eq!(says(&fixture, &other, &["print", "fine"]), "fine\n");
    fixture.node.stop();
}

/// A layer has more files than the file system has inodes left.
#[test]
fn inodes_used_up_while_a_layer_is_unpacked_are_free_again() {
    const FILES: usize = 3000;
    /// Inodes of records that the daemon writes meanwhile.
    const RECORDS_MAX: u64 = 20;
    let disk = SmallDisk::with(INODES);
    let options = Options { root: Some(disk.path().join("root")), ..Options::default() };
    let fixture = PodFixture::on(Node::with(options), host_pod("fixture"));
    let running = fixture.run(&fixture.config("running", &["sleep", "forever"]));
    let names: Vec<String> = (0..FILES).map(|number| format!("many/{number}")).collect();
    let files: Vec<Entry> = names.iter().map(|name| Entry::file(name, b"")).collect();
    let image = Image::of(vec![Layer::new(&files, Compression::Gzip)]);
    let archive = image.oci_archive("localhost/many:1");
    let before = free_inodes(&disk);
    assert!(before < FILES as u64, "{before} are free");
    for _ in 0..2 {
        let refused = fixture.node.try_import(&archive).expect_err("there is no inode for each file");
        assert!(refused.to_lowercase().contains("no space left"), "{refused}");
        let is_free = || (free_inodes(&disk) + RECORDS_MAX >= before).then_some(());
        host::wait_within(REMOVAL_LIMIT, is_free).expect("the inodes are free again");
        assert_eq!(says(&fixture, &running, &["print", "fine"]), "fine\n");
    }
    let next = fixture.run(&fixture.config("next", &["sleep", "forever"]));
    assert_eq!(says(&fixture, &next, &["print", "fine"]), "fine\n");
    fixture.node.stop();
}

/// The kubelet limits the processes of a pod by the pod's cgroup (`podPidsLimit`). A container that starts processes without end,
/// all of which block every signal, in its own PID namespace and in one that it shares.
#[test]
fn a_fork_bomb_ends_with_its_container() {
    const PIDS_MAX: &str = "150";
    const GRACE_SECONDS: i64 = 1;
    for (name, pod) in [("own", host_pod("own")), ("shared", shared(host_pod("shared")))] {
        let node = Node::start();
        let parent = format!("{}/{name}", node.cgroup_parent());
        host::make_kubelet_cgroups(&node.cgroup_parent());
        for root in host::cgroup_roots() {
            // v1 has no such file.
            for above in [root.clone(), root.join(node.cgroup_parent())] {
                let _ = fs::write(above.join("cgroup.subtree_control"), "+pids");
            }
        }
        host::make_kubelet_cgroups(&parent);
        let limit = host::cgroup_file(&parent, "pids.max").expect("the controller pids");
        fs::write(&limit, PIDS_MAX).expect("a limit");
        let mut other_pod = host_pod("other");
        other_pod.log_directory = node.log_directory("other");
        let mut pod = pod;
        pod.linux.as_mut().expect("set").cgroup_parent = format!("/{parent}");
        let fixture = PodFixture::on(node, pod);
        let other_id = fixture.node.run_pod(&other_pod);
        let other = container("other", &fixture.image, &["sleep", "forever"], &other_pod);
        let other = fixture.node.run_container(&other_id, &other, &other_pod);
        let bomb = fixture.run(&armed(&fixture, "bomb", Rights::Default, &["attack", "bomb"]));
        wait_for_line(&fixture, &bomb, "saw refused start");
        for _ in 0..20 {
            fixture.node.version(VersionRequest::default()).expect("the daemon answers");
        }
        assert_eq!(says(&fixture, &other, &["print", "fine"]), "fine\n");
        // No process is left for an exec: refused, or one of the bomb's has just ended.
        let _ = fixture.node.exec_sync(exec(&bomb, &["true"], 5));
        let begin = Instant::now();
        let stop = StopContainerRequest { container_id: bomb.clone(), timeout: GRACE_SECONDS };
        fixture.node.stop_container(stop).expect("a stop");
        let limit = (Duration::from_secs(GRACE_SECONDS as u64) + STOP_LIMIT) * host::slowness();
        assert!(begin.elapsed() < limit, "{name}: {:?}", begin.elapsed());
        assert_eq!(fixture.node.container(&bomb).state(), ContainerState::ContainerExited);
        fixture.node.remove_container(RemoveContainerRequest { container_id: bomb }).expect("a removal");
        let next = fixture.run(&fixture.config("next", &["sleep", "forever"]));
        assert_eq!(says(&fixture, &next, &["print", "fine"]), "fine\n", "{name}");
        fixture.node.stop();
    }
}
