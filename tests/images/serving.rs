//! A node that serves its neighbours, while other things happen to it: its socket is shut down, its settings change at the moment
//! its worker starts, an image is removed that a client reads.

use std::io::{BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use coracle_tests::cri::proto::RemoveImageRequest;
use coracle_tests::host::{self, wait_until};
use coracle_tests::http;
use coracle_tests::layer::digest;
use coracle_tests::registry::Registry;
use coracle_tests::request::image_spec;
use coracle_tests::site::{config, image, local, ports};
use nix::sys::socket::{Shutdown, SockaddrIn, getsockname, shutdown};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::mirror::{node, pull_on, reload};

/// Shuts down the listening socket of a process, as another process with this socket can.
fn shut_down(daemon: i32, address: SocketAddr) {
    let pid = Pid::from_raw(daemon).expect("a pid");
    let process = pidfd_open(pid, PidfdFlags::empty()).expect("the daemon runs");
    let copies = host::open_files(daemon)
        .into_iter()
        .filter(|(_, target)| target.to_string_lossy().starts_with("socket:"))
        .filter_map(|(fd, _)| pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok());
    let is_it = |fd: &OwnedFd| {
        getsockname::<SockaddrIn>(fd.as_raw_fd())
            .is_ok_and(|bound| SocketAddr::from((bound.ip(), bound.port())) == address)
    };
    let listener = copies.into_iter().find(is_it).expect("the daemon listens");
    shutdown(listener.as_raw_fd(), Shutdown::Both).expect("a listening socket can be shut down");
}

/// An attacker in the process that serves can shut down the socket that it shares with the daemon.
#[test]
fn a_socket_that_was_shut_down_is_bound_again() {
    let port = ports(1)[0];
    let node = node(config(Some(port), &[], "open = true"));
    let answers = || http::request(local(port), "GET", "/v2/", "", b"").is_ok();
    // Before the first connection, and while a worker serves.
    for moment in ["before a client", "with a worker"] {
        assert_eq!(!node.workers().is_empty(), moment == "with a worker");
        shut_down(node.pid(), local(port));
        wait_until("the node serves again", answers);
    }
    assert!(node.log().matches("serving images to other nodes").count() >= 3, "{}", node.log());
    node.stop();
}

/// The settings of the last reload count, also if they change while a worker starts with those before.
#[test]
fn a_reload_while_a_worker_starts_counts() {
    let port = ports(1)[0];
    let settings = |offline: &str| config(Some(port), &[], &format!("open = true\noffline = \"{offline}\""));
    let node = node(settings("neighbours"));
    let registry = Registry::start(node.folder());
    registry.push(&image(&node, &[1000], 200), "site", "1");
    pull_on(&[&node], &registry.name("site", "1"));
    let path = format!("/v2/site/manifests/1?ns={}", registry.address());
    let status = || Some(http::request(local(port), "GET", &path, "", b"").ok()?.0.second().to_owned());
    assert_eq!(status().as_deref(), Some("200"));
    for round in 0..10 {
        let (offline, expected) = if round % 2 == 0 { ("none", "404") } else { ("neighbours", "200") };
        // The first ends the worker; the connection lets the next one start.
        reload(&node);
        node.rewrite_config(&settings(offline));
        std::thread::scope(|scope| {
            scope.spawn(status);
            reload(&node);
        });
        wait_until("the worker of before has ended", || status().as_deref() == Some(expected));
        assert_eq!(status().as_deref(), Some(expected), "round {round}");
    }
    node.stop();
}

/// A client that has begun to read a blob gets all of it.
#[test]
fn a_removed_blob_is_sent_to_its_end() {
    let port = ports(1)[0];
    let node = node(config(Some(port), &[], "open = true\nrate_max = 1000000"));
    let registry = Registry::start(node.folder());
    let image = image(&node, &[3_000_000], 210);
    registry.push(&image, "site", "1");
    let name = registry.name("site", "1");
    pull_on(&[&node], &name);
    let blob = image.layers[1].blob.clone();
    let path = format!("/v2/site/blobs/{}", digest(&blob));
    let mut client = http::connect(local(port)).expect("a connection");
    write!(client, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("a request");
    let mut reader = BufReader::new(client);
    let head = http::read_head(&mut reader).expect("an answer");
    assert_eq!(head.second(), "200");
    let image = Some(image_spec(&name));
    node.remove_image(RemoveImageRequest { image }).expect("the image is removed");
    let file = node.root().join("images/blobs/sha256").join(digest(&blob).replace("sha256:", ""));
    wait_until("the blob is removed", || !file.exists());
    let mut body = Vec::new();
    reader.read_to_end(&mut body).expect("the rest");
    assert!(body == blob, "{} of {} bytes", body.len(), blob.len());
    let (head, _) = http::request(local(port), "GET", &path, "", b"").expect("an answer");
    assert_eq!(head.second(), "404");
    node.stop();
}
