//! The daemon's own log, as an operator reads it: a line for each failure with the Kubernetes names, what was taken over after a
//! restart, what a slow pod waits for, and the forms for journald and for programs.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use coracle_tests::cri::proto::RunPodSandboxRequest;
use coracle_tests::host::{wait_for, wait_until};
use coracle_tests::node::{Node, Options, binaries};
use coracle_tests::request::{bridge_pod, container, create, host_pod, pull, run};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The lines that have all of these parts.
fn lines(node: &Node, parts: &[&str]) -> Vec<String> {
    let log = node.log();
    let found = log.lines().filter(|line| parts.iter().all(|part| line.contains(part)));
    found.map(str::to_owned).collect()
}

#[test]
fn each_failed_call_is_one_line_with_the_names_that_people_know() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("web");
    let metadata = pod.metadata.clone().expect("a name");
    let name = format!("name={}/{}", metadata.namespace, metadata.name);
    let pod_id = node.run_pod(&pod);

    let mut request = pull("127.0.0.1:1/nosuch:1");
    request.sandbox_config = Some(pod.clone());
    node.pull_image(request).expect_err("no process listens there");
    let found =
        lines(&node, &["level=warn", "call=pull_image", &name, "image=127.0.0.1:1/nosuch:1", "error="]);
    assert_eq!(found.len(), 1, "{}", node.log());

    let absent = container("one", "localhost/absent:1", &["true"], &pod);
    node.create_container(create(&pod_id, &absent, &pod)).expect_err("no such image");
    let parts = ["level=warn", "call=create_container", &name, "container=one", "image=localhost/absent:1"];
    assert_eq!(lines(&node, &parts).len(), 1, "{}", node.log());

    // A failure in a task of its own is not logged twice.
    let mut broken = container("two", &image, &[], &pod);
    broken.command = vec!["/no/such/program".into()];
    let id = node.create_container(create(&pod_id, &broken, &pod)).expect("created").container_id;
    let start = coracle_tests::cri::proto::StartContainerRequest { container_id: id.clone() };
    node.start_container(start).expect_err("no such program");
    let found = lines(&node, &["level=warn", &id[..13]]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains(&name) && found[0].contains("container=two") && found[0].contains("image="),
        "{found:?}"
    );

    node.try_import(b"no archive at all").expect_err("refused");
    assert_eq!(lines(&node, &["level=warn", "\"image not imported\""]).len(), 1, "{}", node.log());
    let handler = RunPodSandboxRequest { config: Some(host_pod("other")), runtime_handler: "gvisor".into() };
    node.run_pod_sandbox(handler).expect_err("no such handler");
    assert_eq!(lines(&node, &["level=warn", "call=run_pod_sandbox", "/other "]).len(), 1, "{}", node.log());
    node.stop();
}

#[test]
fn transitions_are_logged_with_names_and_a_restart_with_what_it_adopted() {
    let mut node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("kept");
    let metadata = pod.metadata.clone().expect("a name");
    let name = format!("name={}/{}", metadata.namespace, metadata.name);
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("app", &image, &["sleep", "forever"], &pod), &pod);
    for message in ["\"container created\"", "\"container started\""] {
        let found = lines(&node, &["level=info", message, &name, "container=app", &id[..13]]);
        assert_eq!(found.len(), 1, "{message}: {}", node.log());
    }
    assert_eq!(lines(&node, &["level=info", "\"pod sandbox ready\"", &name]).len(), 1);
    assert!(
        lines(&node, &["\"pods of an earlier daemon adopted\""]).is_empty(),
        "there was nothing at the first start"
    );
    node.restart();
    assert_eq!(
        lines(&node, &["level=info", "\"pods of an earlier daemon adopted\"", "pods=1 containers=1"]).len(),
        1,
        "{}",
        node.log()
    );
    node.remove_pod(&pod_id);
    assert_eq!(lines(&node, &["level=info", "\"pod sandbox removed\"", &name]).len(), 1);
    node.stop();
}

