//! The policy of signatures, as users configure it: what is pulled, what is refused before anything is unpacked,
//! and what the node says about it. Signatures are made by openssl; `signers` has those of cosign and notation.

use coracle_tests::cri::proto::RuntimeCondition;
use coracle_tests::fault::{Fault, Faulty, Served};
use coracle_tests::host::wait_until;
use coracle_tests::image::{Image, MANIFEST};
use coracle_tests::layer::digest;
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::{Demand, Lie, Proxy, Registry};
use coracle_tests::request::pull;
use coracle_tests::signing::{Pair, SIMPLE, policy};
use coracle_tests::site::{config, local, ports};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::find;

/// A registry, and a node that requires of all images a signature by this pair of keys.
struct Site {
    /// The node in whose folder the files of registry and policy are.
    fixture: Node,
    registry: Registry,
    pair: Pair,
    node: Node,
}

impl Site {
    fn start() -> Self {
        let fixture = Node::start();
        let registry = Registry::start(fixture.folder());
        let pair = Pair::new(fixture.folder(), "key");
        let config =
            policy(fixture.folder(), &json!({ "default": [{ "type": "cosign", "keyPath": pair.public() }] }));
        let node = Node::with(Options { config, ..Options::default() });
        Self { fixture, registry, pair, node }
    }
}

/// A policy by which one repository needs a signature, and all others are refused.
fn signed_by(pair: &Pair, scope: &str) -> Value {
    json!({
        "default": [{ "type": "reject" }],
        "transports": { "docker": { scope: [{ "type": "cosign", "keyPath": pair.public() }] } },
    })
}

fn hang_up(node: &Node) {
    kill(Pid::from_raw(node.pid()), Signal::SIGHUP).expect("the daemon is ours");
}

fn condition(node: &Node) -> Option<RuntimeCondition> {
    let status = node.status(Default::default()).expect("status").status.expect("conditions");
    status.conditions.into_iter().find(|condition| condition.r#type == "ImagesAccepted")
}

/// Whether the node says that the policy does not accept images of the store.
fn refuses_images(node: &Node) -> bool {
    condition(node).is_some_and(|condition| !condition.status && condition.reason == "RefusedImages")
}

/// The names of the unpacked layers.
fn layers(node: &Node) -> Vec<String> {
    let all = std::fs::read_dir(node.root().join("layers")).expect("a directory").flatten();
    let names = all.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.len() == 64).collect()
}

fn said(node: &Node, words: &[&str]) -> String {
    let output = node.tool(words);
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn a_pull_without_a_policy_requests_nothing_more_and_keeps_nothing() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let signed = registry.push(&Image::probe(&node.probe(), "plain"), "plain", "1");
    Pair::new(node.folder(), "key").sign(&registry, "plain", &signed);
    let proxy = Proxy::start(registry.address(), Demand::Nothing, Lie::None);
    node.pull_image(pull(&proxy.name("plain", "1"))).expect("pull");
    let seen = proxy.seen();
    assert!(!seen.iter().any(|line| line.contains(".sig") || line.contains("referrers")), "{seen:?}");
    assert_eq!(std::fs::read_dir(node.root().join("images/signatures")).expect("a directory").count(), 0);
    assert!(condition(&node).is_none());
    node.stop();
}

