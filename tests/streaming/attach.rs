//! Attach: output from the time of the call, input with and without stdin_once, several clients, a slow
//! client, and a restart of the daemon.

use std::fs;

use coracle_tests::cri::proto::{ContainerConfig, ContainerState};
use coracle_tests::host::wait_until;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::spdy::{Client, Frame};

use crate::{BOTH, OUTPUT, Streams, TERMINAL, V4, attach_url, gives_back_descriptors, with_stdin};

fn attach(
    fixture: &PodFixture,
    container: &str,
    streams: Streams,
) -> (Client, std::collections::BTreeMap<String, u32>) {
    let mut client = Client::connect(&attach_url(&fixture.node, container, streams), V4);
    let open = client.open_stdio(&streams.names());
    (client, open)
}

/// Reads until this text has arrived on a stream.
#[track_caller]
fn read_until(client: &mut Client, stream: u32, text: &str) {
    let mut seen = String::new();
    while !seen.contains(text) {
        match client.next() {
            Ok(Frame::Data(from, _, bytes)) if from == stream => seen += &String::from_utf8_lossy(&bytes),
            Ok(_) => {}
            Err(error) => panic!("{error} before {text:?}; came: {seen:?}"),
        }
    }
}

#[test]
fn str_7_stdin_once_ends_with_its_client_and_otherwise_stays() {
    let fixture = PodFixture::start();
    let once = fixture.run(&with_stdin(&fixture, "once", &["mirror"], true));
    let (client, open) = attach(&fixture, &once, BOTH);
    let outcome = client.finish_session(&open, Some(b"all there is"));
    assert_eq!(outcome.stdout, b"all there is");
    assert_eq!(outcome.exit_code(), 0, "attach does not report the container's exit code");
    assert_eq!(fixture.node.exited(&once).exit_code, 0);

    let kept = fixture.run(&with_stdin(&fixture, "kept", &["mirror"], false));
    for text in ["first", "second"] {
        let (mut client, open) = attach(&fixture, &kept, BOTH);
        client.send(open["stdin"], text.as_bytes()).expect("input");
        read_until(&mut client, open["stdout"], text);
        client.finish(open["stdin"]).expect("the end");
        let outcome = client.finish_session(&open, None);
        assert_eq!(outcome.exit_code(), 0, "closing stdin is how clients detach");
    }
    assert_eq!(fixture.node.container(&kept).state(), ContainerState::ContainerRunning);
    assert_eq!(fixture.node.output(&kept), "", "one line, not finished yet");
    fixture.node.stop();
}

#[test]
fn str_8_every_client_gets_a_copy_and_a_blocked_one_does_not_affect_others() {
    let fixture = PodFixture::start();
    let talker = fixture.run(&with_stdin(&fixture, "talker", &["mirror"], false));
    let before = fixture.node.descriptors();
    let mut clients: Vec<_> = (0..3).map(|_| attach(&fixture, &talker, BOTH)).collect();
    let (mut stalled, open) = attach(&fixture, &talker, OUTPUT);
    // More than the blocked client's socket, pipe and buffers can hold.
    let line = format!("{}\n", "x".repeat(1023));
    for _ in 0..640 {
        let text = line.repeat(64);
        let (writer, writers) = &mut clients[0];
        writer.send(writers["stdin"], text.as_bytes()).expect("input");
        for (client, open) in &mut clients {
            let mut left = text.len();
            while left > 0 {
                match client.next().expect("a copy") {
                    Frame::Data(from, _, bytes) if from == open["stdout"] => left -= bytes.len(),
                    _ => {}
                }
            }
        }
    }
    wait_until("the log has it all", || {
        let path = fixture.node.container(&talker).log_path;
        fs::read_to_string(path).is_ok_and(|text| text.matches(&line).count() == 40 * 1024)
    });
    // The blocked client is disconnected: its output ends.
    let ended = std::iter::from_fn(|| stalled.next().ok()).any(|frame| {
        matches!(frame, Frame::Data(from, true, _) if from == open["stdout"]) || frame == Frame::GoAway
    });
    assert!(ended);
    drop((clients, stalled));
    gives_back_descriptors(&fixture.node, before);
    assert_eq!(fixture.node.container(&talker).state(), ContainerState::ContainerRunning);
    fixture.node.stop();
}

#[test]
fn attaching_works_after_a_restart_of_the_daemon() {
    let mut fixture = PodFixture::start();
    let container = fixture.run(&with_stdin(&fixture, "talker", &["mirror"], true));
    fixture.node.restart();
    let (client, open) = attach(&fixture, &container, BOTH);
    assert_eq!(client.finish_session(&open, Some(b"still here")).stdout, b"still here");
    fixture.node.exited(&container);
    fixture.node.stop();
}

#[test]
fn a_terminal_is_attached_and_resized() {
    let fixture = PodFixture::start();
    let config =
        ContainerConfig { tty: true, ..with_stdin(&fixture, "terminal", &["size", "132x50"], false) };
    let container = fixture.run(&config);
    let (mut client, open) = attach(&fixture, &container, TERMINAL);
    client.send(open["resize"], b"{\"Width\":132,\"Height\":50}").expect("a size");
    let outcome = client.finish_session(&open, None);
    assert!(String::from_utf8_lossy(&outcome.stdout).contains("132x50\r\n"), "{outcome:?}");
    assert_eq!(fixture.node.exited(&container).exit_code, 0);
    fixture.node.stop();
}

#[test]
fn only_running_containers_are_attached_to() {
    use coracle_tests::cri::proto::AttachRequest;
    let fixture = PodFixture::start();
    let container = fixture.create(&fixture.config("created", &["true"]));
    let request = AttachRequest { container_id: container, stdout: true, ..Default::default() };
    assert_eq!(fixture.node.attach(request).unwrap_err().code() as i32, 9);
    let request = AttachRequest { container_id: "feed".into(), stdout: true, ..Default::default() };
    assert_eq!(fixture.node.attach(request).unwrap_err().code() as i32, 5);
    fixture.node.stop();
}
