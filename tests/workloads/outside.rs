//! Another machine on the node's network, and a DNS client on it that keeps its port: connection tracking sees one flow.

use std::fs;
use std::net::UdpSocket;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coracle_tests::host;
use nix::sched::{CloneFlags, setns};

/// The node's address towards it.
const NODE: &str = "10.89.0.1";
/// Identifier of all questions.
const ID: [u8; 2] = [0xc0, 0x4a];
/// Pause between two questions, which are shorter than any timeout of connection tracking.
const EVERY: Duration = Duration::from_millis(200);

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

/// A client that asks one question all the time, also while nothing answers.
pub(crate) struct Client {
    socket: UdpSocket,
    is_over: Arc<AtomicBool>,
}

impl Client {
    /// Starts to ask the node for the address of a name.
    pub(crate) fn new(name: &str) -> Client {
        let bind = || {
            let namespace = fs::File::open("/run/netns/outside").expect("made");
            setns(namespace, CloneFlags::CLONE_NEWNET).expect("root may enter");
            UdpSocket::bind("0.0.0.0:0").expect("a port")
        };
        // The thread ends in that namespace; the socket stays in it.
        let socket = std::thread::spawn(bind).join().expect("the thread ends");
        socket.set_read_timeout(Some(EVERY)).expect("a limit");
        let (asker, question) = (socket.try_clone().expect("a descriptor"), question(name));
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = is_over.clone();
        std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                // It fails while the node refuses the port, and is repeated.
                let _ = asker.send_to(&question, (NODE, 53));
                std::thread::sleep(EVERY);
            }
        });
        Client { socket, is_over }
    }

    /// The address of the next answer; `None` if none comes for a moment.
    pub(crate) fn answer(&self) -> Option<String> {
        let mut answer = [0; 512];
        let length = host::uninterrupted(|| self.socket.recv(&mut answer)).ok()?;
        // One record of four bytes: the answer ends with them.
        let has_address = length > 16 && answer[..2] == ID && answer[7] == 1;
        has_address
            .then(|| answer[length - 4..length].iter().map(u8::to_string).collect::<Vec<_>>().join("."))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// RFC 1035: an identifier, recursion desired, one question of type A and class IN.
fn question(name: &str) -> Vec<u8> {
    let mut question = [&ID[..], &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]].concat();
    for label in name.split('.') {
        question.push(label.len() as u8);
        question.extend(label.bytes());
    }
    question.extend([0, 0, 1, 0, 1]);
    question
}
