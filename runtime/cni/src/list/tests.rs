//! Tests parsing of lists and the input of plugins. A plugin's object must be passed on unchanged.

use std::collections::BTreeMap;

use coracle_job::{Attachment, PortMapping};
use serde_json::value::RawValue;

use super::List;

fn list(version: &str, plugin: &str) -> List {
    List::parse(&format!(r#"{{"cniVersion":"{version}","name":"net","plugins":[{plugin}]}}"#)).unwrap()
}

fn input(plugin: &str, previous: Option<&str>, attachment: Option<&Attachment>) -> String {
    let list = list("1.0.0", plugin);
    String::from_utf8(list.plugins[0].input(&list, previous, attachment).unwrap()).unwrap()
}

fn attachment() -> Attachment {
    let port = |host_ip: &str| PortMapping {
        host_port: 8080,
        container_port: 80,
        protocol: "tcp".into(),
        host_ip: host_ip.into(),
    };
    Attachment {
        port_mappings: vec![port(""), port("127.0.0.1")],
        capabilities: vec![("dns".into(), r#"{"servers":["10.0.0.10"]}"#.into())],
        ..Attachment::default()
    }
}

#[test]
fn invalid_lists_are_refused() {
    let cases = [
        ("", "network configuration list: EOF while parsing a value at line 1 column 0"),
        (r#"{"cniVersion":"2.0.0","name":"n","plugins":[]}"#, r#"network "n": unknown cniVersion "2.0.0""#),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":[]}"#, r#"network "n": no plugins"#),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":[{}]}"#, r#"network "n": a plugin without a type"#),
        (
            r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":7}]}"#,
            r#"network "n": a plugin without a type"#,
        ),
        (
            r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"../sh"}]}"#,
            r#"network "n": plugin type "../sh" is not a file name"#,
        ),
        (
            r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":".."}]}"#,
            r#"network "n": plugin type ".." is not a file name"#,
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(List::parse(text).unwrap_err(), expected, "{text}");
    }
}

#[test]
fn plugins_receive_the_keys_of_the_specification() {
    let all = r#""portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"},{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"127.0.0.1"}]"#;
    let cases = [
        (r#"{"type":"a"}"#, None, r#"{"cniVersion":"1.0.0","name":"net","type":"a"}"#.to_owned()),
        (
            r#"{"type":"a","name":"own","cniVersion":"0.1.0"}"#,
            Some(r#"{"ips": []}"#),
            r#"{"cniVersion":"1.0.0","name":"net","prevResult":{"ips": []},"type":"a"}"#.to_owned(),
        ),
        (
            r#"{"type":"a","capabilities":{"portMappings":true,"dns":false,"mac":true,"bandwidth":null}}"#,
            None,
            format!(r#"{{"cniVersion":"1.0.0","name":"net","runtimeConfig":{{{all}}},"type":"a"}}"#),
        ),
        (
            r#"{"type":"a","capabilities":{"dns":true}}"#,
            None,
            r#"{"cniVersion":"1.0.0","name":"net","runtimeConfig":{"dns":{"servers":["10.0.0.10"]}},"type":"a"}"#
                .to_owned(),
        ),
    ];
    for (plugin, previous, expected) in cases {
        assert_eq!(input(plugin, previous, Some(&attachment())), expected, "{plugin}");
    }
    let without =
        input(r#"{"type":"a","capabilities":{"portMappings":true}}"#, None, Some(&Attachment::default()));
    assert_eq!(without, r#"{"cniVersion":"1.0.0","name":"net","type":"a"}"#, "no ports: no runtimeConfig");
    input(r#"{"type":"a","capabilities":null}"#, None, Some(&Attachment::default()));
    let status = input(r#"{"type":"a","capabilities":{"dns":true}}"#, None, None);
    assert_eq!(status, r#"{"cniVersion":"1.0.0","name":"net","type":"a"}"#, "STATUS has no pod");
}

/// Generates random JSON with numbers, escapes and depths that parsing and printing would change.
struct Generator(u64);

impl Generator {
    fn next(&mut self, below: u64) -> u64 {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }

    fn value(&mut self, depth: u64) -> String {
        const ATOMS: [&str; 10] = [
            "null",
            "true",
            "-0",
            "1e400",
            "18446744073709551616",
            "0.1000",
            r#""a\u0041\/""#,
            r#""ü""#,
            r#""\ud83d\ude00""#,
            "1E+2",
        ];
        let kinds = if depth == 0 { 1 } else { 3 };
        match self.next(kinds) {
            0 => ATOMS[self.next(ATOMS.len() as u64) as usize].to_owned(),
            1 => {
                let items: Vec<_> = (0..self.next(4)).map(|_| self.value(depth - 1)).collect();
                format!("[{}]", items.join(", "))
            }
            _ => {
                let fields: Vec<_> = (0..self.next(4))
                    .map(|index| format!("\"k{index}\" : {}", self.value(depth - 1)))
                    .collect();
                format!("{{{}}}", fields.join(","))
            }
        }
    }
}

#[test]
fn plugin_objects_are_unchanged_except_for_the_documented_keys() {
    let documented = ["name", "cniVersion", "prevResult", "runtimeConfig", "capabilities"];
    for seed in 1..500 {
        let mut generator = Generator(seed);
        let mut fields = vec![r#""type":"a""#.to_owned()];
        for index in 0..generator.next(6) {
            fields.push(format!("\"field{index}\":{}", generator.value(4)));
        }
        for key in ["name", "cniVersion", "prevResult", "runtimeConfig"] {
            if generator.next(3) == 0 {
                fields.push(format!("\"{key}\":{}", generator.value(2)));
            }
        }
        fields.push(r#""capabilities":{"dns":true}"#.to_owned());
        let plugin = format!("{{{}}}", fields.join(","));
        let read = |text: &str| serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(text).unwrap();
        let (before, after) = (read(&plugin), input(&plugin, Some("{}"), Some(&attachment())));
        let after = read(&after);
        for (key, value) in before.iter().filter(|(key, _)| !documented.contains(&key.as_str())) {
            assert_eq!(
                after.get(key).map(|value| value.get()),
                Some(value.get()),
                "seed {seed}, {key} of {plugin}"
            );
        }
        let added = after.keys().filter(|key| !before.contains_key(*key));
        assert!(
            added.clone().all(|key| documented.contains(&key.as_str())),
            "seed {seed}: {added:?} in {plugin}"
        );
        assert!(!after.contains_key("capabilities"), "seed {seed}");
    }
}
