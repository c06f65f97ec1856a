//! Checks the dependencies between crates, and which crates the daemon must not depend on.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

/// The permitted dependencies of each crate. A new one must first be added to ARCHITECTURE.md.
const ARROWS: [(&str, &[&str]); 45] = [
    (
        "coracled",
        &[
            "coracle-base",
            "coracle-config",
            "coracle-control",
            "coracle-engine",
            "coracle-images",
            "coracle-network",
            "coracle-nri",
            "coracle-preflight",
            "coracle-sandbox",
            "coracle-streaming",
            "coracle-job",
        ],
    ),
    (
        "coracle",
        &[
            "coracle-base",
            "coracle-client",
            "coracle-config",
            "coracle-control",
            "coracle-filelist",
            "coracle-network",
            "coracle-preflight",
            "coracle-sandbox",
            "coracle-setup",
            "coracle-job",
            "coracle-worker",
        ],
    ),
    (
        "coracle-preflight",
        &[
            "coracle-base",
            "coracle-config",
            "coracle-network",
            "coracle-nri",
            "coracle-sandbox",
            "coracle-job",
            "coracle-wire",
        ],
    ),
    ("coracle-client", &["coracle-base", "coracle-control", "coracle-wire"]),
    ("coracle-control", &[]),
    ("coracle-setup", &["coracle-client", "coracle-yaml"]),
    ("coracle-config", &["coracle-base", "coracle-job", "coracle-nri"]),
    ("coracle-streaming", &["coracle-base", "coracle-engine", "coracle-sandbox"]),
    (
        "coracle-engine",
        &["coracle-base", "coracle-images", "coracle-network", "coracle-sandbox", "coracle-job"],
    ),
    (
        "coracle-images",
        &["coracle-base", "coracle-reference", "coracle-sandbox", "coracle-job", "coracle-wire"],
    ),
    ("coracle-network", &["coracle-base", "coracle-netlink", "coracle-sandbox", "coracle-job"]),
    ("coracle-base", &["coracle-netlink", "coracle-sandbox", "coracle-job", "coracle-wire"]),
    (
        "coracle-worker",
        &[
            "coracle-bolt",
            "coracle-cdi",
            "coracle-chunked",
            "coracle-decompress",
            "coracle-cni",
            "coracle-fetch",
            "coracle-filelist",
            "coracle-json",
            "coracle-judge",
            "coracle-manifest",
            "coracle-netlink",
            "coracle-programs",
            "coracle-reference",
            "coracle-registries",
            "coracle-sandbox",
            "coracle-scope",
            "coracle-signature",
            "coracle-site",
            "coracle-job",
            "coracle-tar",
            "coracle-trees",
        ],
    ),
    (
        "coracle-fetch",
        &["coracle-job", "coracle-json", "coracle-registries", "coracle-sandbox", "coracle-site"],
    ),
    ("coracle-scope", &["coracle-job", "coracle-sandbox"]),
    ("coracle-site", &["coracle-registries", "coracle-sandbox"]),
    ("coracle-job", &[]),
    ("coracle-reference", &[]),
    ("coracle-signature", &["coracle-reference"]),
    (
        "coracle-judge",
        &["coracle-job", "coracle-json", "coracle-manifest", "coracle-reference", "coracle-signature"],
    ),
    (
        "coracle-manifest",
        &["coracle-chunked", "coracle-job", "coracle-json", "coracle-reference", "coracle-sandbox"],
    ),
    ("coracle-json", &[]),
    ("coracle-bolt", &[]),
    ("coracle-cdi", &["coracle-job", "coracle-registries", "coracle-sandbox", "coracle-yaml"]),
    ("coracle-chunked", &["coracle-tar", "coracle-wire"]),
    ("coracle-convert", &["coracle-chunked", "coracle-decompress", "coracle-tar", "coracle-wire"]),
    ("coracle-decompress", &[]),
    ("coracle-filelist", &["coracle-sandbox"]),
    ("coracle-cni", &["coracle-job", "coracle-programs", "coracle-sandbox"]),
    ("coracle-programs", &["coracle-job", "coracle-sandbox"]),
    ("coracle-registries", &["coracle-sandbox", "coracle-job", "coracle-yaml"]),
    ("coracle-tar", &[]),
    ("coracle-trees", &["coracle-job", "coracle-sandbox"]),
    ("coracle-yaml", &[]),
    ("coracle-nri", &[]),
    ("coracle-netlink", &["coracle-sys"]),
    ("coracle-sandbox", &["coracle-wire", "coracle-sys"]),
    ("coracle-pod", &["coracle-wire", "coracle-sys"]),
    ("coracle-wire", &[]),
    ("coracle-sys", &[]),
    ("coracle-tests", &["coracle-node"]),
    ("coracle-node", &[]),
    ("coracle-probe", &[]),
    ("coracle-protocols", &[]),
    ("coracle-runner", &[]),
];

/// Crates that start threads or contain a runtime with any features. `smol` depends on some of them, but its
/// functions that use them must not be called: see [`smol_is_used_without_its_threads`].
const FORBIDDEN: [&str; 9] = [
    "rayon",
    "tokio-rustls",
    "reqwest",
    "zbus",
    "signal-hook",
    "threadpool",
    "cgroups-rs",
    "actix-rt",
    "rustls",
];

