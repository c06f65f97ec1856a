//! Arrows between crates, and what may not be in the daemon's tree.

use std::process::Command;

use serde_json::Value;

/// Who may use whom. An arrow that is not here is a decision to be made, in ARCHITECTURE.md first.
const ARROWS: [(&str, &[&str]); 10] = [
    ("coracle", &["coracle-nri", "coracle-sandbox", "coracle-job", "coracle-wire"]),
    ("coracle-worker", &["coracle-sandbox", "coracle-job"]),
    ("coracle-job", &[]),
    ("coracle-nri", &[]),
    ("coracle-sandbox", &["coracle-wire", "coracle-sys"]),
    ("coracle-pod", &["coracle-wire", "coracle-sys"]),
    ("coracle-wire", &[]),
    ("coracle-sys", &[]),
    ("coracle-tests", &[]),
    ("coracle-probe", &[]),
];

/// Crates that start threads or bring a runtime, whatever their features. `smol` itself names some of them; what must not
/// happen is that their doors are used: see [`smol_is_used_without_its_threads`].
const FORBIDDEN: [&str; 9] = [
    "rayon",
    "tokio-rustls",
    "reqwest",
    "zbus",
    "signal-hook",
    "threadpool",
    "crossbeam-channel",
    "actix-rt",
    "rustls",
];

fn cargo(arguments: &[&str]) -> String {
    let output =
        Command::new(env!("CARGO")).args(arguments).current_dir(crate::root()).output().expect("cargo runs");
    assert!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("cargo prints text")
}

#[test]
fn arrows_point_one_way() {
    let text = cargo(&["metadata", "--no-deps", "--format-version", "1", "--offline"]);
    let metadata: Value = serde_json::from_str(&text).expect("cargo prints JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let (_, allowed) = ARROWS.iter().find(|(known, _)| *known == name).unwrap_or_else(|| {
            panic!("{name} is new: say here whom it may use");
        });
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let other = dependency["name"].as_str().expect("a name");
            if other.starts_with("coracle") && dependency["kind"].is_null() {
                assert!(allowed.contains(&other), "{name} may not use {other}");
            }
        }
    }
}

#[test]
fn the_daemons_tree_has_no_runtime_and_no_thread_crate() {
    let tree =
        cargo(&["tree", "-p", "coracle", "-e", "normal", "--prefix", "none", "-f", "{p}|{f}", "--offline"]);
    for line in tree.lines() {
        let (package, features) = line.split_once('|').unwrap_or((line, ""));
        let name = package.split(' ').next().unwrap_or_default();
        assert!(
            !FORBIDDEN.contains(&name),
            "{name} is in the daemon's tree; `cargo tree -p coracle -i {name}`"
        );
        if name == "tokio" {
            for feature in features.trim_end_matches(" (*)").split(',') {
                let is_runtime = feature.starts_with("rt")
                    || matches!(feature, "net" | "process" | "signal" | "time" | "full");
                assert!(!is_runtime, "tokio's `{feature}` is on in the daemon");
            }
        }
    }
}

/// smol brings crates that start threads when they are used; clippy.toml forbids their doors, and the sources must not
/// name the crates.
#[test]
fn smol_is_used_without_its_threads() {
    const DOORS: [&str; 9] = [
        "async_io",
        "async_process",
        "async_fs",
        "async_net",
        "blocking::",
        "smol::spawn",
        "smol::block_on",
        "smol::Timer",
        "smol::unblock",
    ];
    for path in crate::files(".rs").into_iter().filter(|path| crate::short(path).starts_with("runtime/src")) {
        let text = std::fs::read_to_string(&path).expect("a source file");
        for (number, line) in
            text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
        {
            let door = DOORS.iter().find(|door| line.contains(**door));
            assert!(door.is_none(), "{}:{}: {door:?} starts a thread", crate::short(&path), number + 1);
        }
    }
}
