//! Checks cross.toml with the real `cross`. Scripts replace the container engine and rustup and record their
//! arguments, so neither an engine nor a network is needed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::{Folder, run, said, workspace};

const TRIPLES: [&str; 2] = ["aarch64-unknown-linux-musl", "x86_64-unknown-linux-musl"];

/// Acts as docker, and records each call on a line.
const DOCKER: &str = "#!/bin/sh\n[ \"$1\" = --help ] && { echo 'Usage: docker'; exit 0; }\n\
    for word; do printf '%s\\t' \"$word\"; done >>\"$RECORD\"\necho >>\"$RECORD\"\n";

/// Reports all toolchains as installed; otherwise cross would download them.
const RUSTUP: &str = "#!/bin/sh\ncase \"$*\" in\n\
    *'toolchain list'*) echo 'stable-x86_64-unknown-linux-gnu (default)' ;;\n\
    *'target list'*) printf '%s (installed)\\n' x86_64-unknown-linux-gnu x86_64-unknown-linux-musl aarch64-unknown-linux-musl ;;\n\
    *'component list'*) echo 'rust-src (installed)' ;;\n\
    *) exit 9 ;;\nesac\n";

/// Runs `cross build` with a configuration; returns whether it succeeded, its output, and the arguments of
/// `docker run`.
fn cross(folder: &Folder, config: &Path, triple: &str, engine: &str) -> (bool, String, Vec<String>) {
    for (name, text) in [(engine, DOCKER), ("rustup", RUSTUP)] {
        let path = folder.write(&format!("bin/{name}"), text);
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is ours");
    }
    let record = folder.write("record", "");
    let path =
        format!("{}:{}", folder.path().join("bin").display(), std::env::var("PATH").unwrap_or_default());
    let output = run(Command::new("cross")
        .args(["build", "--release", "--target", triple, "-p", "coracled", "-p", "coracle"])
        .current_dir(workspace())
        .env("PATH", path)
        .env("CROSS_CONFIG", config)
        .env("CROSS_CONTAINER_ENGINE", folder.path().join("bin").join(engine))
        .env("RECORD", &record)
        .env("SOURCE_DATE_EPOCH", "1780000000")
        // Variables of the cargo that runs this test.
        .env_remove("CARGO")
        .env_remove("RUSTUP_TOOLCHAIN"));
    let record = fs::read_to_string(record).expect("our record");
    let calls: Vec<Vec<String>> =
        record.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect();
    let call = calls.into_iter().find(|words| words.first().is_some_and(|word| word == "run"));
    (output.status.success(), said(&output), call.unwrap_or_default())
}

/// Whether cross warned about an unknown key, which does not fail the build.
fn complains(said: &str) -> bool {
    said.contains("unused key") || said.contains("[cross] warning") || said.contains("[cross] error")
}

#[test]
fn cross_applies_the_settings_of_the_file() {
    let folder = Folder::new("cross");
    for (triple, runner) in TRIPLES.into_iter().zip(["qemu-user", "native"]) {
        for engine in ["docker", "podman"] {
            let (is_fine, said, words) = cross(&folder, Path::new("cross.toml"), triple, engine);
            assert!(is_fine && !complains(&said), "{triple}: {said}");
            let all = words.join(" ");
            let has = |part: &str| assert!(all.contains(part), "{triple}, {engine}: no {part} in {all}");
            // The image of this target and of cross' version.
            has(&format!("cross-rs/{triple}:0.2.5"));
            has(&format!("CROSS_RUNNER={runner}"));
            has("-e SOURCE_DATE_EPOCH");
            has(&format!("cargo build --release --target {triple} -p coracled -p coracle"));
            let mounts: Vec<&String> =
                words.windows(2).filter(|pair| pair[0] == "-v").map(|pair| &pair[1]).collect();
            let mounted = |end: &str| mounts.iter().any(|mount| mount.contains(end));
            // The sources, cargo's directory, and this machine's compiler.
            assert!(mounted(&workspace().display().to_string()), "{mounts:?}");
            assert!(mounted("/cargo") && mounted(":/rust"), "{mounts:?}");
        }
    }
}

#[test]
fn cross_reports_a_wrong_key_or_type() {
    let folder = Folder::new("cross-wrong");
    let ours = fs::read_to_string(workspace().join("cross.toml")).expect("cross.toml");
    for (from, to) in
        [("passthrough", "passthru"), ("runner =", "runer ="), ("\"native\"", "7"), ("[build.env]", "[build")]
    {
        assert!(ours.contains(from), "{from} is in the file");
        let config = folder.write("wrong.toml", &ours.replacen(from, to, 1));
        let (is_fine, said, _) = cross(&folder, &config, TRIPLES[0], "docker");
        assert!(!is_fine || complains(&said), "{to} passed: {said}");
    }
}

#[test]
fn the_file_lists_exactly_the_supported_targets() {
    let text = fs::read_to_string(workspace().join("cross.toml")).expect("cross.toml");
    let config: toml::Table = text.parse().expect("TOML");
    let targets = config["target"].as_table().expect("targets");
    assert_eq!(targets.keys().collect::<Vec<_>>(), TRIPLES);
    for (name, target) in targets {
        // cross does not check the value.
        let runner = target["runner"].as_str().expect("a runner");
        assert!(["native", "qemu-user"].contains(&runner), "{name}: {runner}");
    }
}
