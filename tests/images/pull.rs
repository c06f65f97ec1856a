//! PullImage from Debian's docker-registry: names, manifest lists, credentials, compressions, and pulls whose
//! clients disconnect.

use std::time::Duration;

use coracle_tests::cri::proto::{AuthConfig, ImageFsInfoRequest, RemoveImageRequest};
use coracle_tests::image::{Image, probe_entries};
use coracle_tests::layer::{Compression, Entry, packed};
use coracle_tests::node::Node;
use coracle_tests::prometheus::{node_with_metrics, scrape};
use coracle_tests::registry::{Demand, Lie, Proxy, Registry};
use coracle_tests::request::{image_spec, pull};

use crate::{find, listed};

/// `me:secret` in base64.
const CREDENTIALS: &str = "bWU6c2VjcmV0";

/// The credentials of a kubelet with a pull secret.
fn credentials() -> AuthConfig {
    AuthConfig { username: "me".into(), password: "secret".into(), ..Default::default() }
}

#[test]
fn an_anonymous_pull_is_listed_found_by_every_name_and_removed() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "pulled").with("User", serde_json::json!("1000"));
    let manifest = registry.push(&image, "boats/probe", "1");
    let name = registry.name("boats/probe", "1");
    let answer = node.pull_image(pull(&name)).expect("pull");
    assert_eq!(answer.image_ref, image.id());
    let by_digest = format!("{}/boats/probe@{manifest}", registry.address());
    for known in [&name, &image.id(), &by_digest, &image.id()[7..20].to_owned()] {
        let found = find(&node, known).unwrap_or_else(|| panic!("{known} is not found"));
        assert_eq!(found.id, image.id());
        assert_eq!((found.repo_tags, found.repo_digests), (vec![name.clone()], vec![by_digest.clone()]));
        assert_eq!(found.uid.expect("a numeric user").value, 1000);
        assert!(found.size > 0);
    }
    assert_eq!(listed(&node).len(), 1);
    node.pull_image(pull(&name)).expect("again");
    assert_eq!(listed(&node).len(), 1);
    let usage = node.image_fs_info(ImageFsInfoRequest {}).expect("fs info").image_filesystems;
    assert!(usage[0].used_bytes.expect("bytes").value > 0 && usage[0].timestamp > 0);
    assert!(
        node.root().starts_with(&usage[0].fs_id.as_ref().expect("a place").mountpoint)
            || usage[0]
                .fs_id
                .as_ref()
                .is_some_and(|place| place.mountpoint.starts_with(&node.root().display().to_string()))
    );

    let (text, status) = node.once(&name, &["see", "ids"], |_| ());
    assert_eq!((status.exit_code, status.image_id.as_str()), (0, image.id().as_str()));
    assert!(text.contains("ids Uid 1000 "), "{text}");
    let remove = RemoveImageRequest { image: Some(image_spec(&image.id())) };
    for _ in 0..2 {
        node.remove_image(remove.clone()).expect("remove, known or not");
    }
    assert!(find(&node, &name).is_none() && listed(&node).is_empty());
    node.stop();
}

#[test]
fn challenges_are_answered_with_credentials() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "secret"), "x", "1");
    let demands =
        [Demand::Basic(CREDENTIALS.into()), Demand::Bearer(Some(CREDENTIALS.into())), Demand::Bearer(None)];
    for demand in demands {
        let proxy = Proxy::start(registry.address(), demand.clone(), Lie::None);
        let name = proxy.name("x", "1");
        let anonymous = node.pull_image(pull(&name));
        if matches!(demand, Demand::Bearer(None)) {
            anonymous.expect("anyone gets a token");
            continue;
        }
        let refused = anonymous.expect_err("no credentials");
        assert!(!refused.message().contains("secret"), "{refused}");
        let wrong = AuthConfig { password: "guess".into(), ..credentials() };
        for (auth, is_right) in [(wrong, false), (credentials(), true)] {
            let mut request = pull(&name);
            request.auth = Some(auth);
            let answer = node.pull_image(request);
            assert_eq!(answer.is_ok(), is_right, "{demand:?} {answer:?}\n{:?}", proxy.seen());
        }
    }
    assert!(!node.log().contains("secret"), "a password is in the log");
    node.stop();
}

#[test]
fn the_platform_of_this_machine_is_chosen_from_a_manifest_list() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let mine = Image::probe(&node.probe(), "mine");
    let mut other = Image::probe(&node.probe(), "other");
    other.architecture = "s390x".into();
    registry.push_index(&[other.clone(), mine.clone()], "many", "1");
    let answer = node.pull_image(pull(&registry.name("many", "1"))).expect("pull");
    assert_eq!(answer.image_ref, mine.id());
    registry.push_index(&[other], "foreign", "1");
    let refused = node.pull_image(pull(&registry.name("foreign", "1"))).expect_err("not for this machine");
    assert!(refused.message().to_lowercase().contains("platform"), "{refused}");
    node.stop();
}

