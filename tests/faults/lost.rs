//! What a start of the daemon cannot read: something that is gone for good ends what belonged to it, and an error that passes ends
//! nothing. A container that runs is listed or ended, or a condition in Status tells of it while it is tried again.

use std::fs;
use std::path::{Path, PathBuf};

use coracle_tests::cri::proto::{
    ContainerState, ListContainersRequest, ListPodSandboxRequest, RemoveImageRequest, StatusRequest,
    StopContainerRequest,
};
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::node::Node;
use coracle_tests::request::{container, exec, host_pod, image_spec};

/// A pod with a container that runs.
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

/// The condition that tells of pods which are not wholly known: whether all are, and the message.
fn recovered(node: &Node) -> (bool, String) {
    let status = node.status(StatusRequest::default()).expect("status").status.expect("a status");
    let condition = status.conditions.into_iter().find(|condition| condition.r#type == "PodsRecovered");
    let condition = condition.expect("the condition");
    (condition.status, condition.message)
}

/// Without the fix the container runs on, in no list, also after its pod was stopped and removed.
#[test]
fn what_runs_without_a_record_is_ended() {
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

/// The pod is stopped while nobody lists what runs in it: the record went away from under a daemon that was to read it again.
#[test]
fn stopping_a_pod_ends_what_is_not_listed_either() {
    let mut node = Node::start();
    let image = node.import_probe();
    let life = Life::begin(&node, &image, "unread");
    node.kill9();
    let record = life.directory(&node).join("containers").join(&life.id).join("record");
    fs::rename(&record, record.with_extension("aside")).expect("our file");
    fs::create_dir(&record).expect("our folder");
    node.launch();
    assert!(life.lives() && !life.is_listed(&node));
    node.remove_pod(&life.pod_id);
    assert!(!life.lives(), "it outlives its pod");
    host::wait_until("its pod is no longer asked for", || recovered(&node).0);
    node.stop();
}

/// Without the fix the pod or the container is killed and set aside.
#[test]
fn a_record_that_cannot_be_read_for_a_while_costs_nothing() {
    type Place = fn(&Path, &str) -> PathBuf;
    let places: [(&str, Place); 3] = [
        ("pod", |pod, _| pod.join("record")),
        ("container", |pod, id| pod.join("containers").join(id).join("record")),
        // A link to itself: ELOOP.
        ("list", |pod, _| pod.join("containers")),
    ];
    for (what, place) in places {
        let mut node = Node::start();
        let witness = Life::begin(&node, &node.import_probe(), "witness");
        // Of layers that nobody else needs.
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
        // Nobody knows what its image is: all layers stay.
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

/// How many pods run, and how many descriptors the next daemon has: too few for all of them.
const PODS: usize = 20;
const DESCRIPTORS: u32 = 110;

/// Without the fix about half of the containers are killed: "the pod's monitor is gone: no file descriptors available".
#[test]
fn a_daemon_with_too_few_descriptors_keeps_all_that_runs() {
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
    // Room for others: what the start left out is taken up.
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
