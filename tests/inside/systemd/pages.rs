//! The lines of the pages that need systemd, by the rules of `tests/docs/rules.toml`, on the installed package. Before
//! them the machine gets what they look for: a restart with a running pod, failed calls, a slow plugin, a mistake.

use std::collections::BTreeSet;
use std::fs;

use coracle_tests::cri::proto::{
    LinuxContainerResources, SecurityProfile, StatusRequest, security_profile::ProfileType,
};
use coracle_tests::host;
use coracle_tests::page_rules::{self, Act, Rule, expect_in_order};
use coracle_tests::request::{bridge_pod, security};

use super::*;

/// Directory of the package under its name in the page; lines run here.
const HERE: &str = "/opt/pages";
const NETWORK: &str = "/etc/cni/net.d/10-pages.conflist";
/// The program that a user would write a unit's drop-in with.
const EDITOR: &str = "/opt/pages/editor";
/// Files that this test creates outside of [`HERE`], and removes.
const FILES: [&str; 7] = [
    "/etc/systemd/system/containerd.service",
    "/etc/systemd/system/k3s.service",
    NETWORK,
    "/opt/cni/bin/refuses",
    "/opt/cni/bin/sleeps",
    "/etc/coracle/conf.d/mistake.toml",
    "/var/lib/coracle/import/broken.tar",
];

fn write(path: &str, text: &str) {
    fs::create_dir_all(Path::new(path).parent().expect("a file is in a folder")).expect("a folder");
    fs::write(path, text).expect("a file");
}

