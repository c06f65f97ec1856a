//! The OCI image of the programs: imported and run by a node, and copied into a registry by skopeo as its page says.

use std::path::Path;
use std::process::Command;

use coracle_tests::node::{Node, binaries};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;

use crate::{EPOCH, Folder, release, run, said};

#[test]
fn the_image_of_a_release_is_imported_and_runs() {
    let folder = Folder::new("oci");
    let programs = binaries();
    let out = folder.path().join("out");
    // Both platforms, as in a release, and the programs of this machine in each.
    let triples = ["aarch64-unknown-linux-musl", "x86_64-unknown-linux-musl"];
    release(&out, &programs, EPOCH, "oci", &triples);
    let version = env!("CARGO_PKG_VERSION");
    let archive = out.join(format!("coracle-{version}-oci.tar"));
    let node = Node::start();
    let text = std::fs::read(&archive).expect("an archive");
    node.try_import(&text).unwrap_or_else(|error| panic!("import: {error}"));
    let name = format!("localhost/coracle:{version}");
    let (output, status) = node.once(&name, &["version"], |_| ());
    assert_eq!(status.exit_code, 0, "{output}");
    assert!(output.contains(&format!("coracle {version} ")), "{output}");
    copied_by_skopeo_it_has_both_platforms(&node, &archive);
    node.stop();

    let listed = run(Command::new("tar").arg("-tvf").arg(&archive).env("TZ", "UTC"));
    assert!(said(&listed).lines().all(|line| line.contains(" 0/0 ")), "{}", said(&listed));
}

/// skopeo's `--all` copies the index, from which a node of either platform pulls; without it, only this machine's image.
#[track_caller]
fn copied_by_skopeo_it_has_both_platforms(node: &Node, archive: &Path) {
    let registry = Registry::start(node.folder());
    let version = env!("CARGO_PKG_VERSION");
    let name = registry.name("coracle", version);
    let command = format!(
        "skopeo copy --all --dest-tls-verify=false oci-archive:{}:{version} docker://{name}",
        archive.display()
    );
    let copied = run(Command::new("sh").args(["-c", &command]));
    assert!(copied.status.success(), "{}", said(&copied));
    node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("pull: {error}"));
    let (output, status) = node.once(&name, &["version"], |_| ());
    assert_eq!(status.exit_code, 0, "{output}");
    let raw = ["inspect", "--raw", "--tls-verify=false", &format!("docker://{name}")];
    let index = said(&run(Command::new("skopeo").args(raw)));
    for architecture in ["amd64", "arm64"] {
        assert!(index.contains(&format!("\"architecture\":\"{architecture}\"")), "{index}");
    }
}
