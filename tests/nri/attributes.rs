//! Process attributes that survive exec, as programs of others see them in /proc: CNI plugins, OCI hooks and NRI plugins
//! that the daemon starts, and image verifiers, have what a program started in the daemon's place would have. Regression: CNI plugins and
//! hooks had the worker's limit of 1 GiB of address space, hooks the daemon's blocked signals, all, and later image
//! verifiers, the daemon's limit of open files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle_tests::host::{self, wait_until};
use coracle_tests::image::Image;
use coracle_tests::node::{Node, Options};
use coracle_tests::nri::{Answer, EVENTS, Plugin, api};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::registry::Registry;
use coracle_tests::request::{bridge_pod, pull};

use super::answers;

/// Starts a program with a soft limit of open files that is below the hard one.
const STARTER: [&str; 2] = ["prlimit", "--nofile=900:"];

/// Writes the script's own attributes to `$0.new`, then renames it to `$0.out`. No other process is started before the
/// signal mask is read, because a shell changes its mask when it waits. The limits are read last, because those of an
/// NRI plugin are set just after its start.
const SCRIPT: &str = r#"#!/bin/sh
show() { echo "== $1"; while IFS= read -r line; do echo "$line"; done < "/proc/self/$1"; }
{ show status; show stat; show oom_score_adj; echo "== fd"; echo /proc/self/fd/*; } > "$0.new"
case $0 in */nri/*) sleep 0.3 ;; esac
show limits >> "$0.new"
mv "$0.new" "$0.out"
echo '{"cniVersion":"1.0.0","ips":[{"address":"10.9.9.9/24"}]}'
"#;

fn script(path: &Path) -> PathBuf {
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    host::write_program(path, SCRIPT);
    path.to_owned()
}

/// The lines of the script at `path` that are the same for each process with the same attributes.
fn seen(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(format!("{}.out", path.display())).unwrap_or_default();
    let mut section = "";
    let mut lines = Vec::new();
    for line in text.lines() {
        match (section, line.strip_prefix("== ")) {
            (_, Some(name)) => section = name,
            ("status", None) => {
                let key = line.split(':').next().unwrap_or_default();
                let wanted = ["Umask", "SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
                if wanted.contains(&key) || ["NoNewPrivs", "Seccomp"].contains(&key) {
                    lines.push(line.to_owned());
                }
            }
            ("stat", None) => {
                // Nice value, real-time priority and policy: fields 19, 40 and 41 of proc_pid_stat(5).
                let fields: Vec<_> = line.rsplit(") ").next().unwrap_or_default().split(' ').collect();
                lines.push(format!("scheduling {} {} {}", fields[16], fields[37], fields[38]));
            }
            (section, None) => lines.push(format!("{section} {line}")),
        }
    }
    lines
}

#[test]
fn programs_of_others_start_with_the_attributes_that_the_daemon_was_started_with() {
    let mut node = Node::with(Options { wrapper: STARTER.map(str::to_owned).into(), ..Options::default() });
    let folder = node.folder().to_owned();
    let at = |name: &str| script(&folder.join(name));
    let reference = at("reference");
    let ran = Command::new(STARTER[0]).arg(STARTER[1]).arg(&reference).output().expect("prlimit");
    assert!(ran.status.success(), "{ran:?}");
    let expected = seen(&reference);
    assert!(expected.iter().any(|line| line == "SigBlk:\t0000000000000000"), "{expected:?}");
    assert!(expected.iter().any(|line| line.starts_with("limits Max open files            900 ")));

    let plugin = script(&node.plugins().join("attributes"));
    let list = r#"{"cniVersion":"1.0.0","name":"attributes","plugins":[{"type":"attributes"}]}"#;
    fs::write(node.cni().join("10-attributes.conflist"), list).expect("a network");
    let launched = at("nri/10-attributes");
    let verifier = at("verifiers/one");
    node.rewrite_config(&format!("[image.policy]\nverifiers = {:?}\n", folder.join("verifiers")));
    node.restart();
    let hooks = ["create-runtime", "create-container", "poststart", "poststop"].map(at);
    let hook = |path: &PathBuf| api::Hook { path: path.display().to_string(), ..Default::default() };
    let [create_runtime, create_container, poststart, poststop] =
        hooks.each_ref().map(|path| vec![hook(path)]);
    let hooked = api::Hooks { create_runtime, create_container, poststart, poststop, ..Default::default() };
    let fixture = PodFixture::on(node, bridge_pod("attributes"));
    let handler = answers("CreateContainer", move |_| {
        Answer::adjust(api::ContainerAdjustment { hooks: Some(hooked.clone()), ..Default::default() })
    });
    let registry = Registry::start(&folder);
    registry.push(&Image::probe(&fixture.node.probe(), "attributes"), "app", "1");
    fixture.node.pull_image(pull(&registry.name("app", "1"))).expect("pull");
    let _plugin = Plugin::join(&fixture.node, "20", "hooks", EVENTS, handler);
    fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    fixture.node.remove_pod(&fixture.pod_id);

    for path in hooks.iter().chain([&plugin]) {
        wait_until("it has ended", || path.with_added_extension("out").exists());
        assert_eq!(seen(path), expected, "{}", path.display());
    }
    // If memory is short verifiers end before pods, as workers do.
    let sooner = |line: &String| match line.starts_with("oom_score_adj ") {
        true => "oom_score_adj 500".to_owned(),
        false => line.clone(),
    };
    assert_eq!(seen(&verifier), expected.iter().map(sooner).collect::<Vec<_>>());
    wait_until("the NRI plugin has ended", || launched.with_added_extension("out").exists());
    // It has the connection to the daemon as descriptor 3, and ignores no signal, as when systemd starts it.
    let comparable = |path: &Path| -> Vec<String> {
        let differs = |line: &String| line.starts_with("fd ") || line.starts_with("SigIgn");
        seen(path).into_iter().filter(|line| !differs(line)).collect()
    };
    assert_eq!(comparable(&launched), comparable(&reference));
    fs::remove_file(&launched).expect("ours");
    fixture.node.stop();
}