/// Writes a plugin that fails after some seconds, and a list of it alone; waits until it is in use.
fn use_plugin(cri: &Cri, name: &str, seconds: u32) {
    let path = format!("/opt/cni/bin/{name}");
    let error = r#"{"cniVersion": "1.0.0", "code": 100, "msg": "not today"}"#;
    host::write_program(Path::new(&path), &format!("#!/bin/sh\nsleep {seconds}\necho '{error}'\nexit 1\n"));
    let list = format!(r#"{{"cniVersion": "1.0.0", "name": "{name}", "plugins": [{{"type": "{name}"}}]}}"#);
    write(NETWORK, &list);
    wait_until("the plugin is in use", || {
        let status = cri.status(StatusRequest { verbose: true }).expect("status");
        status.info.values().any(|text| text.contains(name))
    });
}

/// Runs a container that exceeds its memory limit and is killed by the kernel.
fn use_too_much_memory(cri: &Cri, pod_sandbox_id: &str, pod: &PodSandboxConfig) {
    let mut hungry = container("hungry", IMAGE, &["burn", "128"], pod);
    let limit = LinuxContainerResources { memory_limit_in_bytes: 16 << 20, ..Default::default() };
    hungry.linux.as_mut().expect("set").resources = Some(limit);
    let container_id =
        cri.create_container(create(pod_sandbox_id, &hungry, pod)).expect("create").container_id;
    cri.start_container(StartContainerRequest { container_id: container_id.clone() }).expect("start");
    wait_until("it has ended", || {
        let request = ContainerStatusRequest { container_id: container_id.clone(), verbose: false };
        let status = cri.container_status(request).expect("status").status.expect("a status");
        status.state() == ContainerState::ContainerExited && status.exit_code == 137
    });
}

/// Makes the daemon log what the lines of step 5 and 6 search for.
fn fail_in_all_ways(cri: &Cri) {
    use_plugin(cri, "refuses", 0);
    cri.run_pod_sandbox(run(&bridge_pod("refused"))).expect_err("its plugin fails");
    // A wait is logged after ten seconds.
    use_plugin(cri, "sleeps", 11);
    cri.run_pod_sandbox(run(&bridge_pod("slow"))).expect_err("its plugin fails late");

    let pod = host_pod("hungry");
    let id = cri.run_pod_sandbox(run(&pod)).expect("run").pod_sandbox_id;
    let mut strict = container("strict", IMAGE, &["true"], &pod);
    let profile_type = ProfileType::Localhost.into();
    security(&mut strict).seccomp =
        Some(SecurityProfile { profile_type, localhost_ref: "/absent.json".into() });
    cri.create_container(create(&id, &strict, &pod)).expect_err("no such profile");
    use_too_much_memory(cri, &id, &pod);
    remove(cri, id);

    write("/var/lib/coracle/import/broken.tar", "no archive");
    write("/etc/coracle/conf.d/mistake.toml", "log_level = 3\n");
    // `systemctl reload` needs /bin/kill, which the guest lacks.
    systemctl(&["kill", "--signal=HUP", "coracle.service"]);
}

/// Writes a program that enters the drop-in of the page.
fn write_editor() {
    let page = include_str!("../../../docs/install-k3s.md");
    let lines = page.lines().map(str::trim).skip_while(|line| *line != "[Unit]");
    let unit: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    assert!(unit.len() > 1, "{unit:?}");
    host::write_program(
        Path::new(EDITOR),
        &format!("#!/bin/sh\ncat >\"$1\" <<END\n{}\nEND\n", unit.join("\n")),
    );
}

/// Lets the machine have the programs of the package again.
fn remove_extension() {
    let status = Command::new("systemd-sysext").arg("unmerge").status().expect("systemd-sysext");
    assert!(status.success(), "systemd-sysext unmerge: {status}");
    fs::remove_dir_all("/var/lib/extensions").expect("it is ours");
    systemctl(&["daemon-reload"]);
    systemctl(&["restart", "coracle.service"]);
}

/// Runs the line until it succeeds with all texts of its rule: the journal has a message some time after it is sent.
#[track_caller]
fn play(rule: &Rule) {
    let what = format!("{}: {}", rule.page, rule.line);
    // An editor is started only on a terminal.
    let end = if rule.line.starts_with("systemctl edit ") { " >/dev/console 2>&1" } else { "" };
    let run = || {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{}{end}", rule.line)]).env("SYSTEMD_EDITOR", EDITOR).current_dir(HERE);
        let output = shell.output().expect("a shell");
        let text = String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned();
        (output.status.success(), text)
    };
    let is_question = rule.line.contains("journalctl ");
    let is_done = |(is_success, text): &(bool, String)| {
        *is_success && (!is_question || rule.says.iter().all(|part| text.contains(part.as_str())))
    };
    let mut answer = run();
    if is_question {
        answer = wait_within(patience(), || Some(run()).filter(is_done)).unwrap_or(answer);
    }
    assert!(answer.0, "{what}\n{}", answer.1);
    expect_in_order(&answer.1, &rule.says, &what);
}

#[test]
fn lines_of_the_pages_under_systemd_do_what_the_pages_say() {
    let cri = package::installed();
    import();
    fs::create_dir_all(HERE).expect("a folder");
    fs::copy(package::PACKAGE, format!("{HERE}/coracle_VERSION_amd64.deb")).expect("the package");
    fs::copy("/opt/coracle.tar.gz", format!("{HERE}/coracle-VERSION-TRIPLE.tar.gz")).expect("the archive");
    write_editor();
    for unit in &FILES[..2] {
        write(unit, "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n");
    }
    systemctl(&["enable", "--now", "containerd.service"]);
    let (pod_id, _) = start(&cri, &host_pod("web"));

    let mut rules: Vec<(i64, Rule)> = page_rules::all()
        .into_iter()
        .filter_map(|rule| if let Act::Guest(step) = rule.act { Some((step, rule)) } else { None })
        .collect();
    rules.sort_by_key(|(step, _)| *step);
    let mut seen = BTreeSet::new();
    let mut is_prepared = false;
    for (step, rule) in rules {
        if step >= 5 && !is_prepared {
            let cri = Cri::new(Path::new(SOCKET));
            wait_until("the new daemon answers", || cri.version(VersionRequest::default()).is_ok());
            fail_in_all_ways(&cri);
            is_prepared = true;
        }
        if seen.insert((rule.line.clone(), rule.says.clone())) {
            println!("{step} {}: {}", rule.page, rule.line);
            play(&rule);
        }
        if rule.line == "systemctl edit k3s" {
            // coracle's own unit has the order, too, but not this.
            let wants = show("k3s.service", "Wants");
            assert!(wants.contains("coracle.service"), "{wants}");
        }
        if rule.line == "modprobe br_netfilter" {
            let path = "/proc/sys/net/bridge/bridge-nf-call-iptables";
            assert_eq!(fs::read_to_string(path).expect("the module is loaded").trim(), "1");
        }
        if rule.line.starts_with("systemctl disable --now coracle") {
            assert_eq!(property("ActiveState"), "inactive");
            fs::remove_file("/etc/coracle/conf.d/mistake.toml").expect("it is ours");
        }
    }
    assert_eq!([property("UnitFileState"), property("ActiveState")], ["enabled", "active"]);
    let cri = Cri::new(Path::new(SOCKET));
    wait_until("the daemon of the extension answers", || cri.version(VersionRequest::default()).is_ok());
    remove_extension();
    wait_until("the daemon of the package answers", || cri.version(VersionRequest::default()).is_ok());
    remove(&cri, pod_id);
    fs::remove_dir_all("/etc/systemd/system/k3s.service.d").expect("systemctl edit made it");
    for path in FILES {
        // Some are removed above.
        let _ = fs::remove_file(path);
    }
    fs::remove_dir_all(HERE).expect("it is ours");
    fs::remove_dir_all("/etc/cni").expect("it is ours");
    systemctl(&["daemon-reload"]);
}
