//! Random configurations: several members at once, of values that are odd in one way each.

use coracle_tests::random::Random;
use serde_json::{Value, json};

use super::{Case, WORDS};
use crate::archive::{Archive, Member};

pub(super) fn case(random: &mut Random) -> Case {
    let mut case = Case::new("random");
    for _ in 0..1 + random.below(4) {
        let (key, value) = member(random);
        case = case.with(key, value);
    }
    if random.below(2) == 0 {
        case.layers = vec![Archive::of(files(random))];
        let user = user(random);
        case = case.with("User", json!(user));
    }
    case
}

fn pick<T: Clone>(random: &mut Random, list: &[T]) -> T {
    list[random.below(list.len() as u64) as usize].clone()
}

fn member(random: &mut Random) -> (&'static str, Value) {
    let words = json!(WORDS);
    match random.below(7) {
        0 => {
            // The table has an empty program name.
            let values = [json!(["/probe"]), json!([]), json!(null), json!(["probe"])];
            ("Entrypoint", pick(random, &values))
        }
        1 => ("Cmd", pick(random, &[words, json!([]), json!(null), json!(["/probe", "report"])])),
        2 => {
            let pool = ["PATH=/", "A=1", "A=2", "HOME=/h", "B", "C=", "D=x=y", "PATH=", "E=ü", "HOSTNAME=h"];
            let list: Vec<&str> = (0..random.below(5)).map(|_| pick(random, &pool)).collect();
            ("Env", json!(list))
        }
        3 => ("User", json!(user(random))),
        4 => (
            "WorkingDir",
            pick(random, &["", "/", "/etc", "/new/one", "/etc/../tmp", "//etc/", "/tmp/x/"]).into(),
        ),
        5 => (
            "StopSignal",
            pick(random, &["", "TERM", "SIGINT", "9", "SIGRTMIN+1", "SIGRTMAX-1", "64", "x"]).into(),
        ),
        _ => ("Volumes", pick(random, &[json!({ "/data": {} }), json!({ "/a": null }), json!(null)])),
    }
}

fn user(random: &mut Random) -> String {
    let word = |random: &mut Random| {
        pick(
            random,
            &["root", "alice", "bob", "0", "5", "1000", "6", "x", "", "08", "-1", "4294967295", "crew"],
        )
    };
    let user = word(random);
    match random.below(2) {
        0 => user.to_owned(),
        _ => format!("{user}:{}", word(random)),
    }
}

fn files(random: &mut Random) -> Vec<Member> {
    let line = |random: &mut Random, is_group: bool| {
        let name = pick(random, &["root", "alice", "bob", "x", "crew", "5", "#a", "", "+"]);
        // The table has lines with numbers that are none.
        let number = |random: &mut Random| pick(random, &["0", "5", "6", "1000", "07"]);
        let first = number(random);
        let line = match is_group {
            true => {
                let members: Vec<&str> =
                    (0..random.below(4)).map(|_| pick(random, &["root", "alice", "bob", "", " x"])).collect();
                format!("{name}:x:{first}:{}", members.join(","))
            }
            false => format!("{name}:x:{first}:{}:c:/home/{name}:/bin/sh", number(random)),
        };
        pick(random, &[line.clone(), line.clone(), line.clone(), format!(" {line} ")])
    };
    let text = |random: &mut Random, is_group: bool| {
        let lines: Vec<String> = (0..random.below(6)).map(|_| line(random, is_group)).collect();
        let end = if random.below(2) == 0 { "\n" } else { "" };
        format!("{}{end}", lines.join("\n"))
    };
    let (passwd, group) = (text(random, false), text(random, true));
    vec![Member::file("etc/passwd", passwd), Member::file("etc/group", group)]
}
