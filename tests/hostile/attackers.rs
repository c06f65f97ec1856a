//! All attacks from all kinds of containers: kernel files, masks, mounts, devices, system calls, signals,
//! limits.

use coracle_tests::cri::proto::{ContainerConfig, Mount};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, host_pod};

use crate::{MASKED, Rights, armed, got, is_ready, mapped, reached_nothing, says, shared};

fn words<'a>(subject: &[&'a str]) -> Vec<&'a str> {
    [&["attack"], subject].concat()
}

#[test]
fn kernel_files_are_not_writable_and_masks_are_complete() {
    for (name, pod) in [("plain", host_pod("plain")), ("mapped", mapped(host_pod("mapped")))] {
        let fixture = PodFixture::with(pod);
        // Not even all capabilities make a read-only mount writable.
        for rights in Rights::EVERY {
            let id = fixture.run(&armed(&fixture, &format!("{rights:?}"), rights, &["sleep", "forever"]));
            let report = says(&fixture, &id, &words(&["kernel"]));
            assert!(report.contains("saw files "), "{name} {rights:?}: {report}");
            // Any process may request pressure notifications (Documentation/accounting/psi.rst), and the
            // kernel requires SYS_ADMIN for the ranges of memory types: no runtime protects that file from
            // containers with SYS_ADMIN.
            let is_known = |line: &&str| {
                line.starts_with("GOT write /proc/pressure/")
                    || (rights.has_sys_admin() && *line == "GOT write /proc/mtrr")
            };
            let beyond: Vec<&str> = got(&report).into_iter().filter(|line| !is_known(line)).collect();
            assert!(beyond.is_empty(), "{name} {rights:?}: {beyond:#?}");
            let report = says(&fixture, &id, &words(&[&["masks"], &MASKED[..]].concat()));
            assert!(report.contains("held /proc/keys: masked"), "{name} {rights:?}: {report}");
            reached_nothing(&report);
        }
        fixture.node.stop();
    }
}

#[test]
fn masks_cannot_be_removed_by_mounts() {
    for (name, pod) in [("plain", host_pod("plain")), ("mapped", mapped(host_pod("mapped")))] {
        let fixture = PodFixture::with(pod);
        // A container with SYS_ADMIN and without a user namespace can mount kernel file systems again
        // (docs/threat-model.md).
        for rights in Rights::EVERY.into_iter().filter(|rights| name == "mapped" || !rights.has_sys_admin()) {
            let id = fixture.run(&armed(&fixture, &format!("{rights:?}"), rights, &["sleep", "forever"]));
            let report = says(&fixture, &id, &words(&["mounts"]));
            assert!(report.contains("held umount /proc"), "{name} {rights:?}: {report}");
            let beyond: Vec<&str> = got(&report).into_iter().filter(|line| !is_its_own(line)).collect();
            assert!(beyond.is_empty(), "{name} {rights:?}: {beyond:#?}\n{report}");
            // A new user namespace gives it all capabilities, in a mount namespace whose mounts are locked.
            let report = says(&fixture, &id, &words(&["unshared"]));
            let beyond: Vec<&str> = got(&report).into_iter().filter(|line| !is_its_own(line)).collect();
            assert!(beyond.is_empty(), "{name} {rights:?}: {beyond:#?}\n{report}");
        }
        fixture.node.stop();
    }
}

/// Operations that the kernel permits to root of a user namespace and that are harmless: a copy of its mounts
/// with all masks, a message queue and (since Linux 6.7) its own binary formats.
fn is_its_own(line: &str) -> bool {
    ["GOT bind /proc", "GOT mount mqueue", "GOT mount binfmt_misc"].contains(&line)
}

