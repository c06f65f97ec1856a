//! The nodes of lines about images and registries.

use std::fs;
use std::net::SocketAddr;

use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host::wait_until;
use coracle_tests::image::Image;
use coracle_tests::nginx::{Nginx, Wants};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::{Demand, Lie, Proxy, Registry};
use coracle_tests::request::pull;

use crate::line_runner::{LineRunner, text_of};

/// Fails unless a pull with the command line fails with this text.
#[track_caller]
fn fails_with(runner: &LineRunner, image: &str, symptom: &str) {
    let output = runner.run(&format!("coracle image pull {image}"));
    let text = text_of(&output);
    assert!(!output.status.success() && text.contains(symptom), "{symptom:?} is not in {text}");
}

fn mirror(node: &Node, endpoint: &str, more: &str) {
    let address = endpoint.split_once("://").expect("a URL").1;
    let text = format!("mirrors: {{\"{address}\": {{endpoint: [\"{endpoint}\"]}}}}\n{more}");
    fs::write(node.folder().join("registries.yaml"), text).expect("registries.yaml");
}

#[test]
fn a_registry_that_does_not_respond_is_explained() {
    let node = Node::start();
    let runner = LineRunner::of(&node).with("IMAGE", "127.0.0.1:1/app:1");
    fails_with(&runner, "127.0.0.1:1/app:1", "RegistryUnavailable: ");
    runner.run_group("unavailable");
    node.stop();
}

#[test]
fn a_registry_that_wants_credentials_is_explained() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "secret"), "app", "1");
    let proxy = Proxy::start(registry.address(), Demand::Basic("bWU6c2VjcmV0".into()), Lie::None);
    let name = proxy.name("app", "1");
    let runner = LineRunner::of(&node).with("IMAGE", &name);
    fails_with(&runner, &name, "unauthorized");
    runner.run_group("unauthorized");
    node.stop();
}

#[test]
fn an_image_for_another_machine_is_explained() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let mut image = Image::probe(&node.probe(), "s390x");
    image.architecture = "s390x".into();
    registry.push_index(&[image], "app", "1");
    let name = registry.name("app", "1");
    let runner = LineRunner::of(&node).with("IMAGE", &name);
    fails_with(&runner, &name, "no match for platform in manifest");
    fails_with(&runner, &name, "there is: linux/s390x");
    runner.run_group("platform");
    node.stop();
}

/// A registry behind TLS for a page, whose certificate the node does not trust.
fn untrusted(group: &str, symptom: &str, nginx: impl Fn(&Node, SocketAddr) -> Nginx) {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), group), "app", "1");
    let nginx = nginx(&node, registry.address());
    // Not a name of this machine, whose registries may have any certificate.
    let text = format!("mirrors: {{registry.test: {{endpoint: [\"https://{}\"]}}}}\n", nginx.address());
    fs::write(node.folder().join("registries.yaml"), text).expect("registries.yaml");
    let runner = LineRunner::of(&node);
    fails_with(&runner, "registry.test/app:1", symptom);
    runner.run_group(group);
    node.stop();
}

#[test]
fn a_certificate_that_signed_itself_is_named() {
    let symptom = "it signed itself, or an authority that this node does not trust signed it";
    untrusted("self-signed", symptom, |node, upstream| {
        Nginx::self_signed(node.folder(), "own", upstream, "127.0.0.1")
    });
}

#[test]
fn a_certificate_of_an_unknown_authority_is_named() {
    let symptom = "signed by an authority that this node does not trust";
    untrusted("authority", symptom, |node, upstream| {
        Nginx::start(node.folder(), "company", upstream, Wants::default())
    });
}

/// A server that answers every request with a page, as a captive portal does; curl trusts its certificate.
#[test]
fn a_captive_portal_is_explained() {
    let node = Node::start();
    let html = "<!DOCTYPE html><html><body>log in</body></html>";
    let portal = answering("200 OK\r\nContent-Type: text/html", html);
    let nginx = Nginx::start(node.folder(), "portal", portal, Wants::default());
    let trust = format!(
        "configs: {{\"{}\": {{tls: {{ca_file: {}}}}}}}\n",
        nginx.address(),
        nginx.file("ca.pem").display()
    );
    mirror(&node, &format!("https://{}", nginx.address()), &trust);
    let trusted = format!("curl --noproxy '*' --cacert {}", nginx.file("ca.pem").display());
    let runner = LineRunner::of(&node).with("REGISTRY", nginx.address()).with("curl", trusted);
    fails_with(&runner, &format!("{}/app:1", nginx.address()), "it answered with a web page (HTML)");
    runner.run_group("portal");
    node.stop();
}

/// Answers each request with this status and this body until the process ends.
fn answering(status: &'static str, body: &'static str) -> SocketAddr {
    use std::io::Write;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let Ok(reader) = stream.try_clone() else { continue };
            let Ok(head) = coracle_tests::http::read_head(&mut std::io::BufReader::new(reader)) else {
                continue;
            };
            let sent = if head.first.starts_with("HEAD ") { "" } else { body };
            let answer = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{sent}",
                body.len()
            );
            // A client that has disconnected needs no answer.
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    address
}

