//! Programs that decide whether an image may be pulled: their input, their verdicts, and their ends. `tests/compare` has what containerd
//! does with the same programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_tests::host::{self, wait_until, write_program};
use coracle_tests::image::{Image, MANIFEST};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::{Demand, Lie, Proxy, Registry};
use coracle_tests::request::pull;
use coracle_tests::signing;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::find;

/// A registry with an image `app:1`, and a node that asks the programs of a directory.
struct Site {
    fixture: Node,
    registry: Registry,
    digest: String,
    programs: PathBuf,
    node: Node,
}

impl Site {
    /// `more`: lines of the section image.policy.
    fn start(more: &str) -> Self {
        let fixture = Node::start();
        let registry = Registry::start(fixture.folder());
        let digest = registry.push(&Image::probe(&fixture.probe(), "verified"), "app", "1");
        let programs = fixture.folder().join("verifiers");
        fs::create_dir(&programs).expect("a directory");
        let config = format!("[image.policy]\nverifiers = {programs:?}\n{more}");
        let node = Node::with(Options { config, ..Options::default() });
        Self { fixture, registry, digest, programs, node }
    }

    /// Replaces the programs.
    fn set(&self, programs: &[(&str, &str)]) {
        for entry in fs::read_dir(&self.programs).expect("a directory").flatten() {
            fs::remove_file(entry.path()).expect("a program");
        }
        for (name, script) in programs {
            write_program(&self.programs.join(name), &format!("#!/bin/sh\n{script}\n"));
        }
    }

    fn name(&self) -> String {
        self.registry.name("app", "1")
    }

    /// The text of the refusal; the kubelet knows the reason by its prefix.
    fn refusal(&self) -> String {
        let refused = self.node.pull_image(pull(&self.name())).expect_err("refused");
        assert_eq!(refused.code(), tonic::Code::Unknown);
        assert!(refused.message().starts_with("SignatureValidationFailed: pull image "), "{refused}");
        refused.message().to_owned()
    }

