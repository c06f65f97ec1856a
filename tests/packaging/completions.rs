//! The completions of bash, asked as bash asks them; the man pages, read as man reads them. That they agree with the program is
//! a unit test of its own (runtime/daemon/src/cli/pages.rs).

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
    let cases: [(&[&str], &[&str]); 6] = [
        (&["coracle", "c"], &["check", "config"]),
        (&["coracle", "config", ""], &["default", "check"]),
        (&["coracle", "image", "p"], &["pin"]),
        (&["coracle", "check", "--j"], &["--json"]),
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