#[test]
fn an_image_is_pulled_with_its_signature_only() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    let pair = Pair::new(fixture.folder(), "key");
    let scope = format!("{}/team", registry.address());
    let config = policy(fixture.folder(), &signed_by(&pair, &scope));
    let node = Node::with(Options { config, ..Options::default() });
    let signed = registry.push(&Image::probe(&node.probe(), "signed"), "team/app", "1");
    registry.push(&Image::probe(&node.probe(), "unsigned"), "team/app", "2");
    registry.push(&Image::probe(&node.probe(), "other"), "other/app", "1");
    let before = layers(&node);
    for (name, words) in [
        (registry.name("team/app", "2"), "has no signature"),
        (registry.name("team/app", "1"), "has no signature"),
        (registry.name("other/app", "1"), "rule default[0], reject"),
    ] {
        let refused = node.pull_image(pull(&name)).expect_err("refused");
        assert_eq!(refused.code(), tonic::Code::Unknown);
        // The prefix by which a kubelet knows the reason.
        assert!(refused.message().starts_with("SignatureValidationFailed: pull image "), "{refused}");
        assert!(refused.message().contains(words), "{refused}");
    }
    assert_eq!(layers(&node), before, "nothing is unpacked");
    // The signature of another repository is none of this one.
    pair.sign(&registry, "other/app", &signed);
    node.pull_image(pull(&registry.name("team/app", "1"))).expect_err("refused");
    pair.sign(&registry, "team/app", &signed);
    let name = registry.name("team/app", "1");
    node.pull_image(pull(&name)).expect("pull");
    assert!(find(&node, &name).is_some());
    // What was verified, and what applies.
    assert!(said(&node, &["why", &name]).contains(&pair.public()), "{}", said(&node, &["why", &name]));
    let explained = said(&node, &["image", "explain", &name]);
    assert!(explained.contains(&format!("rule transports.docker[\"{scope}\"]")), "{explained}");
    assert!(explained.contains(&pair.public()), "{explained}");
    let checked = said(&node, &["image", "check", "--policy"]);
    assert!(checked.contains(&format!("accepted {name}: cosign: key {}", pair.public())), "{checked}");
    assert!(condition(&node).expect("a condition").status);
    // By its digest the store has it: no registry is needed.
    let by_digest = format!("{}/team/app@{signed}", registry.address());
    drop(registry);
    node.pull_image(pull(&by_digest)).expect("it is in the store, with its signature");
    node.stop();
    fixture.stop();
}

/// The rule of a repository applies to the name by digest, which an image gets with its tag.
#[test]
fn a_tag_that_is_accepted_brings_no_digest_that_is_not() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    let pair = Pair::new(fixture.folder(), "key");
    let repository = format!("{}/team/app", registry.address());
    let gone = Faulty::start(registry.address(), |head, _| match head.second().contains(".sig") {
        true => Fault::Status(503, None),
        false => Fault::None,
    });
    let (rejected, key) =
        (gone.name("team/app", "1"), json!([{ "type": "cosign", "keyPath": pair.public() }]));
    let text = json!({
        "default": [{ "type": "reject" }],
        "transports": { "docker": {
            repository.clone(): key, format!("{}/team/app", gone.address()): key,
            registry.name("team/app", "1"): [{ "type": "insecureAcceptAnything" }],
            rejected.clone(): [{ "type": "reject" }],
        } },
    });
    let config = policy(fixture.folder(), &text);
    let node = Node::with(Options { config, ..Options::default() });
    let signed = registry.push(&Image::probe(&node.probe(), "tagged"), "team/app", "1");
    let (name, by_digest) = (registry.name("team/app", "1"), format!("{repository}@{signed}"));
    let names = |node: &Node| find(node, &name).expect("an image").repo_digests;
    node.pull_image(pull(&name)).expect("pull");
    assert_eq!(names(&node), [""; 0]);
    assert!(find(&node, &by_digest).is_none());
    let refused = node.pull_image(pull(&by_digest)).expect_err("refused");
    assert!(refused.message().contains("has no signature"), "{refused}");
    // No signature is looked for where none is enough.
    let refused = node.pull_image(pull(&rejected)).expect_err("refused");
    assert!(refused.message().starts_with("SignatureValidationFailed"), "{refused}");
    assert!(!gone.served().iter().any(|served| served.head.second().contains(".sig")), "{refused}");
    // With a signature, which is looked for though the tag needs none.
    pair.sign(&registry, "team/app", &signed);
    node.pull_image(pull(&name)).expect("pull");
    assert_eq!(names(&node), [by_digest]);
    node.stop();
    fixture.stop();
}