    fn stop(self) {
        self.node.stop();
        self.fixture.stop();
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn said(node: &Node, words: &[&str]) -> String {
    let output = node.tool(words);
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn programs_see_the_image_and_decide_before_a_layer_is_requested() {
    let site = Site::start("");
    let seen = site.fixture.folder().join("seen");
    let proxy = Proxy::start(site.registry.address(), Demand::Nothing, Lie::None);
    let name = proxy.name("app", "1");
    let record = format!(
        "echo \"$@\" >{seen:?}; cat >>{seen:?}; umask >>{seen:?}; ulimit -v >>{seen:?}; \
         grep SigBlk /proc/self/status >>{seen:?}; echo '  no, by   policy  '; echo quietly >&2; exit 3"
    );
    site.set(&[("10-first", &record), ("20-second", "echo fine")]);
    let refused = site.node.pull_image(pull(&name)).expect_err("refused");
    for words in
        ["SignatureValidationFailed: ", "verifier 10-first refuses the image: no, by policy (exit status: 3)"]
    {
        assert!(refused.message().contains(words), "{refused}");
    }
    let requests = proxy.seen();
    let blobs = requests.iter().filter(|line| line.contains("/blobs/")).count();
    assert_eq!(blobs, 1, "the config and no layer: {requests:?}");
    let size = Image::probe(&site.fixture.probe(), "verified").manifest().len();
    let expected = format!(
        "-name {name} -digest {digest} -stdin-media-type application/vnd.oci.descriptor.v1+json\n\
         {{\"mediaType\":\"{MANIFEST}\",\"digest\":\"{digest}\",\"size\":{size}}}\n0022\nunlimited\nSigBlk:\t0000000000000000\n",
        digest = site.digest
    );
    assert_eq!(read(&seen), expected);
    assert!(site.node.log().contains("image verifier 10-first"), "standard error is in the log");

    site.set(&[("10-first", "echo signed by us"), ("20-second", "")]);
    site.node.pull_image(pull(&name)).expect("pull");
    let why = said(&site.node, &["why", &name]);
    assert!(
        why.contains("verifier 10-first: signed by us") && why.contains("verifier 20-second: accepted"),
        "{why}"
    );
    let explained = said(&site.node, &["image", "explain", &name]);
    assert!(
        explained.contains("verifiers/10-first") && explained.contains("verifiers/20-second"),
        "{explained}"
    );

    // By its digest the store has it, and the programs are asked about each pull.
    site.set(&[("10-first", "exit 1")]);
    let by_digest = format!("{}/app@{}", proxy.address(), site.digest);
    let refused = site.node.pull_image(pull(&by_digest)).expect_err("refused");
    assert!(
        refused.message().contains("verifier 10-first refuses the image: no reason printed"),
        "{refused}"
    );
    site.stop();
}

#[test]
fn a_program_without_a_verdict_refuses_the_image_and_leaves_nothing() {
    let site = Site::start("verifier_timeout = \"700ms\"\n");
    let left = |marker: &str| !host::processes(&format!("sleep {marker}")).is_empty();
    for (script, words) in [
        ("kill -9 $$", "(signal: 9 (SIGKILL))"),
        ("sleep 98761 & setsid sleep 98761 & exec sleep 98761", "did not end within 700 ms and was killed"),
        ("exec yes", "did not end within 700 ms and was killed"),
        ("head -c 3000000 /dev/zero | tr '\\0' x; exit 1", "xxx… (exit status: 1)"),
        ("exit 1; \n", "no reason printed (exit status: 1)"),
        ("echo why >&2; exit 1", "refuses the image: why (exit status: 1)"),
    ] {
        site.set(&[("one", script)]);
        let begun = Instant::now();
        let text = site.refusal();
        let expected = words.split('…').all(|part| text.contains(part));
        assert!(expected && text.contains("verifier one "), "{script}: {text}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{script}");
        wait_until("no process is left", || !left("98761"));
    }
    // Files that cannot be executed, or that others may change, are no verifiers.
    site.set(&[]);
    assert!(site.refusal().contains("has no program"), "empty");
    fs::write(site.programs.join("README"), "text").expect("a file");
    assert!(site.refusal().contains("README: it is no executable file"), "a text");
    site.set(&[("broken", "")]);
    write_program(&site.programs.join("broken"), "#!/absent/interpreter\n");
    assert!(site.refusal().contains("broken: no such file or directory"), "no interpreter");
    site.set(&[("open", "")]);
    let writable = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(site.programs.join("open"), writable).expect("a mode");
    assert!(site.refusal().contains("open: it must be owned by root"), "a program that all users may write");

    // Processes that a program leaves behind, also in sessions of their own, do not delay its verdict, and end with it.
    site.set(&[("one", "sleep 98762 & (setsid sleep 98762 &) & sleep 0.1; echo done")]);
    site.node.pull_image(pull(&site.name())).expect("pull");
    wait_until("no process is left", || !left("98762"));
    site.stop();
}

/// The programs end with the worker, also what they have started.
#[test]
fn programs_end_with_their_pull() {
    let mut site = Site::start("verifier_timeout = \"60s\"\n");
    site.set(&[("slow", "setsid sleep 98763 & exec sleep 98763")]);
    let running = || host::processes("sleep 98763").len();
    std::thread::scope(|scope| {
        let pulling = scope.spawn(|| site.node.pull_image(pull(&site.name())));
        wait_until("the program runs", || running() == 2);
        kill(Pid::from_raw(site.node.pid()), Signal::SIGKILL).expect("the daemon is ours");
        pulling.join().expect("a thread").expect_err("the daemon has ended");
    });
    wait_until("the programs have ended", || running() == 0);
    site.node.kill9();
    site.set(&[("slow", "echo fine")]);
    site.node.launch();
    site.node.pull_image(pull(&site.name())).expect("pull");
    site.stop();
}

#[test]
fn the_policy_and_all_programs_must_accept_and_sighup_reads_the_keys() {
    let site = Site::start("");
    let Site { node, fixture, programs, .. } = &site;
    let hang_up = || kill(Pid::from_raw(node.pid()), Signal::SIGHUP).expect("the daemon is ours");
    let refused = |config: &str, words: &str| {
        node.rewrite_config(config);
        hang_up();
        wait_until(words, || {
            let answer = node.pull_image(pull(&site.name()));
            answer.is_err_and(|status| status.message().contains(words))
        });
    };
    let asks = format!("verifiers = {programs:?}\n");
    let policy = |kind: &str| signing::policy(fixture.folder(), &json!({ "default": [{ "type": kind }] }));
    site.set(&[("one", "exit 1")]);
    refused(&(policy("insecureAcceptAnything") + &asks), "verifier one refuses the image");
    site.set(&[("one", "")]);
    refused(&(policy("reject") + &asks), "rule default[0], reject");
    node.rewrite_config(&(policy("insecureAcceptAnything") + &asks));
    hang_up();
    wait_until("both accept it", || node.pull_image(pull(&site.name())).is_ok());
    // An archive is brought by root of the node: no program is asked.
    site.set(&[("one", "exit 1")]);
    node.try_import(&Image::probe(&node.probe(), "brought").oci_archive("local/brought:1")).expect("import");
    assert!(find(node, "local/brought:1").is_some());
    refused(&asks.replace("verifiers =", "[image.policy]\nverifiers ="), "verifier one refuses the image");
    node.rewrite_config("");
    hang_up();
    wait_until("nothing judges", || node.pull_image(pull(&site.name())).is_ok());
    site.stop();
}
