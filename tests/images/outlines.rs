//! Layers that a neighbour has unpacked, whatever the compression of their blobs: a node takes what it does not have of them, and
//! neighbours that lie, stall or lose the layer lead to the pull of the blob.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::host::wait_until;
use coracle_tests::http::{self, Head};
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use coracle_tests::site::{config, local, make_key, ports};
use coracle_tests::small_disk::SmallDisk;
use coracle_tests::update::{directory, image, release, tree};
use sha2::{Digest as _, Sha256};

use crate::mirror::{logged, node, pull_on, wait_until_idle};

/// The layer of a release, as most registries have it.
fn layer(node: &Node, number: u8) -> Layer {
    let mut entries = release(node, number);
    entries.extend([
        Entry::file("app/more", &noise(6_000_000, 5)),
        // The process that serves could not read it in the tree.
        Entry::file("app/private", &noise(1000, 6)).mode(0o600).owned(1000, 1000),
        Entry::file("app/secret", &noise(1000, 7)).mode(0),
    ]);
    Layer::new(&entries, Compression::Gzip)
}

/// A node that has both releases, a registry with them, and a proxy of it that counts bytes.
struct Site {
    first: Node,
    port: u16,
    new: Layer,
    proxy: Faulty,
    _registry: Registry,
}

impl Site {
    /// `more`: of the configuration of the first node.
    fn new(more: &str) -> Site {
        let port = ports(1)[0];
        let first = node(config(Some(port), &[], &format!("open = true\n{more}")));
        let registry = Registry::start(first.folder());
        let (old, new) = (layer(&first, 1), layer(&first, 2));
        registry.push(&image(old), "app", "1");
        registry.push(&image(new.clone()), "app", "2");
        let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
        let site = Site { first, port, new, proxy, _registry: registry };
        pull_on(&[&site.first], &site.name("1"));
        pull_on(&[&site.first], &site.name("2"));
        site
    }

    /// One whose first node keeps no blobs, so that it has the layers unpacked only.
    fn unpacked_only() -> Site {
        Site::new("[image]\nkeep_blobs = false\n")
    }

    fn name(&self, tag: &str) -> String {
        self.proxy.name("app", tag)
    }

    /// Number of bytes of the new blob that the registry has sent.
    fn sent(&self) -> u64 {
        self.proxy.blob_bytes(&digest(&self.new.blob))
    }

    fn size(&self) -> u64 {
        self.new.blob.len() as u64
    }

    /// Compares the layer of the second release with that of the first node.
    fn check(&self, node: &Node) {
        let expected = tree(&directory(&self.first, &self.new));
        assert!(tree(&directory(node, &self.new)) == expected, "another tree\n{}", node.log());
        let parts = fs::read_dir(node.root().join("images/parts")).expect("parts").count();
        assert_eq!(parts, 0, "no part is left");
    }

    /// The outline of the new layer, as the first node sends it.
    fn outline(&self) -> Vec<u8> {
        let path = format!("/v2/app/outlines/{}", self.new.diff_id);
        let (head, outline) = http::request(local(self.port), "GET", &path, "", b"").expect("an outline");
        assert_eq!(head.second(), "200");
        outline
    }

    /// A proxy of the first node with these faults in its answers for the new layer.
    fn liar(&self, plan: impl Fn(&Head, usize) -> Fault + Send + Sync + 'static) -> Faulty {
        let of_new = format!("s/{}", self.new.diff_id);
        Faulty::start(local(self.port), move |head, before| {
            match head.first.starts_with("GET") && head.second().contains(&of_new) {
                true => plan(head, before),
                false => Fault::None,
            }
        })
    }