/// A CNI plugin that takes its time: the log says so after ten seconds, and SIGUSR1 shows the pod before that.
#[test]
fn a_pod_that_waits_for_a_plugin_says_for_which() {
    let node = Node::start();
    let result = r#"{"cniVersion":"1.0.0","interfaces":[],"ips":[]}"#;
    let script =
        format!("#!/bin/sh\ncat > /dev/null\n[ \"$CNI_COMMAND\" = ADD ] && sleep 12\necho '{result}'\n");
    let plugin = node.plugins().join("sleeper");
    fs::write(&plugin, script).expect("the plugin");
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).expect("ours");
    let list = r#"{"cniVersion":"1.0.0","name":"slow","plugins":[{"type":"sleeper"}]}"#;
    fs::write(node.cni().join("10-slow.conflist"), list).expect("the list");
    wait_until("the list is in use", || node.log().contains("network=slow"));
    let pod = bridge_pod("stuck");
    let metadata = pod.metadata.clone().expect("a name");
    let name = format!("name={}/{}", metadata.namespace, metadata.name);
    let pid = Pid::from_raw(node.pid());
    std::thread::scope(|scope| {
        let other = node.another();
        let request = run(&pod);
        let made = scope.spawn(move || other.run_pod_sandbox(request));
        // Polled, because the pod must have reached its plugin.
        let dumped = wait_for("a dump shows the wait", || {
            kill(pid, Signal::SIGUSR1).expect("the daemon is ours");
            std::thread::sleep(Duration::from_millis(200));
            lines(&node, &["\"dump of a wait\"", "what=\"CNI plugin sleeper\"", &name]).pop()
        });
        assert!(dumped.contains("pod="), "{dumped}");
        assert!(
            !lines(&node, &["\"dump of a pod\"", &name, "state=\"being created\""]).is_empty(),
            "{}",
            node.log()
        );
        // It may well refuse what the plugin answered; that is not what is looked at here.
        let _ = made.join().expect("the call ended");
    });
    let found = lines(&node, &["level=warn", "waiting for CNI plugin sleeper, 10 s", &name]);
    assert_eq!(found.len(), 1, "{}", node.log());
    for listed in node.list_pod_sandbox(Default::default()).expect("list").items {
        node.remove_pod(&listed.id);
    }
    node.stop();
}

#[test]
fn log_lines_may_be_json_objects() {
    let node = Node::with(Options { config: "log_format = \"json\"\n".into(), ..Options::default() });
    let pod = host_pod("json\u{1b}[31m\"");
    let pod_id = node.run_pod(&pod);
    node.remove_pod(&pod_id);
    let log = node.log();
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    for line in &lines {
        assert!(line["time"].is_string() && line["level"].is_string() && line["msg"].is_string(), "{line}");
    }
    assert!(lines.iter().any(|line| line["msg"] == "serving"), "{log}");
    assert!(!log.contains('\u{1b}'), "{log}");
    node.stop();
}

