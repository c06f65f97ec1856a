//! A site as it is in the field: each daemon in a network namespace with an address of its own, a list of neighbours that is the
//! same on all nodes and has a dead address, and one uplink of a limited rate (tc-tbf(8)), behind which a registry is.
//!
//! ```text
//! registry ◄─ proxy ─► bridge: tbf limits what this machine sends ─► veth ─► node, in its network namespace
//!                        └── nodes reach each other without the limit ──┘
//! ```

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, setsockopt, socket, sockopt,
};
use nix::unistd::Pid;

use crate::fault::{Fault, Faulty};
use crate::image::Image;
use crate::layer::{Compression, Entry, Layer, noise};
use crate::node::{Node, Options};
use crate::registry::Registry;
use crate::request::pull;

/// Port on which the nodes serve.
const PORT: u16 = 5000;
/// Repository of the images.
const REPOSITORY: &str = "site";
/// Time limit of a pull.
const LIMIT: Duration = Duration::from_secs(1200);

/// An image with layers of as many random bytes.
pub fn image(node: &Node, layers: &[usize], seed: u64) -> Image {
    let layer = |(number, bytes): (usize, &usize)| {
        let name = format!("noise-{number}");
        Layer::new(&[Entry::file(&name, &noise(*bytes, seed + number as u64))], Compression::Gzip)
    };
    layers.iter().enumerate().map(layer).fold(Image::probe(&node.probe(), "site"), Image::plus)
}

/// Number of bytes of all layers.
pub fn size(image: &Image) -> u64 {
    image.layers.iter().map(|layer| layer.blob.len() as u64).sum()
}

/// Writes a new key to a file.
pub fn make_key(path: &Path) {
    let key = Command::new("openssl").args(["rand", "-hex", "32"]).output().expect("openssl runs");
    std::fs::write(path, key.stdout).expect("a key");
}

/// Ports for nodes. A socket that does not listen has each until this process ends, so that no other program gets it; with
/// SO_REUSEADDR on both a daemon can listen there.
pub fn ports(count: usize) -> Vec<u16> {
    let reserve = |_| {
        let socket =
            socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
        setsockopt(&socket, sockopt::ReuseAddr, &true).expect("SO_REUSEADDR");
        bind(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).expect("a free port");
        getsockname::<SockaddrIn>(socket.into_raw_fd()).expect("a bound address").port()
    };
    (0..count).map(reserve).collect()
}

/// The address of a port of the loopback interface.
pub fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// A configuration that serves on a port of the loopback interface and asks these neighbours.
pub fn config(port: Option<u16>, neighbours: &[SocketAddr], more: &str) -> String {
    let listen = port.map(|port| format!("listen = \"127.0.0.1:{port}\"\n")).unwrap_or_default();
    let neighbours: Vec<String> = neighbours.iter().map(SocketAddr::to_string).collect();
    format!("[mirror]\n{listen}neighbours = {neighbours:?}\n{more}\n")
}

