//! Another machine on the node's network, and a DNS client on it that keeps its port: connection tracking sees one flow.

use std::fs;
use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use coracle_tests::host;
use nix::sched::{CloneFlags, setns};

/// The node's address towards it.
const NODE: &str = "10.89.0.1";
/// Time limit of an answer; questions are repeated as resolvers do.
const ANSWER: Duration = Duration::from_millis(500);

/// Makes the machine: a network namespace, which ends with those of the run.
pub(crate) fn make() {
    for line in [
        "ip netns add outside",
        "ip link add out0 type veth peer name eth0 netns outside",
        "ip address add 10.89.0.1/24 dev out0",
        "ip link set out0 up",
        "ip -n outside address add 10.89.0.2/24 dev eth0",
        "ip -n outside link set eth0 up",
        "ip -n outside route add default via 10.89.0.1",
    ] {
        let mut words = line.split(' ');
        let status = Command::new(words.next().expect("ip")).args(words).status().expect("ip runs");
        assert!(status.success(), "{line}");
    }
}

/// The client.
pub(crate) struct Client(UdpSocket);

impl Client {
    pub(crate) fn new() -> Client {
        let bind = || {
            let namespace = fs::File::open("/run/netns/outside").expect("made");
            setns(namespace, CloneFlags::CLONE_NEWNET).expect("root may enter");
            UdpSocket::bind("0.0.0.0:0").expect("a port")
        };
        // The thread ends in that namespace; the socket stays in it.
        let socket = std::thread::spawn(bind).join().expect("the thread ends");
        socket.set_read_timeout(Some(ANSWER)).expect("a limit");
        Client(socket)
    }

    /// Asks the node for the address of a name; `None` without an answer.
    pub(crate) fn ask(&self, name: &str) -> Option<String> {
        // RFC 1035: an identifier, recursion desired, one question of type A and class IN.
        let mut question = vec![0xc0, 0x4a, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            question.push(label.len() as u8);
            question.extend(label.bytes());
        }
        question.extend([0, 0, 1, 0, 1]);
        self.0.send_to(&question, (NODE, 53)).ok()?;
        let mut answer = [0; 512];
        let length = host::uninterrupted(|| self.0.recv(&mut answer)).ok()?;
        // An answer with one record ends with its address.
        let has_answer = length >= question.len() + 4 && answer[..2] == question[..2] && answer[7] == 1;
        has_answer.then(|| answer[length - 4..length].iter().map(u8::to_string).collect::<Vec<_>>().join("."))
    }
}