/// A registry that wants no retry soon, so that the pull fails at once.
#[test]
fn a_registry_with_a_limit_of_requests_is_counted() {
    let (node, metrics) = coracle_tests::prometheus::node_with_metrics();
    let limit = r#"{"errors": [{"code": "TOOMANYREQUESTS", "message": "toomanyrequests: slow down"}]}"#;
    let registry =
        answering("429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 3600", limit);
    let runner = LineRunner::of(&node).with("METRICS", metrics);
    fails_with(&runner, &format!("{registry}/app:1"), "toomanyrequests");
    runner.run_group("metrics");
    node.stop();
}

#[test]
fn a_broken_registries_yaml_is_named_with_its_line() {
    let mut node = Node::start();
    fs::write(node.folder().join("registries.yaml"), "mirrors: [\n").expect("registries.yaml");
    // All files are checked at the start.
    node.restart();
    let runner = LineRunner::of(&node);
    wait_until("the condition is false", || {
        let info = text_of(&runner.run("crictl info | grep -B3 RegistriesReadable"));
        info.contains("\"status\": false")
    });
    runner.run_group("registries");
    node.stop();
}

#[test]
fn a_full_disk_is_shown() {
    let folder = coracle_tests::node::base().join(format!("docs-full-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let disk = FreshDisk::new(&folder, 16);
    let node = Node::with(Options { root: Some(disk.path().join("root")), ..Options::default() });
    let registry = Registry::start(node.folder());
    let entries = [coracle_tests::layer::Entry::file("big", &vec![0; 20 << 20])];
    let layer = coracle_tests::layer::Layer::new(&entries, coracle_tests::layer::Compression::Plain);
    registry.push(&Image::of(vec![layer]), "big", "1");
    let runner = LineRunner::of(&node);
    fails_with(&runner, &registry.name("big", "1"), "no space left on device");
    runner.run_group("full");
    node.stop();
    drop(disk);
    fs::remove_dir_all(folder).expect("it is ours");
}

/// The registry sends nothing after the first bytes of a layer, until the line has run.
#[test]
fn a_pull_that_takes_long_is_shown() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "slow");
    registry.push(&image, "slow", "1");
    let proxy = Proxy::start(registry.address(), Demand::Nothing, Lie::Stall);
    let name = proxy.name("slow", "1");
    let client = node.another();
    let runner = LineRunner::of(&node);
    std::thread::scope(|scope| {
        scope.spawn(|| client.pull_image(pull(&name)));
        wait_until("the pull is listed", || {
            text_of(&runner.run("coracle image list --pulling")).contains(&name)
        });
        runner.run_group("slow-pull");
        node_ends_pulls(&node);
    });
    node.stop();
}

/// Kills the workers of a node, which ends its pulls.
fn node_ends_pulls(node: &Node) {
    for worker in node.workers() {
        let _ =
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker.pid), nix::sys::signal::Signal::SIGKILL);
    }
}

#[test]
fn the_selection_of_the_page_is_printed_for_its_files() {
    let node = Node::start();
    let ca =
        Nginx::start(node.folder(), "mirror", "127.0.0.1:1".parse().expect("an address"), Wants::default());
    let pem = node.folder().join("mirror.pem");
    fs::copy(ca.file("ca.pem"), &pem).expect("a certificate");
    let text = format!(
        "mirrors:\n  docker.io:\n    endpoint:\n      - \"https://mirror.example:5000\"\nconfigs:\n  \
         \"mirror.example:5000\":\n    auth:\n      username: me\n      password: secret\n    tls:\n      ca_file: {}\n",
        pem.display()
    );
    fs::write(node.folder().join("registries.yaml"), text).expect("registries.yaml");
    LineRunner::of(&node).run_group("explained");
    node.stop();
}

#[test]
fn without_kept_blobs_check_says_readable() {
    let mut node =
        Node::with(Options { config: "[image]\nkeep_blobs = false\n".into(), ..Options::default() });
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "thin"), "thin", "1");
    node.pull_image(pull(&registry.name("thin", "1"))).expect("pull");
    LineRunner::of(&node).run_group("no-blobs");
    node.restart();
    node.stop();
}

#[test]
fn a_damaged_layer_is_found_and_repaired() {
    let node = Node::start();
    node.import_probe();
    let layers = fs::read_dir(node.root().join("layers")).expect("layers").flatten();
    let mut markers = layers.map(|layer| layer.path().join("etc/marker")).chain(
        fs::read_dir(node.root().join("layers"))
            .expect("layers")
            .flatten()
            .map(|layer| layer.path().join("diff/etc/marker")),
    );
    let marker = markers.find(|path| path.exists()).expect("the marker of the probe's image");
    fs::write(marker, "damaged").expect("a file of the layer");
    LineRunner::of(&node).run_group("damaged-layer");
    node.stop();
}