#[test]
fn layers_in_all_compressions_are_unpacked_with_whiteouts_and_links() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    for (tag, packing) in
        [("plain", Compression::Plain), ("gzip", Compression::Gzip), ("zstd", Compression::Zstd)]
    {
        let mut base = probe_entries(&node.probe());
        base.extend([
            Entry::directory("box", 0o755),
            Entry::file("box/old", b"old"),
            Entry::file("box/kept", b"kept"),
            Entry::hard_link("box/twin", "box/kept"),
            Entry::directory("hidden", 0o755),
            Entry::file("hidden/below", b"below"),
        ]);
        let top = [
            Entry::whiteout("box", "old"),
            Entry::directory("hidden", 0o755),
            Entry::whiteout("hidden", ".wh..opq"),
            Entry::file("hidden/above", b"above"),
        ];
        let image = Image::of(vec![packed(&base, packing), packed(&top, packing)])
            .with("Entrypoint", serde_json::json!(["/probe"]));
        registry.push(&image, "layers", tag);
        let name = registry.name("layers", tag);
        node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("{tag}: {error}"));
        assert_eq!(node.once(&name, &["ls", "/box"], |_| ()).0, "kept\ntwin\n", "{tag}");
        assert_eq!(node.once(&name, &["ls", "/hidden"], |_| ()).0, "above\n", "{tag}");
        assert_eq!(node.once(&name, &["cat", "/box/twin"], |_| ()).0, "kept\n", "{tag}");
    }
    node.stop();
}

#[test]
fn invalid_and_missing_names_are_errors() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "there"), "there", "1");
    for name in ["UPPER/case:1", "a b", "", "x@sha256:short"] {
        node.pull_image(pull(name)).expect_err(name);
    }
    let refused = node.pull_image(pull(&registry.name("there", "2"))).expect_err("no such tag");
    assert!(refused.message().contains("there"), "{refused}");
    node.pull_image(pull(&registry.name("nowhere", "1"))).expect_err("no such repository");
    let down = Proxy::start(registry.address(), Demand::Nothing, Lie::Down);
    let refused = node.pull_image(pull(&down.name("there", "1"))).expect_err("503");
    assert!(refused.message().starts_with("RegistryUnavailable"), "{refused}");
    node.stop();
}

#[test]
fn concurrent_pulls_of_one_image_share_one_download() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "joined");
    registry.push(&image, "joined", "1");
    let proxy = Proxy::start(registry.address(), Demand::Nothing, Lie::None);
    let name = proxy.name("joined", "1");
    let clients: Vec<_> = (0..4).map(|_| node.another()).collect();
    std::thread::scope(|scope| {
        for client in clients {
            let name = &name;
            scope.spawn(move || client.pull_image(pull(name)).expect("pull"));
        }
    });
    let blobs =
        proxy.seen().iter().filter(|line| line.starts_with("GET") && line.contains("/blobs/")).count();
    assert_eq!(blobs, 2, "one layer and one configuration, once each: {:?}", proxy.seen());
    node.stop();
}

#[test]
fn a_pull_without_clients_ends() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "stalled"), "stalled", "1");
    let proxy = Proxy::start(registry.address(), Demand::Nothing, Lie::Stall);
    let late = node.pull_image_within(pull(&proxy.name("stalled", "1")), Duration::from_secs(1));
    late.expect_err("it stalls");
    // The worker may wait a grace period for a retry; `wait_until` knows how long anything may take.
    coracle_tests::host::wait_within(Duration::from_secs(60), || node.workers().is_empty().then_some(()))
        .expect("the worker of an abandoned pull ends");
    assert!(listed(&node).is_empty());
    node.stop();
}

/// Each outcome of a pull has its counter; the pulled bytes are counted too.
#[test]
fn pulls_are_counted_by_outcome() {
    let (node, address) = node_with_metrics();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "counted"), "counted", "1");
    let pull_image = |name: &str| node.pull_image(pull(name));
    pull_image(&registry.name("counted", "1")).expect("pull");
    pull_image(&registry.name("absent", "1")).expect_err("there is none");
    pull_image("registry.invalid/x:1").expect_err("no such name");
    let values = scrape(&address);
    for outcome in ["ok", "not_found", "dns"] {
        let name = format!("coracle_image_pulls_total{{outcome=\"{outcome}\"}}");
        assert_eq!(values.get(&name), Some(&1.0), "{name}: {values:#?}");
    }
    assert!(values["coracle_image_pull_bytes_total"] > 1000.0, "{values:#?}");
    node.stop();
}
