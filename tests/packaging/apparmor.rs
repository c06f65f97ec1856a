//! The compiled AppArmor profile in the daemon matches its source.

use std::fs;
use std::process::Command;

use crate::workspace;

/// Compiles the profile again; fails if only the source, the features or the result were changed.
#[test]
fn the_compiled_profile_is_its_source() {
    let folder = workspace().join("sandbox/apparmor");
    let made = Command::new(folder.join("compile")).output().expect("sandbox/apparmor/compile");
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "apparmor_parser: tests/tools/install test: {said}");
    let kept = fs::read(folder.join("coracle-default.bin")).expect("the compiled profile");
    assert!(!kept.is_empty());
    assert!(
        made.stdout == kept,
        "{} bytes instead of {}: sandbox/apparmor/compile > sandbox/apparmor/coracle-default.bin, with Debian 12's apparmor_parser",
        made.stdout.len(),
        kept.len()
    );
}
