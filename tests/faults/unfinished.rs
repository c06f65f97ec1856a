//! Clients that begin requests and do not finish them.

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::VersionRequest;
use coracle_tests::host;
use coracle_tests::node::Node;

/// Finding F4: 100 connections with 10 calls each, half of a body of 16 MiB sent, needed 599 MB of the daemon.
#[test]
fn half_sent_requests_do_not_decide_how_much_memory_the_daemon_needs() {
    const CONNECTIONS: usize = 100;
    const CALLS: usize = 10;
    const MEBIBYTE: usize = 1 << 20;
    const PEAK_KIB_MAX: u64 = 24 << 10;
    let node = Node::start();
    // A message of 16 MiB is the longest, with its prefix.
    for bytes in [16 * MEBIBYTE, MEBIBYTE, 16 << 10] {
        let clients: Vec<Cri> = (0..CONNECTIONS).map(|_| node.another()).collect();
        for client in &clients {
            client.begin_calls(CALLS, bytes);
        }
        node.another().version(VersionRequest::default()).expect("a new client is served");
        node.version(VersionRequest::default()).expect("a client from before is served");
        let peak = host::proc_value(node.pid(), "status", "VmHWM").expect("its peak");
        assert!(peak <= PEAK_KIB_MAX, "{peak} KiB with requests of {bytes} bytes");
    }
    node.stop();
}
