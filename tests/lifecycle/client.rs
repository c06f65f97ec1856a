//! `coracle logs`, `exec` and `events` as a person or a script uses them: rotation, streams, a terminal, exit codes, readers and daemons
//! that go away in the middle.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{ReopenContainerLogRequest, StopContainerRequest};
use coracle_tests::host::wait_until;
use coracle_tests::node::{Node, binaries};
use coracle_tests::pod_fixture::PodFixture;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::screen::Screen;

/// A command of the client with the node's flags, which stand before its own words.
fn client(node: &Node, command: &str, words: &[&str]) -> Command {
    let mut client = Command::new(binaries().join("coracle"));
    client.arg(command).args(node.flags()).args(words);
    client.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    client
}

fn run(node: &Node, command: &str, words: &[&str]) -> Output {
    client(node, command, words).output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn out(node: &Node, command: &str, words: &[&str]) -> String {
    let output = run(node, command, words);
    assert!(output.status.success(), "{command} {words:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[track_caller]
fn fails(node: &Node, command: &str, words: &[&str], code: i32, expected: &str) {
    let output = run(node, command, words);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{command} {words:?}: {error}");
    assert!(error.contains(expected) && output.stdout.is_empty(), "{command} {words:?}: {error}");
}

/// Finding S6: the command continued after the message, with the daemon at the default state directory.
#[test]
fn a_command_with_an_invalid_flag_or_state_directory_asks_no_daemon() {
    let node = Node::start();
    let mine = node.folder().join("mine.toml");
    fs::write(&mine, "state = 'relative'\n").expect("a file");
    let mine = mine.display().to_string();
    let state = node.state().display().to_string();
    for (words, expected) in [
        (&["image", "--state", "relative", "list"][..], "--state: state: expected an absolute path"),
        (&["image", "--config", &mine, "prune"], "mine.toml:1: state: expected an absolute path"),
        (&["image", "--config", "/absent.toml", "prune"], "/absent.toml: read: no such file"),
        (&["image", "--state", &state, "--log-level", "loud", "list"], "--log-level"),
    ] {
        let output = Command::new(binaries().join("coracle")).args(words).output().expect("it runs");
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {error}");
        assert!(error.contains(expected) && error.contains("no daemon was asked"), "{words:?}: {error}");
        assert!(!error.contains("ask the daemon"), "{words:?}: {error}");
    }
    // A mistake in another key of the file, and a file that a flag makes unimportant.
    fs::write(&mine, "log_level = 'loud'\n").expect("a file");
    let asked = Command::new(binaries().join("coracle"))
        .args(["image", "--config", &mine, "--state", &state, "list"])
        .output()
        .expect("it runs");
    assert!(asked.status.success() && text(&asked.stderr).contains("log_level"), "{}", text(&asked.stderr));
    node.stop();
}

/// Lines of a child's standard output, as they come.
fn lines(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok)
}

/// Waits for a child to end by itself.
#[track_caller]
fn ended(child: &mut Child) -> Option<i32> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("ours") {
            return status.code();
        }
        if begun.elapsed() > Duration::from_secs(20) {
            child.kill().expect("ours");
            child.wait().expect("ours");
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Ends a child like Ctrl-C.
fn interrupt(child: &mut Child) {
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).expect("ours");
    child.wait().expect("ours");
}

fn log_path(fixture: &PodFixture, id: &str) -> PathBuf {
    PathBuf::from(fixture.node.container(id).log_path)
}

#[test]
fn logs_are_printed_from_the_end_and_from_a_time_on() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("app", &["print", "hello"]));
    fixture.node.exited(&id);
    let node = &fixture.node;
    assert_eq!(out(node, "logs", &["app"]), "hello\n");
    assert_eq!(out(node, "logs", &["-f", &id[..12]]), "hello\n", "it has ended, so following ends");
    let line = out(node, "logs", &["-t", "app"]);
    let (time, said) = line.split_once(' ').expect("a time");
    assert!(time.ends_with('Z') && time.len() == 30 && said == "hello\n", "{line}");
    assert_eq!(out(node, "logs", &["--since", time, "app"]), "hello\n");
    assert_eq!(out(node, "logs", &["--since=10m", "app"]), "hello\n");
    assert_eq!(out(node, "logs", &["--since", "2200-01-01", "app"]), "");
    // Lines of the file as the kubelet would find it.
    let path = log_path(&fixture, &id);
    let more: String = (0..20_000)
        .map(|number| format!("2026-11-22T10:00:00.000000000Z stdout F line {number}\n"))
        .collect();
    fs::write(&path, more).expect("the log");
    assert_eq!(out(node, "logs", &["--tail", "2", "app"]), "line 19998\nline 19999\n");
    assert_eq!(out(node, "logs", &["--tail=0", "app"]), "");
    assert_eq!(out(node, "logs", &["app"]).lines().count(), 20_000);
    // More than a pipe holds, so that the client notices whenever it writes.
    let mut early = client(node, "logs", &["app"]).spawn().expect("it runs");
    drop(early.stdout.take());
    assert_eq!(ended(&mut early), Some(1));
    let mut said = String::new();
    early.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    assert_eq!(said, "");

    fails(node, "logs", &["absent"], 1, "no container is called absent");
    fails(node, "logs", &[], 2, "one container is expected");
    fails(node, "logs", &["app", "b"], 2, "one container is expected");
    fails(node, "logs", &["--tail", "x", "app"], 2, "--tail x");
    fails(node, "logs", &["--since", "soon", "app"], 2, "--since soon");
    fs::remove_file(&path).expect("the log");
    fails(node, "logs", &["app"], 1, "no such file");
    // It has no writer; opening it must not wait.
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).expect("a FIFO");
    fails(node, "logs", &["app"], 1, "not a regular file");
    fs::remove_file(&path).expect("ours");
    fixture.node.stop();
}

