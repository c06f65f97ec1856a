//! Files that the daemon cannot read at its start: if they are lost, their processes are ended; a temporary
//! error ends nothing. Each running container is listed or ended, or a condition in Status reports it while
//! the daemon retries.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_tests::cri::proto::{
    ContainerState, ListContainersRequest, ListPodSandboxRequest, NamespaceMode, RemoveContainerRequest,
    RemoveImageRequest, RemovePodSandboxRequest, StartContainerRequest, StatusRequest, StopContainerRequest,
    VersionRequest,
};
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{
    DEFAULT_NETWORK, bridge_pod, container, create, exec, host_pod, image_spec, mapped,
};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, send, socket};
use nix::unistd::Pid;

/// A pod with a running container.
struct Life {
    pod_id: String,
    id: String,
    pid: i32,
    born: Option<u64>,
}

impl Life {
    fn begin(node: &Node, image: &str, name: &str) -> Life {
        let pod = host_pod(name);
        let pod_id = node.run_pod(&pod);
        let id = node.run_container(&pod_id, &container("one", image, &["sleep", "forever"], &pod), &pod);
        let pid = node.container_pid(&id);
        Life { pod_id, id, pid, born: host::start_time(pid) }
    }

    fn lives(&self) -> bool {
        host::is_alive(self.pid) && host::start_time(self.pid) == self.born
    }

    fn is_listed(&self, node: &Node) -> bool {
        let listed = node.list_containers(ListContainersRequest::default()).expect("list").containers;
        listed
            .iter()
            .any(|container| container.id == self.id && container.state() == ContainerState::ContainerRunning)
    }

    fn directory(&self, node: &Node) -> PathBuf {
        node.root().join("pods").join(&self.pod_id)
    }
}

