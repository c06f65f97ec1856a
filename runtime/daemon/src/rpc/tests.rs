//! Tests client and server on one reactor: hyper's client and coracle's server, connected through a real socket.

use std::convert::Infallible;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use coracle_base::listen::Listener;
use coracle_base::reactor::{self, Watched, deadline, sleep};
use coracle_base::testdir::TestDir;
use http::Request;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use hyper::client::conn::http2::SendRequest;
use prost::Message;
use smol::future::FutureExt;

use super::io::Io;
use super::server::{CONNECTIONS_MAX, OnReactor};
use super::{Server, answers, v1};
use crate::daemon::Daemon;
use coracle_config::{self as config, Sources};

const LONG: Duration = Duration::from_secs(10);

/// A daemon with its own socket and directories.
struct Node {
    server: Server,
    dir: TestDir,
}

impl Node {
    async fn start(name: &str) -> Node {
        let dir = TestDir::new(name);
        let mut config = config::load(&Sources::default()).unwrap();
        config.root = dir.path().join("root");
        config.state = dir.path().join("state");
        config.nri.socket_path = dir.path().join("nri.sock");
        // The program is loaded, but no pod is started.
        std::fs::write(dir.path().join("coracle-pod"), "").unwrap();
        config.program_dir = Some(dir.path().to_owned());
        let daemon = Daemon::start(&config).await.unwrap();
        let listener = Listener::bind(&dir.path().join("coracle.sock")).unwrap();
        Node { server: Server::start(listener, answers(daemon)), dir }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.dir.path().join("coracle.sock")).unwrap()
    }

    async fn client(&self) -> SendRequest<Sent> {
        client(self.connect()).await
    }

    /// A client that never reads a byte of a response body.
    async fn reluctant_client(&self) -> SendRequest<Sent> {
        let io = Io::of_client(Watched::new(self.connect().into()).unwrap());
        let mut builder = hyper::client::conn::http2::Builder::new(OnReactor);
        let (client, connection) = builder.initial_stream_window_size(0).handshake(io).await.unwrap();
        reactor::spawn(async move { drop(connection.await) }).detach();
        client
    }

    /// Waits until the server's number of running calls is `calls`.
    async fn calls(&self, calls: usize) {
        let reached = async {
            while self.server.counts().calls != calls {
                sleep(Duration::from_millis(1)).await;
            }
        };
        deadline(LONG, reached).await.unwrap();
    }
}

async fn client(socket: UnixStream) -> SendRequest<Sent> {
    let io = Io::of_client(Watched::new(socket.into()).unwrap());
    let (client, connection) = hyper::client::conn::http2::handshake(OnReactor, io).await.unwrap();
    reactor::spawn(async move { drop(connection.await) }).detach();
    client
}

/// The body of a request: one gRPC message, a part of one, or nothing. Those that are not whole do not end.
struct Sent {
    bytes: Option<Bytes>,
    is_whole: bool,
}

impl Sent {
    fn message(message: &impl Message) -> Sent {
        let mut bytes = BytesMut::new();
        bytes.put_u8(0);
        bytes.put_u32(message.encoded_len() as u32);
        message.encode(&mut bytes).unwrap();
        Sent { bytes: Some(bytes.freeze()), is_whole: true }
    }

    /// The first half of a message of this length.
    fn half(length: usize) -> Sent {
        let mut bytes = BytesMut::new();
        bytes.put_u8(0);
        bytes.put_u32(length as u32);
        bytes.put_bytes(0, length / 2);
        Sent { bytes: Some(bytes.freeze()), is_whole: false }
    }

    fn silence() -> Sent {
        Sent { bytes: None, is_whole: false }
    }
}

