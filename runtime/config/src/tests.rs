//! Tests that the table is consistent, that files are merged as documented, and that each problem is reported with its place.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::value::{Origin, Raw};
use super::{
    Address, Changes, Config, KEYS, Problem, Sources, changes, document, load, load_for_client, read,
};

/// A directory with configuration files of one test; removed on drop.
struct Files(PathBuf);

impl Files {
    fn new(name: &str, files: &[(&str, &str)]) -> Files {
        let root = std::env::temp_dir().join(format!("coracle-config-{name}-{}", std::process::id()));
        std::fs::create_dir_all(root.join("conf.d")).unwrap();
        for (path, text) in files {
            std::fs::write(root.join(path), text).unwrap();
        }
        Files(root)
    }

    fn sources(&self, flags: &[(&str, &str)]) -> Sources {
        let flag = |name: &str| {
            KEYS.iter().find(|key| key.flag.as_ref().is_some_and(|flag| flag.name == name)).unwrap()
        };
        let flags = flags.iter().map(|(name, value)| (flag(name), (*value).to_owned())).collect();
        Sources { file: Some(self.0.join("config.toml")), flags }
    }

    fn load(&self, flags: &[(&str, &str)]) -> Result<Config, Vec<String>> {
        let problems = |problems: Vec<Problem>| {
            let prefix = format!("{}/", self.0.display());
            problems.iter().map(|problem| problem.to_string().replace(&prefix, "")).collect()
        };
        load(&self.sources(flags)).map_err(problems)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn parse_text(text: &str) -> (Vec<Option<(Raw, Origin)>>, Vec<Problem>) {
    let mut values = vec![None; KEYS.len()];
    let mut problems = Vec::new();
    read::parse(Path::new("f"), text, &mut values, &mut problems);
    (values, problems)
}

#[test]
fn each_key_of_the_table_is_unique_and_has_a_valid_default() {
    let mut config = Config::default();
    for (index, key) in KEYS.iter().enumerate() {
        let raw = read::literal(key.default).unwrap();
        (key.store)(&mut config, &raw).unwrap_or_else(|error| panic!("{}: {error}", key.name));
        assert_eq!(key.is_list, matches!(raw, Raw::List(_)), "{}", key.name);
        assert!(!KEYS[..index].iter().any(|other| other.name == key.name), "{} twice", key.name);
        assert!(key.text.ends_with('.') && !key.text.contains('\n'), "{}", key.name);
    }
    assert_eq!(config.root, Path::new("/var/lib/coracle"));
    assert_eq!(config.nri.dispatcher.sync_timeout, Duration::from_secs(10));
}

#[test]
fn the_default_file_uncommented_is_the_default() {
    let text: String = document()
        .lines()
        .map(|line| {
            line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line).to_owned() + "\n"
        })
        .collect();
    let (values, problems) = parse_text(&text);
    assert_eq!(problems, []);
    assert!(values.iter().all(Option::is_some), "a key is missing from the default file");
    let files = Files::new("default", &[("config.toml", &text)]);
    let empty = Files::new("empty", &[("config.toml", "")]);
    assert_eq!(files.load(&[]), empty.load(&[]));
    assert_eq!(changes(&files.load(&[]).unwrap(), &empty.load(&[]).unwrap()), Changes::default());
}

#[test]
fn drop_ins_override_the_file_in_order_and_flags_override_all() {
    let files = Files::new(
        "merge",
        &[
            ("config.toml", "root = '/a'\nstate = '/a'\nlisten = '/a.sock'\n[cni]\nbin_dirs = ['/a']\n"),
            ("conf.d/20-b.toml", "state = '/c'\n[metrics]\naddress = '127.0.0.1:9100'\n"),
            ("conf.d/10-a.toml", "state = '/b'\nlisten = 'unix:///b.sock'"),
            ("conf.d/README", "not toml"),
        ],
    );
    let config = files.load(&[("--root", "/f"), ("--cni-bin-dir", "/x"), ("--cni-bin-dir", "/y")]).unwrap();
    assert_eq!(config.root, Path::new("/f"));
    assert_eq!(config.state, Path::new("/c"));
    assert_eq!(config.listen, Path::new("/b.sock"));
    assert_eq!(config.cni.bin_dirs, [Path::new("/x"), Path::new("/y")]);
    assert_eq!(config.metrics_address, Some(Address::Tcp("127.0.0.1:9100".parse().unwrap())));
}

#[test]
fn every_mistake_is_named_with_file_and_line_at_once() {
    let long = format!("listen = '/{}'", "x".repeat(107));
    let files = Files::new(
        "mistakes",
        &[
            (
                "config.toml",
                "rooot = '/a'\n\nstate = 'relative'\n[cgroup]\ndriver = 'sytemd'\n[streaming]\nport = 70000\n",
            ),
            (
                "conf.d/1.toml",
                "[image]\nkeep_blobs = 'yes'\n[nri]\nplugin_sync_timeout = '5 s'\nrestart = 1\n",
            ),
            ("conf.d/2.toml", "[oops\n"),
            ("conf.d/3.toml", &long),
            ("conf.d/4.toml", "cni = 3\nport = 1\n"),
        ],
    );
    let problems = files.load(&[("--metrics", "here")]).unwrap_err();
    let expected = [
        "conf.d/1.toml:2: image.keep_blobs: expected true or false, found \"yes\"",
        "conf.d/1.toml:4: nri.plugin_sync_timeout: expected a time like \"5s\" or \"500ms\", from 10 ms to 120000 ms, \
         found \"5 s\"",
        "conf.d/1.toml:5: nri.restart: expected one of never, on-failure, found 1",
        "conf.d/2.toml:1: ",
        "conf.d/3.toml:1: listen: the path has 108 bytes, a unix socket's has 107 at most",
        "conf.d/4.toml:1: cni: expected a table, written [cni]",
        "conf.d/4.toml:2: unknown key `port`, did you mean `streaming.port`?",
        "config.toml:1: unknown key `rooot`, did you mean `root`?",
        "config.toml:3: state: expected an absolute path, found \"relative\"",
        "config.toml:5: cgroup.driver: expected one of auto, cgroupfs, systemd, found \"sytemd\"",
        "config.toml:7: streaming.port: expected a number from 0 to 65535, found 70000",
        "--metrics: metrics.address: expected ADDRESS:PORT or unix:///PATH, found \"here\"",
    ];
    assert_eq!(problems.len(), expected.len(), "{problems:#?}");
    for (problem, expected) in problems.iter().zip(expected) {
        assert!(problem.starts_with(expected), "{problem}\nexpected {expected}");
    }
}

#[test]
fn only_the_default_file_may_be_absent() {
    let files = Files::new("absent", &[]);
    assert_eq!(files.load(&[]).unwrap_err(), ["config.toml: read: no such file or directory"]);
}

#[test]
fn a_reload_says_what_needs_a_restart() {
    let before = Files::new("before", &[("config.toml", "")]).load(&[]).unwrap();
    let text = "log_level = 'debug'\nroot = '/b'\n";
    let after = Files::new("after", &[("config.toml", text)]).load(&[]).unwrap();
    let expected = Changes { reloadable: vec!["log_level"], needs_restart: vec!["root"] };
    assert_eq!(changes(&before, &after), expected);
}

#[test]
fn defaults_of_runtime_handlers_are_parsed() {
    let text = "[runtime_handlers]\naliases = ['gpu', 'x']\ncdi_devices = ['gpu=v.com/gpu=all', 'gpu=v.com/gpu=0']\n\
                annotations = ['gpu=a/b=c=d']\nseccomp = ['x=/etc/p.json']\ncgroup = ['x=memory.high=1']\n";
    let config = Files::new("handlers", &[("config.toml", text)]).load(&[]).unwrap();
    let handlers = config.runtime_handlers;
    assert_eq!(handlers.mistakes(), [""; 0]);
    let named = |text: &str| ("gpu".to_owned(), text.to_owned());
    assert_eq!(handlers.cdi_devices, [named("v.com/gpu=all"), named("v.com/gpu=0")]);
    assert_eq!(handlers.annotations, [("gpu".to_owned(), ("a/b".to_owned(), "c=d".to_owned()))]);
    for (line, expected) in [
        ("cdi_devices = ['gpu']", "expected \"HANDLER=VENDOR/CLASS=DEVICE\", found \"gpu\""),
        ("cdi_devices = ['gpu=all']", "found \"gpu=all\""),
        ("cdi_devices = ['gpu=v.com/=all']", "found \"gpu=v.com/=all\""),
        ("annotations = ['gpu=a']", "expected \"HANDLER=NAME=VALUE\""),
        ("seccomp = ['gpu=unconfined']", "runtime/default, or an absolute path"),
        ("cgroup = ['gpu=memory.max=3']", "of a file that requests do not set"),
        ("cgroup = ['gpu=../pids.max=3']", "expected \"HANDLER=FILE=VALUE"),
        ("cgroup = ['gpu=pids=3']", "expected \"HANDLER=FILE=VALUE"),
        ("no_new_privileges = 'gpu'", "expected a list"),
    ] {
        let files = Files::new("handlers", &[("config.toml", &format!("[runtime_handlers]\n{line}\n"))]);
        let problems = files.load(&[]).unwrap_err();
        assert!(problems.len() == 1 && problems[0].contains(expected), "{line}: {problems:?}");
    }
}

/// Finding S6: with an invalid `--state`, `coracle image import` asked the daemon with the default state directory.
#[test]
fn a_client_asks_no_daemon_unless_its_state_directory_is_known() {
    for (text, flags, state) in [
        ("state = '/a'", &[][..], Some("/a")),
        ("state = 'a'", &[], None),
        ("stat = '/a'", &[], None),
        ("state = '/a", &[], None),
        ("state = '/a'\nlog_level = 'loud'", &[], Some("/a")),
        ("state = '/a'\nnri.colour = 1", &[], Some("/a")),
        ("state = 'a'", &[("--state", "/b")], Some("/b")),
        ("state = '/a", &[("--state", "/b")], Some("/b")),
        ("state = '/a'", &[("--state", "b")], None),
        ("state = '/a'", &[("--log-level", "loud")], None),
    ] {
        let files = Files::new("client", &[("config.toml", text)]);
        let loaded = load_for_client(&files.sources(flags));
        let found = loaded.as_ref().ok().map(|(config, _)| config.state.as_path());
        assert_eq!(found, state.map(Path::new), "{text} {flags:?}: {loaded:?}");
    }
    let absent = Files::new("client-absent", &[]);
    assert!(load_for_client(&absent.sources(&[])).is_err(), "the file that --config names does not exist");
    assert!(load_for_client(&absent.sources(&[("--state", "/b")])).is_ok());
}

/// Any input is parsed, and each problem has a line of the file.
#[test]
fn each_problem_of_random_input_has_a_line_of_the_file() {
    let mut seed: u64 = 0x5eed;
    let pieces = [
        "root", " = ", "'/x'", "[", "]", "\n", "cni", ".", "{", "}", "\"", "1", "é", "\u{0}", "#", ",", "= =",
    ];
    for _ in 0..2000 {
        let mut text = String::new();
        for _ in 0..12 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            text.push_str(pieces[(seed >> 33) as usize % pieces.len()]);
        }
        let (_, problems) = parse_text(&text);
        for problem in problems {
            let Origin::File(_, line) = problem.origin else { panic!("{text:?}") };
            assert!((1..=text.split('\n').count()).contains(&line), "{text:?}: line {line}");
        }
    }
}

