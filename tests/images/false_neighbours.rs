//! Programs in the place of neighbours that say and send anything: whatever they do, a pull has the image in time, its bytes come from
//! the registry, and nothing else is left. And clients that hold up a node which serves.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::host;
use coracle_tests::http::{self, Head};
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use coracle_tests::site::{config, image, local, ports, size};

use crate::mirror::{logged, node, pull_on, sent, wait_until_idle};

/// Time limit of a pull past false neighbours: the forty seconds of docs/registries.md, and time to spare on a busy machine.
const LIMIT: Duration = Duration::from_secs(75);

/// The head of an answer to a question.
fn says(state: &str, more: &str) -> Fault {
    let status = if state.starts_with("complete") || state.starts_with("fetching") {
        "200 OK"
    } else {
        "202 Accepted"
    };
    let fields = format!("Coracle-State: {state}\r\n{more}Content-Length: 1000000\r\nConnection: close\r\n");
    Fault::Raw(format!("HTTP/1.1 {status}\r\n{fields}\r\n").into_bytes())
}

type Plan = Box<dyn Fn(&Head, usize) -> Fault + Send + Sync>;

/// Answers questions by `state`, and requests for content by `content`.
fn who(state: &'static str, content: impl Fn(usize) -> Fault + Send + Sync + 'static) -> Plan {
    Box::new(move |head, before| match head.first.starts_with("HEAD") {
        true => says(state, ""),
        false => content(before),
    })
}

#[test]
fn false_answers_of_neighbours_do_not_delay_a_pull() {
    let registry_home = node(String::new());
    let registry = Registry::start(registry_home.folder());
    let image = image(&registry_home, &[600_000, 400_000], 300);
    registry.push(&image, "site", "1");
    let plans: Vec<(&str, Plan)> = vec![
        (
            "waits, with more than there is",
            who("waiting 18446744073709551615 a1", |_| Fault::Status(404, None)),
        ),
        ("has all, and is busy", who("complete 1000000 a2", |_| Fault::Status(503, Some(1)))),
        ("has all, and sends none of it", who("complete 1000000 a3", |_| Fault::Status(202, None))),
        ("downloads, and sends nothing", who("fetching 18446744073709551615 a4", |_| Fault::Stall(0))),
        ("downloads, and ends at once", who("fetching 500000 a5", |_| Fault::Status(202, None))),
        ("downloads, and sends single bytes", who("resuming 500000 a6", |_| Fault::Drip(1))),
        (
            "says something else each time",
            Box::new(|head, before| match (head.first.starts_with("HEAD"), before % 3) {
                (true, 0) => says("waiting 7 a7", ""),
                (true, 1) => says("fetching 7 a7", ""),
                (true, _) => says("nothing 0 a7", "Coracle-Outline: 4194304\r\n"),
                (false, _) => Fault::Status(404, None),
            }),
        ),
        (
            "has an outline that is too long",
            Box::new(|head, _| match head.first.starts_with("HEAD") {
                true => says("nothing 0 a8", "Coracle-Outline: 4194305\r\n"),
                false => Fault::Status(404, None),
            }),
        ),
        ("says nonsense", who("complete -1 \u{7f}", |_| Fault::Status(200, None))),
        (
            "sends several parts",
            who("complete 1000000 a9", |_| {
                let fields = ["Content-Type: multipart/byteranges; boundary=x"];
                Fault::raw("206 Partial Content", &fields, &[b'x'; 600])
            }),
        ),
    ];
    std::thread::scope(|scope| {
        for (about, plan) in plans {
            let (registry, image) = (&registry, &image);
            scope.spawn(move || {
                let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
                let liar = Faulty::start(registry.address(), plan);
                let own = ports(1)[0];
                let node = node(config(Some(own), &[liar.address()], "open = true"));
                let begun = Instant::now();
                pull_on(&[&node], &proxy.name("site", "1"));
                let took = begun.elapsed();
                println!("{about}: {took:?}");
                assert!(took < LIMIT, "{about}: {took:?}\n{}", node.log());
                let of_others = logged(&node, "neighbours");
                assert!(of_others < 10_000, "{about}\n{}", node.log());
                assert!(sent(&proxy, image) + of_others >= size(image), "{about}\n{}", node.log());
                let asked = liar.served().iter().filter(|one| one.head.first.starts_with("HEAD")).count();
                assert!(asked > 0, "{about}: it was asked");
                node.stop();
            });
        }
    });
    drop(registry);
    registry_home.stop();
}