    /// Pulls the first release on a new node, and then the second one past a proxy of the first node with these faults in the
    /// answers for the new layer; returns the node.
    fn pull_past(&self, plan: impl Fn(&Head, usize) -> Fault + Send + Sync + 'static) -> Node {
        let liar = self.liar(plan);
        let node = node(config(None, &[liar.address()], "[registry]\nrate_window = \"2s\"\n"));
        pull_on(&[&node], &self.name("1"));
        pull_on(&[&node], &self.name("2"));
        self.check(&node);
        let asked = format!("outlines/{}", self.new.diff_id);
        assert!(liar.served().iter().any(|served| served.head.second().contains(&asked)), "it was asked");
        node
    }

    /// A neighbour with these faults is left in time, and the registry sends the blob.
    fn leads_to_the_registry(
        &self,
        about: &str,
        plan: impl Fn(&Head, usize) -> Fault + Send + Sync + 'static,
    ) {
        let before = self.sent();
        let begun = Instant::now();
        let node = self.pull_past(plan);
        let took = begun.elapsed();
        assert_eq!(self.sent(), before + self.size(), "{about}\n{}", node.log());
        assert!(node.log().contains("is not taken from neighbour"), "{about}\n{}", node.log());
        assert!(took < Duration::from_secs(60), "{about}: {took:?}");
        node.stop();
    }

    fn stop(self) {
        self.first.stop();
    }
}

fn second(neighbour: SocketAddr, port: Option<u16>, more: &str) -> Node {
    node(config(port, &[neighbour], more))
}

#[test]
fn an_update_of_a_plain_layer_takes_what_changed_from_a_neighbour() {
    let site = Site::new("");
    let port = ports(1)[0];
    let other = second(local(site.port), Some(port), "open = true");
    pull_on(&[&other], &site.name("1"));
    let before = site.sent();
    assert_eq!(before, site.size(), "the first node has it from the registry");
    pull_on(&[&other], &site.name("2"));
    assert_eq!(site.sent(), before, "the registry is not asked for it again");
    let received = logged(&other, "neighbours");
    assert!(
        received > 0 && received <= site.size() / 20,
        "{received} of {} bytes\n{}",
        site.size(),
        other.log()
    );
    assert_eq!((logged(&other, "fetched"), logged(&other, "reused")), (0, site.size() - received));
    site.check(&other);
    let name = site.name("2");
    assert_eq!(other.once(&name, &["cat", "/app/release"], |_| ()).0, "release 2\n");
    // The second node passes it on in the same way, although it has no blob.
    let third = second(local(port), None, "");
    pull_on(&[&third], &name);
    assert_eq!(site.sent(), before);
    site.check(&third);
    wait_until_idle(&site.first);
    [third, other].into_iter().for_each(Node::stop);
    site.stop();
}

#[test]
fn a_node_without_the_image_takes_all_of_an_unpacked_layer() {
    let site = Site::unpacked_only();
    let before = site.sent();
    let other = second(local(site.port), None, "");
    pull_on(&[&other], &site.name("2"));
    assert_eq!(site.sent(), before);
    assert!(logged(&other, "neighbours") > site.size() / 2, "{}", other.log());
    assert_eq!(logged(&other, "fetched"), 0);
    site.check(&other);
    other.stop();
    site.stop();
}

#[test]
fn without_partial_pulls_a_blob_is_pulled() {
    let site = Site::unpacked_only();
    let before = site.sent();
    let other = second(local(site.port), None, "[image]\npartial_pulls = false\n");
    pull_on(&[&other], &site.name("2"));
    assert_eq!(site.sent(), before + site.size());
    site.check(&other);
    other.stop();
    site.stop();
}

#[test]
fn a_node_that_serves_no_one_writes_no_outline() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&image(layer(&node, 1)), "app", "1");
    node.pull_image(pull(&registry.name("app", "1"))).expect("pull");
    assert_eq!(fs::read_dir(node.root().join("images/contents")).expect("indexes").count(), 0);
    node.stop();
}

type Plan = Box<dyn Fn(&Head, usize) -> Fault + Send + Sync>;