#[test]
fn following_survives_rotation_and_the_daemon_and_ends_with_the_container() {
    let mut fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("ticks", &["ticks", "20"]));
    let mut follow = client(&fixture.node, "logs", &["-f", "ticks"]).spawn().expect("it runs");
    let mut told = lines(&mut follow);
    assert_eq!(told.next().as_deref(), Some("tick 0"));
    let path = log_path(&fixture, &id);
    fs::rename(&path, path.with_extension("old")).expect("a rotation");
    fixture
        .node
        .reopen_container_log(ReopenContainerLogRequest { container_id: id.clone() })
        .expect("reopen");
    wait_until("the new file has lines", || fs::metadata(&path).is_ok_and(|about| about.len() > 200));
    fixture.node.kill9();
    let seen_without_daemon = fs::metadata(&path).expect("the log").len();
    wait_until("it writes on", || fs::metadata(&path).is_ok_and(|about| about.len() > seen_without_daemon));
    fixture.node.launch();
    let stop = StopContainerRequest { container_id: id, timeout: 0 };
    fixture.node.stop_container(stop).expect("stop");
    let rest: Vec<_> = told.collect();
    assert_eq!(ended(&mut follow), Some(0));
    // Every line once, in order, over both files.
    for (index, line) in rest.iter().enumerate() {
        assert_eq!(*line, format!("tick {}", index + 1));
    }
    assert!(rest.len() > 5, "{rest:?}");
    let written = [path.with_extension("old"), path]
        .map(|path| fs::read_to_string(path).expect("a log").lines().count());
    assert_eq!(rest.len() + 1, written.iter().sum::<usize>());
    fixture.node.stop();
}

#[test]
fn a_follower_ends_when_its_output_is_closed() {
    let fixture = PodFixture::start();
    fixture.run(&fixture.config("quiet", &["sleep", "forever"]));
    let mut follow = client(&fixture.node, "logs", &["-f", "quiet"]).spawn().expect("it runs");
    assert!(follow.try_wait().expect("ours").is_none());
    drop(follow.stdout.take());
    assert_eq!(ended(&mut follow), Some(1));
    fixture.node.stop();
}

