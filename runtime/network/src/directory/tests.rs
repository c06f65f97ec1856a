//! Tests which file applies, and which list stays active when files become invalid.

use std::fs;
use std::rc::Rc;

use super::{FILE_BYTES_MAX, Scan, choose, scan, signature};
use crate::conf::List;
use crate::tests::Folder;

const LIST: &str = r#"{"cniVersion":"1.0.0","name":"NAME","plugins":[{"type":"bridge"}]}"#;

fn list(name: &str) -> String {
    LIST.replace("NAME", name)
}

#[test]
fn the_first_valid_file_by_name_applies() {
    let folder = Folder::new("scan");
    folder.write("README", "no configuration");
    folder.write("00-bad.conflist", "{");
    folder.write("10-long.conf", &" ".repeat(FILE_BYTES_MAX as usize + 1));
    folder.write("20-list.conf", &list("wrong-ending"));
    folder.write("Z-bytes.conflist", &list("upper-case-first"));
    folder.write("a.conflist", &list("later"));
    fs::create_dir(folder.0.join("05-folder.conflist")).unwrap();
    nix::unistd::mkfifo(&folder.0.join("06-fifo.conf"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let found = scan(&folder.0);
    assert_eq!(found.list.map(|list| list.name).as_deref(), Some("upper-case-first"));
    let bad: Vec<_> = found.bad.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    let expected = [
        "00-bad.conflist: EOF while parsing an object at line 1 column 1",
        "06-fifo.conf: not a regular file",
        "10-long.conf: longer than 262144 bytes",
        "20-list.conf: a list of plugins must be in a file named .conflist",
    ];
    assert_eq!(bad, expected);
}

#[test]
fn plugins_in_the_directory_of_the_network_are_read_in_order() {
    let folder = Folder::new("folder");
    folder.write("1.conflist", r#"{"cniVersion":"1.1.0","name":"pods"}"#);
    fs::create_dir(folder.0.join("pods")).unwrap();
    folder.write("pods/2.conf", r#"{"type":"two"}"#);
    folder.write("pods/1.conf", r#"{"type":"one"}"#);
    folder.write("pods/0.json", "ignored");
    let found = scan(&folder.0).list.unwrap().text;
    assert_eq!(found, r#"{"cniVersion":"1.1.0","name":"pods","plugins":[{"type":"one"},{"type":"two"}]}"#);
}

#[test]
fn a_list_stays_active_while_its_file_is_invalid() {
    let dir = std::path::Path::new("/d");
    let make = |file: &str| List {
        file: file.to_owned(),
        name: "n".into(),
        version: "1.0.0".into(),
        capabilities: Default::default(),
        text: file.to_owned(),
    };
    let bad = |file: &str| vec![(file.to_owned(), "why".to_owned())];
    let found =
        |list: Option<&str>, bad: Vec<(String, String)>| Scan { list: list.map(make), bad, error: None };
    let nothing = Err("no CNI configuration file in /d".to_owned());
    let broken = |file: &str| Err(format!("/d/{file}: why"));
    let cases = [
        ("empty", None, found(None, vec![]), None, nothing.clone()),
        ("only bad", None, found(None, bad("a")), None, broken("a")),
        ("bad is skipped", None, found(Some("b"), bad("a")), Some("b"), broken("a")),
        ("its own file is bad", Some("a"), found(None, bad("a")), Some("a"), broken("a")),
        (
            "its own file is bad, another is not",
            Some("a"),
            found(Some("b"), bad("a")),
            Some("a"),
            broken("a"),
        ),
        ("its file was removed", Some("a"), found(None, vec![]), None, nothing),
        ("its file was removed, an invalid one remains", Some("a"), found(None, bad("b")), None, broken("b")),
        ("an earlier file was added", Some("b"), found(Some("a"), vec![]), Some("a"), Ok(())),
        ("same", Some("a"), found(Some("a"), vec![]), Some("a"), Ok(())),
        (
            "the directory cannot be read",
            Some("a"),
            Scan { error: Some("read /d: i/O error".into()), ..Scan::default() },
            Some("a"),
            Err("read /d: i/O error".to_owned()),
        ),
    ];
    for (what, current, scan, expected, status) in cases {
        let (list, said) = choose(current.map(|file| Rc::new(make(file))), scan, dir);
        assert_eq!(list.as_ref().map(|list| list.file.as_str()), expected, "{what}");
        assert_eq!(said, status, "{what}");
    }
}

#[test]
fn the_signature_changes_with_every_change() {
    let folder = Folder::new("signature");
    let empty = signature(&folder.0);
    assert_eq!(signature(&folder.0.join("missing")), empty);
    fs::create_dir(folder.0.join("pods")).unwrap();
    let mut before = signature(&folder.0);
    assert_ne!(before, empty);
    for (file, text) in [("1.conf", "a"), ("1.conf", "ab"), ("pods/1.conf", "a"), ("pods/1.conf", "ab")] {
        folder.write(file, text);
        let now = signature(&folder.0);
        assert_ne!(now, before, "{file} {text}");
        before = now;
    }
    assert_eq!(signature(&folder.0), before);
}
