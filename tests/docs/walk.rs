//! The README's walk-through as one script, on a daemon that its first line starts.

use std::fs;
use std::path::PathBuf;

use coracle_tests::image::{ARCHITECTURE, Image};
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::Node;
use coracle_tests::page_rules::{Act, Rule, all, expect_in_order};
use coracle_tests::registry::Registry;
use serde_json::json;

use crate::extract::Line;
use crate::line_runner::{LineRunner, script, text_of};
use crate::pages::{ruled, workspace};

/// Debian's static busybox, which `tests/tools/install test` unpacks.
fn busybox() -> Image {
    let usual = || workspace().join("target/tools");
    let tools = std::env::var_os("CORACLE_TOOLS_DIR").map_or_else(usual, PathBuf::from);
    let path = tools.join("guest").join(ARCHITECTURE).join("bin/busybox");
    let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut entries = vec![Entry::directory("bin", 0o755), Entry::program("bin/busybox", &bytes)];
    entries.extend(["sh", "sleep"].map(|name| Entry::hard_link(&format!("bin/{name}"), "bin/busybox")));
    Image::of(vec![Layer::new(&entries, Compression::Plain)]).with("Env", json!(["PATH=/bin"]))
}

/// Marks the beginning of a line's output.
const MARK: &str = "== line ";

/// All lines as one script. Each one prints its index before.
fn whole(lines: &[(Line, &Rule)]) -> String {
    let steps = lines.iter().enumerate();
    let steps = steps.map(|(index, (line, rule))| format!("echo '{MARK}{index}'\n{}\n", script(line, rule)));
    // The jobs of the shell are the daemon that it started.
    format!("exec 2>&1\ntrap 'kill $(jobs -p); wait' EXIT\n{}", steps.collect::<String>())
}

#[test]
fn the_walk_through_of_the_readme_works_line_by_line() {
    let mut node = Node::start();
    node.terminate();
    fs::remove_file(node.socket()).expect("the socket of the ended daemon");
    let registry = Registry::start(node.folder());
    registry.push(&busybox(), "library/busybox", "1.36");
    let mirror = format!("mirrors: {{docker.io: {{endpoint: [\"http://{}\"]}}}}\n", registry.address());
    fs::write(node.folder().join("registries.yaml"), mirror).expect("registries.yaml");

    let runner = LineRunner::of(&node).with("/tmp/demo", node.log_directory("demo"));
    let archive = busybox().docker_archive(&["busybox:1.36"]);
    fs::write(runner.folder().join("busybox.tar"), archive).expect("an archive");
    // The endpoint is that of the page's variable alone.
    fs::remove_file(runner.folder().join("crictl.yaml")).expect("it is ours");
    fs::write(runner.folder().join("crictl.yaml"), "timeout: 30\n").expect("crictl.yaml");
    play_in_order(&runner);
    node.launch();
    node.stop();
}

fn play_in_order(runner: &LineRunner) {
    let rules = all();
    let is_of_walk = |rule: &Rule| matches!(&rule.act, Act::Run { group, .. } if group == "walk");
    let lines: Vec<(Line, &Rule)> = ruled(&rules)
        .into_iter()
        .filter_map(|(_, line, rule)| Some((line, rule.filter(|rule| is_of_walk(rule))?)))
        .collect();
    let output = runner.run(&whole(&lines));
    let text = text_of(&output);
    assert!(output.status.success(), "{text}");
    for (index, (line, rule)) in lines.iter().enumerate() {
        let mark = format!("{MARK}{index}\n");
        let (_, rest) = text.split_once(&mark).unwrap_or_else(|| panic!("{mark} is missing in {text}"));
        let own = rest.split(MARK).next().unwrap_or_default();
        expect_in_order(own, &rule.says, &format!("README.md:{}: {}", line.number, line.text));
    }
}
