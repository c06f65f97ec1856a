//! Clients that begin requests and do not finish them.

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::VersionRequest;
use coracle_tests::host;
use coracle_tests::node::Node;
use tonic::Code;

/// Finding F4: 100 connections with 10 calls each, half of a body of 16 MiB sent, needed 599 MB of the daemon. Requests to the API for
/// cAdvisor, which are shorter, were not counted at all.
#[test]
fn half_sent_requests_do_not_decide_how_much_memory_the_daemon_needs() {
    const CONNECTIONS: usize = 100;
    const MEBIBYTE: usize = 1 << 20;
    const PEAK_KIB_MAX: u64 = 24 << 10;
    let mut node = Node::start();
    let (cri, containerd) = (node.socket(), node.folder().join("containerd.sock"));
    node.rewrite_config(&format!("[metrics]\ncontainerd_socket = \"{}\"\n", containerd.display()));
    node.restart();
    // A message of 16 MiB is the longest, with its prefix; to containerd's API 4096 bytes are.
    let requests =
        [(&cri, 10, 16 * MEBIBYTE), (&cri, 10, MEBIBYTE), (&cri, 10, 16 << 10), (&containerd, 100, 4096)];
    for (socket, calls, bytes) in requests {
        let clients: Vec<Cri> = (0..CONNECTIONS).map(|_| Cri::new(socket)).collect();
        for client in &clients {
            client.begin_calls(calls, bytes);
        }
        node.another().version(VersionRequest::default()).expect("a new client is served");
        node.version(VersionRequest::default()).expect("a client from before is served");
        let refused =
            Cri::new(&containerd).version(VersionRequest::default()).expect_err("it is not containerd's");
        assert_eq!(refused.code(), Code::Unimplemented, "a new client of the API is answered: {refused}");
        let peak = host::proc_value(node.pid(), "status", "VmHWM").expect("its peak");
        println!("{}: peak {peak} KiB with requests of {bytes} bytes", socket.display());
        assert!(peak <= PEAK_KIB_MAX, "{peak} KiB with requests of {bytes} bytes to {}", socket.display());
    }
    node.stop();
}