#[test]
fn a_command_has_streams_and_an_exit_code() {
    let fixture = PodFixture::start();
    fixture.run(&fixture.config("app", &["sleep", "forever"]));
    let node = &fixture.node;
    assert_eq!(out(node, "exec", &["app", "/probe", "print", "--help"]), "--help\n");
    assert_eq!(out(node, "exec", &["app", "--", "/probe", "print", "x"]), "x\n");
    assert_eq!(run(node, "exec", &["app", "/probe", "exit", "37"]).status.code(), Some(37));
    // More than any pipe takes, through both directions.
    let mut cat = client(node, "exec", &["-i", "app", "/probe", "mirror"])
        .stdin(Stdio::piped())
        .spawn()
        .expect("it runs");
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|number| number as u8).collect();
    let mut input = cat.stdin.take().expect("a pipe");
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || input.write_all(&sent));
    let output = cat.wait_with_output().expect("it ends");
    writer.join().expect("no panic").expect("all is read");
    assert!(output.status.success() && output.stdout == bytes, "{} bytes", output.stdout.len());
    // A command that does not read its input ends although it stays open.
    let mut open = client(node, "exec", &["-i", "app", "/probe", "print", "y"])
        .stdin(Stdio::piped())
        .spawn()
        .expect("it runs");
    assert_eq!(ended(&mut open), Some(0));
    // Output that is not read any more ends the client, not the daemon.
    let mut blast = client(node, "exec", &["app", "/probe", "blast", "50000000"]).spawn().expect("it runs");
    drop(blast.stdout.take());
    assert_eq!(ended(&mut blast), Some(1));

    fails(node, "exec", &["app"], 2, "a container and a command are expected");
    fails(node, "exec", &["absent", "ls"], 1, "no container is called absent");
    fails(node, "exec", &["app", "/nowhere"], 1, "/nowhere");
    let long = "x".repeat(100_000);
    let too_long: Vec<&str> = ["app", "/probe"].into_iter().chain([long.as_str(); 12]).collect();
    fails(node, "exec", &too_long, 1, "a request of more than 1048576 bytes");
    let id = fixture.create(&fixture.config("created", &["sleep", "forever"]));
    fails(node, "exec", &[&id, "ls"], 1, "not running");
    fixture.node.stop();
}

#[test]
fn a_command_outlives_its_client_and_a_client_outlives_the_daemon() {
    let mut fixture = PodFixture::start();
    fixture.run(&fixture.config("app", &["sleep", "forever"]));
    let mut ticks =
        client(&fixture.node, "exec", &["app", "/probe", "ticks", "23"]).spawn().expect("it runs");
    let mut said = lines(&mut ticks);
    assert_eq!(said.next().as_deref(), Some("tick 0"));
    interrupt(&mut ticks);
    std::thread::sleep(Duration::from_millis(300));
    let commands = || coracle_tests::host::processes("/probe ticks 23").len();
    assert_eq!(commands(), 1, "nothing reads its output, and it continues");

    let mut ticks =
        client(&fixture.node, "exec", &["app", "/probe", "ticks", "23"]).spawn().expect("it runs");
    let mut said = lines(&mut ticks);
    assert_eq!(said.next().as_deref(), Some("tick 0"));
    fixture.node.kill9();
    assert!(said.nth(20).is_some(), "the streams do not pass through the daemon");
    interrupt(&mut ticks);
    // Its output has no reader any more.
    wait_until("the second one has ended", || commands() <= 1);
    fixture.node.launch();
    fixture.node.stop();
}

/// Regression: the daemon dropped the output as fast as it came, and answered nothing else meanwhile.
#[test]
fn output_without_a_client_is_read_at_a_limited_rate() {
    let fixture = PodFixture::start();
    fixture.run(&fixture.config("app", &["sleep", "forever"]));
    let blast = ["app", "/probe", "blast", "1000000000000"];
    for _ in 0..4 {
        let mut blast = client(&fixture.node, "exec", &blast).spawn().expect("it runs");
        let mut first = [0];
        blast.stdout.take().expect("a pipe").read_exact(&mut first).expect("output");
        interrupt(&mut blast);
    }
    let taken = || {
        let read = coracle_tests::host::proc_value(fixture.node.pid(), "io", "rchar");
        (read.expect("CONFIG_TASK_IO_ACCOUNTING"), Instant::now())
    };
    std::thread::sleep(Duration::from_millis(300));
    let (before, begun) = taken();
    std::thread::sleep(Duration::from_secs(2));
    let (after, ended) = taken();
    // Four streams of at most 26 MB/s, and once the bytes of a burst of each.
    let limit = 110e6 * (ended - begun).as_secs_f64();
    assert!(((after - before) as f64) < limit, "{} bytes in {:?}", after - before, ended - begun);
    assert!(after > before, "the output is read");
    assert_eq!(coracle_tests::host::processes("/probe blast 1000000000000").len(), 4);
    fixture.node.stop();
}

