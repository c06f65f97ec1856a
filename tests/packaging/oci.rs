//! The OCI image of the programs, imported and run by a node.

use std::process::Command;

use coracle_tests::node::{Node, binaries};

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
    node.stop();

    let listed = run(Command::new("tar").arg("-tvf").arg(&archive).env("TZ", "UTC"));
    assert!(said(&listed).lines().all(|line| line.contains(" 0/0 ")), "{}", said(&listed));
}
