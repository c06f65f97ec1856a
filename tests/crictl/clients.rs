//! Programs with other libraries of gRPC than ours, and of several years: whatever they send as `:authority`, they connect.
//! Without the change of those values, all but `unix-url-without-dialer` and `authority-localhost` got RST_STREAM
//! PROTOCOL_ERROR.

use std::path::PathBuf;
use std::process::Command;

use coracle_tests::node::Node;

/// The programs that `tests/tools/install test` builds of `dialers/main.go`: grpc-go of January 2020, of 2023 and of
/// 2026.
const DIALERS: [&str; 3] = ["dialers-v1.27.0", "dialers-v1.57.1", "dialers-v1.80.0"];

pub(crate) fn tools() -> PathBuf {
    let usual = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools");
    std::env::var_os("CORACLE_TOOLS_DIR").map_or_else(|| PathBuf::from(usual), PathBuf::from)
}

/// The lines that a client prints for each way of dialling.
#[track_caller]
fn lines(command: &mut Command) -> Vec<String> {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}; `tests/tools/install test` makes it"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(str::to_owned).collect()
}

#[track_caller]
fn all_connect(lines: &[String], count: usize) {
    assert!(lines.len() == count && lines.iter().all(|line| line.ends_with(" ok")), "{lines:#?}");
}

#[test]
fn every_dialling_method_of_seven_years_of_grpc_go_connects() {
    let node = Node::start();
    for name in DIALERS {
        let lines = lines(Command::new(tools().join("bin").join(name)).arg(node.socket()));
        println!("{name}: {lines:?}");
        all_connect(&lines, 9);
    }
    node.stop();
}

#[test]
fn grpcio_of_python_connects_with_a_path_as_authority() {
    let node = Node::start();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/crictl/dialers/ask.py");
    let lines = lines(Command::new(tools().join("grpcio/bin/python3")).arg(script).arg(node.socket()));
    all_connect(&lines, 3);
    node.stop();
}