/// Crates of the daemon and of each pod's monitor, which must not depend on cgroups-rs and its zbus.
const LEAN: [&str; 3] = ["coracled", "coracle-sandbox", "coracle-pod"];

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

/// All crates that are linked into `package`, with their features.
fn linked(package: &str) -> Vec<(String, Vec<String>)> {
    let tree =
        cargo(&["tree", "-p", package, "-e", "normal", "--prefix", "none", "-f", "{p}|{f}", "--offline"]);
    tree.lines()
        .map(|line| {
            let (package, features) = line.split_once('|').unwrap_or((line, ""));
            let name = package.split(' ').next().unwrap_or_default().to_owned();
            (name, features.trim_end_matches(" (*)").split(',').map(str::to_owned).collect())
        })
        .collect()
}

/// Each further version of a crate in one program costs flash and memory: the list in deny.toml has the reasons.
#[test]
fn a_crate_is_twice_in_a_program_for_a_reason_only() {
    let text = std::fs::read_to_string(crate::root().join("deny.toml")).expect("a file");
    let rules: toml::Table = toml::from_str(&text).expect("TOML");
    let listed: Vec<&str> = rules["bans"]["skip"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|entry| {
            assert!(entry["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{entry:?}");
            entry["crate"].as_str().expect("a crate and the beginning of its version")
        })
        .collect();
    for package in ["coracled", "coracle"] {
        let target = "x86_64-unknown-linux-musl";
        let tree =
            ["tree", "-p", package, "-e", "normal", "--prefix", "none", "--target", target, "--offline"];
        let text = cargo(&tree);
        let linked: BTreeSet<(&str, &str)> = text
            .lines()
            .filter_map(|line| {
                let mut words = line.split(' ');
                Some((words.next()?, words.next()?.strip_prefix('v')?))
            })
            .collect();
        for (name, version) in &linked {
            let is_listed = listed.iter().any(|entry| {
                entry.split_once('@').is_some_and(|(other, begin)| {
                    other == *name && format!("{version}.").starts_with(&format!("{begin}."))
                })
            });
            // The newest version needs no reason.
            let newer =
                linked.iter().filter(|(other, of)| other == name && numbers(of) > numbers(version)).count();
            assert!(
                newer == 0 || is_listed,
                "{package}: {name} {version} beside a newer one: say why in deny.toml"
            );
        }
    }
}

/// The numbers of a version, for comparison.
fn numbers(version: &str) -> Vec<u64> {
    version.split(['.', '+']).map_while(|number| number.parse().ok()).collect()
}

#[test]
fn the_daemons_tree_has_no_runtime_and_no_thread_crate() {
    for package in LEAN {
        for (name, features) in linked(package) {
            assert!(
                !FORBIDDEN.contains(&name.as_str()),
                "{name} is in the tree of {package}; `cargo tree -p {package} -i {name}`"
            );
            let is_allowed = |feature: &str| match name.as_str() {
                "tokio" => {
                    !feature.starts_with("rt")
                        && !matches!(feature, "net" | "process" | "signal" | "time" | "full")
                }
                // Its client and server are disabled: `sync` starts threads with crossbeam's channels,
                // `async` requires tokio.
                "ttrpc" => matches!(feature, "rustprotobuf"),
                _ => true,
            };
            let wrong = features.iter().find(|feature| !is_allowed(feature));
            assert!(wrong.is_none(), "{name}'s feature {wrong:?} is on in {package}");
        }
    }
}

/// ttrpc depends on crossbeam for its `sync` client and server, which are disabled, so nothing of it is
/// linked. No other crate may depend on it.
#[test]
fn crossbeam_is_there_for_ttrpc_alone() {
    let tree = cargo(&[
        "tree",
        "-p",
        "coracled",
        "-e",
        "normal",
        "--prefix",
        "none",
        "-i",
        "crossbeam",
        "--offline",
    ]);
    let users = tree.lines().nth(1).unwrap_or_default();
    assert!(users.starts_with("ttrpc "), "{tree}");
    let others: Vec<_> =
        tree.lines().filter(|line| line.starts_with("coracle") || line.starts_with("ttrpc")).collect();
    assert_eq!(others.len() + 1, tree.lines().count(), "{tree}");
}

/// Whether a file belongs to the daemon's program including its tests: everything below runtime/ except the
/// worker and its requests to systemd.
fn is_of_the_daemon(path: &str) -> bool {
    let is_of_workers = ["runtime/worker/", "runtime/scope/"].iter().any(|crate_| path.starts_with(crate_));
    path.starts_with("runtime/") && !is_of_workers
}

/// smol depends on crates that start threads when they are used; clippy.toml forbids the functions that use
/// them, and the sources must not name the crates.
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
    for path in crate::files(".rs").into_iter().filter(|path| is_of_the_daemon(&crate::short(path))) {
        let text = std::fs::read_to_string(&path).expect("a source file");
        for (number, line) in
            text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
        {
            let door = DOORS.iter().find(|door| line.contains(**door));
            assert!(door.is_none(), "{}:{}: {door:?} starts a thread", crate::short(&path), number + 1);
        }
    }
}