/// The journal reads `<3>` as a priority; a file that is not the journal's gets none.
#[test]
fn lines_for_the_journal_begin_with_their_priority() {
    let folder = coracle_tests::node::base().join(format!("journal-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let config = folder.join("config.toml");
    fs::write(&config, "nonsense = 1\n").expect("a configuration");
    let said = |journal: &dyn Fn(&File) -> String| {
        let path = folder.join("stderr");
        let stderr = File::create(&path).expect("a file");
        let stream = journal(&stderr);
        let status = Command::new(binaries().join("coracled"))
            .arg("--config")
            .arg(&config)
            .env("JOURNAL_STREAM", stream)
            .stdin(Stdio::null())
            .stderr(stderr)
            .status()
            .expect("the program runs");
        assert_eq!(status.code(), Some(2));
        fs::read_to_string(path).expect("its words")
    };
    let own = |file: &File| {
        let about = file.metadata().expect("it is open");
        format!("{}:{}", about.dev(), about.ino())
    };
    let text = said(&own);
    assert!(text.starts_with("<3>time=") && text.contains("level=error"), "{text}");
    let text = said(&|_: &File| "1:2".to_owned());
    assert!(text.starts_with("time="), "{text}");
    fs::remove_dir_all(folder).expect("ours");
}

/// Checks that the journal gets each key of a message as a field, and that nothing is written to stderr then.
#[test]
fn the_journal_gets_each_key_as_a_field() {
    let folder = coracle_tests::node::base().join(format!("native-journal-{}", std::process::id()));
    fs::create_dir_all(folder.join("journal")).expect("a folder");
    fs::write(folder.join("config.toml"), "nonsense = \"a\\nPRIORITY=0\"\n").expect("a configuration");
    let journal = UnixDatagram::bind(folder.join("journal/socket")).expect("a socket");
    journal.set_read_timeout(Some(Duration::from_secs(10))).expect("a limit");
    let stderr = File::create(folder.join("stderr")).expect("a file");
    let about = stderr.metadata().expect("it is open");
    let script = "mount -t tmpfs none /run && mkdir -p /run/systemd/journal && mount --bind \"$1/journal\" \
                  /run/systemd/journal && exec \"$2\" --config \"$1/config.toml\"";
    let status = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .args([&folder, &binaries().join("coracled")])
        .env("JOURNAL_STREAM", format!("{}:{}", about.dev(), about.ino()))
        .stdin(Stdio::null())
        .stderr(stderr)
        .status()
        .expect("unshare runs");
    assert_eq!(status.code(), Some(2));
    let mut entry = [0; 8192];
    let count = journal.recv(&mut entry).expect("an entry");
    let entry = String::from_utf8_lossy(&entry[..count]).into_owned();
    let fields: Vec<&str> = entry.lines().collect();
    assert_eq!(fields[..2], ["PRIORITY=3", "SYSLOG_IDENTIFIER=coracle"], "{entry}");
    assert!(fields[2].starts_with("MESSAGE=time=2") && fields[2].contains(" level=error msg="), "{entry}");
    assert!(fields.contains(&"CORACLE_MSG=invalid configuration"), "{entry}");
    assert!(fields.iter().any(|field| field.starts_with("CORACLE_PROBLEM=/")), "{entry}");
    assert!(entry.ends_with('\n') && fields.len() == 5, "{entry}");
    assert_eq!(fs::read_to_string(folder.join("stderr")).expect("it is there"), "");
    fs::remove_dir_all(folder).expect("ours");
}

/// A kubelet tries again every few seconds: a warning that does not change is logged once, and other pods and causes are not pushed out.
#[test]
fn a_failure_that_repeats_is_one_line_with_a_count() {
    let mut node = Node::start();
    let (pod, other) = (host_pod("again"), host_pod("other"));
    let (pod_id, other_id) = (node.run_pod(&pod), node.run_pod(&other));
    let absent = |pod| container("one", "localhost/absent:1", &["true"], pod);
    for _ in 0..5 {
        node.create_container(create(&pod_id, &absent(&pod), &pod)).expect_err("no such image");
        node.create_container(create(&other_id, &absent(&other), &other)).expect_err("no such image");
    }
    let another = container("one", "localhost/absent:2", &["true"], &pod);
    node.create_container(create(&pod_id, &another, &pod)).expect_err("no such image");
    let of_pod = |id: &str, image: &str| {
        lines(&node, &["call=create_container", &format!("pod={}", &id[..13]), image])
    };
    for (id, image) in [(&pod_id, "absent:1 "), (&other_id, "absent:1 "), (&pod_id, "absent:2 ")] {
        assert_eq!(of_pod(id, image).len(), 1, "{}", node.log());
    }
    let history = fs::read_to_string(node.state().join("history/pods").join(&pod_id)).expect("a history");
    assert_eq!(history.matches("absent:1\",").count(), 1, "{history}");
    // The count would be lost.
    node.terminate();
    assert_eq!(lines(&node, &["call=create_container", "repeated=4"]).len(), 2, "{}", node.log());
    node.launch();
    node.stop();
}
