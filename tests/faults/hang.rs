//! File systems and files that do not respond: a network file system without its server, a FIFO instead of a
//! file (finding 10 in docs/results/0.1.0.md). The affected call fails with an error that names the path; all
//! other calls are answered meanwhile. Regression: in each of these tests the daemon blocked in open or stat
//! for ever.

use std::path::Path;
use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ContainerConfig, ContainerState, Device, ListContainersRequest, Mount, RemoveContainerRequest,
    ReopenContainerLogRequest, SecurityProfile, StartContainerRequest, StopContainerRequest, VersionRequest,
    security_profile::ProfileType,
};
use coracle_tests::host;
use coracle_tests::mute_fs::MuteFs;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, exec, host_pod, security};
use nix::sys::stat::Mode;
use tonic::{Code, Status};

/// The documented time limit for a path, and the tolerance of the machine.
const LIMIT: Duration = Duration::from_secs(10);
const OVERTIME: Duration = Duration::from_secs(12);

/// Maximum time of another pod's call meanwhile, on a machine with concurrent tests.
const ANSWER: Duration = Duration::from_secs(5);

/// Makes calls until `is_over`; each must be answered soon.
fn others_are_answered(client: &Cri, container_id: &str, is_over: impl Fn() -> bool) {
    while !is_over() {
        let begin = Instant::now();
        client.version(VersionRequest::default()).expect("version");
        client.list_containers(ListContainersRequest::default()).expect("list");
        client.exec_sync(exec(container_id, &["true"], 5)).expect("exec in another container");
        assert!(begin.elapsed() < ANSWER, "the daemon was busy for {:?}", begin.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Makes calls concurrently with those of others; returns their answers.
fn beside_others<T: Send>(
    fixture: &PodFixture,
    bystander: &str,
    calls: Vec<Box<dyn FnOnce(Cri) -> T + Send>>,
) -> Vec<(T, Duration)> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = calls
            .into_iter()
            .map(|call| {
                let client = fixture.node.another();
                scope.spawn(move || {
                    let begin = Instant::now();
                    (call(client), begin.elapsed())
                })
            })
            .collect();
        others_are_answered(&fixture.node, bystander, || threads.iter().all(|thread| thread.is_finished()));
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

#[track_caller]
fn assert_in_time(refused: &Status, took: Duration, path: &str) {
    assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused}");
    assert!(refused.message().contains(path), "{refused}");
    assert!((LIMIT..LIMIT + OVERTIME).contains(&took), "after {took:?}: {refused}");
}

fn mounting(fixture: &PodFixture, name: &str, path: &str) -> ContainerConfig {
    let mut config = fixture.config(name, &["sleep", "forever"]);
    config.mounts.push(Mount {
        container_path: "/volume".into(),
        host_path: path.into(),
        ..Default::default()
    });
    config
}

type CreateCall = Box<dyn FnOnce(Cri) -> Result<String, Status> + Send>;

fn creating(fixture: &PodFixture, config: &ContainerConfig) -> CreateCall {
    let request = create(&fixture.pod_id, config, &fixture.pod);
    Box::new(move |client| client.create_container(request).map(|made| made.container_id))
}

/// All host paths of a container: volumes, devices, the profile. They block concurrently; a fourth access to
/// one path is refused at once; when the file system responds again, a retry succeeds.
#[test]
fn an_unresponsive_file_system_affects_only_calls_that_use_it() {
    let fixture = PodFixture::start();
    let bystander = fixture.run(&fixture.config("bystander", &["sleep", "forever"]));
    let mute = MuteFs::mount(&fixture.node.folder().join("mute"));
    mute.fall_silent();
    let below = format!("{}/below", mute.path());
    let mut with_device = fixture.config("device", &["true"]);
    with_device.devices.push(Device {
        container_path: "/dev/mute".into(),
        host_path: format!("{}/device", mute.path()),
        permissions: "rw".into(),
    });
    let mut with_profile = fixture.config("profile", &["true"]);
    security(&mut with_profile).seccomp = Some(SecurityProfile {
        profile_type: ProfileType::Localhost.into(),
        localhost_ref: format!("{}/profile.json", mute.path()),
    });
    let mut configs = vec![(below.clone(), mounting(&fixture, "below", &below))];
    configs.push((format!("{}/device", mute.path()), with_device));
    configs.push((format!("{}/profile.json", mute.path()), with_profile));
    for number in 0..3 {
        configs.push((mute.path(), mounting(&fixture, &format!("top{number}"), &mute.path())));
    }
    let calls = configs.iter().map(|(_, config)| creating(&fixture, config)).collect();
    let answers = beside_others(&fixture, &bystander, calls);
    for ((path, _), (answer, took)) in configs.iter().zip(answers) {
        assert_in_time(&answer.expect_err(path), took, path);
    }
    // Three workers are blocked on this path: no further one is started, and the call fails at once.
    let begin = Instant::now();
    let request = create(&fixture.pod_id, &configs[3].1, &fixture.pod);
    let refused = fixture.node.create_container(request.clone()).expect_err("it still hangs");
    assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused}");
    assert!(refused.message().contains("3 workers") && refused.message().contains(&mute.path()), "{refused}");
    assert!(begin.elapsed() < ANSWER);
    mute.answer();
    host::wait_until("the workers end with their answers", || fixture.node.workers().is_empty());
    // The daemon sees their ends a moment later.
    let create = || fixture.node.create_container(request.clone()).ok();
    let id = host::wait_for("a retry succeeds", create).container_id;
    fixture.node.start_container(StartContainerRequest { container_id: id.clone() }).expect("start");
    // A volume that stops responding does not prevent the container's end.
    mute.fall_silent();
    fixture.node.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 0 }).expect("stop");
    fixture.node.remove_container(RemoveContainerRequest { container_id: id }).expect("remove");
    mute.answer();
    drop(mute);
    fixture.node.stop();
}

