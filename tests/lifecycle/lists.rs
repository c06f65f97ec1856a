//! `coracle pods`, `ps`, `images` and `stats` as a person or a script uses them: filters, every form, names that others chose, a daemon
//! that is dead, frozen or ends in the middle. That they read as crictl's lists do is tested in tests/crictl.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::process::{Command, Output, Stdio};

use coracle_tests::cri::proto::{ContainerConfig, StopPodSandboxRequest};
use coracle_tests::host;
use coracle_tests::node::{Node, binaries};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::host_pod;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The output of a command that must work.
#[track_caller]
fn out(node: &Node, words: &[&str]) -> String {
    let output = node.tool(words);
    assert!(output.status.success() && output.stderr.is_empty(), "{words:?}: {}", error(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[track_caller]
fn json(node: &Node, words: &[&str]) -> Value {
    serde_json::from_str(&out(node, words)).expect("JSON")
}

/// The IDs that a list has with these filters.
#[track_caller]
fn ids(node: &Node, words: &[&str]) -> Vec<String> {
    out(node, &[words, &["-q"]].concat()).lines().map(str::to_owned).collect()
}

fn labelled(mut config: ContainerConfig, name: &str, value: &str) -> ContainerConfig {
    config.labels.insert(name.to_owned(), value.to_owned());
    config
}

#[test]
fn an_empty_list_has_a_heading_and_is_no_error() {
    let node = Node::start();
    for (command, member) in [("pods", "items"), ("ps", "containers"), ("stats", "stats")] {
        assert_eq!(out(&node, &[command]).lines().count(), 1, "{command}");
        assert_eq!(out(&node, &[command, "-q"]), "", "{command}");
        assert_eq!(json(&node, &[command, "-o", "json"])[member], serde_json::json!([]), "{command}");
        assert_eq!(out(&node, &[command, "-o", "yaml"]), format!("{member}: []\n"), "{command}");
    }
    assert_eq!(out(&node, &["images", "nothing-has-this-name"]).lines().count(), 1);
    node.stop();
}

#[test]
fn lists_are_filtered_and_equal_in_all_formats() {
    let fixture = PodFixture::start();
    let node = &fixture.node;
    let web = fixture.run(&labelled(fixture.config("web", &["sleep", "forever"]), "tier", "front"));
    let web_2 = fixture.run(&labelled(fixture.config("web-2", &["sleep", "forever"]), "tier", "back"));
    let done = fixture.run(&fixture.config("done", &["exit", "3"]));
    node.exited(&done);
    let pod = fixture.pod.metadata.clone().expect("a name");
    let full = format!("{}/{}", pod.namespace, pod.name);

    let cases: &[(&[&str], &[&String])] = &[
        (&["ps"], &[&web_2, &web]),
        (&["ps", "-a"], &[&done, &web_2, &web]),
        (&["ps", "--state", "exited"], &[&done]),
        (&["ps", "-s", "Exited"], &[&done]),
        (&["ps", "--name", "web"], &[&web_2, &web]),
        (&["ps", "--name", "^web$"], &[&web]),
        (&["ps", "--label", "tier=front"], &[&web]),
        (&["ps", "--label", "tier=front", "--label", "other=1"], &[]),
        (&["ps", "--id", &web[..10]], &[&web]),
        (&["ps", "--pod", &full], &[&web_2, &web]),
        (&["ps", "-p", &fixture.pod_id[..12], "--name=2"], &[&web_2]),
        (&["ps", "--pod", "nobody"], &[]),
        (&["ps", "--namespace", &pod.namespace], &[&web_2, &web]),
        (&["ps", "--namespace", "elsewhere"], &[]),
        (&["ps", "--image", &fixture.image], &[&web_2, &web]),
        (&["ps", "--latest"], &[&done]),
        (&["ps", "-n", "2"], &[&done, &web_2]),
        (&["pods", "--name", &pod.name, "--state", "ready"], &[&fixture.pod_id]),
        (&["pods", "--state", "notready"], &[]),
        (&["stats", "--name", "web-2", "--seconds", "0"], &[&web_2]),
    ];
    for (words, expected) in cases {
        assert_eq!(ids(node, words).iter().collect::<Vec<_>>(), *expected, "{words:?}");
        let found = json(node, &[*words, &["-o", "json"]].concat());
        let found = found.as_object().and_then(|one| one.values().next()).and_then(Value::as_array);
        let id =
            |object: &Value| object["id"].as_str().or(object["attributes"]["id"].as_str()).map(str::to_owned);
        let found: Vec<_> = found.expect("an array").iter().filter_map(id).collect();
        assert_eq!(found.iter().collect::<Vec<_>>(), *expected, "{words:?}");
        let table = out(node, words);
        for (line, id) in table.lines().skip(1).zip(*expected) {
            assert!(line.starts_with(&id[..13]) && !line.contains(&id[..14]), "{table}");
        }
    }
    let wide = out(node, &["ps", "-a", "-o", "wide", "--no-trunc"]);
    let lines: Vec<_> = wide.lines().collect();
    assert!(
        lines[0].contains("REASON") && lines[1].starts_with(&done) && lines[1].contains("Error"),
        "{wide}"
    );
    let pid = node.container_pid(&web).to_string();
    assert!(lines[3].split_whitespace().any(|cell| cell == pid), "{wide}");
    // Letters may stand together, and the last one may have a value.
    assert_eq!(out(node, &["ps", "-aqn", "1"]), format!("{done}\n"));
    let stats = out(node, &["stats", "--seconds", "0.2", "--name", "^web$"]);
    let cells: Vec<_> = stats.lines().nth(1).expect("a line").split_whitespace().collect();
    assert_eq!(cells[..2], [&web[..13], "web"]);
    assert!(cells[2].parse::<f64>().is_ok() && cells[3].ends_with('B'), "{stats}");

    let id = fixture.pod_id.clone();
    node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.clone() }).expect("stop");
    assert_eq!(ids(node, &["pods", "--state", "notready"]), [id]);
    assert_eq!(ids(node, &["stats", "--seconds", "0"]), Vec::<String>::new());
    fixture.node.stop();
}

#[test]
fn mistakes_are_named_with_exit_code_2() {
    let node = Node::start();
    for (words, expected) in [
        (&["ps", "--state", "ready"][..], "--state ready: created, running"),
        (&["pods", "--label", "x"], "--label x: NAME=VALUE"),
        (&["pods", "-o", "xml"], "--output xml: table, wide"),
        (&["ps", "extra"], "ps: extra: nothing more"),
        (&["ps", "--nam", "x"], "did you mean `--name`?"),
        (&["stats", "--seconds", "soon"], "--seconds soon"),
    ] {
        let output = node.tool(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(error(&output).contains(expected), "{words:?}: {}", error(&output));
    }
    node.stop();
}

/// The CRI does not limit what names, labels and annotations contain.
#[test]
fn control_characters_reach_programs_and_no_terminal() {
    let hostile = "a\u{1b}]0;PWNED\u{7}\n\u{9b}31m\u{202e}: \"b\" #";
    let mut pod = host_pod("hostile");
    pod.metadata.as_mut().expect("a name").name = hostile.to_owned();
    pod.annotations.insert("note".to_owned(), hostile.to_owned());
    let fixture = PodFixture::with(pod);
    let node = &fixture.node;
    fixture.run(&labelled(fixture.config("app", &["sleep", "forever"]), "tag", hostile));
    for words in [&["pods"][..], &["ps"], &["stats", "-o", "wide", "--seconds", "0"]] {
        let table = out(node, words);
        assert_eq!(table.lines().count(), 2, "{table:?}");
    }
    for words in [&["pods"][..], &["ps"], &["stats", "--seconds", "0"]] {
        for form in ["table", "wide", "json", "yaml"] {
            let text = out(node, &[words, &["-o", form]].concat());
            let is_safe = |letter: char| letter == '\n' || !letter.is_control() && letter != '\u{202e}';
            assert!(text.chars().all(is_safe), "{words:?} {form}: {text:?}");
        }
    }
    let pods = json(node, &["pods", "-o", "json"]);
    assert_eq!(pods["items"][0]["metadata"]["name"], hostile);
    assert_eq!(pods["items"][0]["annotations"]["note"], hostile);
    let containers = json(node, &["ps", "-o", "json"]);
    assert_eq!(containers["containers"][0]["labels"]["tag"], hostile);
    // Annotations may have the environment of containers.
    let report = node.folder().join("report.tar.gz");
    out(node, &["support-dump", &report.display().to_string()]);
    let listed = Command::new("tar").arg("-xzOf").arg(&report).output().expect("tar");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(
        listed.contains(&fixture.pod_id) && listed.contains("\"tag\": \"a") && !listed.contains("\"note\""),
        "{listed}"
    );
    fixture.node.stop();
}

#[test]
fn a_daemon_that_does_not_answer_is_reported_within_a_limit() {
    let mut fixture = PodFixture::start();
    fixture.run(&fixture.config("app", &["sleep", "forever"]));
    // The daemon's flag and the filter have one name.
    let state = fixture.node.state().display().to_string();
    assert_eq!(ids(&fixture.node, &["pods", "--state", &state, "--state", "ready"]).len(), 1);
    let daemon = Pid::from_raw(fixture.node.pid());
    kill(daemon, Signal::SIGSTOP).expect("it runs");
    let started = std::time::Instant::now();
    let frozen = fixture.node.tool(&["ps"]);
    kill(daemon, Signal::SIGCONT).expect("it runs");
    assert_eq!(frozen.status.code(), Some(1), "{}", error(&frozen));
    assert!(started.elapsed().as_secs() < 20 && frozen.stdout.is_empty());
    fixture.node.kill9();
    for command in ["pods", "ps", "images", "stats"] {
        let output = fixture.node.tool(&[command]);
        assert_eq!(output.status.code(), Some(1), "{command}");
        assert!(
            output.stdout.is_empty() && error(&output).contains("ask the daemon at "),
            "{}",
            error(&output)
        );
    }
    fixture.node.launch();
    assert_eq!(ids(&fixture.node, &["ps"]).len(), 1);
    fixture.node.stop();
}

/// A half list would be taken for all there is.
#[test]
fn nothing_is_printed_if_the_daemon_ends_in_the_middle() {
    let folder = coracle_tests::node::base().join(format!("lists-{}", coracle_tests::request::fresh()));
    fs::create_dir_all(&folder).expect("a directory");
    let socket = UnixListener::bind(folder.join("control.sock")).expect("a socket");
    let serve = std::thread::spawn(move || {
        let (mut stream, _) = socket.accept().expect("a client");
        let mut request = String::new();
        BufReader::new(stream.try_clone().expect("a copy")).read_line(&mut request).expect("a request");
        let image = r#"{"image":{"id":"sha256:aa","tags":["localhost/x:1"],"digests":[],"size_bytes":1,"pinned":false}}"#;
        writeln!(stream, "{image}").expect("an answer");
    });
    let output = Command::new(binaries().join("coracle"))
        .args(["images", "--state"])
        .arg(&folder)
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    serve.join().expect("it answered");
    fs::remove_dir_all(&folder).expect("ours");
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty() && error(&output).contains("the daemon ended"), "{}", error(&output));
}

#[test]
fn a_reader_that_leaves_early_is_no_panic() {
    let node = Node::start();
    let (reader, writer) = nix::unistd::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(binaries().join("coracle"))
        .arg("images")
        .args(node.flags())
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .expect("it runs");
    assert_eq!((output.status.code(), error(&output)), (Some(1), String::new()));
    host::wait_until("the daemon answers other clients", || {
        out(&node, &["images", "-q"]).lines().count() == 1
    });
    node.stop();
}
