//! cross.toml, read by the real `cross`: with stand-ins for the container engine and for rustup that record what they are asked,
//! since neither an engine nor a network is needed to see the command that an engine would be given.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::{Folder, run, said, workspace};

const TRIPLES: [&str; 2] = ["aarch64-unknown-linux-musl", "x86_64-unknown-linux-musl"];

/// Says that it is docker, and records each call on a line.
const DOCKER: &str = "#!/bin/sh\n[ \"$1\" = --help ] && { echo 'Usage: docker'; exit 0; }\n\
    for word; do printf '%s\\t' \"$word\"; done >>\"$RECORD\"\necho >>\"$RECORD\"\n";

/// Everything is installed: cross would otherwise add toolchains over the network.
const RUSTUP: &str = "#!/bin/sh\ncase \"$*\" in\n\
    *'toolchain list'*) echo 'stable-x86_64-unknown-linux-gnu (default)' ;;\n\
    *'target list'*) printf '%s (installed)\\n' x86_64-unknown-linux-gnu x86_64-unknown-linux-musl aarch64-unknown-linux-musl ;;\n\
    *'component list'*) echo 'rust-src (installed)' ;;\n\
    *) exit 9 ;;\nesac\n";

/// Runs `cross build` with a configuration; gives whether it was content, what it said, and the words of `docker run`.
fn cross(folder: &Folder, config: &Path, triple: &str, engine: &str) -> (bool, String, Vec<String>) {
    for (name, text) in [(engine, DOCKER), ("rustup", RUSTUP)] {
        let path = folder.write(&format!("bin/{name}"), text);
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is ours");
    }
    let record = folder.write("record", "");
    let path =
        format!("{}:{}", folder.path().join("bin").display(), std::env::var("PATH").unwrap_or_default());
    let output = run(Command::new("cross")
        .args(["build", "--release", "--target", triple, "-p", "coracle", "-p", "coracle-worker"])
        .current_dir(workspace())
        .env("PATH", path)
        .env("CROSS_CONFIG", config)
        .env("CROSS_CONTAINER_ENGINE", folder.path().join("bin").join(engine))
        .env("RECORD", &record)
        .env("SOURCE_DATE_EPOCH", "1780000000")
        // Those of the cargo that runs this test.
        .env_remove("CARGO")
        .env_remove("RUSTUP_TOOLCHAIN"));
    let record = fs::read_to_string(record).expect("our record");
    let calls: Vec<Vec<String>> =
        record.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect();
    let call = calls.into_iter().find(|words| words.first().is_some_and(|word| word == "run"));
    (output.status.success(), said(&output), call.unwrap_or_default())
}

/// Unknown keys are a warning to cross, and the build goes on without what they were to say.
fn complains(said: &str) -> bool {
    said.contains("unused key") || said.contains("[cross] warning") || said.contains("[cross] error")
}

#[test]
fn cross_reads_our_file_as_we_mean_it() {
    let folder = Folder::new("cross");
    for (triple, runner) in TRIPLES.into_iter().zip(["qemu-user", "native"]) {
        for engine in ["docker", "podman"] {
            let (is_fine, said, words) = cross(&folder, Path::new("cross.toml"), triple, engine);
            assert!(is_fine && !complains(&said), "{triple}: {said}");
            let all = words.join(" ");
            let has = |part: &str| assert!(all.contains(part), "{triple}, {engine}: no {part} in {all}");
            // The tool's own image of this target, at the tool's own version.
            has(&format!("cross-rs/{triple}:0.2.5"));
            has(&format!("CROSS_RUNNER={runner}"));
            has("-e SOURCE_DATE_EPOCH");
            has(&format!("cargo build --release --target {triple} -p coracle -p coracle-worker"));
            let mounts: Vec<&String> =
                words.windows(2).filter(|pair| pair[0] == "-v").map(|pair| &pair[1]).collect();
            let mounted = |end: &str| mounts.iter().any(|mount| mount.contains(end));
            // The sources, cargo's folder, and this machine's compiler.
            assert!(mounted(&workspace().display().to_string()), "{mounts:?}");
            assert!(mounted("/cargo") && mounted(":/rust"), "{mounts:?}");
        }
    }
}

#[test]
fn a_wrong_key_or_type_in_it_is_told() {
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
fn every_target_of_the_file_is_ours_and_every_runner_is_known() {
    let text = fs::read_to_string(workspace().join("cross.toml")).expect("cross.toml");
    let config: toml::Table = text.parse().expect("TOML");
    let targets = config["target"].as_table().expect("targets");
    assert_eq!(targets.keys().collect::<Vec<_>>(), TRIPLES);
    for (name, target) in targets {
        // cross does not look at the value.
        let runner = target["runner"].as_str().expect("a runner");
        assert!(["native", "qemu-user"].contains(&runner), "{name}: {runner}");
    }
}
