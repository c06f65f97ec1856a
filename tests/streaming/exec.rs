//! Exec: output, status, input, terminals, concurrent sessions, and clients that disconnect.

use std::io::Write;
use std::time::Duration;

use coracle_tests::host::{self, wait_until};
use coracle_tests::spdy::{Client, Frame, upgrade};

use crate::{BOTH, OUTPUT, TERMINAL, V4, exec, exec_url, gives_back_descriptors, sleeping};

#[test]
fn str_1_an_exec_returns_output_and_success() {
    let (fixture, container) = sleeping();
    let outcome = exec(&fixture.node, &container, &["raw", "hello"], None);
    assert_eq!((outcome.stdout.as_slice(), outcome.stderr.as_slice()), (&b"hello"[..], &b""[..]));
    assert_eq!(outcome.exit_code(), 0);
    let outcome = exec(&fixture.node, &container, &["both"], None);
    assert_eq!((outcome.stdout, outcome.stderr), (b"to stdout\n".to_vec(), b"to stderr\n".to_vec()));
    fixture.node.stop();
}

#[test]
fn str_2_exit_codes_signals_and_missing_commands_are_reported() {
    let (fixture, container) = sleeping();
    assert_eq!(exec(&fixture.node, &container, &["exit", "3"], None).exit_code(), 3);
    assert_eq!(exec(&fixture.node, &container, &["raise", "SIGKILL"], None).exit_code(), 137);
    let request = coracle_tests::cri::proto::ExecRequest {
        container_id: container,
        cmd: vec!["/no/such/program".into()],
        stdout: true,
        ..Default::default()
    };
    let url = fixture.node.exec(request).expect("the command is looked for when the streams are there").url;
    let mut client = Client::connect(&url, V4);
    let open = client.open_stdio(&["error", "stdout"]);
    let status = client.finish_session(&open, None).status;
    assert_eq!((&status["reason"], &status["code"]), (&"InternalError".into(), &500.into()), "{status}");
    assert!(status["message"].as_str().is_some_and(|text| text.contains("no such file")), "{status}");
    fixture.node.stop();
}

#[test]
fn str_3_and_4_input_above_the_window_is_transferred_to_its_end() {
    let (fixture, container) = sleeping();
    let input: Vec<u8> = (0..3_000_000_u32).map(|number| (number / 7) as u8).collect();
    let outcome = exec(&fixture.node, &container, &["mirror"], Some(&input));
    assert!(outcome.stdout == input, "{} of {} bytes came back", outcome.stdout.len(), input.len());
    assert_eq!(outcome.exit_code(), 0);
    let outcome = exec(&fixture.node, &container, &["sink"], Some(&input));
    assert_eq!(outcome.stdout, b"read 3000000\n");
    // A process that reads nothing blocks neither its own output nor its end.
    let outcome = exec(&fixture.node, &container, &["print", "deaf"], Some(&input));
    assert_eq!(outcome.stdout, b"deaf\n");
    fixture.node.stop();
}

#[test]
fn str_5_a_token_is_valid_once_and_for_its_kind() {
    let (fixture, container) = sleeping();
    let headers = |protocol: &'static str| {
        [("Connection", "Upgrade"), ("Upgrade", "SPDY/3.1"), ("X-Stream-Protocol-Version", protocol)]
    };
    let answer = |url: &str, headers: &[(&str, &str)]| {
        let (head, _) = upgrade(url, "POST", headers).expect("an answer");
        head
    };
    let url = exec_url(&fixture.node, &container, &["true"], OUTPUT);
    let other_kind = url.replace("/exec/", "/attach/");
    assert_eq!(answer(&other_kind, &headers(V4)).second(), "404");
    assert_eq!(answer(&url, &headers(V4)).second(), "404", "it was spent");
    let (base, _) = url.rsplit_once('/').expect("a token");
    for path in [base.to_owned(), format!("{base}/"), format!("{base}/x"), format!("{base}/x/y")] {
        assert_eq!(answer(&path, &headers(V4)).second(), "404", "{path}");
    }
    let fresh = || exec_url(&fixture.node, &container, &["true"], OUTPUT);
    let refused = answer(&fresh(), &headers("v9.channel.k8s.io"));
    assert_eq!(refused.second(), "403");
    assert_eq!(refused.get("x-accepted-stream-protocol-versions"), Some(V4));
    assert_eq!(answer(&fresh(), &headers(V4)[..2]).second(), "400");
    assert_eq!(answer(&fresh(), &[]).second(), "400");
    fixture.node.stop();
}

