//! `coracle support-dump`: complete, without secrets, with the daemon running or dead.

use std::fs;
use std::path::Path;
use std::process::Command;

use coracle_tests::cri::proto::{AuthConfig, KeyValue};
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::pull;

/// Extracts an archive and returns the texts of its files by their names.
fn extract(node: &Node, archive: &Path) -> Vec<(String, String)> {
    let place = node.folder().join("extracted");
    fs::create_dir(&place).expect("a folder");
    let status = Command::new("tar").arg("xzf").arg(archive).arg("-C").arg(&place).status().expect("tar");
    assert!(status.success(), "{status}");
    let mut found = Vec::new();
    let mut open = vec![place.clone()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).expect("a folder").flatten() {
            match entry.path().is_dir() {
                true => open.push(entry.path()),
                false => {
                    let name = entry.path().strip_prefix(&place).expect("below it").display().to_string();
                    found.push((name, fs::read_to_string(entry.path()).expect("a text")));
                }
            }
        }
    }
    fs::remove_dir_all(place).expect("ours");
    found
}

#[track_caller]
fn assert_part(files: &[(String, String)], name: &str, part: &str) {
    let name = format!("coracle-support/{name}");
    let found = files.iter().find(|(own, _)| *own == name);
    let (_, text) = found.unwrap_or_else(|| panic!("no {name}"));
    assert!(text.contains(part), "{name} lacks {part:?}:\n{text}");
}

#[test]
fn an_archive_has_what_a_report_needs_and_no_secret() {
    const SECRETS: [&str; 4] =
        ["word-of-the-pull", "word-of-the-file", "word-of-a-proxy", "word-of-the-environment"];
    let mut fixture = PodFixture::start();
    let node = &fixture.node;
    let registries =
        format!("configs: {{\"127.0.0.1:1\": {{auth: {{username: me, password: {}}}}}}}\n", SECRETS[1]);
    fs::write(node.folder().join("registries.yaml"), registries).expect("registries.yaml");
    let config = node.folder().join("config.toml");
    let text = fs::read_to_string(&config).expect("the configuration");
    fs::write(&config, format!("# http://me:{}@proxy:3128\n{text}", SECRETS[2])).expect("the configuration");
    let mut request = pull("127.0.0.1:1/absent:1");
    request.auth =
        Some(AuthConfig { username: "me".into(), password: SECRETS[0].into(), ..Default::default() });
    node.pull_image(request).expect_err("no process listens there");
    let mut config = fixture.config("app", &["sleep", "forever"]);
    config.envs.push(KeyValue { key: "PASSWORD".into(), value: SECRETS[3].into() });
    fixture.run(&config);
    let archive = node.folder().join("dump.tar.gz");
    let made = node.tool(&["support-dump", &archive.display().to_string()]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let files = extract(node, &archive);
    let history = format!("history/pods/{}", fixture.pod_id);
    for (name, part) in [
        ("version.txt", "coracle 0."),
        ("check.txt", "pods can run"),
        ("configuration/config.toml", "(hidden)@proxy:3128"),
        ("conditions.json", "RuntimeReady"),
        ("pods.json", fixture.pod_id.as_str()),
        ("containers.json", "\"running\""),
        ("metrics.txt", "# TYPE coracle_"),
        ("history/node", "127.0.0.1:1/absent:1"),
        (&history, "pod sandbox ready"),
        ("files.txt", "/record"),
        ("kernel.txt", "Linux version"),
    ] {
        assert_part(&files, name, part);
    }
    for (name, text) in &files {
        for secret in SECRETS {
            assert!(!text.contains(secret), "{name} has {secret}");
        }
    }
    fixture.node.kill9();
    let made = fixture.node.tool(&["support-dump", "-"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    fs::write(&archive, made.stdout).expect("the archive");
    let files = extract(&fixture.node, &archive);
    assert_part(&files, "pods.json", "the daemon does not answer");
    assert_part(&files, &history, "pod sandbox ready");
    // Regression: with an invalid configuration the archive had nothing of the root and state directories.
    let config = fixture.node.folder().join("config.toml");
    let text = fs::read_to_string(&config).expect("the configuration");
    fs::write(&config, format!("{text}\n[unknown]\nkey = 1\n")).expect("the configuration");
    let made = fixture.node.tool(&["support-dump", "-"]);
    fs::write(&archive, made.stdout).expect("the archive");
    let files = extract(&fixture.node, &archive);
    assert_part(&files, "mistakes.txt", "unknown");
    assert_part(&files, &history, "pod sandbox ready");
    fs::write(&config, text).expect("the configuration");
    assert_eq!(fixture.node.tool(&["support-dump"]).status.code(), Some(2));
    assert_eq!(fixture.node.tool(&["support-dump", "/no/such/place/x"]).status.code(), Some(1));
    fixture.node.stop();
}