#[test]
fn existing_images_that_a_policy_refuses_are_named_and_sighup_reads_keys() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (pair, other) = (Pair::new(node.folder(), "key"), Pair::new(node.folder(), "other"));
    let signed = registry.push(&Image::probe(&node.probe(), "before"), "team/app", "1");
    let (name, by_digest) =
        (registry.name("team/app", "1"), format!("{}/team/app@{signed}", registry.address()));
    node.pull_image(pull(&name)).expect("pull");
    let scope = registry.address().to_string();
    node.rewrite_config(&policy(node.folder(), &signed_by(&pair, &scope)));
    hang_up(&node);
    wait_until("the image is refused", || refuses_images(&node));
    let shown = condition(&node).expect("a condition");
    assert!(shown.message.contains(&name), "{shown:?}");
    let checked = said(&node, &["image", "check", "--policy"]);
    assert!(checked.contains("would be refused") && checked.contains("no signature is stored"), "{checked}");
    // It is judged again also if the store has it.
    node.pull_image(pull(&by_digest)).expect_err("refused");
    pair.sign(&registry, "team/app", &signed);
    node.pull_image(pull(&name)).expect("pull");
    wait_until("the condition is true", || condition(&node).is_some_and(|condition| condition.status));
    // Another key is in force after SIGHUP and not before; the signatures in the store are judged by it.
    std::fs::copy(other.public(), pair.public()).expect("a key");
    node.pull_image(pull(&by_digest)).expect("the old key is in force");
    hang_up(&node);
    wait_until("the image is refused", || refuses_images(&node));
    let refused = node.pull_image(pull(&name)).expect_err("refused");
    assert!(refused.message().contains("it was not made by"), "{refused}");
    // Without a policy all is as before.
    node.rewrite_config("");
    hang_up(&node);
    wait_until("there is no condition", || condition(&node).is_none());
    node.pull_image(pull(&name)).expect("pull");
    node.stop();
}

#[test]
fn a_policy_with_a_mistake_refuses_everything_and_a_reload_keeps_the_one_before() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    registry.push(&Image::probe(&fixture.probe(), "mistake"), "app", "1");
    let name = registry.name("app", "1");
    let broken = json!({ "default": [{ "type": "cosign", "keyPath": "/absent/key.pub" }] });
    let config = policy(fixture.folder(), &broken);
    let node = Node::with(Options { config, ..Options::default() });
    let refused = node.pull_image(pull(&name)).expect_err("refused");
    for words in ["SignatureValidationFailed: ", "policy.json: default[0].keyPath: /absent/key.pub"] {
        assert!(refused.message().contains(words), "{refused}");
    }
    assert_eq!(condition(&node).expect("a condition").reason, "BrokenPolicy");
    let archive = node.try_import(&Image::probe(&node.probe(), "import").oci_archive("local/app:1"));
    assert!(archive.expect_err("refused").contains("/absent/key.pub"));
    policy(fixture.folder(), &json!({ "default": [{ "type": "insecureAcceptAnything" }] }));
    hang_up(&node);
    wait_until("it is read", || condition(&node).is_some_and(|condition| condition.status));
    node.pull_image(pull(&name)).expect("pull");
    policy(fixture.folder(), &broken);
    hang_up(&node);
    wait_until("it is known", || condition(&node).is_some_and(|condition| !condition.status));
    assert!(condition(&node).expect("a condition").message.contains("stays in force"));
    node.pull_image(pull(&name)).expect("the policy before is in force");
    node.stop();
    fixture.stop();
}

/// Archives are judged on a node: from the command, and in an import directory.
#[test]
fn archives_with_their_signature_are_imported_and_others_are_not() {
    let fixture = Node::start();
    let pair = Pair::new(fixture.folder(), "key");
    let required = json!({ "default": [{ "type": "cosign", "keyPath": pair.public() }] });
    let config = policy(fixture.folder(), &required);
    let node = Node::with(Options { config, ..Options::default() });
    let import = node.folder().join("import");
    std::fs::create_dir_all(&import).expect("a directory");
    let image = |marker: &str| Image::probe(&node.probe(), marker);
    let before = layers(&node);
    let refused = node.try_import(&image("a").oci_archive("localhost/a:1")).expect_err("refused");
    assert!(refused.contains("has no signature"), "{refused}");
    let other = Pair::new(fixture.folder(), "other").signed_archive(&image("a"), "localhost/a:1");
    let refused = node.try_import(&other).expect_err("refused");
    assert!(refused.contains("it was not made by"), "{refused}");
    assert_eq!(layers(&node), before, "nothing is unpacked");
    node.try_import(&pair.signed_archive(&image("a"), "localhost/a:1")).expect("import");
    assert!(find(&node, "localhost/a:1").is_some_and(|image| !image.pinned));

    let put = |name: &str, bytes: &[u8]| {
        std::fs::write(import.join("part"), bytes).expect("an archive");
        std::fs::rename(import.join("part"), import.join(name)).expect("an archive");
    };
    put("unsigned.tar", &image("b").oci_archive("localhost/b:1"));
    put("signed.tar", &pair.signed_archive(&image("c"), "localhost/c:1"));
    wait_until("the signed one is there", || find(&node, "localhost/c:1").is_some_and(|image| image.pinned));
    wait_until("the other is refused", || node.log().contains("images not imported"));
    assert!(find(&node, "localhost/b:1").is_none() && node.log().contains("has no signature"));
    put("unsigned.tar", &pair.signed_archive(&image("b"), "localhost/b:1"));
    wait_until("its next version is there", || find(&node, "localhost/b:1").is_some());
    let checked = said(&node, &["image", "check", "--policy"]);
    assert!(checked.matches(&format!("cosign: key {}", pair.public())).count() >= 3, "{checked}");
    node.stop();
    fixture.stop();
}