/// A volume that stops responding between create and start: nothing was started, so the same start can be
/// repeated.
#[test]
fn a_start_on_an_unresponsive_file_system_can_be_retried() {
    let fixture = PodFixture::start();
    let bystander = fixture.run(&fixture.config("bystander", &["sleep", "forever"]));
    let mute = MuteFs::mount(&fixture.node.folder().join("mute"));
    let id = fixture.create(&mounting(&fixture, "late", &mute.path()));
    mute.fall_silent();
    let request = StartContainerRequest { container_id: id.clone() };
    let asked = request.clone();
    let call: Box<dyn FnOnce(Cri) -> Result<(), Status> + Send> =
        Box::new(move |client| client.start_container(asked).map(drop));
    let (answer, took) = beside_others(&fixture, &bystander, vec![call]).remove(0);
    assert_in_time(&answer.expect_err("it hangs"), took, &mute.path());
    assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerCreated);
    mute.answer();
    fixture.node.start_container(request).expect("the retry");
    assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerRunning);
    drop(mute);
    fixture.node.stop();
}

/// The log directory belongs to the kubelet and may be on any file system.
#[test]
fn an_unresponsive_log_directory_fails_the_start() {
    let fixture = PodFixture::start();
    let bystander = fixture.run(&fixture.config("bystander", &["sleep", "forever"]));
    let mute = MuteFs::mount(&fixture.node.folder().join("mute"));
    let mut pod = host_pod("logs");
    pod.log_directory = mute.path();
    let pod_id = fixture.node.run_pod(&pod);
    let mut config = fixture.config("mute", &["true"]);
    config.log_path = "0.log".into();
    let id = fixture.node.create(&pod_id, &config, &pod);
    mute.fall_silent();
    let asked = StartContainerRequest { container_id: id };
    let call: Box<dyn FnOnce(Cri) -> Result<(), Status> + Send> =
        Box::new(move |client| client.start_container(asked).map(drop));
    let (answer, took) = beside_others(&fixture, &bystander, vec![call]).remove(0);
    assert_in_time(&answer.expect_err("it hangs"), took, &format!("{}/0.log", mute.path()));
    fixture.node.remove_pod(&pod_id);
    mute.answer();
    drop(mute);
    host::wait_until("the worker ends", || fixture.node.workers().is_empty());
    fixture.node.stop();
}

fn make_fifo(path: &Path) {
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("our folder");
    nix::unistd::mkfifo(path, Mode::S_IRWXU).expect("a FIFO");
}

/// A user who can write to a log directory can create a FIFO there.
#[test]
fn a_fifo_in_place_of_a_log_is_refused() {
    let fixture = PodFixture::start();
    let bystander = fixture.run(&fixture.config("bystander", &["ticks", "50"]));
    let log = fixture.node.container(&bystander).log_path;
    let config = fixture.config("trapped", &["true"]);
    let path = Path::new(&fixture.pod.log_directory).join(&config.log_path);
    make_fifo(&path);
    let id = fixture.create(&config);
    let call: Box<dyn FnOnce(Cri) -> Result<(), Status> + Send> =
        Box::new(move |client| client.start_container(StartContainerRequest { container_id: id }).map(drop));
    let (answer, took) = beside_others(&fixture, &bystander, vec![call]).remove(0);
    let refused = answer.expect_err("a FIFO");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains(&format!("{}: is a FIFO", path.display())), "{refused}");
    assert!(took < ANSWER);
    // Instead of the new file of a rotation: the old one stays in use.
    let old = format!("{log}.old");
    std::fs::rename(&log, &old).expect("as the kubelet rotates");
    make_fifo(Path::new(&log));
    let reopen = ReopenContainerLogRequest { container_id: bystander.clone() };
    let refused = fixture.node.reopen_container_log(reopen.clone()).expect_err("a FIFO");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains(&format!("{log}: is a FIFO")), "{refused}");
    let written = std::fs::metadata(&old).expect("the old log").len();
    host::wait_until("the old log grows", || std::fs::metadata(&old).expect("the old log").len() > written);
    std::fs::remove_file(&log).expect("our FIFO");
    fixture.node.reopen_container_log(reopen).expect("a file again");
    host::wait_until("the new log grows", || std::fs::metadata(&log).is_ok_and(|log| log.len() > 0));
    fixture.node.stop();
}

#[test]
fn a_profile_that_is_not_a_file_or_too_long_is_refused() {
    let fixture = PodFixture::start();
    let bystander = fixture.run(&fixture.config("bystander", &["sleep", "forever"]));
    let fifo = fixture.node.folder().join("profiles/fifo.json");
    make_fifo(&fifo);
    let long = fixture.node.folder().join("profiles/long.json");
    std::fs::File::create(&long).and_then(|file| file.set_len(1 << 30)).expect("a sparse file");
    for (path, what) in [(&fifo, "is a FIFO"), (&long, "has more than 1048576 bytes")] {
        let mut config = fixture.config("profile", &["true"]);
        security(&mut config).seccomp = Some(SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: path.display().to_string(),
        });
        let (answer, took) = beside_others(&fixture, &bystander, vec![creating(&fixture, &config)]).remove(0);
        let refused = answer.expect_err(what);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        let text = format!("{}: {what}", path.display());
        assert!(refused.message().contains(&text), "{refused}");
        assert!(took < ANSWER);
    }
    fixture.node.stop();
}
