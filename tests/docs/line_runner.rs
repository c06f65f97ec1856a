//! A directory in which lines run: the placeholders and default paths of the pages stand for those of a node.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use coracle_tests::host::patience;
use coracle_tests::node::{Node, binaries};
use coracle_tests::page_rules::{Act, Rule, all, expect_in_order};

use crate::extract::Line;
use crate::pages::{read, ruled};

/// The endpoint in the pages.
pub(crate) const ENDPOINT: &str = "unix:///run/coracle/coracle.sock";

/// Runs lines of the pages in a directory of its own.
pub(crate) struct LineRunner {
    folder: PathBuf,
    /// Directories that the search path has before those of the machine.
    path: String,
    crictl: PathBuf,
    /// A program and its first arguments that start the shell; empty: the shell is started directly.
    wrapper: Vec<String>,
    /// Texts of lines and what they stand for, in the order of replacement.
    pairs: Vec<(String, String)>,
}

impl LineRunner {
    /// A working directory of the node: `coracle` and crictl use this node, as they use that of the machine with the
    /// configuration of the package.
    pub(crate) fn of(node: &Node) -> LineRunner {
        let folder = node.folder().join("work");
        for name in ["bin", "etc/modules-load.d", "etc/sysctl.d", "etc/init.d", "etc/conf.d"] {
            fs::create_dir_all(folder.join(name)).expect("a folder");
        }
        let endpoint = format!("unix://{}", node.socket().display());
        let crictl = folder.join("crictl.yaml");
        fs::write(&crictl, read("packaging/crictl.yaml").replace(ENDPOINT, &endpoint)).expect("crictl.yaml");
        for (name, script) in [("coracle", command_line_of(node)), ("coracled", daemon_of(node))] {
            let program = folder.join("bin").join(name);
            fs::write(&program, script).expect("a script");
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("our file");
        }
        let (here, root, config) =
            (folder.display(), node.root().display(), node.folder().join("config.toml"));
        let pairs = [
            (ENDPOINT, endpoint),
            ("/etc/coracle/config.toml", config.display().to_string()),
            ("/etc/", format!("{here}/etc/")),
            ("/var/lib/coracle", root.to_string()),
            ("FLAGS", node.flags().join(" ")),
        ];
        LineRunner {
            path: format!("{here}/bin"),
            pairs: pairs.map(|(from, to)| (from.to_owned(), to)).into(),
            wrapper: Vec::new(),
            crictl,
            folder,
        }
    }

    /// Runs lines in the workspace; they need no node.
    pub(crate) fn workspace() -> LineRunner {
        LineRunner {
            folder: crate::pages::workspace().to_owned(),
            path: binaries().display().to_string(),
            crictl: "/dev/null".into(),
            wrapper: Vec::new(),
            pairs: Vec::new(),
        }
    }

    /// Lets a text of lines stand for another one. Later ones are replaced first.
    pub(crate) fn with(mut self, from: &str, to: impl ToString) -> LineRunner {
        self.pairs.insert(0, (from.to_owned(), to.to_string()));
        self
    }

    /// Sets the program that starts the shell.
    pub(crate) fn wrapped(mut self, wrapper: &[&str]) -> LineRunner {
        self.wrapper = wrapper.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs the lines of this group, in the order of the pages. Lines with the same rule run once.
    #[track_caller]
    pub(crate) fn run_group(&self, group: &str) {
        let rules = all();
        let mut count = 0;
        for (page, line, rule) in ruled(&rules) {
            let Some(rule @ Rule { act: Act::Run { group: name, exit, .. }, .. }) = rule else { continue };
            if name == group {
                let what = format!("{page}:{}: {}", line.number, line.text);
                let output = self.run(&script(&line, rule));
                let text = text_of(&output);
                assert_eq!(output.status.code(), Some(*exit), "{what}\n{text}");
                expect_in_order(&text, &rule.says, &what);
                count += 1;
            }
        }
        assert!(count > 0, "no line has the group {group}");
    }

    /// Runs a script with bash, with a time limit.
    pub(crate) fn run(&self, script: &str) -> Output {
        let limit = (3 * patience()).as_secs().to_string();
        let shell = ["timeout", "--kill-after=5", &limit, "bash", "-e", "-o", "pipefail", "-c"];
        let mut words = self.wrapper.iter().map(String::as_str).chain(shell);
        let path = std::env::var("PATH").unwrap_or_default();
        Command::new(words.next().expect("at least the shell"))
            .args(words)
            .arg(self.replaced(script))
            .current_dir(&self.folder)
            .env("PATH", format!("{}:{path}", self.path))
            .env("CRI_CONFIG_FILE", &self.crictl)
            .env_remove("CONTAINER_RUNTIME_ENDPOINT")
            .stdin(Stdio::null())
            .output()
            .expect("bash and timeout")
    }

    /// Replaces the texts of [`LineRunner::with`], where they are whole words.
    fn replaced(&self, script: &str) -> String {
        self.pairs.iter().fold(script.to_owned(), |script, (from, to)| replace_words(&script, from, to))
    }
}

/// A script that runs the daemon with the flags of this node, before the words of the user.
fn daemon_of(node: &Node) -> String {
    format!("#!/bin/sh\nexec {}/coracled {} \"$@\"\n", binaries().display(), node.flags().join(" "))
}

/// A script that runs the command line with the flags of this node, before the words of the user.
fn command_line_of(node: &Node) -> String {
    format!(
        "#!/bin/sh\nprogram={}/coracle\ncase \"$1 $2\" in\n\
         \"config default\"|*--help*) exec \"$program\" \"$@\" ;;\n\
         config\\ *|image\\ *) group=\"$1 $2\"; shift 2 ;;\n\
         *) group=$1; shift ;;\nesac\n\
         exec \"$program\" $group {} \"$@\"\n",
        binaries().display(),
        node.flags().join(" "),
    )
}

/// The line in the frame of its rule.
pub(crate) fn script(line: &Line, rule: &Rule) -> String {
    let Act::Run { with, frame, .. } = &rule.act else { panic!("{}: it is not run", rule.line) };
    let text = with.iter().fold(line.text.clone(), |text, (from, to)| replace_words(&text, from, to));
    frame.replace("LINE", &text)
}

/// Both streams of a command.
pub(crate) fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

/// Replaces a text wherever no letter, digit or `…` continues it on either side.
fn replace_words(text: &str, from: &str, to: &str) -> String {
    let is_part = |letter: Option<char>| letter.is_some_and(|c| c.is_alphanumeric() || "_…".contains(c));
    let mut result = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(from) {
        let (before, after) = (&rest[..at], &rest[at + from.len()..]);
        let is_start = is_part(from.chars().next()) && is_part(before.chars().next_back());
        let is_end = is_part(from.chars().next_back()) && is_part(after.chars().next());
        result.push_str(before);
        result.push_str(if is_start || is_end { from } else { to });
        rest = after;
    }
    result + rest
}

#[test]
fn placeholders_are_replaced_as_whole_words() {
    let replace = |text: &str| replace_words(text, "IMAGE", "x:1");
    assert_eq!(
        replace("pull IMAGE; IMAGES IMAGE… MY_IMAGE (IMAGE)"),
        "pull x:1; IMAGES IMAGE… MY_IMAGE (x:1)"
    );
    assert_eq!(replace_words("ls /etc/a /etc/b", "/etc/", "/tmp/etc/"), "ls /tmp/etc/a /tmp/etc/b");
    assert_eq!(replace_words("export IMAGE… -o", "IMAGE…", "a b"), "export a b -o");
}