/// A neighbour has layers, and says nothing about who made them.
#[test]
fn neighbours_are_not_asked_for_signatures() {
    let port = ports(1)[0];
    let served = config(Some(port), &[], "open = true\n");
    let first = Node::with(Options { config: served, ..Options::default() });
    let registry = Registry::start(first.folder());
    let pair = Pair::new(first.folder(), "key");
    let signed = registry.push(&Image::probe(&first.probe(), "shared"), "team/app", "1");
    let name = registry.name("team/app", "1");
    first.pull_image(pull(&name)).expect("pull");
    let neighbour = Faulty::start(local(port), |_, _| Fault::None);
    let required = policy(first.folder(), &signed_by(&pair, &registry.address().to_string()));
    let asks = config(None, &[local(neighbour.address().port())], "");
    let node = Node::with(Options { config: asks + &required, ..Options::default() });
    let refused = node.pull_image(pull(&name)).expect_err("refused");
    assert!(refused.message().contains("has no signature"), "{refused}");
    pair.sign(&registry, "team/app", &signed);
    node.pull_image(pull(&name)).expect("pull");
    let asked = neighbour.served();
    let paths: Vec<&str> = asked.iter().map(|served| served.head.second()).collect();
    assert!(paths.iter().any(|path| path.contains("/blobs/")), "its layer comes from there: {paths:?}");
    let is_of_signature = |path: &&str| path.contains(".sig") || path.contains("referrers");
    assert!(!paths.iter().any(is_of_signature), "{paths:?}");
    node.stop();
    first.stop();
}