/// Sends the outline with another last byte of this text.
fn changed(site: &Site, text: &[u8]) -> Plan {
    let mut outline = site.outline();
    let at = outline.windows(text.len()).position(|bytes| bytes == text).expect("it is in the outline");
    outline[at + text.len() - 1] ^= 1;
    Box::new(move |head, _| match head.second().contains("/outlines/") {
        true => Fault::raw("200 OK", &[], &outline),
        false => Fault::None,
    })
}

/// Length in bytes of the archive of the new layer.
fn layer_bytes(site: &Site) -> u64 {
    let outline = site.outline();
    u64::from_le_bytes(*outline.last_chunk().expect("a length"))
}

#[test]
fn a_neighbour_that_lies_leads_to_the_registry() {
    let site = Site::unpacked_only();
    let outline = |head: &Head| head.second().contains("/outlines/");
    let garbage = noise(20_000, 9);
    let release = Sha256::digest(b"release 2\n");
    let plans: Vec<(&str, Plan)> = vec![
        ("changed chunks", Box::new(move |head, _| if outline(head) { Fault::None } else { Fault::Flip })),
        ("the digest of another chunk", changed(&site, &release)),
        ("another header", changed(&site, b"ustar")),
        ("another length", changed(&site, &(layer_bytes(&site)).to_le_bytes())),
        ("garbage", Box::new(move |_, _| Fault::raw("200 OK", &[], &garbage))),
        ("nothing", Box::new(|_, _| Fault::raw("200 OK", &[], b""))),
        ("a page", Box::new(|_, _| Fault::raw("200 OK", &[], b"<html>"))),
        (
            "a short outline",
            Box::new(move |head, _| if outline(head) { Fault::Cut(100) } else { Fault::None }),
        ),
        ("no layer any more", Box::new(|_, _| Fault::Status(404, None))),
        (
            "other ranges",
            Box::new(move |head, _| match outline(head) {
                true => Fault::None,
                false => Fault::raw("206 Partial Content", &["Content-Range: bytes 7-99/100000"], &[0; 93]),
            }),
        ),
        (
            "more than the range",
            Box::new(move |head, _| if outline(head) { Fault::None } else { Fault::Longer(9) }),
        ),
        ("single bytes", Box::new(move |head, _| if outline(head) { Fault::None } else { Fault::Cut(1) })),
    ];
    for (about, plan) in plans {
        site.leads_to_the_registry(about, plan);
    }
    let longer = [site.outline(), vec![0; 9]].concat();
    let node = site.pull_past(move |head, _| match outline(head) {
        true => Fault::raw("200 OK", &[], &longer),
        false => Fault::None,
    });
    let limit = format!("longer than {} bytes", site.outline().len());
    assert!(node.log().contains(&limit), "{limit}: {}", node.log());
    node.stop();
    site.stop();
}

#[test]
fn other_answers_to_ranges_lead_to_the_registry() {
    let site = Site::unpacked_only();
    let outline = |head: &Head| head.second().contains("/outlines/");
    let path = format!("/v2/app/archives/{}", site.new.diff_id);
    let (_, archive) = http::request(local(site.port), "GET", &path, "", b"").expect("an archive");
    let length = archive.len();
    let range = |head: &Head| {
        let (first, last) = head.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?))
    };
    let plans: Vec<(&str, Plan)> = vec![
        (
            "the whole archive",
            Box::new(
                move |head, _| if outline(head) { Fault::None } else { Fault::raw("200 OK", &[], &archive) },
            ),
        ),
        (
            "zeros",
            Box::new(move |head, _| match (outline(head), range(head)) {
                (false, Some((first, last))) => {
                    let field = format!("Content-Range: bytes {first}-{last}/{length}");
                    Fault::raw("206 Partial Content", &[&field], &vec![0; (last - first + 1) as usize])
                }
                _ => Fault::None,
            }),
        ),
        (
            "several parts",
            Box::new(move |head, _| match outline(head) {
                true => Fault::None,
                false => {
                    let fields = ["Content-Type: multipart/byteranges; boundary=x"];
                    Fault::raw("206 Partial Content", &fields, &[b'x'; 900])
                }
            }),
        ),
        (
            "slow for ever",
            Box::new(move |head, _| if outline(head) { Fault::None } else { Fault::Drip(100) }),
        ),
    ];
    for (about, plan) in plans {
        site.leads_to_the_registry(about, plan);
    }
    site.stop();
}

