//! The bash completions, executed by bash, and the man pages, formatted by man. A unit test checks that they
//! match the program (runtime/daemon/src/cli/pages_tests.rs).

use std::process::Command;

use crate::{run, said, workspace};

fn complete(words: &[&str]) -> Vec<String> {
    let script = "source packaging/completions/coracle.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _coracle; \
                  printf '%s\\n' \"${COMPREPLY[@]}\"";
    let output = run(Command::new("bash").args(["-c", script, "bash"]).args(words).current_dir(workspace()));
    assert!(output.status.success(), "{}", said(&output));
    said(&output).lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_flags_and_values() {
    let cases: [(&[&str], &[&str]); 16] = [
        (&["coracle", "c"], &["check", "config"]),
        (&["coracle", "config", ""], &["default", "check"]),
        (&["coracle", "image", "pi"], &["pin"]),
        (&["coracle", "image", "list", "--p"], &["--pulling"]),
        (&["coracle", "image", "check", "--r"], &["--repair"]),
        (&["coracle", "image", "list", "-o", "j"], &["json"]),
        (&["coracle", "image", "export", "x", "-o", "docs/kern"], &["docs/kernel.md"]),
        (&["coracle", "check", "--j"], &["--json"]),
        (&["coracle", "ps", "--no"], &["--no-trunc"]),
        (&["coracle", "ps", "-o", "y"], &["yaml"]),
        (&["coracle", "pods", "--state", "r"], &["ready"]),
        (&["coracle", "ps", "--state", "r"], &["running"]),
        (&["coracle", "logs", "--ti"], &["--timestamps"]),
        (&["coracle", "exec", "--t"], &["--tty"]),
        (&["coracle", "serve", "--log-level", "w"], &["warn"]),
        (&["coracle", "serve", "--config", "docs/kern"], &["docs/kernel.md"]),
    ];
    for (words, expected) in cases {
        assert_eq!(complete(words), expected, "{words:?}");
    }
    let flags = complete(&["coracle", "serve", "--"]);
    for flag in ["--config", "--root", "--metrics"] {
        assert!(flags.iter().any(|known| known == flag), "{flags:?}");
    }
}

#[test]
fn the_version_names_commit_and_target() {
    let program = coracle_tests::node::binaries().join("coracle");
    let output = run(Command::new(program).arg("version"));
    let text = said(&output);
    let target = format!("{}-unknown-linux-musl)\n", std::env::consts::ARCH);
    assert!(text.starts_with("coracle 0.1.0 (commit ") && text.ends_with(&target), "{text}");
}
