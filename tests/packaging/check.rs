//! `coracle check` from outside, on the machine that runs the tests: it can run pods, and what is taken away is missed.

use std::process::Command;

use coracle_tests::node::{Node, binaries};
use serde_json::Value;

use crate::{Folder, run, said};

fn check(folder: &Folder, config: &str, flags: &[&str]) -> (bool, String) {
    let file = folder.write("config.toml", config);
    let output =
        run(Command::new(binaries().join("coracle")).args(["check", "--config"]).arg(file).args(flags));
    (output.status.success(), said(&output))
}

/// A configuration with a place of its own for everything.
fn own(folder: &Folder) -> String {
    let folder = folder.path().display();
    format!(
        "root = \"{folder}/root\"\nstate = \"{folder}/state\"\nlisten = \"unix://{folder}/sock\"\n\
         [cni]\nconf_dir = \"{folder}/cni\"\nbin_dirs = [\"{folder}/bin\"]\n\
         [nri]\nsocket_path = \"{folder}/nri.sock\"\n[registry]\nconfig = \"{folder}/registries.yaml\"\n"
    )
}

fn state(report: &str, name: &str) -> String {
    let report: Value = serde_json::from_str(report).unwrap_or_else(|error| panic!("{error}: {report}"));
    let needs = report["needs"].as_array().expect("needs");
    let need = needs.iter().find(|need| need["name"] == name).unwrap_or_else(|| panic!("{name}: {report}"));
    need["state"].as_str().expect("a state").to_owned()
}

#[test]
fn this_machine_runs_pods_and_says_so() {
    let folder = Folder::new("check");
    let (is_fine, text) = check(&folder, &own(&folder), &[]);
    assert!(is_fine && text.ends_with("pods can run\n"), "{text}");
    assert!(text.contains("have      overlayfs\n"), "{text}");
    let (is_fine, json) = check(&folder, &own(&folder), &["--json"]);
    assert!(is_fine, "{json}");
    // One line per need, and the verdict.
    let report: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(report["can_run_pods"], true);
    assert_eq!(report["needs"].as_array().expect("needs").len(), text.lines().count() - 1);
    for need in report["needs"].as_array().expect("needs") {
        let page = crate::workspace().join(need["page"].as_str().expect("a page"));
        let page = std::fs::read_to_string(page).expect("it is there");
        assert!(page.contains(&format!("| {} |", need["name"].as_str().expect("a name"))), "{need}");
    }
}

#[test]
fn without_its_programs_no_pod_runs() {
    let folder = Folder::new("programs");
    let config = format!("program_dir = \"{}/nowhere\"\n{}", folder.path().display(), own(&folder));
    let (is_fine, text) = check(&folder, &config, &[]);
    assert!(!is_fine && text.ends_with("see what is missing above\n"), "{text}");
    let line = text.lines().find(|line| line.contains("  programs")).expect("its line");
    assert!(line.starts_with("missing   programs: no ") && line.contains("/nowhere/coracle-pod"), "{line}");
}

#[test]
fn a_root_that_cannot_be_written_is_missed() {
    let folder = Folder::new("root");
    // Always there, and a file system that holds no layers.
    let (is_fine, json) = check(&folder, &own(&folder), &["--json", "--root", "/sys/kernel"]);
    assert_eq!(state(&json, "file system of root"), "unknown");
    assert!(is_fine, "what nobody knows is no reason to refuse: {json}");
    assert_eq!(state(&json, "space in root"), "degraded");
}

#[test]
fn the_network_is_told_with_its_plugins() {
    let folder = Folder::new("cni");
    let (_, text) = check(&folder, &own(&folder), &[]);
    assert!(text.contains("degraded  CNI network: no CNI configuration file in "), "{text}");
    let list = r#"{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"macvlan"},{"type":"tuning"}]}"#;
    folder.write("cni/10-pods.conflist", list);
    folder.write("bin/macvlan", "");
    let (is_fine, text) = check(&folder, &own(&folder), &[]);
    assert!(text.contains("have      CNI network: network pods of "), "{text}");
    assert!(text.contains("degraded  CNI plugins: no tuning; "), "{text}");
    assert!(is_fine, "pods on the node's network run all the same: {text}");
}

#[test]
fn mistakes_in_registries_yaml_are_named_with_their_line() {
    let folder = Folder::new("registries");
    folder.write("registries.yaml", "mirrors:\n  example.org:\n    endpoint:\n      - \"ftp://mirror\"\n");
    let (_, text) = check(&folder, &own(&folder), &[]);
    let line = text.lines().find(|line| line.contains("registries file")).expect("its line");
    assert!(line.starts_with("degraded") && line.contains("registries.yaml:4"), "{line}");
    folder.write("registries.yaml", "mirrors:\n  example.org:\n    endpoint:\n      - \"https://mirror\"\n");
    let (_, json) = check(&folder, &own(&folder), &["--json"]);
    assert_eq!(state(&json, "registries file"), "have");
}

#[test]
fn a_daemon_that_answers_is_fine_and_a_silent_one_is_not() {
    let node = Node::start();
    let folder = Folder::new("daemon");
    let state_directory = node.state().display().to_string();
    let listen = format!("unix://{}", node.socket().display());
    let (_, text) = check(&folder, &own(&folder), &["--state", &state_directory, "--listen", &listen]);
    assert!(text.contains("have      one daemon on state: a daemon answers at "), "{text}");
    let (_, json) = check(&folder, &own(&folder), &["--json", "--state", &state_directory]);
    assert_eq!(state(&json, "one daemon on state"), "degraded", "another socket, the same state");
    // Its NRI socket is another runtime's for who serves elsewhere.
    let nri = node.nri().display().to_string();
    let (_, json) = check(&folder, &own(&folder), &["--json", "--nri-socket", &nri]);
    assert_eq!(state(&json, "no other runtime"), "degraded");
    node.stop();
}