fn run(program: &str, words: &str) -> String {
    let output = Command::new(program).args(words.split(' ')).output().expect("ip and tc of iproute2");
    assert!(output.status.success(), "{program} {words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A bridge, and network namespaces that are connected to it; removed on drop.
struct Network {
    bridge: String,
    subnet: String,
    namespaces: Vec<String>,
}

impl Network {
    fn new(count: usize) -> Network {
        let id = std::process::id();
        let (bridge, subnet) =
            (format!("cms{}", id % 1_000_000), format!("172.{}.{}", 28 + id / 256 % 4, id % 256));
        let mut network = Network { bridge, subnet, namespaces: Vec::new() };
        let bridge = network.bridge.clone();
        let ip = |words: &str| drop(run("ip", words));
        ip(&format!("link add {bridge} type bridge"));
        ip(&format!("address add {}.1/24 dev {bridge}", network.subnet));
        ip(&format!("link set {bridge} up"));
        for number in 0..count {
            let (name, link) = (format!("{bridge}n{number}"), format!("{bridge}v{number}"));
            ip(&format!("netns add {name}"));
            network.namespaces.push(name.clone());
            ip(&format!("link add {link} type veth peer name eth0 netns {name}"));
            ip(&format!("link set {link} master {bridge} up"));
            ip(&format!("-n {name} address add {}/24 dev eth0", network.address(number)));
            ip(&format!("-n {name} link set eth0 up"));
            ip(&format!("-n {name} link set lo up"));
        }
        network
    }

    /// Limits what this machine sends to all namespaces together.
    fn limit(&self, kbit: u32) {
        // A short queue: what waits in it for a node that was killed is lost.
        let limit = format!("rate {kbit}kbit burst 16kb latency 50ms");
        run("tc", &format!("qdisc add dev {} root tbf {limit}", self.bridge));
    }

    /// Number of bytes that have been sent to all namespaces, with the headers of all layers.
    fn passed(&self) -> u64 {
        let text = run("tc", &format!("-s -j qdisc show dev {}", self.bridge));
        let found: serde_json::Value = serde_json::from_str(&text).expect("tc writes JSON");
        found[0]["bytes"].as_u64().expect("the statistics of the queue")
    }

    /// Address of a node; one more than there are nodes is not in use.
    fn address(&self, number: usize) -> IpAddr {
        format!("{}.{}", self.subnet, 10 + number).parse().expect("an address")
    }

    fn host(&self) -> IpAddr {
        format!("{}.1", self.subnet).parse().expect("an address")
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // A failed test has reported its error already.
        for name in &self.namespaces {
            let _ = Command::new("ip").args(["netns", "delete", name]).output();
        }
        let _ = Command::new("ip").args(["link", "delete", &self.bridge]).output();
    }
}

/// A network namespace behind a line of a limited rate, for programs other than the nodes of a site.
pub struct Uplink {
    network: Network,
    _only: MutexGuard<'static, ()>,
}

impl Uplink {
    /// Makes the namespace; waits until another network of this process has ended.
    pub fn start() -> Uplink {
        let _only = only();
        Uplink { network: Network::new(1), _only }
    }

    /// The address of this machine for programs in the namespace.
    pub fn host(&self) -> IpAddr {
        self.network.host()
    }

    /// Sets the rate of the line towards the namespace; without one it is not limited. Begins to count its bytes again.
    pub fn limit(&self, kbit: Option<u32>) {
        // Fails if there is none.
        let _ = Command::new("tc").args(["qdisc", "del", "dev", &self.network.bridge, "root"]).output();
        match kbit {
            Some(kbit) => self.network.limit(kbit),
            None => drop(run("tc", &format!("qdisc add dev {} root pfifo limit 1000", self.network.bridge))),
        }
    }

    /// Number of bytes that were sent into the namespace, with the headers of all layers.
    pub fn carried(&self) -> u64 {
        self.network.passed()
    }

    /// Runs a function in a thread of the namespace, to which programs belong that it starts.
    pub fn enter<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        let namespace = Path::new("/run/netns").join(&self.network.namespaces[0]);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let namespace = std::fs::File::open(namespace).expect("a namespace");
                setns(namespace, CloneFlags::CLONE_NEWNET).expect("it is ours to enter");
                run()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// Only one network exists in this process: the names of its links have the process ID only.
fn only() -> MutexGuard<'static, ()> {
    static ONLY: Mutex<()> = Mutex::new(());
    ONLY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nodes that have one key and serve each other.
pub struct Site {
    /// The nodes.
    pub nodes: Vec<Node>,
    uplink: Faulty,
    registry: Registry,
    key: PathBuf,
    network: Network,
    /// Held while the network exists.
    _only: MutexGuard<'static, ()>,
}

impl Site {
    /// Starts the nodes of a site whose uplink has this rate; waits until another one of this process has ended.
    pub fn start(count: usize, uplink_kbit: u32) -> Site {
        let _only = only();
        let network = Network::new(count);
        let neighbours: Vec<String> =
            (0..=count).map(|number| SocketAddr::new(network.address(number), PORT).to_string()).collect();
        let key = std::env::temp_dir().join(format!("{}-key", network.bridge));
        make_key(&key);
        let start = |number: usize| {
            let config = format!(
                "[mirror]\nlisten = \"{}\"\nkey_file = \"{}\"\nneighbours = {neighbours:?}\n",
                neighbours[number],
                key.display()
            );
            let net = format!("--net=/run/netns/{}", network.namespaces[number]);
            let wrapper = vec!["nsenter".to_owned(), net];
            Node::with(Options { config, wrapper, ..Options::default() })
        };
        let nodes: Vec<Node> = (0..count).map(start).collect();
        let registry = Registry::start(nodes[0].folder());
        let uplink = Faulty::start_at(network.host(), registry.address(), |_, _| Fault::None);
        for node in &nodes {
            let address = uplink.address();
            let text = format!("mirrors:\n  \"{address}\":\n    endpoint: [\"http://{address}\"]\n");
            std::fs::write(node.folder().join("registries.yaml"), text).expect("a configuration");
        }
        network.limit(uplink_kbit);
        Site { nodes, uplink, registry, key, network, _only }
    }

    /// Adds an image with layers of as many random bytes to the registry; returns its name and the number of
    /// bytes of its layers. Images with another `seed` have only the layer of the probe in common.
    pub fn push(&self, layers: &[usize], seed: u64) -> (String, u64) {
        self.push_image(&image(&self.nodes[0], layers, seed * 1000), &seed.to_string())
    }

    /// Adds an image to the registry; returns its name and the number of bytes of its layers.
    pub fn push_image(&self, image: &Image, tag: &str) -> (String, u64) {
        self.registry.push(image, REPOSITORY, tag);
        (self.uplink.name(REPOSITORY, tag), size(image))
    }

    /// Number of bytes that the uplink has carried to the nodes, with the headers of all layers.
    pub fn carried(&self) -> u64 {
        self.network.passed()
    }

    /// The requests for blobs so far, with the numbers of bytes that were sent.
    pub fn requests(&self) -> Vec<String> {
        let of_blobs =
            self.uplink.served().into_iter().filter(|served| served.head.second().contains("/blobs/"));
        let line = |served: crate::fault::Served| {
            let range = served.head.get("range").unwrap_or_default();
            format!("{} {} {range}: {}", served.bytes, served.status, &served.head.first)
        };
        of_blobs.map(line).collect()
    }

    /// Pulls an image on these nodes at once, and kills the daemons of some of them some time later; returns the time until the last
    /// of the others has it.
    ///
    /// # Panics
    /// If a pull of a node that is not killed fails.
    pub fn pull(&self, name: &str, nodes: &[usize], kills: &[(usize, Duration)]) -> Duration {
        let begun = Instant::now();
        let one = |number: usize| {
            let node = &self.nodes[number];
            let pulled = node.pull_image_within(pull(name), LIMIT).map(|_| begun.elapsed());
            match kills.iter().any(|(other, _)| *other == number) {
                // It may have had the image before.
                true => Duration::ZERO,
                false => pulled.unwrap_or_else(|error| panic!("node {number}: {error}\n{}", node.log())),
            }
        };
        let one = &one;
        std::thread::scope(|scope| {
            let pulls: Vec<_> = nodes.iter().map(|number| scope.spawn(move || one(*number))).collect();
            let mut kills = kills.to_vec();
            kills.sort_by_key(|(_, after)| *after);
            for (number, after) in kills {
                std::thread::sleep(after.saturating_sub(begun.elapsed()));
                let daemon = Pid::from_raw(self.nodes[number].pid());
                kill(daemon, Signal::SIGKILL).expect("it is ours to kill");
            }
            pulls.into_iter().map(|pull| pull.join().expect("no panic")).max().unwrap_or_default()
        })
    }

    /// Ends the nodes; fails if anything is left of them.
    pub fn stop(self) {
        self.nodes.into_iter().for_each(Node::stop);
        std::fs::remove_file(self.key).expect("the key is ours");
    }
}
