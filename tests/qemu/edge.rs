//! The example edge node (targets/edge) boots from its image, runs a pod, and serves its page.

use std::process::Command;

use crate::disk::workspace;
use crate::target::Arch;

#[track_caller]
fn boots(arch: Arch) {
    for (program, words) in [("image", vec![arch.name()]), ("run", vec!["--test", arch.name()])] {
        let program = workspace().join("targets/edge").join(program);
        let output = Command::new(&program).args(words).output().expect("the script runs");
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