/// The condition for pods whose state is unknown: whether all are known, and the message.
pub(crate) fn recovered(node: &Node) -> (bool, String) {
    let status = node.status(StatusRequest::default()).expect("status").status.expect("a status");
    let condition = status.conditions.into_iter().find(|condition| condition.r#type == "PodsRecovered");
    let condition = condition.expect("the condition");
    (condition.status, condition.message)
}

/// Finding F5: sockets that another program removed, alone or with the state directory, were not there until a restart.
#[test]
fn sockets_and_directories_that_are_removed_while_the_daemon_runs_are_made_again() {
    let node = Node::with_bridge();
    let image = node.import_probe();
    let life = Life::begin(&node, &image, "witness");
    let directories = [node.socket().parent().expect("a directory").to_owned(), node.state()];
    for (number, directory) in directories.into_iter().enumerate() {
        host::remove_while_written(&directory);
        let sockets = [node.socket(), node.state().join("control.sock")];
        host::wait_until("the sockets are there", || sockets.iter().all(|socket| socket.exists()));
        assert_eq!(fs::metadata(&directory).expect("it is there").mode() & 0o777, 0o711, "{directory:?}");
        let client = node.another();
        client.version(VersionRequest::default()).expect("a new connection");
        let asked = node.tool(&["pods"]);
        assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
        assert!(life.lives() && life.is_listed(&node), "{directory:?}");
        let executed = node.exec_sync(exec(&life.id, &["true"], 5));
        match directory == node.state() {
            false => drop(executed.expect("the monitor is reached")),
            // The confinement that an exec must get is lost.
            true => assert!(executed.expect_err("not without it").message().contains("confinement")),
        }
        // A monitor in a user namespace passes through the directory as another user.
        let pod = mapped(bridge_pod(&format!("new{number}")), 200_000);
        let id = node.run_pod(&pod);
        node.remove_pod(&id);
    }
    let open = host::open_files(node.pid()).into_iter().map(|(_, target)| target.into_os_string());
    assert_eq!(open.filter(|target| target == "anon_inode:inotify").count(), 1, "a user has 128 instances");
    node.remove_pod(&life.pod_id);
    node.stop();
}

/// Finding F5: without them no container and no pod was removed until a restart.
#[test]
fn directories_of_the_root_that_are_removed_while_the_daemon_runs_are_made_again() {
    let mut node = Node::with_bridge();
    let image = node.import_probe();
    for name in ["garbage", "spare", "quarantine"] {
        let directory = node.root().join(name);
        let life = Life::begin(&node, &image, name);
        // One container that the daemon removes by itself, and one with more files, which a worker removes.
        let many = Life::begin(&node, &image, "many");
        for number in 0..100 {
            fs::write(format!("/proc/{}/root/{number}", many.pid), "").expect("a file of the container");
        }
        let gone = || {
            host::wait_until("it is removed", || {
                let _ = fs::remove_dir_all(&directory); // a worker may remove files of it
                !directory.exists()
            });
        };
        for life in [&life, &many] {
            gone();
            node.remove_container(RemoveContainerRequest { container_id: life.id.clone() }).expect(name);
            gone();
            node.remove_pod(&life.pod_id);
        }
        gone();
        let next = Life::begin(&node, &image, "next");
        gone();
        node.restart();
        assert!(next.lives() && next.is_listed(&node), "{name}");
        node.remove_pod(&next.pod_id);
        host::wait_until("the garbage is deleted", || {
            fs::read_dir(node.root().join("garbage")).is_ok_and(|mut files| files.next().is_none())
        });
    }
    node.stop();
}

/// The directories of a node without pods: their content is lost, and the next pull and the next pod make them again.
#[test]
fn directories_of_images_and_pods_that_are_removed_are_made_again_with_their_next_use() {
    let mut node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    node.import_probe();
    let first = node.run_pod(&bridge_pod("first"));
    node.remove_pod(&first);
    let of_images = ["records", "blobs", "parts", "users", "signatures", "contents"];
    let names = ["pods", "networks", "layers/l", "layers", "images"].map(str::to_owned);
    for name in names.into_iter().chain(of_images.map(|name| format!("images/{name}"))) {
        let directory = node.root().join(&name);
        let mode = fs::metadata(&directory).expect(&name).mode();
        host::remove_while_written(&directory);
        let image = match name.as_str() {
            "layers/l" | "pods" | "networks" => "localhost/probe:1".to_owned(),
            _ => node.import_probe(),
        };
        let pod = bridge_pod("next");
        let id = node.run_pod(&pod);
        let config = container("one", &image, &["sleep", "forever"], &pod);
        let inside = node.run_container(&id, &config, &pod);
        node.exec_sync(exec(&inside, &["true"], 5)).expect(&name);
        assert_eq!(fs::metadata(&directory).expect(&name).mode(), mode, "{name}");
        node.remove_pod(&id);
    }
    node.restart();
    let life = Life::begin(&node, "localhost/probe:1", "last");
    node.remove_pod(&life.pod_id);
    node.stop();
}

/// Finding F5: after the loss of the state directory the next daemon found no monitor, and ended every container.
#[test]
fn a_restart_after_the_loss_of_the_state_directory_ends_nothing() {
    let mut node = Node::with_bridge();
    let image = node.import_probe();
    let life = Life::begin(&node, &image, "witness");
    let pod = mapped(bridge_pod("mapped"), 200_000);
    let other = node.run_pod(&pod);
    let config = container("one", &image, &["sleep", "forever"], &pod);
    let inside = node.run_container(&other, &config, &pod);
    let pid = node.container_pid(&inside);
    let sandboxes = || node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items.len();
    for directory in [node.state(), node.state().join("pods"), node.state().join("pods").join(&life.pod_id)] {
        host::remove_while_written(&directory);
        let files = [&life.pod_id, &other].map(|id| node.state().join("pods").join(id));
        let has_files =
            |path: &PathBuf| path.join("monitor.sock").exists() && path.join("monitor.pid").exists();
        host::wait_until("the monitors have their files", || files.iter().all(has_files));
        host::wait_until("the monitors serve", || node.log().matches("made again, but").count() >= 2);
        assert_eq!(sandboxes(), 2);
    }
    node.kill9();
    node.launch();
    assert!(life.lives() && life.is_listed(&node), "{}", node.log());
    assert!(host::is_alive(pid), "{}", node.log());
    assert_eq!(recovered(&node), (true, String::new()), "its monitors answer");
    let refused = node.create_container(create(&other, &container("two", &image, &["true"], &pod), &pod));
    let refused = refused
        .and_then(|made| node.start_container(StartContainerRequest { container_id: made.container_id }));
    assert!(refused.expect_err("it would have the node's memory as /dev/shm").message().contains("shm"));
    // What ends now is reported by the monitor to the new directory.
    node.kill9();
    kill(Pid::from_raw(life.pid), Signal::SIGKILL).expect("it runs");
    node.launch();
    assert!(!life.is_listed(&node));
    for id in [&life.pod_id, &other] {
        node.remove_pod(id);
    }
    node.stop();
}

/// Regression: the container continued to run unlisted, even after its pod was stopped and removed.
#[test]
fn running_containers_without_a_record_are_ended() {
    type Place = fn(&Path, &str) -> PathBuf;
    type Put = fn(&Path);
    let places: [(&str, Place, Put); 5] = [
        ("its directory is gone", |pod, id| pod.join("containers").join(id), |_| ()),
        ("its record is gone", |pod, id| pod.join("containers").join(id).join("record"), |_| ()),
        ("all containers are gone", |pod, _| pod.join("containers"), |_| ()),
        ("the pod is gone", |pod, _| pod.to_owned(), |_| ()),
        (
            "its directory is a file",
            |pod, id| pod.join("containers").join(id),
            |path| fs::write(path, "").expect("our folder"),
        ),
    ];
    let mut node = Node::start();
    let image = node.import_probe();
    let witness = Life::begin(&node, &image, "witness");
    for (number, (what, place, put)) in places.into_iter().enumerate() {
        let victim = Life::begin(&node, &image, &format!("victim{number}"));
        node.kill9();
        let path = place(&victim.directory(&node), &victim.id);
        fs::rename(&path, node.folder().join(format!("aside{number}"))).expect(what);
        put(&path);
        node.launch();
        assert!(
            victim.is_listed(&node) == victim.lives(),
            "{what}: it runs and is not listed\n{}",
            node.log()
        );
        assert!(!victim.lives(), "{what}");
        assert!(witness.lives() && witness.is_listed(&node), "{what}: the witness is hit");
        let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
        if pods.iter().any(|pod| pod.id == victim.pod_id) {
            node.remove_pod(&victim.pod_id);
        }
        host::wait_until(&format!("{what}: nothing of the pod is left"), || {
            node.monitors().len() == 1
                && !host::cgroups_below(&node.cgroup_parent()).iter().any(|path| {
                    let path = path.display().to_string();
                    path.contains(&victim.id) || path.contains(&victim.pod_id)
                })
        });
    }
    node.stop();
}

/// Earlier builds logged an error for each removal that a kill of the daemon had interrupted (found by `make cluster-bad-day`).
#[test]
fn the_rest_of_an_interrupted_removal_is_no_error() {
    let mut node = Node::start();
    let image = node.import_probe();
    let ended = Life::begin(&node, &image, "ended");
    let stop = StopContainerRequest { container_id: ended.id.clone(), timeout: 0 };
    node.stop_container(stop).expect("stop");
    node.kill9();
    let directory = ended.directory(&node).join("containers").join(&ended.id);
    fs::rename(directory, node.folder().join("aside")).expect("the first step of a removal");
    node.launch();
    let log = host::wait_for("the rest is removed", || {
        let log = node.log();
        log.contains("removing the notes of a removed container").then_some(log)
    });
    assert!(!log.contains("level=error"), "{log}");
    let running = Life::begin(&node, &image, "running");
    node.kill9();
    let directory = running.directory(&node).join("containers").join(&running.id);
    fs::rename(directory, node.folder().join("aside2")).expect("the record of a container that runs is lost");
    node.launch();
    host::wait_until("it is ended", || !running.lives());
    assert!(node.log().contains("level=error msg=\"ending a container without a record\""), "{}", node.log());
    node.stop();
}

/// Earlier builds waited for the monitor's answer before they ended the container. The record of the other container of the pod cannot
/// be read at first: then nothing of the pod is ended.
#[test]
fn a_container_without_a_record_is_ended_while_its_monitor_is_stopped() {
    let mut node = Node::start();
    let image = node.import_probe();
    let (witness, victim) = (Life::begin(&node, &image, "witness"), Life::begin(&node, &image, "victim"));
    let pod = host_pod("victim");
    let other =
        node.run_container(&victim.pod_id, &container("two", &image, &["sleep", "forever"], &pod), &pod);
    let other_pid = node.container_pid(&other);
    let monitor = host::proc_value(victim.pid, "status", "PPid").expect("its parent is the monitor") as i32;
    node.kill9();
    let signal = |signal| kill(Pid::from_raw(monitor), signal).expect("the monitor lives");
    signal(Signal::SIGSTOP);
    let containers = victim.directory(&node).join("containers");
    fs::rename(containers.join(&victim.id), node.folder().join("aside")).expect("our folder");
    let record = containers.join(&other).join("record");
    fs::rename(&record, record.with_extension("aside")).expect("our file");
    fs::create_dir(&record).expect("our folder");
    node.launch();
    // Longer than the daemon waits for a monitor.
    std::thread::sleep(Duration::from_secs(8));
    assert!(victim.lives() && host::is_alive(other_pid), "{}", node.log());
    fs::remove_dir(&record).expect("our folder");
    fs::rename(record.with_extension("aside"), &record).expect("the record is back");
    host::wait_until("it is ended", || !victim.lives());
    // The condition follows when the container's cgroup is removed.
    host::wait_until("the condition names the monitor", || {
        let (is_recovered, message) = recovered(&node);
        !is_recovered && message.contains(&format!("delete the pod (`crictl rmp -f {}`)", victim.pod_id))
    });
    assert!(host::is_alive(other_pid) && node.container_pid(&other) == other_pid, "{}", node.log());
    assert!(witness.lives() && witness.is_listed(&node));
    signal(Signal::SIGCONT);
    host::wait_until("the pod is adopted", || recovered(&node).0);
    node.exec_sync(exec(&other, &["true"], 5)).expect("the monitor serves");
    node.remove_pod(&victim.pod_id);
    node.stop();
}

/// The pod is stopped while its container is unlisted: the record was removed while the daemon was retrying
/// to read it.
#[test]
fn stopping_a_pod_ends_unlisted_containers() {
    let mut node = Node::start();
    let image = node.import_probe();
    let life = Life::begin(&node, &image, "unread");
    node.kill9();
    let record = life.directory(&node).join("containers").join(&life.id).join("record");
    fs::rename(&record, record.with_extension("aside")).expect("our file");
    fs::create_dir(&record).expect("our folder");
    node.launch();
    assert!(life.lives() && !life.is_listed(&node));
    let (_, message) = recovered(&node);
    let parts = [&life.pod_id[..13], &life.id, "is a directory", "`mv` it away"];
    assert!(parts.iter().all(|part| message.contains(part)), "pod, file, cause and cure: {message}");
    node.remove_pod(&life.pod_id);
    assert!(!life.lives(), "it outlives its pod");
    host::wait_until("its pod is no longer asked for", || recovered(&node).0);
    node.stop();
}

/// Fails if such a pod cannot be removed, or another container of the node that does not exist cannot be asked for.
#[test]
fn a_pod_whose_record_cannot_be_read_is_removed_and_set_aside() {
    let mut node = Node::with_bridge();
    let image = node.import_probe();
    let witness = Life::begin(&node, &image, "witness");
    let life = Life::begin(&node, &image, "unread");
    node.kill9();
    let record = life.directory(&node).join("record");
    fs::rename(&record, record.with_extension("aside")).expect("our file");
    fs::create_dir(&record).expect("our folder");
    node.launch();
    assert!(life.lives() && !life.is_listed(&node));
    let stop =
        |id: &str| node.stop_container(StopContainerRequest { container_id: id.to_owned(), timeout: 0 });
    stop(&"ab".repeat(32)).expect("it is no container of the pod");
    stop(&life.id).expect_err("it runs, and is not listed");
    // A first error is not enough: the network of a pod may need its record.
    let remove = || node.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: life.pod_id.clone() });
    remove().expect_err("it may be read again");
    host::wait_until("it is removed", || remove().is_ok());
    assert!(!life.lives(), "it outlives its pod");
    assert_eq!(recovered(&node), (true, String::new()));
    let aside = node.root().join("quarantine").join(format!("{}.0", life.pod_id));
    assert!(aside.join("record").is_dir(), "{}", node.log());
    assert!(witness.lives() && witness.is_listed(&node));
    assert_eq!(node.monitors().len(), 1);
    node.stop();
}