/// Ten nodes that pull at once start the processes that serve on all of them, at the moment at which all are asked.
#[test]
fn a_neighbour_that_needs_long_to_answer_once_is_asked_again() {
    let port = ports(1)[0];
    let honest = node(config(Some(port), &[], "open = true"));
    let registry = Registry::start(honest.folder());
    let image = image(&honest, &[100_000], 340);
    registry.push(&image, "site", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("site", "1");
    pull_on(&[&honest], &name);
    let is_first = AtomicBool::new(true);
    let late = Faulty::start(local(port), move |_, _| {
        if is_first.swap(false, Ordering::Relaxed) {
            // More than the five seconds in which an answer has to begin.
            std::thread::sleep(Duration::from_secs(6));
        }
        Fault::None
    });
    let before = sent(&proxy, &image);
    let other = node(config(None, &[late.address()], "[registry]\nconnections = 1\n"));
    pull_on(&[&other], &name);
    assert_eq!(sent(&proxy, &image), before, "{}", other.log());
    other.stop();
    honest.stop();
}

/// The whole blob in place of its rest: the bytes before it are kept.
#[test]
fn a_whole_blob_in_place_of_its_rest_discards_nothing() {
    let port = ports(1)[0];
    let honest = node(config(Some(port), &[], "open = true"));
    let registry = Registry::start(honest.folder());
    let image = image(&honest, &[1_000_000], 310);
    registry.push(&image, "site", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("site", "1");
    pull_on(&[&honest], &name);
    let (blob, before) = (image.layers[1].blob.clone(), sent(&proxy, &image));
    let path = format!("/blobs/{}", digest(&blob));
    let liar = Faulty::start(local(port), move |head, _| {
        match (head.first.starts_with("GET") && head.second().contains(&path), head.get("range")) {
            (true, None) => Fault::Cut(300_000),
            (true, Some(_)) => Fault::raw("200 OK", &[], &blob),
            (false, _) => Fault::None,
        }
    });
    let other = node(config(None, &[liar.address()], ""));
    pull_on(&[&other], &name);
    let large = image.layers[1].blob.len() as u64;
    let fetched = sent(&proxy, &image) - before;
    assert!((large - 300_000..large - 200_000).contains(&fetched), "{fetched} of {large}\n{}", other.log());
    other.stop();
    honest.stop();
}

/// Manifests of neighbours, which count while no registry can be reached: each wait and each length has a limit, and what has another
/// digest is refused.
#[test]
#[ignore = "takes a minute: make test-all PARTS=slow"]
fn documents_of_false_neighbours_are_limited() {
    let home = node(String::new());
    let registry = Registry::start(home.folder());
    let manifest = registry.push(&image(&home, &[10], 330), "site", "1");
    // At this port no registry is.
    let name = format!("127.0.0.1:1/site@{manifest}");
    let long = vec![b' '; 5 << 20];
    let plans: Vec<(&str, Fault)> = vec![
        (
            "too long",
            Fault::raw("200 OK", &["Content-Type: application/vnd.oci.image.manifest.v1+json"], &long),
        ),
        ("a page", Fault::raw("200 OK", &[], b"<html>")),
        ("another one", Fault::raw("200 OK", &[], b"another manifest")),
        ("nothing for ever", Fault::Stall(0)),
        ("single bytes", Fault::Drip(1)),
        ("no end of its head", Fault::Raw([&b"HTTP/1.1 200 OK\r\nX: "[..], &vec![b'x'; 1 << 20]].concat())),
    ];
    std::thread::scope(|scope| {
        for (about, fault) in plans {
            let (name, upstream) = (&name, registry.address());
            scope.spawn(move || {
                let liar = Faulty::start(upstream, move |_, _| fault.clone());
                let more = "offline = \"neighbours\"\n[registry]\nconnect_timeout = \"500ms\"\n";
                let node = node(config(None, &[liar.address()], more));
                let begun = Instant::now();
                let refused = node.pull_image(pull(name)).expect_err("no one has it");
                assert!(refused.message().contains("RegistryUnavailable"), "{about}: {refused}");
                assert!(!liar.served().is_empty(), "{about}: it was asked");
                assert!(begun.elapsed() < LIMIT, "{about}: {:?}", begun.elapsed());
                node.stop();
            });
        }
    });
    drop(registry);
    home.stop();
}

/// A client that reads a little each second would hold a place for hours.
#[test]
#[ignore = "takes a minute: make test-all PARTS=slow"]
fn a_client_that_reads_slowly_for_ever_is_disconnected() {
    let port = ports(1)[0];
    let node = node(config(Some(port), &[], "open = true"));
    let registry = Registry::start(node.folder());
    // More than the buffers of a connection.
    let image = image(&node, &[16_000_000], 320);
    registry.push(&image, "site", "1");
    pull_on(&[&node], &registry.name("site", "1"));
    let path = format!("/v2/site/blobs/{}", digest(&image.layers[1].blob));
    let mut client = http::connect(local(port)).expect("a connection");
    write!(client, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").expect("a request");
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                let _ = client.read(&mut [0; 1000]);
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        // The process ends when no one is connected.
        let has_left =
            host::wait_within(Duration::from_secs(150), || node.workers().is_empty().then_some(()));
        has_ended.store(true, Ordering::Relaxed);
        assert!(has_left.is_some(), "it is served for ever");
    });
    let (head, body) = http::request(local(port), "GET", &path, "", b"").expect("others are served");
    assert_eq!((head.second(), body.len()), ("200", image.layers[1].blob.len()));
    wait_until_idle(&node);
    node.stop();
}

/// Address of a client on the loopback interface, which has many.
fn connect_from(number: u8, to: SocketAddr) -> TcpStream {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
    use std::os::fd::AsRawFd;
    let from = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    bind(from.as_raw_fd(), &SockaddrIn::new(127, 0, 7, number, 0)).expect("an address");
    let SocketAddr::V4(to) = to else { panic!("IPv4") };
    connect(from.as_raw_fd(), &SockaddrIn::from(to)).expect("a connection");
    TcpStream::from(from)
}

/// All places are taken by clients that request ranges of an archive of many files, each at another place, and read nothing.
#[test]
#[ignore = "takes a minute: make test-all PARTS=slow"]
fn the_memory_of_the_serving_process_is_bounded() {
    const KIB_MAX: u64 = 16 << 10;
    let port = ports(1)[0];
    let node = node(config(Some(port), &[], "open = true\n[image]\nkeep_blobs = false\n"));
    let registry = Registry::start(node.folder());
    let mut entries: Vec<Entry> = (0..20_000)
        .map(|number| Entry::file(&format!("d{}/f{number}", number % 90), &noise(200, number)))
        .collect();
    entries.extend((0..8).map(|number| Entry::file(&format!("large-{number}"), &noise(4_000_000, number))));
    let layer = Layer::new(&entries, Compression::Gzip);
    registry.push(&Image::of(vec![layer.clone()]), "site", "1");
    pull_on(&[&node], &registry.name("site", "1"));
    let path = format!("/v2/site/archives/{}", layer.diff_id);
    http::request(local(port), "HEAD", &path, "", b"").expect("an answer");
    let clients: Vec<TcpStream> = (0..160_u32)
        .map(|number| {
            let mut client = connect_from((number / 20) as u8 + 1, local(port));
            let begin = number * 250_000;
            write!(client, "GET {path} HTTP/1.1\r\nHost: x\r\nRange: bytes={begin}-\r\n\r\n")
                .expect("a request");
            std::thread::sleep(Duration::from_millis(10));
            client
        })
        .collect();
    let parent = node.workers().first().expect("a serving process").pid;
    let child = host::children(parent).first().copied().expect("a confined process");
    let mut peak = 0;
    for _ in 0..100 {
        peak = peak.max(host::proc_value(child, "status", "RssAnon").unwrap_or(0));
        std::thread::sleep(Duration::from_millis(50));
    }
    let threads = host::proc_value(child, "status", "Threads").unwrap_or(0);
    println!("{peak} KiB with {threads} threads");
    assert!(threads > 100, "{threads} threads: the clients are served");
    assert!((1 << 10..KIB_MAX).contains(&peak), "{peak} KiB");
    drop(clients);
    let (head, body) = http::request(local(port), "GET", &path, "", b"").expect("others are served");
    assert_eq!((head.second(), digest(&body)), ("200", layer.diff_id.clone()));
    wait_until_idle(&node);
    node.stop();
}
