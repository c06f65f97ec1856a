//! Tests monitors of pods with a user namespace, and the process that creates it. Needs root and a built `coracle-pod` (see
//! `fixture`).
#![forbid(unsafe_code)]

mod fixture;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_sandbox::Error;
use coracle_sandbox::monitor::{self, ConnectError, Monitor};
use coracle_sandbox::userns::{IdRange, UserMappings};

const SIGTERM: i32 = 15;
/// The monitor's descriptor of the pod's user namespace.
const USER_NAMESPACE: i32 = 6;

const RANGE: IdRange = IdRange { inside: 0, outside: 200_000, length: 65_536 };

/// Starts a monitor in a new directory.
fn spawn(directory: &Path, mappings: &UserMappings) -> Result<Monitor, Error> {
    let _ = fs::remove_dir_all(directory);
    fs::create_dir_all(directory).unwrap();
    fixture::spawn(directory, Some(mappings), &fixture::record(&[]))
}

fn directory(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("coracle-userns-{name}-{}", std::process::id()))
}

fn link(path: &str) -> String {
    fs::read_link(path).unwrap_or_else(|error| panic!("{path}: {error}")).display().to_string()
}

/// Children of this thread that have not been reaped.
fn children() -> String {
    fs::read_to_string("/proc/thread-self/children").unwrap()
}

#[test]
fn the_monitor_joins_the_namespaces_and_its_helper_ends_as_root() {
    let directory = directory("joined");
    let monitor = spawn(&directory, &UserMappings { users: RANGE, groups: RANGE }).unwrap();
    let of = |kind: &str| link(&format!("/proc/{}/ns/{kind}", monitor.pid));
    assert_eq!(of("user"), link("/proc/self/ns/user"));
    for kind in ["net", "ipc", "uts"] {
        assert_ne!(of(kind), link(&format!("/proc/self/ns/{kind}")), "{kind}");
    }
    let user = link(&format!("/proc/{}/fd/{USER_NAMESPACE}", monitor.pid));
    assert!(user.starts_with("user:["), "{user}");
    assert_ne!(user, of("user"));
    let helpers = fs::read_to_string(format!("/proc/{0}/task/{0}/children", monitor.pid)).unwrap();
    assert_eq!(helpers, "");
    monitor.signal(SIGTERM).unwrap();
    let start = Instant::now();
    while !monitor.is_gone() {
        assert!(start.elapsed() < Duration::from_secs(10), "the monitor does not end");
        std::hint::spin_loop();
    }
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_mapping_that_the_kernel_refuses_is_named_and_leaves_no_process_as_root() {
    let empty = IdRange { length: 0, ..RANGE };
    let cases = [
        (UserMappings { users: empty, groups: RANGE }, "write uid_map 0 200000 0: invalid argument"),
        (UserMappings { users: RANGE, groups: empty }, "write gid_map 0 200000 0: invalid argument"),
    ];
    for (mappings, expected) in cases {
        let directory = directory("refused");
        let error = spawn(&directory, &mappings).map(|monitor| monitor.pid).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert_eq!(monitor::connect(&directory).unwrap_err(), ConnectError::NotThere);
        assert_eq!(children(), "");
        fs::remove_dir_all(&directory).unwrap();
    }
}
