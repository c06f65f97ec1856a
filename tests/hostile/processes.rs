//! Processes in containers that use other entries of the kernel, wait for a core dump of the runtime, make mounts of cgroups,
//! or exchange files while the runtime works with them. Tracers are in [`crate::trace`].

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{
    ContainerConfig, Mount, NamespaceMode, StartContainerRequest, StopContainerRequest, VersionRequest,
};
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, create, exec, host_pod, image_spec, pod_namespaces};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::{Rights, armed, got, mapped, reached_nothing, says, shared};

/// The lines of a report about one entry: name and answer.
fn answers<'a>(report: &'a str, entry: &str) -> Vec<(&'a str, &'a str)> {
    let start = format!("saw {entry} ");
    let words = report.lines().filter_map(|line| line.strip_prefix(start.as_str()));
    words.map(|line| line.split_once(' ').expect("a name and an answer")).collect()
}

/// A filter that compares only the numbers of one ABI is avoided by another entry of the kernel. What `socketcall` reads from
/// memory no filter can see (docs/threat-model.md); everything else is refused by each entry.
#[cfg(target_arch = "x86_64")]
#[test]
fn runtime_default_refuses_the_same_calls_by_each_entry_of_the_kernel() {
    let fixture = PodFixture::start();
    for rights in [Rights::Default, Rights::Ptrace] {
        let id = fixture.run(&armed(&fixture, &format!("{rights:?}"), rights, &["sleep", "forever"]));
        let report = says(&fixture, &id, &["attack", "other-entries"]);
        let (i386, x32) = (answers(&report, "i386"), answers(&report, "x32"));
        assert_eq!((i386.len(), x32.len()), (37, 30), "{report}");
        for (name, said) in i386.into_iter().filter(|(name, _)| *name != "socketcall").chain(x32) {
            let is_refused = ["EPERM", "ENOSYS"].contains(&said);
            assert!(is_refused, "{rights:?}: {name} reached the kernel, which said {said}:\n{report}");
        }
    }
    // The kernel has the entry, and without the filter its calls are not refused.
    let id = fixture.run(&armed(&fixture, "unfiltered", Rights::AllUnfiltered, &["sleep", "forever"]));
    let report = says(&fixture, &id, &["attack", "other-entries"]);
    let i386 = answers(&report, "i386");
    let refused = i386.iter().filter(|(_, said)| ["EPERM", "ENOSYS"].contains(said)).count();
    let has_entry = i386.iter().any(|(_, said)| *said != "ENOSYS");
    assert!(!has_entry || refused < i386.len() / 2, "{report}");
    fixture.node.stop();
}

/// The kernel would give the memory of a monitor that is killed by a fault to the program in `core_pattern`, and a container may
/// be able to read what this program makes of it.
#[test]
fn no_core_dump_has_the_memory_of_the_runtime() {
    for (name, pod) in [("own", bridge_pod("own")), ("shared", shared(bridge_pod("shared")))] {
        let fixture = PodFixture::on(Node::with_bridge(), pod);
        let container = fixture.run(&fixture.config("control", &["sleep", "forever"]));
        // A container that sees the node's processes asks the kernel about them.
        let mut pod = host_pod("looks");
        pod_namespaces(&mut pod).pid = NamespaceMode::Node.into();
        pod.log_directory = fixture.node.log_directory("looks");
        let pod_id = fixture.node.run_pod(&pod);
        let words = ["sleep", "forever"];
        let observer = coracle_tests::request::container("looks", &fixture.image, &words, &pod);
        let observer = fixture.node.run_container(&pod_id, &observer, &pod);
        let mut pids = vec![fixture.node.container_pid(&container).to_string()];
        pids.extend(fixture.node.monitors().iter().map(|monitor| monitor.pid.to_string()));
        assert!(pids.len() > 2, "{name}: {pids:?}");
        let words: Vec<&str> =
            ["attack", "dumps"].into_iter().chain(pids.iter().map(String::as_str)).collect();
        let report = says(&fixture, &observer, &words);
        let modes: Vec<&str> = report.lines().filter_map(|line| line.rsplit(' ').next()).collect();
        assert_eq!(modes.len(), pids.len(), "{name}: {report}");
        if modes.iter().all(|mode| *mode == "unknown") {
            eprintln!("this kernel does not say it (before Linux 6.16)");
        } else {
            assert_eq!(modes[0], "user", "{name}: the program of a container: {report}");
            assert!(modes[1..].iter().all(|mode| *mode == "none"), "{name}: {report}");
        }
        fixture.node.stop();
    }
}

