//! Unmodified crictl over SPDY and over WebSocket.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};

use coracle_tests::host::{self, wait_for, wait_until};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::registry::free_address;
use coracle_tests::request;

use crate::{gives_back_descriptors, sleeping, sleeping_on, with_stdin};

/// Number of transferred bytes: 1 GiB.
const LARGE: u64 = 1 << 30;

fn crictl(node: &Node, words: &[&str]) -> Command {
    let endpoint = format!("unix://{}", node.socket().display());
    let mut command = Command::new("crictl");
    command
        .args(["--config", "/dev/null", "--timeout", "60s"])
        .args(["--runtime-endpoint", &endpoint, "--image-endpoint", &endpoint])
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[track_caller]
fn spawn(command: &mut Command) -> Child {
    command.spawn().unwrap_or_else(|error| panic!("crictl: {error}; tests/tools/install builds it"))
}

/// Checks that these are the bytes of `probe blast` and returns their number.
fn check_blast(mut from: impl Read) -> u64 {
    let (mut done, mut buffer) = (0_u64, vec![0; 1 << 16]);
    loop {
        let count = from.read(&mut buffer).expect("bytes");
        if count == 0 {
            return done;
        }
        for (index, byte) in buffer[..count].iter().enumerate() {
            assert_eq!(*byte, ((done + index as u64) / 1024) as u8, "byte {}", done + index as u64);
        }
        done += count as u64;
    }
}

/// The daemon's own memory, without the pages of its program, which it drops after ten seconds without a call.
fn memory_kib(node: &Node) -> u64 {
    host::anonymous_kib(node.pid())
}

/// Asserts that the memory is within 1 MB of the idle daemon's, during and after the transfer.
fn stays_small(node: &Node, idle_kib: u64, what: &str) {
    let now = memory_kib(node);
    assert!(now <= idle_kib + 1024, "{what}: {idle_kib} KiB idle, now {now} KiB");
}

#[test]
fn an_exec_has_input_and_an_exit_code_over_both_transports() {
    let (fixture, container) = sleeping();
    for transport in ["spdy", "websocket"] {
        let words = ["exec", "--transport", transport, "-i", &container, "/probe", "mirror"];
        let mut child = spawn(&mut crictl(&fixture.node, &words));
        child.stdin.take().expect("a pipe").write_all(b"to and fro").expect("input");
        let output = child.wait_with_output().expect("crictl ends");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.stdout, b"to and fro", "{transport}: {said}");
        assert!(output.status.success(), "{transport}: {said}");
        let words = ["exec", "--transport", transport, &container, "/probe", "exit", "3"];
        let output = spawn(&mut crictl(&fixture.node, &words)).wait_with_output().expect("crictl ends");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains('3'), "{transport}: {said}");
    }
    fixture.node.stop();
}

