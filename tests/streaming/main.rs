//! kubectl exec, attach and port-forward from the clients' point of view: with unmodified crictl, and with a
//! client that can also violate the protocol.
#![forbid(unsafe_code)]

mod attach;
mod crictl;
mod exec;
mod forward;
mod hostile;

use coracle_tests::cri::proto::{AttachRequest, ContainerConfig, ExecRequest, PortForwardRequest};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request;
use coracle_tests::spdy::{Client, Outcome};

/// The protocol that current clients negotiate.
const V4: &str = "v4.channel.k8s.io";

/// The streams that a client requests.
#[derive(Debug, Clone, Copy)]
struct Streams {
    stdin: bool,
    stderr: bool,
    tty: bool,
}

/// Standard output and error only.
const OUTPUT: Streams = Streams { stdin: false, stderr: true, tty: false };
/// Standard input, output and error.
const BOTH: Streams = Streams { stdin: true, ..OUTPUT };
/// The streams of an interactive shell.
const TERMINAL: Streams = Streams { stdin: true, stderr: false, tty: true };

impl Streams {
    /// Stream names in the order of real clients.
    fn names(self) -> Vec<&'static str> {
        let mut names = vec!["error"];
        names.extend(self.stdin.then_some("stdin"));
        names.push("stdout");
        names.extend(self.stderr.then_some("stderr"));
        names.extend(self.tty.then_some("resize"));
        names
    }
}

/// The URL of an exec of the probe.
#[track_caller]
fn exec_url(node: &Node, container: &str, words: &[&str], streams: Streams) -> String {
    let Streams { stdin, stderr, tty } = streams;
    let mut cmd = vec!["/probe".to_owned()];
    cmd.extend(words.iter().map(|word| (*word).to_owned()));
    let request = ExecRequest { container_id: container.into(), cmd, tty, stdin, stdout: true, stderr };
    node.exec(request).unwrap_or_else(|error| panic!("exec: {error}")).url
}

/// The URL of an attach.
#[track_caller]
fn attach_url(node: &Node, container: &str, streams: Streams) -> String {
    let Streams { stdin, stderr, tty } = streams;
    let request = AttachRequest { container_id: container.into(), stdin, tty, stdout: true, stderr };
    node.attach(request).unwrap_or_else(|error| panic!("attach: {error}")).url
}

/// The URL of a port-forward.
#[track_caller]
fn forward_url(node: &Node, pod_id: &str) -> String {
    let request = PortForwardRequest { pod_sandbox_id: pod_id.into(), port: Vec::new() };
    node.port_forward(request).unwrap_or_else(|error| panic!("port forward: {error}")).url
}

/// Runs the probe in a container to its end.
#[track_caller]
fn exec(node: &Node, container: &str, words: &[&str], input: Option<&[u8]>) -> Outcome {
    let streams = if input.is_some() { BOTH } else { OUTPUT };
    let mut client = Client::connect(&exec_url(node, container, words, streams), V4);
    let open = client.open_stdio(&streams.names());
    client.finish_session(&open, input)
}

/// A fixture with a sleeping container.
fn sleeping() -> (PodFixture, String) {
    sleeping_on(Options::default())
}

/// A fixture with a sleeping container on a node with these settings.
fn sleeping_on(options: Options) -> (PodFixture, String) {
    let fixture = PodFixture::on(Node::with(options), request::host_pod("fixture"));
    let container = fixture.run(&fixture.config("sleeper", &["sleep", "forever"]));
    (fixture, container)
}

/// A container with an open standard input.
fn with_stdin(fixture: &PodFixture, name: &str, words: &[&str], stdin_once: bool) -> ContainerConfig {
    ContainerConfig { stdin: true, stdin_once, ..fixture.config(name, words) }
}

/// Waits until the daemon has no more descriptors than before.
#[track_caller]
fn gives_back_descriptors(node: &Node, before: usize) {
    host::wait_until("the daemon gives every descriptor back", || node.descriptors() <= before);
}