/// Regression: clients that had ended held places until their pulls ended, and lists were refused.
#[test]
fn ended_clients_free_their_connections() {
    let fixture = PodFixture::start();
    // A registry that accepts connections and does not answer.
    let registry = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let image = format!("{}/x:1", registry.local_addr().expect("a port"));
    // A client that ends before it has connected holds no place: each one waits longer, for the machine may be slow.
    let is_refused = (0..60).any(|attempt| {
        let mut pull = Command::new(binaries().join("coracle"));
        pull.args(["image", "pull", &image]).args(fixture.node.flags()).stdout(Stdio::null());
        let pull = pull.stderr(Stdio::piped()).spawn().expect("it runs");
        std::thread::sleep(Duration::from_millis(20 + 10 * attempt));
        kill(Pid::from_raw(pull.id() as i32), Signal::SIGINT).expect("ours");
        text(&pull.wait_with_output().expect("ours").stderr).contains("too many requests")
    });
    assert_eq!(out(&fixture.node, "ps", &["-q"]), "");
    assert!(
        is_refused,
        "operations have places of their own, which end with them and not with their clients"
    );
    // The pulls end.
    drop(registry);
    fixture.node.stop();
}

/// Regression: the worker waited in open(2) for the client, and a place of a pull was taken for 15 minutes.
#[test]
fn an_import_whose_client_has_ended_ends() {
    let fixture = PodFixture::start();
    let path = fixture.node.state().join("stream-1");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    let import = fixture.node.tool(&["image", "import", &path.display().to_string()]);
    assert!(text(&import.stderr).contains("no process writes to it"), "{}", text(&import.stderr));
    fs::remove_file(&path).expect("ours");
    fixture.node.stop();
}

/// Annotations may need six bytes a character in JSON.
#[test]
fn pods_with_large_annotations_are_listed() {
    let fixture = PodFixture::start();
    let mut large = coracle_tests::request::host_pod("large");
    large.annotations.insert("example.com/text".into(), "\u{1}".repeat(200_000));
    let id = fixture.node.run_pod(&large);
    assert!(out(&fixture.node, "pods", &["-q", "--no-trunc"]).contains(&id));
    assert!(out(&fixture.node, "pods", &["-o", "json"]).contains("\\u0001"));
    fixture.node.remove_pod(&id);
    fixture.node.stop();
}

/// Regression: keys were not read any more, the terminal stayed raw, and signals did nothing.
#[test]
fn a_terminal_outlives_the_daemon() {
    let mut fixture = PodFixture::start();
    fixture.run(&fixture.config("app", &["sleep", "forever"]));
    for by_a_signal in [false, true] {
        let screen = Screen::new();
        let mut exec = screen.run(client(&fixture.node, "exec", &["-i", "-t", "app", "/probe", "mirror"]));
        wait_until("the terminal is raw", || screen.is_raw());
        fixture.node.kill9();
        screen.type_in("still here\n");
        screen.shows("still here");
        match by_a_signal {
            true => kill(Pid::from_raw(exec.id() as i32), Signal::SIGTERM).expect("ours"),
            // The end of the input for the command's terminal.
            false => screen.type_in("\u{4}"),
        }
        assert_eq!(ended(&mut exec), Some(1), "its exit code is not known");
        assert!(!screen.is_raw(), "the settings are restored");
        fixture.node.launch();
    }
    fixture.node.stop();
}