#[test]
fn invalid_requests_are_refused() {
    use coracle_tests::cri::proto::ExecRequest;
    let (fixture, container) = sleeping();
    let good = ExecRequest {
        container_id: container.clone(),
        cmd: vec!["/probe".into()],
        stdout: true,
        ..Default::default()
    };
    for (request, code) in [
        (ExecRequest { cmd: Vec::new(), ..good.clone() }, 3),
        (ExecRequest { stdout: false, ..good.clone() }, 3),
        (ExecRequest { tty: true, stderr: true, ..good.clone() }, 3),
        (ExecRequest { container_id: "feed".into(), ..good.clone() }, 5),
    ] {
        assert_eq!(fixture.node.exec(request.clone()).unwrap_err().code() as i32, code, "{request:?}");
    }
    let ended = fixture.run(&fixture.config("ended", &["true"]));
    fixture.node.exited(&ended);
    let request = ExecRequest { container_id: ended, ..good };
    assert_eq!(fixture.node.exec(request).unwrap_err().code() as i32, 9);
    fixture.node.stop();
}

#[test]
fn str_6_a_terminal_has_the_size_of_its_client() {
    let (fixture, container) = sleeping();
    let mut client = Client::connect(&exec_url(&fixture.node, &container, &["size", "132x50"], TERMINAL), V4);
    let open = client.open_stdio(&TERMINAL.names());
    for size in ["{\"Width\":80,\"Height\":24}\n{\"Wid", "th\":132,\"Height\":50}"] {
        client.send(open["resize"], size.as_bytes()).expect("a size");
    }
    let outcome = client.finish_session(&open, None);
    let text = String::from_utf8_lossy(&outcome.stdout).into_owned();
    assert!(text.ends_with("132x50\r\n"), "a terminal ends its lines so: {text:?}");
    assert_eq!(outcome.exit_code(), 0);
    let client_of = |words: &[&str]| {
        let mut client = Client::connect(&exec_url(&fixture.node, &container, words, TERMINAL), V4);
        let open = client.open_stdio(&TERMINAL.names());
        client.finish_session(&open, None)
    };
    let seen = client_of(&["see", "env"]);
    assert!(String::from_utf8_lossy(&seen.stdout).contains("TERM=xterm"), "{seen:?}");
    fixture.node.stop();
}

#[test]
fn str_10_pings_are_answered_while_output_flows() {
    let (fixture, container) = sleeping();
    let mut client =
        Client::connect(&exec_url(&fixture.node, &container, &["blast", "100000000"], OUTPUT), V4);
    client.open_stdio(&OUTPUT.names());
    client.ping(7).expect("a ping");
    let answered = std::iter::from_fn(|| client.next().ok()).any(|frame| frame == Frame::Ping(7));
    assert!(answered);
    fixture.node.stop();
}

#[test]
fn a_hundred_concurrent_sessions_are_served() {
    let (fixture, container) = sleeping();
    let before = fixture.node.descriptors();
    let urls: Vec<String> =
        (0..100).map(|_| exec_url(&fixture.node, &container, &["mirror"], BOTH)).collect();
    let sessions: Vec<_> = urls
        .into_iter()
        .enumerate()
        .map(|(number, url)| {
            std::thread::spawn(move || {
                let text = format!("number {number}");
                let mut client = Client::connect(&url, V4);
                let open = client.open_stdio(&BOTH.names());
                let outcome = client.finish_session(&open, Some(text.as_bytes()));
                assert_eq!((outcome.exit_code(), outcome.stdout), (0, text.into_bytes()));
            })
        })
        .collect();
    for session in sessions {
        session.join().expect("a session");
    }
    gives_back_descriptors(&fixture.node, before);
    fixture.node.stop();
}