/// CVE-2022-0492 with more rights than `cve_2022_0492_release_agents_cannot_be_set`, and at any time of the container's life.
/// A container with SYS_ADMIN and without a user namespace is not among them (docs/threat-model.md).
#[test]
fn no_mount_of_cgroups_lets_a_container_name_a_program_of_the_kernel() {
    for (name, pod) in [("plain", host_pod("plain")), ("mapped", mapped(host_pod("mapped")))] {
        let fixture = PodFixture::with(pod);
        for rights in Rights::EVERY.into_iter().filter(|rights| name == "mapped" || !rights.has_sys_admin()) {
            let id = fixture.run(&armed(&fixture, &format!("{rights:?}"), rights, &["sleep", "forever"]));
            let report = says(&fixture, &id, &["attack", "cgroups"]);
            assert!(report.contains("saw the end"), "{name} {rights:?}: {report}");
            assert!(report.contains("held remount /sys/fs/cgroup"), "{name} {rights:?}: {report}");
            // A cgroup namespace of its own user namespace has mounts, with the files of its own cgroup, which are the node's.
            let is_its_own = |line: &&str| {
                name == "mapped"
                    && line.starts_with("GOT mount ")
                    && line.ends_with(" in a namespace of its own")
            };
            let beyond: Vec<&str> = got(&report).into_iter().filter(|line| !is_its_own(line)).collect();
            assert!(beyond.is_empty(), "{name} {rights:?}: {beyond:#?}\n{report}");
        }
        fixture.node.stop();
    }
}

/// Mounts a directory of the node.
fn mount(config: &mut ContainerConfig, path: &Path, target: &str) {
    let host_path = path.display().to_string();
    config.mounts.push(Mount { container_path: target.into(), host_path, ..Default::default() });
}

/// One container exchanges, without pause, a directory of a volume and a link; others start with a mount below this path, so
/// that a mount point has to be made there, for each of some targets of the link. Whether the start succeeds depends on the
/// moment; nothing appears on the node, and /proc, /sys and /dev keep what they have.
#[test]
fn a_race_for_the_parent_of_a_mount_point_stays_inside() {
    /// Number of starts.
    const ROUNDS: usize = 200;
    let fixture = PodFixture::start();
    let folder = fixture.node.folder();
    let canary = folder.join("canary");
    fs::create_dir_all(&canary).expect("a directory");
    fs::write(canary.join("planted"), "x").expect("a file");
    let (up, out) = ("/../../../../../..".to_owned(), folder.display().to_string());
    let (mut started, mut refused) = (0, 0);
    for (number, target) in
        [up, out, "/proc".into(), "/dev".into(), "/sys/fs/cgroup".into()].iter().enumerate()
    {
        let volume = folder.join(format!("volume{number}"));
        fs::create_dir_all(volume.join("path")).expect("a directory");
        symlink(target, volume.join("other")).expect("a link");
        let words = ["swap", "/volume/path", "/volume/other"];
        let mut config = fixture.config(&format!("swapper{number}"), &words);
        mount(&mut config, &volume, "/volume");
        let swapper = fixture.run(&config);
        let host_mounts = host::mounts("canary").len();
        for round in 0..ROUNDS / 5 {
            let words = ["attack", "masks", "/proc/keys"];
            let mut config = armed(&fixture, &format!("victim{number}-{round}"), Rights::Default, &words);
            mount(&mut config, &volume, "/volume");
            mount(&mut config, &canary, "/volume/path/sub/sys");
            let id = fixture.create(&config);
            if fixture.node.start_container(StartContainerRequest { container_id: id.clone() }).is_err() {
                refused += 1;
                continue; // it lost the race, which is fine
            }
            started += 1;
            fixture.node.exited(&id);
            let report = fixture.node.output(&id);
            assert!(report.contains("held /proc/keys: masked"), "{target}, round {round}: {report}");
            reached_nothing(&report);
            assert_eq!(host::mounts("canary").len(), host_mounts, "{target}, round {round}: on the node");
        }
        let stop = StopContainerRequest { container_id: swapper, timeout: 0 };
        fixture.node.stop_container(stop).expect("a stop");
        for place in
            [Path::new("/sub"), &folder.join("sub"), Path::new("/dev/sub"), Path::new("/sys/fs/cgroup/sub")]
        {
            assert!(!place.exists(), "{target}: {} was made on the node", place.display());
        }
    }
    assert!(started > 0, "no container ever started, {refused} were refused: nothing was shown");
    fixture.node.stop();
}

