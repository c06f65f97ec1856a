//! Properties of the release programs, which guests use: size, static linking, and reproducibility.

use std::path::PathBuf;
use std::process::Command;

use crate::disk::{built, workspace};
use crate::target::Arch;

const PROGRAMS: [&str; 3] = ["coracled", "coracle", "coracle-pod"];

#[test]
fn programs_of_both_targets_are_static_and_within_their_limit() {
    let triples = Arch::ALL.map(Arch::triple);
    let output = Command::new(workspace().join("packaging/sizes")).args(triples).output().expect("it runs");
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Paths of the source tree, cargo's sources and the compiler on this machine, which would make builds
/// differ.
fn places() -> Vec<PathBuf> {
    let home = || PathBuf::from(std::env::var_os("HOME").expect("a home")).join(".cargo");
    let cargo = std::env::var_os("CARGO_HOME").map_or_else(home, PathBuf::from);
    let output = Command::new("rustc").args(["--print", "sysroot"]).output().expect("rustc runs");
    let sysroot = String::from_utf8(output.stdout).expect("a path");
    vec![workspace().to_owned(), cargo, PathBuf::from(sysroot.trim())]
}

#[test]
fn programs_contain_no_paths_of_the_build_machine() {
    let places = places();
    for arch in Arch::ALL {
        for name in PROGRAMS {
            let program = built(arch, "release").join(name);
            let bytes = std::fs::read(&program).expect("a program: make guests");
            for place in &places {
                let place = place.as_os_str().as_encoded_bytes();
                let is_there = bytes.windows(place.len()).any(|window| window == place);
                assert!(!is_there, "{}: {}", program.display(), String::from_utf8_lossy(place));
            }
        }
    }
}