#[test]
fn running_execs_do_not_prevent_list_commands() {
    let fixture = PodFixture::start();
    fixture.run(&fixture.config("app", &["sleep", "forever"]));
    let node = &fixture.node;
    let mut all: Vec<_> = (0..8)
        .map(|_| client(node, "exec", &["app", "/probe", "ticks", "20"]).spawn().expect("it runs"))
        .collect();
    // Clients whose output is not read would end.
    let mut readers: Vec<_> = all.iter_mut().map(lines).collect();
    for reader in &mut readers {
        assert_eq!(reader.next().as_deref(), Some("tick 0"));
    }
    fails(node, "exec", &["app", "/probe", "print", "x"], 1, "too many requests");
    assert_eq!(out(node, "ps", &["-q"]).lines().count(), 1);
    all.iter_mut().for_each(interrupt);
    wait_until("their places are free", || {
        run(node, "exec", &["app", "/probe", "print", "x"]).status.success()
    });
    fixture.node.stop();
}

/// The client gets a terminal of the test; a controlling terminal would send the signal of a new size by itself.
#[test]
fn a_terminal_is_raw_and_has_a_size() {
    let fixture = PodFixture::start();
    fixture.run(&fixture.config("app", &["sleep", "forever"]));
    let screen = Screen::new();
    screen.resize(77, 33);
    assert!(!screen.is_raw());
    let mut exec = screen.run(client(&fixture.node, "exec", &["-i", "-t", "app", "/probe", "size", "20x10"]));
    screen.shows("77x33\r\n");
    assert!(screen.is_raw());
    screen.resize(20, 10);
    kill(Pid::from_raw(exec.id() as i32), Signal::SIGWINCH).expect("ours");
    screen.shows("20x10\r\n");
    assert_eq!(ended(&mut exec), Some(0));
    assert!(!screen.is_raw(), "the settings are restored");
    fixture.node.stop();
}

#[test]
fn events_come_as_they_happen() {
    let mut fixture = PodFixture::start();
    let mut plain = client(&fixture.node, "events", &[]).spawn().expect("it runs");
    let mut json = client(&fixture.node, "events", &["-o", "json"]).spawn().expect("it runs");
    let (mut told, mut objects) = (lines(&mut plain), lines(&mut json));
    // The first ones may happen before the clients listen.
    let (mut line, mut object) = (String::new(), String::new());
    std::thread::scope(|scope| {
        let first = scope.spawn(|| (told.next().expect("a line"), objects.next().expect("an object")));
        while !first.is_finished() {
            let id = fixture
                .run(&fixture.config(&format!("c{}", coracle_tests::request::fresh()), &["exit", "0"]));
            fixture.node.exited(&id);
        }
        (line, object) = first.join().expect("no panic");
    });
    let metadata = fixture.pod.metadata.clone().expect("a name");
    assert!(
        line.contains(" container ")
            && line.contains(&format!(" {}/{}/c", metadata.namespace, metadata.name)),
        "{line}"
    );
    let object: Value = serde_json::from_str(&object).expect("JSON");
    assert!(
        object["containerEventType"].as_str().is_some_and(|kind| kind.starts_with("CONTAINER_")),
        "{object}"
    );
    assert_eq!(object["podSandboxId"], fixture.pod_id.as_str());
    let id = fixture.run(&fixture.config("last", &["exit", "0"]));
    fixture.node.exited(&id);
    fixture.node.remove_pod(&fixture.pod_id);
    let end = format!(" pod deleted {}", &fixture.pod_id[..13]);
    let told: Vec<String> = told.take_while(|line| !line.contains(&end)).collect();
    let of_last: Vec<_> = told.iter().filter(|line| line.ends_with("/last")).collect();
    for (happened, line) in ["created", "started", "stopped", "deleted"].into_iter().zip(&of_last) {
        assert!(line.contains(&format!(" container {happened} {}", &id[..13])), "{told:?}");
    }
    assert_eq!(of_last.len(), 4, "{told:?}");
    fails(&fixture.node, "events", &["x"], 2, "nothing more is expected");
    fails(&fixture.node, "events", &["-o", "xml"], 2, "--output xml");
    fixture.node.terminate();
    for child in [&mut plain, &mut json] {
        assert_eq!(ended(child), Some(1));
        let mut said = String::new();
        child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
        assert!(said.contains("daemon"), "{said}");
    }
    fixture.node.launch();
    fixture.node.stop();
}