/// A container exchanges its working directory, which each exec enters, for links to places outside of its root, while commands
/// are executed in it and other containers of the same image start. Its execs run in its root or fail; the others are as usual.
#[test]
fn a_container_that_exchanges_its_working_directory_stays_in_its_root() {
    /// Number of execs with each link.
    const ROUNDS: usize = 25;
    let fixture = PodFixture::start();
    let mut config = armed(&fixture, "attacker", Rights::Default, &["sleep", "forever"]);
    config.working_dir = "/place/work".into();
    let attacker = fixture.run(&config);
    // Made by the test as a process of the container would do it.
    let place = PathBuf::from(format!("/proc/{}/root/place", fixture.node.container_pid(&attacker)));
    let targets = ["/../../../../../..", "/proc/self/fd/3", "/proc/1/cwd", "/dev/fd", "/proc/sys/kernel"];
    let (mut inside, mut refused) = (0, 0);
    for (number, target) in targets.into_iter().enumerate() {
        let other = format!("other{number}");
        symlink(target, place.join(&other)).expect("a link");
        std::thread::scope(|scope| {
            let client = fixture.node.another();
            let words = ["swap".to_owned(), "/place/work".to_owned(), format!("/place/{other}")];
            let container = attacker.clone();
            let swapping = scope.spawn(move || {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                // It ends by its time limit.
                client.exec_sync(exec(&container, &words, 1))
            });
            for round in 0..ROUNDS {
                let asked = Instant::now();
                let done = fixture.node.exec_sync(exec(&attacker, &["see", "place"], 5));
                match done {
                    Ok(answer) if answer.exit_code == 0 => inside += 1,
                    // A directory outside of the root has no path in it (getcwd(3)).
                    Ok(answer) => panic!("{target}, round {round}: {answer:?}"),
                    Err(_) => refused += 1,
                }
                assert!(
                    asked.elapsed() < Duration::from_secs(10) * host::slowness(),
                    "{:?}",
                    asked.elapsed()
                );
            }
            assert!(swapping.join().expect("the thread ends").is_err(), "{target}: nothing was exchanged");
        });
        if place.join("work").is_symlink() {
            fs::remove_file(place.join("work")).expect("the link");
            fs::rename(place.join(&other), place.join("work")).expect("the directory");
        }
        let next = fixture.run(&fixture.config(&format!("next{number}"), &["cat", "/etc/resolv.conf"]));
        fixture.node.exited(&next);
        assert!(
            fixture.node.output(&next).contains("nameserver 192.0.2.53"),
            "{}",
            fixture.node.output(&next)
        );
        fixture.node.version(VersionRequest::default()).expect("the daemon answers");
    }
    assert!(inside > 0, "no exec ran, {refused} were refused");
    assert_eq!(says(&fixture, &attacker, &["attack", "masks", "/proc/keys"]), "held /proc/keys: masked\n");
    fixture.node.stop();
}

/// Something exchanges a directory of an image, without pause, and a link out of it, while containers start with a volume below
/// this path. Only root can do that; the kernel resolves the path below the image's root each time.
#[test]
fn a_race_for_a_part_of_the_path_of_an_image_volume_stays_in_the_image() {
    /// Number of starts.
    const ROUNDS: usize = 60;
    const LIMIT: Duration = Duration::from_secs(120);
    let fixture = PodFixture::start();
    let canary = fixture.node.folder().join("canary");
    fs::create_dir_all(canary.join("sub")).expect("a directory");
    fs::write(canary.join("sub/name"), "planted\n").expect("a file");
    let layer = Layer::new(&[Entry::file("path/sub/name", b"inside\n")], Compression::Plain);
    let image = Image::of(vec![layer]);
    fixture.node.try_import(&image.oci_archive("localhost/data:1")).expect("an import");
    let mut folders = Vec::new();
    host::directories(&fixture.node.root().join("layers"), &mut folders);
    let path =
        folders.into_iter().find(|folder| folder.ends_with("path") && folder.join("sub/name").exists());
    let path = path.expect("the directory of the layer");
    let (mut inside, mut refused) = (0, 0);
    for (number, up) in
        ["/../../../../../..", "../../../../../../../../../../../..", ""].into_iter().enumerate()
    {
        let link = path.with_file_name(format!("link{number}"));
        symlink(format!("{up}{}", canary.display()), &link).expect("a link");
        let (is_over, begun) = (AtomicBool::new(false), Instant::now());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // An even number of exchanges. If the test fails it ends, too.
                while !is_over.load(Ordering::Relaxed) && begun.elapsed() < LIMIT {
                    for _ in 0..2 {
                        renameat_with(CWD, &path, CWD, &link, RenameFlags::EXCHANGE).expect("an exchange");
                    }
                }
            });
            for round in 0..ROUNDS / 3 {
                let name = format!("victim{number}-{round}");
                let mut config = fixture.config(&name, &["cat", "/volume/name"]);
                config.mounts.push(Mount {
                    container_path: "/volume".into(),
                    readonly: true,
                    image: Some(image_spec(&image.id())),
                    image_sub_path: "path/sub".into(),
                    ..Default::default()
                });
                let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
                let started = made.and_then(|made| {
                    let container_id = made.container_id;
                    let start = StartContainerRequest { container_id: container_id.clone() };
                    fixture.node.start_container(start).map(|_| container_id)
                });
                let Ok(id) = started else {
                    refused += 1;
                    continue; // the link leads to nothing in the image
                };
                fixture.node.exited(&id);
                assert_eq!(fixture.node.output(&id), "inside\n", "round {round}");
                inside += 1;
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
    println!("{inside} started, {refused} were refused");
    assert!(inside > 0 && refused > 0, "{inside} started, {refused} were refused: there was no race");
    fixture.node.stop();
}
