//! `coracle image …` as a person or a script uses it: help, pipes, JSON, other names, and text that others wrote.

use std::io::Write;
use std::process::{Child, Command, Output, Stdio};

use coracle_tests::host::wait_until;
use coracle_tests::image::{Image, probe_entries};
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::{Node, binaries};
use coracle_tests::registry::Registry;

use crate::find;

fn image(node: &Node) -> Image {
    Image::probe(&node.probe(), "commands").repacked(&probe_entries(&node.probe()), Compression::Plain)
}

/// Starts `coracle image …` against this node, with pipes.
fn start(node: &Node, words: &[&str]) -> Child {
    Command::new(binaries().join("coracle"))
        .args(["image", "--config"])
        .arg(node.folder().join("config.toml"))
        .args(words)
        .arg("--state")
        .arg(node.state())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program runs")
}

/// `coracle image …` against this node, with bytes for its standard input.
fn piped(node: &Node, words: &[&str], input: &[u8]) -> Output {
    let mut child = start(node, words);
    let mut stdin = child.stdin.take().expect("a pipe");
    std::thread::scope(|scope| {
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output().expect("it ends")
    })
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

#[test]
fn help_needs_no_daemon_and_is_no_error() {
    for words in [&["image", "--help"][..], &["image", "list", "--help"], &["image", "help"], &["--help"]] {
        let output = Command::new(binaries().join("coracle")).args(words).output().expect("it runs");
        assert!(output.status.success() && output.stderr.is_empty(), "{words:?}: {}", text(&output));
        assert!(String::from_utf8_lossy(&output.stdout).contains("image list"), "{words:?}");
    }
    let output = Command::new(binaries().join("coracle")).args(["image", "lst"]).output().expect("it runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("did you mean `list`?"), "{}", text(&output));
}

/// A shell that `nsenter --wd` starts in another mount namespace has none: the message said neither which file nor why.
#[test]
fn a_relative_name_without_a_working_directory_is_explained() {
    let folder = coracle_tests::node::base().join(format!("gone-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let output = Command::new("sh")
        .args(["-c", "rmdir \"$PWD\" && exec \"$0\" image import x.tar"])
        .arg(binaries().join("coracle"))
        .current_dir(&folder)
        .output()
        .expect("it runs");
    let expected = "import: x.tar: the working directory: no such file or directory";
    assert!(!output.status.success() && text(&output).contains(expected), "{}", text(&output));
}

#[test]
fn archives_go_through_pipes_and_lists_are_json() {
    let node = Node::start();
    let image = image(&node);
    let output = piped(&node, &["import", "-"], &image.docker_archive(&["localhost/b:1", "localhost/a:1"]));
    assert!(output.status.success() && text(&output).starts_with("imported "), "{}", text(&output));
    let output = piped(&node, &["export", "localhost/a:1", "-o", "-"], b"");
    assert!(output.status.success(), "{}", text(&output));
    let archive = output.stdout;
    let output = piped(&node, &["tag", "localhost/a:1", "localhost/c:2"], b"");
    assert!(output.status.success(), "{}", text(&output));

    let listed = text(&piped(&node, &["list"], b""));
    let names: Vec<_> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let expected = ["NAME", "coracle.local/sandbox:v1", "localhost/a:1", "localhost/b:1", "localhost/c:2"];
    assert_eq!(names, expected, "{listed}");
    assert!(listed.lines().next().is_some_and(|head| head.ends_with("PINNED")), "{listed}");
    let json = text(&piped(&node, &["list", "-o", "json"], b""));
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let ours = json.as_array().expect("an array").iter().find(|one| one["id"] == image.id().as_str());
    assert_eq!(ours.expect("it is there")["tags"].as_array().map(Vec::len), Some(3), "{json}");
    let json = text(&piped(&node, &["df", "-o", "json"], b""));
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert!(json[0]["used_bytes"].as_u64() > Some(0) && json[0]["free_bytes"].as_u64() > Some(0), "{json}");

    let output = piped(&node, &["prune"], b"");
    assert!(output.status.success(), "{}", text(&output));
    assert!(find(&node, "localhost/a:1").is_none(), "nothing uses it");
    let output = piped(&node, &["import", "-"], &archive);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(find(&node, "localhost/a:1").expect("it is back").id, image.id());
    // In use: it stays.
    let pod = coracle_tests::request::host_pod("user");
    let pod_id = node.run_pod(&pod);
    let config = coracle_tests::request::container("one", "localhost/a:1", &["sleep", "forever"], &pod);
    node.run_container(&pod_id, &config, &pod);
    assert!(piped(&node, &["prune"], b"").status.success());
    assert!(find(&node, "localhost/a:1").is_some());
    node.remove_pod(&pod_id);
    let output = piped(&node, &["remove", "localhost/a:1", "--force"], b"");
    assert!(output.status.success(), "a flag may stand behind: {}", text(&output));
    node.stop();
}

#[test]
fn an_import_that_takes_long_is_listed() {
    let node = Node::start();
    let archive = image(&node).docker_archive(&["localhost/slow:1"]);
    let (first, rest) = archive.split_at(archive.len() / 2);
    let mut child = start(&node, &["import", "-"]);
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(first).expect("the worker reads it");
    let pulling = || text(&piped(&node, &["list", "--pulling"], b""));
    wait_until("it is listed", || pulling().contains("/stdin-"));
    stdin.write_all(rest).expect("the worker reads it");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", text(&output));
    assert!(!pulling().contains("/stdin-"), "{}", pulling());
    node.stop();
}

/// On a terminal an import shows a line about itself until it has ended.
#[test]
fn an_import_shows_its_progress_on_a_terminal() {
    let node = Node::start();
    let archive = image(&node).docker_archive(&["localhost/slow:1"]);
    let (first, rest) = archive.split_at(archive.len() / 2);
    let (fifo, typescript) = (node.folder().join("slow.tar"), node.folder().join("typescript"));
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    let command = format!(
        "{} image import --config {} --state {} {}",
        binaries().join("coracle").display(),
        node.folder().join("config.toml").display(),
        node.state().display(),
        fifo.display()
    );
    let mut script = Command::new("script")
        .args(["--quiet", "--return", "--flush", "--command", &command])
        .arg(&typescript)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("script runs");
    let mut writer = std::fs::File::options().write(true).open(&fifo).expect("the worker opens it");
    writer.write_all(first).expect("the worker reads it");
    let shown = || String::from_utf8_lossy(&std::fs::read(&typescript).unwrap_or_default()).into_owned();
    wait_until("the line is drawn", || shown().contains("/slow.tar") && shown().contains("\u{1b}[K"));
    assert!(!shown().contains("imported"), "{}", shown());
    writer.write_all(rest).expect("the worker reads it");
    drop(writer);
    assert!(script.wait().expect("it ends").success(), "{}", shown());
    assert!(shown().contains("\r\u{1b}[Kimported "), "the line is removed before: {:?}", shown());
    std::fs::remove_file(&fifo).expect("ours");
    node.stop();
}

#[test]
fn images_are_pulled_by_hand() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "by hand"), "hand", "1");
    let name = registry.name("hand", "1");
    let output = piped(&node, &["pull", &name], b"");
    assert!(output.status.success() && text(&output).starts_with("pulled "), "{}", text(&output));
    assert!(find(&node, &name).is_some());
    let output = piped(&node, &["pull", &registry.name("absent", "1")], b"");
    assert!(!output.status.success() && text(&output).contains("not found"), "{}", text(&output));
    node.stop();
}

/// A name in an archive, or a message of a registry, must not reach the terminal as a command to it.
#[test]
fn text_of_archives_is_escaped_for_terminals_and_logs() {
    let node = Node::start();
    let hostile = "\u{1b}]0;PWNED\u{7}\u{1b}[31m";
    let manifest = serde_json::json!([{ "Config": format!("{hostile}.json"), "RepoTags": [], "Layers": [] }]);
    let entries = [Entry::file("manifest.json", manifest.to_string().as_bytes())];
    let archive = Layer::new(&entries, Compression::Plain).blob;
    let output = piped(&node, &["import", "-"], &archive);
    assert!(!output.status.success());
    let said = text(&output);
    assert!(said.contains("PWNED") && said.contains("\\u{1b}]0;"), "it is shown: {said}");
    assert!(!said.contains('\u{1b}') && !said.contains('\u{7}'), "{said:?}");
    assert!(!node.log().contains('\u{1b}'));
    let refused = node.pull_image(coracle_tests::request::pull(&format!("localhost/{hostile}:1")));
    let refused = refused.expect_err("no reference");
    assert!(!refused.message().contains('\u{1b}'), "{refused}");
    node.stop();
}

#[test]
fn images_of_other_platforms_are_named() {
    let node = Node::start();
    let foreign = |architecture: &str| Image { architecture: architecture.into(), ..image(&node) };
    // Named directly, not by an index: as with containerd, because the node may have an emulator.
    node.try_import(&foreign("s390x").docker_archive(&["localhost/x:1"])).expect("it is taken");
    let registry = Registry::start(node.folder());
    registry.push(&foreign("x86-64"), "foreign", "0");
    registry.push(&foreign("mips"), "foreign", "1");
    for tag in ["0", "1"] {
        node.pull_image(coracle_tests::request::pull(&registry.name("foreign", tag))).expect("it is taken");
    }
    wait_until("the log says so", || {
        let log = node.log();
        log.contains("the image is for linux/s390x") && log.contains("the image is for linux/mips")
    });
    registry.push_index(&[foreign("s390x"), foreign("riscv64")], "foreign", "1");
    let refused =
        node.pull_image(coracle_tests::request::pull(&registry.name("foreign", "1"))).expect_err("none");
    assert!(refused.message().contains("there is: linux/riscv64, linux/s390x"), "{refused}");
    node.stop();
}

/// An error names its operation and its object once, also if it passes through several programs.
#[test]
fn errors_name_the_archive_or_image_once() {
    let node = Node::start();
    let absent = node.folder().join("absent.tar").display().to_string();
    let said = text(&piped(&node, &["import", &absent], b""));
    assert_eq!(said, format!("coracle: import {absent}: not found\n"));
    let said = text(&piped(&node, &["import", "-"], &[0xff; 2048]));
    let (before, after) = said.split_once(": archive: ").unwrap_or_else(|| panic!("{said}"));
    let fifo = format!("coracle: import {}/stdin-", node.state().display());
    assert!(before.starts_with(&fifo), "the FIFO has the name of the stream: {said}");
    assert_eq!(after, "it is no tar archive, plain or compressed with gzip or zstd\n");
    let name = "127.0.0.1:1/app:1";
    let said = text(&piped(&node, &["pull", name], b""));
    assert_eq!(said.matches(name).count(), 1, "{said}");
    assert!(said.starts_with(&format!("coracle: RegistryUnavailable: pull image {name}: http://")), "{said}");
    node.stop();
}