/// `script` gives crictl a terminal, whose size `stty` sets.
#[test]
fn an_exec_in_a_terminal_has_its_size() {
    let (fixture, container) = sleeping();
    let endpoint = format!("unix://{}", fixture.node.socket().display());
    let inner = format!(
        "stty cols 132 rows 50; exec crictl --config /dev/null --runtime-endpoint {endpoint} exec -i -t {container} \
         /probe size 132x50"
    );
    let mut child = Command::new("script")
        .args(["-qec", &inner, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script of bsdutils");
    let held = child.stdin.take();
    let output = child.wait_with_output().expect("crictl ends");
    drop(held);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("132x50"), "{text}");
    fixture.node.stop();
}

#[test]
fn attached_input_reaches_a_container() {
    let fixture = PodFixture::start();
    let container = fixture.run(&with_stdin(&fixture, "reader", &["mirror"], true));
    let mut child = spawn(&mut crictl(&fixture.node, &["attach", "-i", &container]));
    child.stdin.take().expect("a pipe").write_all(b"over crictl\n").expect("input");
    let output = child.wait_with_output().expect("crictl ends");
    assert_eq!(output.stdout, b"over crictl\n", "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fixture.node.exited(&container).exit_code, 0);
    assert_eq!(fixture.node.output(&container), "over crictl\n");
    fixture.node.stop();
}

#[test]
fn a_gibibyte_passes_through_an_exec() {
    let (fixture, container) = sleeping();
    let idle = memory_kib(&fixture.node);
    let before = fixture.node.descriptors();
    let words = ["exec", &container, "/probe", "blast", &LARGE.to_string()];
    let mut child = spawn(&mut crictl(&fixture.node, &words));
    let output = child.stdout.take().expect("a pipe");
    let reading = std::thread::spawn(move || check_blast(output));
    let mut looks = 0;
    while !reading.is_finished() {
        stays_small(&fixture.node, idle, "while it flows");
        looks += 1;
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(reading.join().expect("the bytes are right"), LARGE);
    assert!(looks > 0 && child.wait().expect("crictl ends").success());
    gives_back_descriptors(&fixture.node, before);
    stays_small(&fixture.node, idle, "after");
    fixture.node.stop();
}

#[test]
fn a_gibibyte_passes_through_a_port_forward() {
    let fixture = PodFixture::on(Node::with_bridge(), request::bridge_pod("echo"));
    let container = fixture.run(&fixture.config("echo", &["echo", "127.0.0.1:80"]));
    wait_until("the server serves", || fixture.node.output(&container).contains("serving"));
    for transport in ["websocket", "spdy"] {
        // The tunnel has one more layer of framing: a tenth of the bytes is sufficient.
        let bytes = if transport == "spdy" { LARGE } else { LARGE / 10 };
        let idle = memory_kib(&fixture.node);
        let before = fixture.node.descriptors();
        let address: SocketAddr = free_address();
        let port = format!("{}:80", address.port());
        let words = ["port-forward", "--transport", transport, &fixture.pod_id, &port];
        let mut child = spawn(&mut crictl(&fixture.node, &words));
        let stream = wait_for("crictl listens", || TcpStream::connect(("127.0.0.1", address.port())).ok());
        let mut to = stream.try_clone().expect("a second handle");
        let writing = std::thread::spawn(move || {
            let (mut block, mut done) = (vec![0; 1 << 16], 0_u64);
            while done < bytes {
                for (index, kibibyte) in block.chunks_mut(1024).enumerate() {
                    kibibyte.fill((done / 1024 + index as u64) as u8);
                }
                let part = block.len().min((bytes - done) as usize);
                to.write_all(&block[..part]).expect("bytes");
                done += part as u64;
            }
            to.shutdown(std::net::Shutdown::Write).expect("half a close");
        });
        let reading = std::thread::spawn(move || check_blast(stream));
        while !reading.is_finished() {
            stays_small(&fixture.node, idle, transport);
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert_eq!(reading.join().expect("the bytes are right"), bytes, "{transport}");
        writing.join().expect("the writer ends");
        child.kill().expect("crictl is ours to end");
        child.wait().expect("it is our child");
        gives_back_descriptors(&fixture.node, before);
        stays_small(&fixture.node, idle, "after");
    }
    fixture.node.stop();
}

/// If the server has a certificate, the URLs that it returns are https, and the protocol over TLS is unchanged.
#[test]
fn an_exec_over_tls_has_the_same_protocol() {
    let folder = std::env::temp_dir().join(format!("coracle-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = |name: &str| folder.join(name).display().to_string();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
        .args(["-subj", "/CN=coracle", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"])
        .args(["-keyout", &file("key.pem"), "-out", &file("cert.pem")])
        .output()
        .expect("openssl");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let config = format!(
        "[streaming]\ntls_cert_file = {:?}\ntls_key_file = {:?}\n",
        file("cert.pem"),
        file("key.pem")
    );
    let (fixture, container) = sleeping_on(Options { config, ..Options::default() });
    let before = fixture.node.descriptors();
    for transport in ["spdy", "websocket"] {
        // It requires a certificate, too, which crictl cannot verify.
        let (cert, key) = (file("cert.pem"), file("key.pem"));
        let tls =
            ["--tls-ca", &cert, "--tls-cert", &cert, "--tls-key", &key, "--tls-server-name", "127.0.0.1"];
        let command = ["-i", &container, "/probe", "mirror"];
        let words = [&["exec", "--transport", transport][..], &tls, &command].concat();
        let mut child = spawn(&mut crictl(&fixture.node, &words));
        let text = "sealed ".repeat(100_000);
        let (mut stdin, input) = (child.stdin.take().expect("a pipe"), text.clone());
        let writing = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().expect("crictl ends");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        writing.join().expect("the writer ends").unwrap_or_else(|error| panic!("{error}: {said}"));
        assert!(output.stdout == text.as_bytes(), "{transport}: {} bytes: {said}", output.stdout.len());
    }
    wait_until("the sessions before are over", || fixture.node.workers().is_empty());
    // A silent client gets no process; one with an incomplete handshake has it for a few seconds.
    let address = {
        let url = crate::exec_url(&fixture.node, &container, &["true"], crate::OUTPUT);
        url.trim_start_matches("https://").split('/').next().expect("an address").to_owned()
    };
    let mut idle: Vec<_> = (0..100).map(|_| TcpStream::connect(&address).expect("a connection")).collect();
    assert_eq!(fixture.node.workers().len(), 0, "a process for nothing");
    idle.last_mut().expect("a hundred").write_all(&[0x16]).expect("a byte");
    wait_until("a process for one client", || fixture.node.workers().len() == 1);
    wait_until("it is gone with its client's time", || fixture.node.workers().is_empty());
    drop(idle);
    // A client that does not use TLS is refused.
    let url = crate::exec_url(&fixture.node, &container, &["true"], crate::OUTPUT);
    let plain = url.replace("https://", "http://");
    assert!(
        plain != url
            && coracle_tests::spdy::upgrade(&plain, "POST", &[])
                .is_ok_and(|(head, _)| head.second() != "101")
    );
    gives_back_descriptors(&fixture.node, before);
    std::fs::remove_dir_all(&folder).expect("the folder is ours");
    fixture.node.stop();
}