/// Finding F9. Such a directory is not a pod, so that its name is free. Regression: new pods were refused for a minute.
#[test]
fn a_directory_that_cannot_be_removed_keeps_no_pod_from_starting() {
    let mut node = Node::start();
    let image = node.import_probe();
    let life = Life::begin(&node, &image, "witness");
    let id = "ab".repeat(32);
    let of_pod = node.root().join("pods").join(&id);
    let of_container = life.directory(&node).join("containers").join(&id);
    for (what, place, record) in [
        ("pod", &of_pod, None),
        ("pod with a damaged record", &of_pod, Some("torn")),
        ("container", &of_container, None),
    ] {
        node.kill9();
        fs::create_dir(place).expect("our folder");
        mount(Some("coracle-test"), place, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
        if let Some(record) = record {
            fs::write(place.join("record"), record).expect("our file");
        }
        node.launch();
        assert!(life.lives() && life.is_listed(&node), "{what}");
        let (is_recovered, message) = recovered(&node);
        let parts = [place.to_str().expect("UTF-8"), "busy", "or remove the directory by hand"];
        assert!(!is_recovered && parts.iter().all(|part| message.contains(part)), "{what}: {message}");
        let other = node.run_pod(&host_pod("other"));
        node.remove_pod(&other);
        umount2(place, MntFlags::MNT_DETACH).expect("our mount");
        host::wait_until("it is removed", || recovered(&node).0 && !place.exists());
    }
    node.remove_pod(&life.pod_id);
    node.stop();
}

/// Regression: the pod or the container was killed and quarantined.
#[test]
fn a_temporary_read_error_of_a_record_ends_nothing() {
    type Place = fn(&Path, &str) -> PathBuf;
    let places: [(&str, Place); 3] = [
        ("pod", |pod, _| pod.join("record")),
        ("container", |pod, id| pod.join("containers").join(id).join("record")),
        // A symbolic link to itself: ELOOP.
        ("list", |pod, _| pod.join("containers")),
    ];
    for (what, place) in places {
        let mut node = Node::start();
        let witness = Life::begin(&node, &node.import_probe(), "witness");
        // An image whose layers no other image has.
        let image = "localhost/only-here:1".to_owned();
        let archive = Image::probe(&node.probe(), "only here").oci_archive(&image);
        node.try_import(&archive).expect("import");
        let life = Life::begin(&node, &image, "life");
        node.kill9();
        let path = place(&life.directory(&node), &life.id);
        let aside = path.with_file_name("aside");
        fs::rename(&path, &aside).expect(what);
        match what {
            "list" => std::os::unix::fs::symlink(&path, &path).expect("our folder"),
            _ => fs::create_dir(&path).expect("our folder"),
        }
        node.launch();
        assert!(life.lives(), "{what}: killed\n{}", node.log());
        assert!(witness.is_listed(&node), "{what}");
        let (is_recovered, message) = recovered(&node);
        assert!(!is_recovered && message.contains("1 pods"), "{what}: {message}");
        assert!(!node.root().join("quarantine").exists(), "{what}: set aside");
        // The layers of its image are unknown: all layers are kept.
        let remove = RemoveImageRequest { image: Some(image_spec(&image)) };
        node.remove_image(remove).expect("remove the image");
        match what {
            "list" => fs::remove_file(&path).expect("our link"),
            _ => fs::remove_dir(&path).expect("our folder"),
        }
        fs::rename(&aside, &path).expect("the record is back");
        host::wait_until(&format!("{what}: it is found again"), || recovered(&node).0);
        assert!(life.lives() && life.is_listed(&node), "{what}");
        assert_eq!(node.container_pid(&life.id), life.pid, "{what}");
        node.exec_sync(exec(&life.id, &["true"], 5)).expect("its layers are there, its monitor serves");
        node.stop_container(StopContainerRequest { container_id: life.id.clone(), timeout: 0 })
            .expect("stop");
        assert!(!life.lives(), "{what}");
        node.stop();
    }
}

/// Number of pods, and number of descriptors of the next daemon: too few for all pods.
const PODS: usize = 20;
const DESCRIPTORS: u32 = 110;

/// Regression: about half of the containers were killed: "the pod's monitor is gone: no file descriptors
/// available".
#[test]
fn a_daemon_with_too_few_descriptors_keeps_all_containers() {
    let mut node = Node::start();
    let image = node.import_probe();
    let lives: Vec<_> = (0..PODS).map(|number| Life::begin(&node, &image, &format!("pod{number}"))).collect();
    node.kill9();
    node.limit_descriptors(Some(DESCRIPTORS));
    node.launch();
    for (number, life) in lives.iter().enumerate() {
        assert!(life.lives() && life.is_listed(&node), "{number}\n{}", node.log());
    }
    let (is_recovered, message) = recovered(&node);
    assert!(!is_recovered && message.contains("LimitNOFILE"), "{message}");
    let serves = |life: &&Life| node.exec_sync(exec(&life.id, &["true"], 5)).is_ok();
    let (served, others): (Vec<&Life>, Vec<&Life>) = lives.iter().partition(serves);
    assert!(!served.is_empty() && !others.is_empty(), "{} of {PODS} are served", served.len());
    // With free descriptors the remaining pods are recovered.
    for life in &served {
        node.remove_pod(&life.pod_id);
    }
    host::wait_until("others are served", || others.iter().any(serves));
    node.kill9();
    node.limit_descriptors(None);
    node.launch();
    assert!(recovered(&node).0);
    for life in others {
        assert!(life.lives());
        node.exec_sync(exec(&life.id, &["true"], 5)).expect("exec");
    }
    node.stop();
}

/// Regression: the daemon ended processes of a listed container that has the node's PID namespace, because a runtime in
/// that container had moved them to a cgroup whose name is an ID, too.
#[test]
fn a_cgroup_inside_a_listed_container_is_not_that_of_a_lost_one() {
    let mut node = Node::start();
    let image = node.import_probe();
    let mut pod = host_pod("outer");
    let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    let options = context.and_then(|context| context.namespace_options.as_mut());
    options.expect("options").pid = NamespaceMode::Node.into();
    let pod_id = node.run_pod(&pod);
    let outer = node.run_container(&pod_id, &container("outer", &image, &["sleep", "forever"], &pod), &pod);
    let pid = node.container_pid(&outer);
    node.exec_sync(exec(&outer, &["orphan", "600"], 1)).expect_err("its child outlives it");
    let monitor = host::proc_value(pid, "status", "PPid").expect("its parent is the monitor");
    let inherited = || {
        let list = fs::read_to_string(format!("/proc/{monitor}/task/{monitor}/children")).expect("a list");
        list.split_whitespace().filter_map(|child| child.parse::<i32>().ok()).find(|child| *child != pid)
    };
    host::wait_until("the monitor inherits the child", || inherited().is_some());
    let child = inherited().expect("the child");
    let inner = "ab".repeat(32);
    for outer in host::cgroups_below(&node.cgroup_parent()).iter().filter(|path| path.ends_with(&outer)) {
        let folder = outer.join(&inner);
        fs::create_dir_all(&folder).expect("a cgroup");
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(all) = fs::read_to_string(outer.join(file)) {
                let _ = fs::write(folder.join(file), all); // v2 inherits
            }
        }
        fs::write(folder.join("cgroup.procs"), child.to_string()).expect("the child joins");
    }
    node.restart();
    host::wait_until("the pod is adopted", || recovered(&node).0);
    assert!(host::is_alive(child) && host::is_alive(pid), "{}", node.log());
    node.remove_pod(&pod_id);
    host::wait_until("it ends with its container", || !host::is_alive(child));
    node.stop();
}

