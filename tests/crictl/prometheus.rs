//! Prometheus' own tool about the metrics, the alert rules and the dashboard: its parser decides whether they are valid.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::prometheus::{get, node_with_metrics};
use coracle_tests::request::host_pod;
use serde_json::{Value, json};

use crate::clients::tools;

/// Runs promtool with this standard input and returns its output; panics with it if promtool finds an error.
#[track_caller]
fn promtool(words: &[&str], input: &str) -> String {
    let mut command = Command::new(tools().join("bin/promtool"));
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .unwrap_or_else(|error| panic!("promtool: {error}; `tests/tools/install test` gets it"));
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "promtool {words:?}: {text}");
    text
}

/// Checks a file of rules that a test has made, and returns promtool's output.
fn checked(node: &Node, name: &str, rules: &Value) -> String {
    let path = node.folder().join(name);
    // JSON is YAML.
    fs::write(&path, rules.to_string()).expect("a file");
    promtool(&["check", "rules", &path.display().to_string()], "")
}

/// Besides the syntax, promtool checks names, types and help texts by Prometheus' conventions.
#[test]
fn metrics_follow_the_conventions() {
    let (node, address) = node_with_metrics();
    let fixture = PodFixture::on(node, host_pod("fixture"));
    fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    let answer = get(&address, "GET /metrics HTTP/1.1");
    let body = answer.split_once("\r\n\r\n").expect("a head").1;
    let text = promtool(&["check", "metrics"], body);
    assert_eq!(text.trim(), "", "promtool warns");
    fixture.node.stop();
}

/// Each rule of docs/alerts.yml fires for the series that tests/crictl/alerts.yml gives, and not for those of a healthy node.
#[test]
fn alert_rules_fire_when_they_should() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/alerts.yml");
    let cases = concat!(env!("CARGO_MANIFEST_DIR"), "/crictl/alerts.yml");
    let text = promtool(&["check", "rules", docs], "");
    assert!(text.contains("SUCCESS"), "{text}");
    promtool(&["test", "rules", cases], "");
    let alerts = |path| {
        let text = fs::read_to_string(path).expect("it is in the source tree");
        let names = text.lines().filter_map(|line| {
            let line = line.trim().trim_start_matches("- ");
            line.strip_prefix("alert: ").or_else(|| line.strip_prefix("alertname: ")).map(str::to_owned)
        });
        names.collect::<BTreeSet<_>>()
    };
    assert_eq!(alerts(docs), alerts(cases), "each rule has a case");
}

/// Each panel has an ID, a place and a data source of its own kind, as Grafana's schema wants: panels that overlap are moved by
/// Grafana, and those with equal IDs are lost.
fn layout(panels: &[Value]) {
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().expect("an ID")), "{panel}");
        let place = |key: &str| panel["gridPos"][key].as_u64().expect("a place");
        assert!(place("x") + place("w") <= 24, "{panel}");
        for x in place("x")..place("x") + place("w") {
            for y in place("y")..place("y") + place("h") {
                assert!(taken.insert((x, y)), "it covers another panel: {panel}");
            }
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}");
        let targets = panel["targets"].as_array().expect("targets");
        let letters: BTreeSet<_> = targets.iter().map(|target| target["refId"].as_str()).collect();
        assert_eq!(letters.len(), targets.len(), "{panel}");
        assert!(!panel["title"].as_str().expect("a title").is_empty() && panel["type"] == "timeseries");
    }
}

/// The dashboard's expressions are valid PromQL about metrics that the daemon serves.
#[test]
fn the_dashboard_asks_for_metrics_that_are_served() {
    let (node, address) = node_with_metrics();
    let dashboard: Value = serde_json::from_str(include_str!("../../docs/grafana.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let expressions: Vec<&str> = targets.filter_map(|target| target["expr"].as_str()).collect();
    assert!(expressions.len() > 10, "{expressions:?}");
    layout(dashboard["panels"].as_array().expect("panels"));
    let rules = expressions.iter().enumerate();
    let rules: Vec<_> =
        rules.map(|(number, expr)| json!({"record": format!("dashboard:{number}"), "expr": expr})).collect();
    let text = checked(&node, "dashboard.yml", &json!({"groups": [{"name": "dashboard", "rules": rules}]}));
    assert!(text.contains(&format!("{} rules found", expressions.len())), "{text}");
    let answer = get(&address, "GET /metrics HTTP/1.1");
    let words =
        expressions.iter().flat_map(|expr| expr.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'));
    for metric in words.filter(|word| word.starts_with("coracle_") || word.starts_with("process_")) {
        let ends = ["_bucket", "_sum", "_count"];
        let family = ends.iter().find_map(|end| metric.strip_suffix(end)).unwrap_or(metric);
        assert!(answer.contains(&format!("# TYPE {family} ")), "{metric}");
    }
    node.stop();
}