#[test]
fn device_nodes_can_be_created_but_not_opened() {
    for (name, pod) in [("plain", host_pod("plain")), ("mapped", mapped(host_pod("mapped")))] {
        let fixture = PodFixture::with(pod);
        for rights in Rights::EVERY {
            let mut config = armed(&fixture, &format!("{rights:?}"), rights, &["sleep", "forever"]);
            volume(&fixture, &mut config, "volume", "/volume");
            let id = fixture.run(&config);
            let report = says(&fixture, &id, &words(&["devices", "/tmp", "/dev", "/dev/shm", "/volume"]));
            assert!(report.contains("mknod /volume/attack-sda"), "{name} {rights:?}: {report}");
            reached_nothing(&report);
        }
        fixture.node.stop();
    }
}

/// Mounts a directory of the node.
fn volume(fixture: &PodFixture, config: &mut ContainerConfig, name: &str, target: &str) {
    let path = fixture.node.folder().join(name);
    std::fs::create_dir_all(&path).expect("a directory");
    let host_path = path.display().to_string();
    config.mounts.push(Mount { container_path: target.into(), host_path, ..Default::default() });
}

/// Each of these calls reaches the kernel from a container without a filter, as the kernel's errors show.
#[test]
fn runtime_default_refuses_dangerous_system_calls() {
    let fixture = PodFixture::start();
    let id = fixture.run(&armed(&fixture, "filtered", Rights::Default, &["sleep", "forever"]));
    let report = says(&fixture, &id, &words(&["calls"]));
    let mut calls = 0;
    for line in report.lines().filter_map(|line| line.strip_prefix("saw call ")) {
        let (name, said) = line.split_once(' ').expect("a name and an answer");
        calls += 1;
        assert!(["EPERM", "ENOSYS"].contains(&said), "{name} reached the kernel, which said {said}");
    }
    assert_eq!(calls, 32, "{report}");
    // Without the filter, the same calls are not refused.
    let id = fixture.run(&armed(&fixture, "unfiltered", Rights::AllUnfiltered, &["sleep", "forever"]));
    let report = says(&fixture, &id, &words(&["calls"]));
    let refused = report.matches(" EPERM").count() + report.matches(" ENOSYS").count();
    assert!(refused < 12, "most are refused without a filter, too: {report}");
    fixture.node.stop();
}

/// Signals and limits do not affect processes of the runtime whose PIDs a container can see, and PID 1 of a
/// shared PID namespace continues to reap.
#[test]
fn signals_and_limits_do_not_end_the_pod() {
    for (name, pod) in
        [("shared", shared(bridge_pod("shared"))), ("mapped", shared(mapped(bridge_pod("mapped"))))]
    {
        let fixture = PodFixture::on(Node::with_bridge(), pod);
        for rights in [Rights::Default, Rights::Unfiltered, Rights::PtraceUnfiltered] {
            let id = fixture.run(&armed(&fixture, &format!("{rights:?}"), rights, &["sleep", "forever"]));
            let report = says(&fixture, &id, &words(&["signals"]));
            assert!(report.contains("saw signal 1 "), "{name} {rights:?}: {report}");
            reached_nothing(&report);
            // It still adopts and reaps processes: a limit of its CPU time would end it now.
            assert!(says(&fixture, &id, &words(&["orphans", "300"])).contains("done"), "{name} {rights:?}");
            assert!(is_ready(&fixture), "{name} {rights:?} ended the pod");
            let pid = fixture.node.container_pid(&id);
            let zombies = || host_zombies(pid);
            host::wait_until("pid 1 reaps", || zombies() == 0);
        }
        let next = fixture.run(&fixture.config("next", &["true"]));
        assert_eq!(fixture.node.exited(&next).exit_code, 0, "{name}");
        fixture.node.stop();
    }
}

/// Number of zombies in the PID namespace of a process.
fn host_zombies(pid: i32) -> usize {
    let wanted = host::namespace(pid, "pid");
    let entries = std::fs::read_dir("/proc").expect("procfs").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // A zombie has no namespace; its parent has.
    let parents = pids.filter_map(|pid| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut words = text.rsplit(')').next()?.split_whitespace();
        (words.next()? == "Z").then(|| words.next()?.parse::<i32>().ok()).flatten()
    });
    parents.filter(|&parent| host::namespace(parent, "pid") == wanted).count()
}