/// Regression: the loss of the connection to the monitor replaced the entry for the record that cannot be read, and the
/// layers of its container were removed with their image.
#[test]
fn layers_are_kept_while_a_record_cannot_be_read_and_the_monitor_is_stopped() {
    let mut node = Node::start();
    let image = "localhost/only-here:1".to_owned();
    let archive = Image::probe(&node.probe(), "only here").oci_archive(&image);
    node.try_import(&archive).expect("import");
    let life = Life::begin(&node, &image, "life");
    let monitor = host::proc_value(life.pid, "status", "PPid").expect("its parent is the monitor") as i32;
    let signal = |process, signal| kill(Pid::from_raw(process), signal).expect("it lives");
    node.kill9();
    let record = life.directory(&node).join("containers").join(&life.id).join("record");
    let aside = record.with_extension("aside");
    fs::rename(&record, &aside).expect("our file");
    fs::create_dir(&record).expect("our folder");
    node.launch();
    // The next attempt to read the record is then some seconds away.
    std::thread::sleep(Duration::from_secs(8));
    // It cannot connect again until the monitor is stopped.
    signal(node.pid(), Signal::SIGSTOP);
    replace_connection(&node, &life.pod_id);
    signal(monitor, Signal::SIGSTOP);
    signal(node.pid(), Signal::SIGCONT);
    host::wait_until("the connection is lost", || recovered(&node).1.contains("monitor of"));
    let remove = RemoveImageRequest { image: Some(image_spec(&image)) };
    let layers = || {
        let all = fs::read_dir(node.root().join("layers")).expect("layers").flatten();
        all.filter(|entry| entry.file_name().len() == 64).count()
    };
    node.remove_image(remove).expect("remove the image");
    // Unused layers are removed in the background.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(layers(), 1, "the container runs");
    signal(monitor, Signal::SIGCONT);
    fs::remove_dir(&record).expect("our folder");
    fs::rename(&aside, &record).expect("the record is back");
    host::wait_until("the pod is adopted", || recovered(&node).0);
    assert!(life.lives() && life.is_listed(&node));
    node.exec_sync(exec(&life.id, &["true"], 5)).expect("its layers are there");
    node.remove_pod(&life.pod_id);
    node.stop();
}

/// Takes the daemon's connection to the monitor of a pod away, as the monitor serves one at a time.
fn replace_connection(node: &Node, pod_id: &str) {
    let state = fs::File::open(node.state().join("pods").join(pod_id)).expect("its state");
    // The path of the socket is longer than an address.
    let path = format!("/proc/self/fd/{}/monitor.sock", state.as_raw_fd());
    let other =
        socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    connect(other.as_raw_fd(), &UnixAddr::new(path.as_str()).expect("a path")).expect("the monitor listens");
    // No request: the monitor closes the connection after it has accepted it.
    send(other.as_raw_fd(), &[0xff; 5], MsgFlags::MSG_NOSIGNAL).expect("a frame");
    let closed = recv(other.as_raw_fd(), &mut [0; 16], MsgFlags::empty());
    assert!(matches!(closed, Ok(0) | Err(Errno::ECONNRESET)), "{closed:?}");
}
