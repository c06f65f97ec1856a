//! Checks that the tables of docs/cri-support.md contain exactly the fields of their messages.

use std::collections::BTreeMap;
use std::fs;

use crate::root;

/// Fields of each message of the protocol, without those of other systems, which are comments there.
fn messages() -> BTreeMap<String, Vec<String>> {
    let text = fs::read_to_string(root().join("runtime/daemon/proto/cri.proto")).expect("the protocol");
    let mut messages: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut current = None;
    for line in text.lines() {
        let code = line.split("//").next().unwrap_or_default().trim();
        if let Some(name) = code.strip_prefix("message ").and_then(|rest| rest.strip_suffix(" {")) {
            current = Some(name.to_owned());
        } else if code == "}" {
            current = None;
        } else if let (Some(message), Some((declared, _))) = (&current, code.split_once(" = "))
            && let Some(field) = declared.split_whitespace().last()
        {
            messages.entry(message.clone()).or_default().push(field.to_owned());
        }
    }
    messages
}

#[test]
fn every_field_is_in_its_table() {
    let messages = messages();
    let text = fs::read_to_string(root().join("docs/cri-support.md")).expect("the tables");
    let mut seen: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut message = "";
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            message = heading;
        } else if line.starts_with("## ") {
            message = "";
        } else if let Some(row) = line.strip_prefix("| ").filter(|_| !message.is_empty()) {
            let columns: Vec<&str> = row.split('|').map(str::trim).collect();
            if columns[0] != "field" && columns[0] != "windows" {
                assert!(["H", "R", "K", "—"].contains(&columns[1]), "{message}: {line}");
                seen.entry(message).or_default().push(columns[0]);
            }
        }
    }
    assert_eq!(seen.len(), 12, "tables: {:?}", seen.keys());
    for (message, fields) in seen {
        let known = messages.get(message).unwrap_or_else(|| panic!("{message} is no message"));
        assert_eq!(&fields, known, "{message}");
    }
}