#[test]
fn a_neighbour_that_stalls_in_an_outline_is_abandoned() {
    let site = Site::unpacked_only();
    for what in ["/outlines/", "/archives/"] {
        site.leads_to_the_registry(what, move |head, _| match head.second().contains(what) {
            true => Fault::Stall(1000),
            false => Fault::None,
        });
    }
    site.stop();
}

#[test]
fn ranges_that_end_early_are_resumed() {
    let site = Site::unpacked_only();
    let before = site.sent();
    // The node has nothing of the layer, so that the first range is long.
    let liar = site.liar(|head, before| match head.second().contains("/archives/") && before == 0 {
        true => Fault::Cut(300_000),
        false => Fault::None,
    });
    let node = second(liar.address(), None, "");
    pull_on(&[&node], &site.name("2"));
    site.check(&node);
    assert_eq!(site.sent(), before, "{}", node.log());
    let ranges: Vec<_> =
        liar.served().into_iter().filter(|one| one.head.second().contains("/archives/")).collect();
    let begin = |range: &str| range.strip_prefix("bytes=")?.split('-').next()?.parse::<u64>().ok();
    let begins: Vec<u64> = ranges.iter().filter_map(|one| begin(one.head.get("range")?)).collect();
    assert_eq!(ranges[0].bytes, 300_000, "it was cut");
    // Some bytes may have been lost with the connection.
    assert!((64 << 10..=300_000).contains(&(begins[1] - begins[0])), "{begins:?}");
    assert!(logged(&node, "neighbours") < layer_bytes(&site) + 600_000, "{}", node.log());
    node.stop();
    site.stop();
}

/// An outline of a layer with one file of this many zeros: a few hundred bytes for a neighbour.
fn outline_of_zeros(bytes: u64) -> Vec<u8> {
    let header = &Layer::new(&[Entry::file("zeros", b"").claiming(bytes)], Compression::Plain).blob[..512];
    let number = |mut number: u64| {
        let mut digits = Vec::new();
        while number >= 0x80 {
            digits.push(number as u8 | 0x80);
            number >>= 7;
        }
        digits.push(number as u8);
        digits
    };
    let mut outline = b"coroln\0\x01".to_vec();
    outline.extend([&[1][..], &number(512), b"0", &number(0), &number(512), header].concat());
    outline.extend([&[2, 0, 5][..], b"zeros", &[0, 1], &[0; 32], &number(bytes)].concat());
    outline.push(0);
    outline.extend((512 + bytes).to_le_bytes());
    outline
}

#[test]
fn an_outline_of_zeros_neither_fills_the_disk_nor_ends_the_pull() {
    let site = Site::unpacked_only();
    // What is not verified may be unpacked to sixteen times the length of the blob.
    let (long, full) = (15 << 30, 150 << 20);
    assert!(full < 16 * site.size() && long > 16 * site.size());
    for (bytes, why) in [(long, "too long for what is not verified"), (full, "of them are reserved")] {
        let before = site.sent();
        let outline = outline_of_zeros(bytes);
        let liar = site.liar(move |_, _| Fault::raw("200 OK", &[], &outline));
        let disk = SmallDisk::new(100);
        let config = config(None, &[liar.address()], "");
        let node = Node::with(Options { root: Some(disk.path().join("root")), config, ..Options::default() });
        pull_on(&[&node], &site.name("2"));
        site.check(&node);
        assert_eq!(site.sent(), before + site.size(), "{bytes}\n{}", node.log());
        let log = node.log();
        let is_logged = |line: &str| line.contains("is not taken from") && line.contains(why);
        assert!(log.lines().any(is_logged), "{bytes}\n{log}");
        node.stop();
    }
    site.stop();
}