/// STR-14: a command continues without its client, with its standard input closed and its output dropped;
/// nothing else remains.
#[test]
fn str_14_disconnected_clients_leave_nothing() {
    let (fixture, container) = sleeping();
    let before = fixture.node.descriptors();
    // Only processes of this node, because concurrent tests may run the same commands.
    let parent = fixture.node.cgroup_parent();
    let marked = |words: &str| {
        let running = host::processes(words).into_iter();
        let own = running.filter(|process| process.command.starts_with("/probe "));
        own.filter(|process| host::is_in_cgroup(process.pid, &parent)).count()
    };
    // It reads until end of file, which it gets when its client disconnects.
    let mut client = Client::connect(&exec_url(&fixture.node, &container, &["sink"], BOTH), V4);
    client.open_stdio(&BOTH.names());
    wait_until("the command runs", || marked("/probe sink") == 1);
    drop(client);
    wait_until("the command reads its end", || marked("/probe sink") == 0);
    // It writes more than any pipe can hold without a reader, and is not killed by that.
    let mut client =
        Client::connect(&exec_url(&fixture.node, &container, &["blast", "50000000"], OUTPUT), V4);
    client.open_stdio(&OUTPUT.names());
    drop(client);
    wait_until("the command writes to its end", || marked("/probe blast") == 0);
    // A terminal is hung up.
    let mut client =
        Client::connect(&exec_url(&fixture.node, &container, &["sleep", "forever"], TERMINAL), V4);
    client.open_stdio(&TERMINAL.names());
    wait_until("the command runs", || marked("/probe sleep forever") == 2);
    drop(client);
    wait_until("the terminal hangs up", || marked("/probe sleep forever") == 1);
    // At random moments of a session: a failed assertion prints the seed.
    let mut seed = 3_u64;
    for round in 0..60 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let url = exec_url(&fixture.node, &container, &["blast", "2000000"], BOTH);
        if round % 6 == 0 {
            continue; // its token expires
        }
        let mut client = Client::connect(&url, V4);
        let names = BOTH.names();
        client.open_stdio(&names[..(round % 6).min(names.len())]);
        // Fails if the server has disconnected.
        let _ = client.write(&vec![0; (seed >> 33) as usize % 7]);
        for _ in 0..(seed >> 40) % 20 {
            if round % 6 < names.len() || client.next().is_err() {
                break;
            }
        }
    }
    wait_until("every command ends", || marked("/probe blast") == 0);
    gives_back_descriptors(&fixture.node, before);
    fixture.node.stop();
}

/// A client on a slow connection receives all bytes, long after the process has exited.
#[test]
fn a_slow_client_receives_all_output() {
    let (fixture, container) = sleeping();
    let mut client =
        Client::connect(&exec_url(&fixture.node, &container, &["blast", "12000000"], OUTPUT), V4);
    let streams = client.open_stdio(&OUTPUT.names());
    let (mut count, mut frames) = (0, 0);
    while let Ok(frame) = client.next() {
        if let Frame::Data(stream, _, bytes) = frame
            && stream == streams["stdout"]
        {
            (count, frames) = (count + bytes.len(), frames + 1);
            if frames % 20 == 0 {
                // Pings on a slow connection: the worst case for the end of a connection.
                std::thread::sleep(Duration::from_millis(400));
                let _ = client.ping(frames);
            }
        }
    }
    assert_eq!(count, 12_000_000);
    fixture.node.stop();
}

#[test]
fn unread_output_blocks_only_its_command() {
    let (fixture, container) = sleeping();
    let mut client =
        Client::connect(&exec_url(&fixture.node, &container, &["blast", "100000000"], OUTPUT), V4);
    client.open_stdio(&OUTPUT.names());
    std::io::stdout().flush().expect("stdout");
    // The daemon buffers a limited part of it, and serves other clients.
    let before = host::anonymous_kib(fixture.node.pid());
    for _ in 0..20 {
        assert_eq!(exec(&fixture.node, &container, &["print", "beside"], None).stdout, b"beside\n");
    }
    let after = host::anonymous_kib(fixture.node.pid());
    assert!(after <= before + 1024, "{before} KiB, then {after} KiB");
    drop(client);
    fixture.node.stop();
}
