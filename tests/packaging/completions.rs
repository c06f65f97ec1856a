//! The completions, executed by bash, zsh and fish, and the man pages, formatted by man. A unit test checks that they
//! match the program (runtime/cli/src/cli/pages_tests.rs).

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::{run, said, workspace};

/// A function of bash and zsh in the place of the program, which completions ask for images, pods and containers.
const PROGRAM: &str = "coracle() { case $* in image\\ list\\ --quiet) echo reg.example/one:1 ;; \
                       pods\\ --quiet) echo a1b2c3 ;; ps\\ --all\\ --quiet) echo d4e5f6 ;; \
                       *) printf '%s\\n' \"became: $*\" ;; esac }";

fn complete(words: &[&str]) -> Vec<String> {
    let script = "source packaging/completions/coracle.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _coracle; \
                  printf '%s\\n' \"${COMPREPLY[@]}\"";
    let script = format!("{PROGRAM}\n{script}");
    let output = run(Command::new("bash").args(["-c", &script, "bash"]).args(words).current_dir(workspace()));
    assert!(output.status.success(), "{}", said(&output));
    said(&output).lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_flags_and_values() {
    let cases: [(&[&str], &[&str]); 22] = [
        (&["coracle", "image", "pin", "reg"], &["reg.example/one:1"]),
        (&["coracle", "image", "remove", "--force", ""], &["reg.example/one:1"]),
        (&["coracle", "ps", "--image", ""], &["reg.example/one:1"]),
        (&["coracle", "ps", "--pod", "a"], &["a1b2c3"]),
        (&["coracle", "logs", "d"], &["d4e5f6"]),
        (&["coracle", "c"], &["check", "config"]),
        (&["coracle", "config", ""], &["default", "check", "status"]),
        (&["coracle", "config", "status", "--o"], &["--output"]),
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

/// In an interactive zsh on a terminal each line is typed with a tab at its end; a function prints what it has become.
#[test]
fn zsh_completes_commands_options_and_values() {
    let cases = [
        ("image pi", "image pin"),
        ("image pin reg", "image pin reg.example/one:1"),
        ("ps --pod a", "ps --pod a1b2c3"),
        ("logs d", "logs d4e5f6"),
        ("image check --rep", "image check --repair"),
        ("config st", "config status"),
        ("config status --out", "config status --output"),
        ("config status -o js", "config status -o json"),
        ("k3s dis", "k3s disable"),
        ("ps -o ya", "ps -o yaml"),
        ("ps --all --no-t", "ps --all --no-trunc"),
        ("serve --log-level deb", "serve --log-level debug"),
        ("image import docs/kern", "image import docs/kernel.md"),
        ("image export x -o docs/kern", "image export x -o docs/kernel.md"),
        ("config check docs/kern", "config check docs/kernel.md"),
    ];
    let mut typed = format!(
        "PS1='> '; fpath=($PWD/packaging/completions $fpath); autoload -U compinit; compinit -u -D\n{PROGRAM}\n"
    );
    for (line, _) in cases {
        typed += &format!("coracle {line}\t\n");
    }
    typed += "exit\n";
    let mut zsh = Command::new("script")
        .args(["--quiet", "--return", "--command", "zsh -f -i", "/dev/null"])
        .env("TERM", "dumb")
        .current_dir(workspace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script runs");
    zsh.stdin.take().expect("a pipe").write_all(typed.as_bytes()).expect("it reads");
    let output = zsh.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let became: Vec<&str> =
        text.lines().filter_map(|line| line.trim().strip_prefix("became: ")).map(str::trim_end).collect();
    let expected: Vec<&str> = cases.iter().map(|(_, expected)| *expected).collect();
    assert_eq!(became, expected, "{text}");
}

#[test]
fn fish_completes_commands_options_and_values() {
    for (line, expected) in [
        ("image pi", &["pin"][..]),
        ("image pin ", &["reg.example/one:1"]),
        ("ps --pod ", &["a1b2c3"]),
        ("logs ", &["d4e5f6"]),
        ("image check --re", &["--repair"]),
        ("config ", &["check", "default", "status"]),
        ("config status --o", &["--output"]),
        ("k3s ", &["disable", "enable", "status"]),
        ("ps -o ", &["json", "table", "wide", "yaml"]),
        ("serve --log-level d", &["debug"]),
        ("image import docs/kern", &["docs/kernel.md"]),
    ] {
        let program = "function coracle; switch \"$argv\"; case 'image list --quiet'; echo reg.example/one:1; \
                       case 'pods --quiet'; echo a1b2c3; case 'ps --all --quiet'; echo d4e5f6; end; end";
        let script =
            format!("{program}; source packaging/completions/coracle.fish; complete -C 'coracle {line}'");
        let output = run(Command::new("fish").args(["--no-config", "-c", &script]).current_dir(workspace()));
        assert!(output.status.success(), "{}", said(&output));
        let text = said(&output);
        let words: Vec<&str> = text.lines().filter_map(|line| line.split('\t').next()).collect();
        assert_eq!(words, expected, "{line}");
    }
}

#[test]
fn the_versions_name_commit_and_target() {
    for (name, word) in [("coracle", "version"), ("coracled", "--version")] {
        let program = coracle_tests::node::binaries().join(name);
        let text = said(&run(Command::new(program).arg(word)));
        let target = format!("{}-unknown-linux-musl)\nmonitors: version ", std::env::consts::ARCH);
        assert!(text.starts_with(&format!("{name} 0.1.0 (commit ")) && text.contains(&target), "{text}");
        assert!(text.contains("\ninterfaces: CRI v1, CNI 0.1.0 to 1.1.0, NRI v0."), "{text}");
    }
}