impl Body for Sent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.bytes.take() {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            None if self.is_whole => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

/// Calls a method; returns the gRPC status, its text, and the response message.
async fn call(
    client: &mut SendRequest<Sent>,
    path: &str,
    timeout: Option<&str>,
    body: Sent,
) -> (i32, String, Bytes) {
    let mut request = Request::post(format!("http://localhost{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    if let Some(timeout) = timeout {
        request = request.header("grpc-timeout", timeout);
    }
    let response = deadline(LONG, client.send_request(request.body(body).unwrap())).await.unwrap().unwrap();
    let (head, body) = response.into_parts();
    let body = deadline(LONG, body.collect()).await.unwrap().unwrap();
    let headers = body.trailers().cloned().unwrap_or(head.headers);
    let text =
        |name: &str| headers.get(name).map_or(String::new(), |value| value.to_str().unwrap().to_owned());
    (text("grpc-status").parse().unwrap(), text("grpc-message"), body.to_bytes())
}

const VERSION: &str = "/runtime.v1.RuntimeService/Version";

async fn version(client: &mut SendRequest<Sent>) -> v1::VersionResponse {
    let (status, text, bytes) =
        call(client, VERSION, None, Sent::message(&v1::VersionRequest::default())).await;
    assert_eq!((status, text.as_str()), (0, ""));
    v1::VersionResponse::decode(&bytes[5..]).unwrap()
}

#[test]
fn version_answers_what_a_kubelet_accepts() {
    reactor::run(async {
        let node = Node::start("version").await;
        let answer = version(&mut node.client().await).await;
        assert_eq!((answer.version.as_str(), answer.runtime_api_version.as_str()), ("0.1.0", "v1"));
        assert_eq!(answer.runtime_name, "coracle");
    });
}

#[test]
fn unknown_methods_leave_the_connection_usable() {
    reactor::run(async {
        let node = Node::start("unserved").await;
        let mut client = node.client().await;
        let paths = [
            "/runtime.v1.RuntimeService/CheckpointPod",
            "/runtime.v1.RuntimeService/NoSuchMethod",
            "/runtime.v1alpha2.RuntimeService/Version",
            "/grpc.health.v1.Health/Check",
            "/",
        ];
        for path in paths {
            let (status, text, _) =
                call(&mut client, path, None, Sent::message(&v1::VersionRequest::default())).await;
            assert_eq!(status, 12, "{path}: {text}");
        }
        version(&mut client).await;
        assert_eq!(node.server.counts().connections, 1);
    });
}

#[test]
fn the_callers_limit_ends_a_call() {
    reactor::run(async {
        let node = Node::start("timeout").await;
        let mut client = node.client().await;
        let start = Instant::now();
        let (status, text, _) = call(&mut client, VERSION, Some("50m"), Sent::silence()).await;
        assert_eq!(status, 4, "{text}");
        assert!(start.elapsed() >= Duration::from_millis(50));
        node.calls(0).await;
        version(&mut client).await;
    });
}

#[test]
fn a_client_that_disconnects_ends_its_call() {
    reactor::run(async {
        let node = Node::start("cancel").await;
        let mut client = node.client().await;
        let waiting = reactor::spawn(async move { call(&mut client, VERSION, None, Sent::silence()).await });
        node.calls(1).await;
        drop(waiting);
        node.calls(0).await;
    });
}

#[test]
fn messages_have_a_limit_of_16_mib() {
    reactor::run(async {
        let node = Node::start("size").await;
        let mut client = node.client().await;
        let sized = |bytes: usize| v1::VersionRequest { version: "v".repeat(bytes) };
        let (status, text, _) =
            call(&mut client, VERSION, None, Sent::message(&sized((16 << 20) - 16))).await;
        assert_eq!(status, 0, "{text}");
        let (status, text, _) = call(&mut client, VERSION, None, Sent::message(&sized(16 << 20))).await;
        assert_eq!(status, 8, "{text}");
        version(&mut client).await;
    });
}

#[test]
fn a_connection_above_the_limit_gets_an_answer() {
    reactor::run(async {
        let node = Node::start("limit").await;
        // Each with a call that the other API does not answer, or it would give way.
        let other = node.dir.path().join("other.sock");
        let never = Rc::new(|request: Request<super::Counted>| {
            drop(request);
            std::future::pending::<Result<http::Response<tonic::body::Body>, Infallible>>().boxed_local()
        });
        let server = node.server.start_beside(Listener::bind(&other).unwrap(), never);
        let mut held = Vec::new();
        for number in 1..=CONNECTIONS_MAX {
            let mut client = client(UnixStream::connect(&other).unwrap()).await;
            let request = Sent::message(&v1::VersionRequest::default());
            held.push(reactor::spawn(async move { call(&mut client, VERSION, None, request).await }));
            while server.counts().calls != number {
                sleep(Duration::from_millis(1)).await;
            }
        }
        let mut refused = Watched::new(node.connect()).unwrap();
        let mut text = Vec::new();
        let reading = smol::io::AsyncReadExt::read_to_end(&mut refused, &mut text);
        deadline(LONG, reading).await.unwrap().unwrap();
        assert!(text.ends_with(b"too many connections"), "{text:?}");
        assert_eq!(text.len(), 9 + usize::from(text[2]), "the GOAWAY frame is as long as it says");
        drop(held);
        while node.server.counts().connections > 0 {
            sleep(Duration::from_millis(1)).await;
        }
        version(&mut node.client().await).await;
    });
}

/// Regression: with a call on each connection whose request or answer waited for the client, all others were refused.
#[test]
fn connections_whose_calls_wait_for_their_clients_are_closed_for_new_ones() {
    reactor::run(async {
        for (name, is_whole) in [("unsent", false), ("unread-few", true)] {
            let node = Node::start(name).await;
            let mut held = Vec::new();
            for number in 1..=CONNECTIONS_MAX {
                let mut client = node.reluctant_client().await;
                let body = Sent { is_whole, ..Sent::message(&v1::VersionRequest::default()) };
                let request = Request::post(format!("http://localhost{VERSION}"))
                    .header("content-type", "application/grpc")
                    .header("te", "trailers")
                    .body(body);
                held.push((reactor::spawn(client.send_request(request.unwrap())), client));
                while node.server.counts().calls_total != number as u64 {
                    sleep(Duration::from_millis(1)).await;
                }
            }
            node.calls(if is_whole { 0 } else { CONNECTIONS_MAX }).await;
            for _ in 0..3 {
                version(&mut node.client().await).await;
            }
            let counts = node.server.counts();
            assert_eq!(counts.refused, 0, "{name}: {counts:?}");
        }
    });
}

/// Connections that have sent one byte, or only the preface, do not prevent new connections; connections with occasional calls
/// are kept.
#[test]
fn idle_connections_are_closed_for_new_ones() {
    reactor::run(async {
        let node = Node::start("idle").await;
        let mut used = node.client().await;
        version(&mut used).await;
        let mut held = Vec::new();
        for _ in 0..2 * CONNECTIONS_MAX {
            let silent = Watched::new(node.connect()).unwrap();
            silent.write_all(b"P").await.unwrap();
            held.push(silent);
            if held.len().is_multiple_of(64) {
                version(&mut node.client().await).await;
            }
        }
        while node.server.counts().connections < CONNECTIONS_MAX {
            sleep(Duration::from_millis(1)).await;
        }
        version(&mut node.client().await).await;
        version(&mut used).await;
        let counts = node.server.counts();
        assert_eq!((counts.connections <= CONNECTIONS_MAX, counts.refused), (true, 0), "{counts:?}");
    });
}

/// Regression: 20 000 such answers used 146 MB.
#[test]
fn connections_that_do_not_read_their_answers_are_closed_for_others() {
    const CONNECTIONS: usize = 20;
    const ANSWERS: usize = 240;
    reactor::run(async {
        let node = Node::start("unread").await;
        let mut good = node.client().await;
        let mut held = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut client = node.reluctant_client().await;
            for _ in 0..ANSWERS {
                let request = Request::post(format!("http://localhost{VERSION}"))
                    .header("content-type", "application/grpc")
                    .header("te", "trailers")
                    .body(Sent::message(&v1::VersionRequest::default()));
                let answer = deadline(LONG, client.send_request(request.unwrap())).await.unwrap();
                held.push(answer.unwrap());
            }
            version(&mut good).await;
        }
        // The good one, and those whose answers fit.
        let is_ended = async {
            while node.server.counts().connections > CONNECTIONS {
                sleep(Duration::from_millis(1)).await;
            }
        };
        deadline(LONG, is_ended).await.unwrap();
        version(&mut good).await;
    });
}

/// Regression: 1000 such requests of 100 connections used 599 MB.
#[test]
fn connections_that_do_not_finish_their_requests_are_closed_for_others() {
    const CONNECTIONS: usize = 20;
    reactor::run(async {
        let node = Node::start("unfinished").await;
        let mut good = node.client().await;
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut client = node.client().await;
            for _ in 0..2 {
                let request = Request::post(format!("http://localhost{VERSION}"))
                    .header("content-type", "application/grpc")
                    .header("te", "trailers")
                    .body(Sent::half(super::MESSAGE_BYTES_MAX));
                let answer = client.send_request(request.unwrap());
                reactor::spawn(async move { drop(answer.await) }).detach();
            }
            clients.push(client);
            version(&mut good).await;
        }
        // Two such requests are too many: the good client is left, and perhaps one whose second has not begun.
        let is_ended = async {
            while node.server.counts().connections > 2 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        deadline(LONG, is_ended).await.unwrap();
        version(&mut good).await;
    });
}

#[test]
fn garbage_ends_its_connection_only() {
    reactor::run(async {
        let node = Node::start("garbage").await;
        let mut good = node.client().await;
        for garbage in
            [&b"GET / HTTP/1.1\r\n\r\n"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff", b"\0"]
        {
            let bad = Watched::new(node.connect()).unwrap();
            bad.write_all(garbage).await.unwrap();
            drop(bad);
            version(&mut good).await;
        }
    });
}

#[test]
fn a_drain_waits_for_calls_and_no_longer_than_its_limit() {
    reactor::run(async {
        for (limit, grpc_timeout, expected) in [(LONG, "100m", 0), (Duration::from_millis(20), "10S", 1)] {
            let node = Node::start(&format!("drain-{expected}")).await;
            let mut client = node.client().await;
            version(&mut client).await;
            let waiting = reactor::spawn(async move {
                call(&mut client, VERSION, Some(grpc_timeout), Sent::silence()).await
            });
            node.calls(1).await;
            let start = Instant::now();
            assert_eq!(node.server.drain(limit).await, expected);
            assert!(start.elapsed() < LONG / 2);
            assert!(UnixStream::connect(node.dir.path().join("coracle.sock")).is_err(), "still accepting");
            if expected == 0 {
                assert_eq!(waiting.await.0, 4, "the running call got its answer");
            }
        }
    });
}