/// A mirror that has no signatures, others, or none that it shows, is no reason to refuse what the registry's signatures prove; and a mirror
/// that has them is sufficient.
#[test]
fn a_mirror_without_signatures_or_with_others_hides_none_of_the_registry() {
    let Site { fixture, registry, pair, node } = Site::start();
    let signed = registry.push(&Image::probe(&node.probe(), "mirrored"), "team/app", "1");
    pair.sign_as("app.invalid/team/app", &registry, "team/app", &signed);
    let index = "application/vnd.oci.image.index.v1+json";
    let stranger = json!({ "layers": [{ "mediaType": SIMPLE, "digest": digest(b"other"), "size": 5 }] });
    let pulled_from = |endpoints: &[String]| {
        let endpoints = endpoints.join("\", \"");
        let yaml = format!("mirrors: {{app.invalid: {{endpoint: [\"{endpoints}\"]}}}}\n");
        std::fs::write(node.folder().join("registries.yaml"), yaml).expect("the node's registries");
        node.pull_image(pull("app.invalid/team/app:1"))
    };
    let upstream = format!("http://{}", registry.address());
    for (lie, answer) in [
        ("absent", Fault::Status(404, None)),
        ("broken", Fault::Status(503, None)),
        ("denied", Fault::Status(403, None)),
        (
            "stranger",
            Fault::raw("200 OK", &[&format!("Content-Type: {MANIFEST}")], stranger.to_string().as_bytes()),
        ),
        ("empty", Fault::raw("200 OK", &[&format!("Content-Type: {index}")], br#"{"manifests":[]}"#)),
    ] {
        let mirror = Faulty::start(registry.address(), move |head, _| {
            match head.second().contains(".sig") || head.second().contains("referrers/") {
                true => answer.clone(),
                false => Fault::None,
            }
        });
        let mirror_url = format!("http://{}", mirror.address());
        pulled_from(&[mirror_url.clone(), upstream.clone()]).unwrap_or_else(|error| panic!("{lie}: {error}"));
        let asked = mirror.served().iter().any(|served| served.head.second().contains(".sig"));
        assert!(asked, "{lie}: the mirror was asked first");
        let is_of_signatures = |served: &&Served| {
            served.head.second().contains(".sig") || served.head.second().contains("referrers/")
        };
        let count = mirror.served().iter().filter(is_of_signatures).count();
        assert!(lie != "broken" || count == 1, "{count}: a mirror that does not answer takes no more time");
        let refused = pulled_from(&[mirror_url]).expect_err(lie);
        assert!(refused.message().contains("without them: "), "{lie}: {refused}");
    }
    pulled_from(&[upstream]).expect("the mirror has the signatures, and the registry cannot be reached");
    node.stop();
    fixture.stop();
}

/// A registry that attaches anything: no list and no signature is believed, and none of it is endless.
#[test]
fn a_lying_registry_attaches_nothing_that_counts() {
    let Site { fixture, registry, pair, node } = Site::start();
    let other = digest(b"other");
    let layer =
        |media_type: &str, size: usize| json!({ "mediaType": media_type, "digest": other, "size": size });
    let lies = [
        ("text", json!({ "layers": [layer("text/plain", 5)] }), "has no signature"),
        ("long", json!({ "layers": [layer(SIMPLE, 1 << 30)] }), "longer than 131072 bytes"),
        ("absent", json!({ "layers": [layer(SIMPLE, 5)] }), "not found"),
        ("list", json!({ "layers": "no list" }), "invalid type"),
        (
            "path",
            json!({ "layers": [{ "mediaType": SIMPLE, "digest": "../../x", "size": 5 }] }),
            "is not a sha256 digest",
        ),
        ("many", json!({ "layers": vec![layer("text/plain", 5); 20_000] }), "has no signature"),
    ];
    for (repository, manifest, words) in lies {
        registry.push(&Image::probe(&node.probe(), repository), repository, "1");
        let manifest = manifest.to_string().into_bytes();
        let liar = Faulty::start(registry.address(), move |head, _| match head.second().contains(".sig") {
            true => Fault::raw("200 OK", &[&format!("Content-Type: {MANIFEST}")], &manifest),
            false => Fault::None,
        });
        let refused = node.pull_image(pull(&liar.name(repository, "1"))).expect_err("refused");
        assert!(refused.message().contains(words), "{repository}: {refused}");
    }
    beside(&node, &registry, &pair, &other);
    let gone = Faulty::start(registry.address(), |head, _| match head.second().contains("referrers/") {
        true => Fault::Status(503, None),
        false => Fault::None,
    });
    let refused = node.pull_image(pull(&gone.name("text", "1"))).expect_err("refused");
    assert!(
        !refused.message().contains("SignatureValidationFailed"),
        "a registry that is down is not unsigned: {refused}"
    );
    // What it answers is sufficient, and the rest is not asked for.
    let signed = registry.push(&Image::probe(&node.probe(), "half"), "half", "1");
    pair.sign_as(&gone.name("half", "1"), &registry, "half", &signed);
    node.pull_image(pull(&gone.name("half", "1"))).expect("pull");
    let asked = |served: &Served| served.head.second().contains("half/referrers/");
    assert!(!gone.served().iter().any(asked), "{:?}", gone.served());
    node.stop();
    fixture.stop();
}

/// Whatever is attached beside a signature, it counts; and a refusal says what was not looked at.
fn beside(node: &Node, registry: &Registry, pair: &Pair, other: &str) {
    let signed = registry.push(&Image::probe(&node.probe(), "beside"), "beside", "1");
    let bundle = "application/vnd.dev.sigstore.bundle.v0.3+json";
    let foreign =
        json!({ "manifests": vec![json!({ "digest": other, "size": 5, "artifactType": bundle }); 100] });
    let foreign = foreign.to_string().into_bytes();
    let crowded =
        Faulty::start(registry.address(), move |head, _| match head.second().contains("referrers/") {
            true => Fault::raw(
                "200 OK",
                &["Content-Type: application/vnd.oci.image.index.v1+json", "Link: </v2/x>; rel=\"next\""],
                &foreign,
            ),
            false => Fault::None,
        });
    pair.sign_as(&crowded.name("beside", "1"), registry, "beside", &signed);
    node.pull_image(pull(&crowded.name("beside", "1"))).expect("pull");
    let refused = node.pull_image(pull(&crowded.name("text", "1"))).expect_err("refused");
    for words in ["more than 32 referrers are not looked at", "only the first part of the list", "not found"]
    {
        assert!(refused.message().contains(words), "{refused}");
    }
}