/// Most of the blob is there, or little of it, from a registry that ended.
#[test]
fn bytes_of_the_registry_are_not_requested_again() {
    for (percent, is_continued) in [(90, true), (10, false)] {
        let port = ports(1)[0];
        let first = node(config(Some(port), &[], "open = true\n[image]\nkeep_blobs = false\n"));
        let registry = Registry::start(first.folder());
        let new = layer(&first, 2);
        registry.push(&image(new.clone()), "app", "2");
        let (blob, size) = (digest(&new.blob), new.blob.len() as u64);
        let has_ended = Arc::new(AtomicBool::new(false));
        let (path, ended) = (format!("/blobs/{blob}"), has_ended.clone());
        let proxy = Faulty::start(registry.address(), move |head, before| {
            match ended.load(Ordering::Relaxed) && head.second().contains(&path) {
                true if before <= 1 => Fault::Cut(size * percent / 100),
                true => Fault::Status(404, None),
                false => Fault::None,
            }
        });
        pull_on(&[&first], &proxy.name("app", "2"));
        let gone = has_ended.clone();
        let neighbour = Faulty::start(local(port), move |_, _| match gone.load(Ordering::Relaxed) {
            true => Fault::Status(404, None),
            false => Fault::None,
        });
        let other = second(neighbour.address(), None, "");
        has_ended.store(true, Ordering::Relaxed);
        let before = proxy.blob_bytes(&blob);
        other.pull_image(pull(&proxy.name("app", "2"))).expect_err("the registry has ended");
        let begun = proxy.blob_bytes(&blob) - before;
        assert!((size * percent / 100..size).contains(&begun), "{percent}: {begun} of {size}");
        has_ended.store(false, Ordering::Relaxed);
        pull_on(&[&other], &proxy.name("app", "2"));
        let fetched = proxy.blob_bytes(&blob) - before;
        assert_eq!(fetched, if is_continued { size } else { begun }, "{percent}\n{}", other.log());
        assert_eq!(logged(&other, "neighbours") > size / 2, !is_continued, "{percent}\n{}", other.log());
        assert!(tree(&directory(&other, &new)) == tree(&directory(&first, &new)), "{percent}");
        assert_eq!(fs::read_dir(other.root().join("images/parts")).expect("parts").count(), 0, "{percent}");
        other.stop();
        first.stop();
    }
}

/// A kill between the two moves that publish a layer and its outline.
#[test]
fn a_layer_whose_outline_was_not_published_is_pulled_from_the_registry() {
    let mut site = Site::unpacked_only();
    let name = site.new.diff_id.trim_start_matches("sha256:").to_owned();
    let (outline, parts) =
        (site.first.root().join("images/contents").join(&name), site.first.root().join("images/parts"));
    site.first.kill9();
    fs::rename(outline, parts.join(format!("{name}-999999-outline"))).expect("the outline");
    site.first.launch();
    let is_empty = || fs::read_dir(&parts).expect("parts").count() == 0;
    wait_until("the daemon removes what is not published", is_empty);
    let before = site.sent();
    let other = second(local(site.port), None, "");
    pull_on(&[&other], &site.name("2"));
    assert_eq!(site.sent(), before + site.size());
    site.check(&other);
    other.stop();
    site.stop();
}