#[test]
fn long_files_and_too_many_drop_ins_are_not_read() {
    let files = Files::new("bounds", &[("config.toml", &"#".repeat(1 << 20))]);
    files.load(&[]).expect("a file of the maximum size");
    std::fs::write(files.0.join("config.toml"), "#".repeat((1 << 20) + 1)).unwrap();
    assert_eq!(files.load(&[]).unwrap_err(), ["config.toml: read: 1048577 bytes, 1048576 at most"]);
    std::fs::write(files.0.join("config.toml"), "").unwrap();
    for number in 0..256 {
        std::fs::write(files.0.join(format!("conf.d/{number}.toml")), "").unwrap();
    }
    files.load(&[]).expect("as many drop-ins as are permitted");
    std::fs::write(files.0.join("conf.d/more.toml"), "").unwrap();
    assert_eq!(files.load(&[]).unwrap_err(), ["conf.d: 257 files, 256 at most"]);
}

/// A day before 1970 would be no time, so that every image is refused.
#[test]
fn days_before_1970_and_malformed_days_are_refused() {
    for (day, is_right) in [
        ("", true),
        ("1970-01-01", true),
        ("2026-12-31", true),
        ("1969-12-31", false),
        ("1900-01-01", false),
        ("2026-13-01", false),
        ("2026-00-01", false),
        ("2026-01-32", false),
        ("2026-1-1", false),
    ] {
        let text = format!("[image.policy]\nminimum_time = \"{day}\"\n");
        let files = Files::new("day", &[("config.toml", &text)]);
        assert_eq!(files.load(&[]).is_ok(), is_right, "{day}");
    }
}
