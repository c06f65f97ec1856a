//! Pods that run across an upgrade: a daemon uses a monitor of an earlier build, and reports it.
//!
//! A relay in front of a real monitor, which changes the version in its Hello to 3, acts as the earlier
//! build.

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::thread;

use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::exec;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType,
    UnixAddr, accept4, bind, connect, listen, recvmsg, sendmsg, shutdown, socket,
};

/// Reply 1, Hello: all bytes except the version (sandbox/wire/src/frame.rs).
const HELLO: [u8; 3] = [0, 1, 0];
const OLD_VERSION: u8 = 3;

fn seqpacket() -> OwnedFd {
    socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("a socket")
}

/// An address of a socket through a descriptor of its directory, because the path is too long.
fn address(directory: &fs::File, name: &str) -> UnixAddr {
    UnixAddr::new(&PathBuf::from(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd()))).expect("short")
}

/// Forwards one message with its descriptors; false at the end.
fn pass(from: RawFd, to: RawFd, is_answer: bool) -> bool {
    let mut bytes = [0; 512];
    let mut space = nix::cmsg_space!([RawFd; 8]);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let Ok(message) = recvmsg::<UnixAddr>(from, &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)
    else {
        return false;
    };
    let length = message.bytes;
    let mut files: Vec<RawFd> = Vec::new();
    for control in message.cmsgs().into_iter().flatten() {
        if let ControlMessageOwned::ScmRights(received) = control {
            files.extend(received);
        }
    }
    if length == 0 {
        return false;
    }
    if is_answer && length == HELLO.len() + 1 && bytes[..HELLO.len()] == HELLO {
        bytes[HELLO.len()] = OLD_VERSION;
    }
    let rights = [ControlMessage::ScmRights(&files)];
    let rights = if files.is_empty() { &[][..] } else { &rights[..] };
    let sent =
        sendmsg::<UnixAddr>(to, &[IoSlice::new(&bytes[..length])], rights, MsgFlags::MSG_NOSIGNAL, None);
    for file in files {
        let _ = nix::unistd::close(file);
    }
    sent.is_ok()
}

/// Relays between the monitor of `state` and one daemon.
fn relay(state: &Path) {
    let directory = fs::File::open(state).expect("a pod's state");
    fs::rename(state.join("monitor.sock"), state.join("new.sock")).expect("its socket");
    let listener = seqpacket();
    bind(listener.as_raw_fd(), &address(&directory, "monitor.sock")).expect("bind");
    listen(&listener, Backlog::new(4).expect("few")).expect("listen");
    thread::spawn(move || {
        while let Ok(daemon) = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
            let monitor = seqpacket();
            if connect(monitor.as_raw_fd(), &address(&directory, "new.sock")).is_err() {
                return;
            }
            let (to, back) = (monitor.as_raw_fd(), monitor);
            let answers = thread::spawn(move || {
                while pass(back.as_raw_fd(), daemon, true) {}
                let _ = shutdown(daemon, Shutdown::Both); // an end of the monitor is one of its connection
            });
            while pass(daemon, to, false) {}
            let _ = shutdown(to, Shutdown::Both); // the other direction ends, too
            let _ = answers.join();
            let _ = nix::unistd::close(daemon);
        }
    });
}

/// Regression: no condition was shown, and the version of a monitor was ignored.
#[test]
fn a_monitor_of_an_earlier_build_is_used_and_reported() {
    let mut fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("one", &["sleep", "forever"]));
    let created = fixture.create(&fixture.config("two", &["sleep", "forever"]));
    let condition = |fixture: &PodFixture| {
        let status = fixture.node.status(Default::default()).expect("status").status.expect("conditions");
        status.conditions.into_iter().find(|condition| condition.r#type == "PodsNeedRestart")
    };
    assert_eq!(condition(&fixture), None);
    fixture.node.kill9();
    relay(&fixture.node.state().join("pods").join(&fixture.pod_id));
    fixture.node.launch();
    let shown = condition(&fixture).expect("it is shown");
    assert!(
        shown.status && shown.reason == "OldMonitor" && shown.message.starts_with("1 pods "),
        "{shown:?}"
    );
    // It continues: the container, an exec, a start of a container that was created before the upgrade.
    let answer = fixture.node.exec_sync(exec(&id, &["print", "still"], 10)).expect("exec");
    assert_eq!(answer.stdout, b"still\n");
    let request = coracle_tests::cri::proto::StartContainerRequest { container_id: created.clone() };
    fixture.node.start_container(request).expect("start");
    let answer = fixture.node.exec_sync(exec(&created, &["print", "two"], 10)).expect("exec");
    assert_eq!(answer.stdout, b"two\n");
    fixture.node.stop();
}
