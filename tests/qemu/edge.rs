//! The example edge node (targets/edge) boots from its image, runs a pod, and serves its page.

use std::path::PathBuf;
use std::process::Command;

use crate::disk::workspace;
use crate::target::Arch;

/// Directory of the programs that the image of `arch` gets: the release's on this machine's architecture, and on the other
/// one those of the shortest build (`make other-programs`).
fn programs(arch: Arch) -> PathBuf {
    let profile = if arch.name() == std::env::consts::ARCH { "release" } else { "debug" };
    workspace().join(format!("target/{}-unknown-linux-musl/{profile}", arch.name()))
}

#[track_caller]
fn boots(arch: Arch) {
    for (program, words) in [("image", vec![arch.name()]), ("run", vec!["--test", arch.name()])] {
        let program = workspace().join("targets/edge").join(program);
        let output = Command::new(&program)
            .args(words)
            .env("CORACLE_PROGRAMS", programs(arch))
            .output()
            .expect("the script runs");
        let said = String::from_utf8_lossy(&output.stdout).replace('\r', "");
        for line in said.lines().filter(|line| line.starts_with("edge: ")) {
            println!("{}: {line}", arch.name());
        }
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}{complaint}", program.display());
    }
}

#[test]
fn an_edge_node_on_x86_64_runs_a_pod() {
    boots(Arch::X86_64);
}

#[test]
fn an_edge_node_on_aarch64_runs_a_pod() {
    boots(Arch::Aarch64);
}