/// Damage in the tree of the neighbour, and in that of this node.
#[test]
fn damaged_files_are_found() {
    type Spoil = fn(&Path);
    let spoils: [(&str, Spoil); 4] = [
        ("another byte", |layer| {
            let file = fs::File::options().write(true).open(layer.join("app/new-2")).expect("a file");
            file.write_all_at(b"x", 7).expect("a write");
        }),
        ("a FIFO", |layer| {
            fs::remove_file(layer.join("app/new-2")).expect("a file");
            nix::unistd::mkfifo(&layer.join("app/new-2"), nix::sys::stat::Mode::S_IRUSR).expect("a FIFO");
        }),
        ("a link", |layer| {
            fs::rename(layer.join("app/new-2"), layer.join("app/aside")).expect("a file");
            std::os::unix::fs::symlink("aside", layer.join("app/new-2")).expect("a link");
        }),
        ("no files", |layer| fs::remove_dir_all(layer.join("app")).expect("a directory")),
    ];
    for (about, spoil) in spoils {
        let site = Site::unpacked_only();
        let other = second(local(site.port), None, "");
        pull_on(&[&other], &site.name("1"));
        let (before, expected) = (site.sent(), tree(&directory(&site.first, &site.new)));
        spoil(&directory(&site.first, &site.new));
        pull_on(&[&other], &site.name("2"));
        assert_eq!(site.sent(), before + site.size(), "{about}\n{}", other.log());
        assert!(other.log().contains("is not taken from"), "{about}\n{}", other.log());
        assert!(tree(&directory(&other, &site.new)) == expected, "{about}");
        other.stop();
        site.stop();
    }
}

#[test]
fn damaged_files_of_the_node_itself_are_taken_from_the_neighbour() {
    let site = Site::unpacked_only();
    let other = second(local(site.port), None, "");
    let old = layer(&site.first, 1);
    pull_on(&[&other], &site.name("1"));
    let file = fs::File::options().write(true).open(directory(&other, &old).join("app/more"));
    file.expect("a file").write_all_at(b"damage", 3_000_000).expect("a write");
    let before = site.sent();
    pull_on(&[&other], &site.name("2"));
    assert_eq!(site.sent(), before, "{}", other.log());
    assert!(other.log().contains("is not what it was"), "{}", other.log());
    site.check(&other);
    other.stop();
    site.stop();
}

#[test]
fn outlines_and_archives_need_the_key_and_a_name() {
    let port = ports(1)[0];
    let key = std::env::temp_dir().join(format!("coracle-outlines-{}", std::process::id()));
    make_key(&key);
    let first = node(config(Some(port), &[], &format!("key_file = \"{}\"", key.display())));
    let registry = Registry::start(first.folder());
    let layer = layer(&first, 1);
    registry.push(&image(layer.clone()), "app", "1");
    pull_on(&[&first], &registry.name("app", "1"));
    for kind in ["outlines", "archives"] {
        for digest in [&layer.diff_id, &digest(b"absent")] {
            let path = format!("/v2/app/{kind}/{digest}");
            let (head, body) = http::request(local(port), "GET", &path, "", b"").expect("an answer");
            assert!(head.second() == "401" && body.len() < 100, "{path}");
        }
    }
    // A node with the key takes the layer.
    let with_key = format!("key_file = \"{}\"", key.display());
    let other = second(local(port), None, &with_key);
    pull_on(&[&other], &registry.name("app", "1"));
    assert!(logged(&other, "neighbours") > 0, "{}", other.log());
    other.stop();
    // Without a key, by a name that a layer has.
    let port = ports(1)[0];
    let open = node(config(Some(port), &[], "open = true"));
    pull_on(&[&open], &registry.name("app", "1"));
    let get = |path: &str| http::request(local(port), "GET", path, "", b"").expect("an answer");
    let (head, body) = get(&format!("/v2/app/archives/{}", layer.diff_id));
    assert_eq!((head.second(), digest(&body)), ("200", layer.diff_id.clone()));
    for path in [
        format!("/v2/app/archives/{}", digest(b"absent")),
        format!("/v2/app/outlines/{}", digest(&layer.blob)),
        "/v2/app/archives/sha256:../../../../etc/passwd".to_owned(),
        "/v2/app/outlines/..".to_owned(),
    ] {
        assert_eq!(get(&path).0.second(), "404", "{path}");
    }
    open.stop();
    first.stop();
    fs::remove_file(key).expect("the key is here");
}
