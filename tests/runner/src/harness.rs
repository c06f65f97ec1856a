//! Test programs: which ones a build made, and how they are run.
//!
//! They are run directly and not by cargo, so that several suites run while cargo builds, and with the times of their tests, which
//! the harness prints for compilers that permit unstable options.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use crate::steps::{self, Threads};

/// Builds all test programs, and prints one JSON object a line.
pub(crate) const BUILD: [&str; 6] = [
    "test",
    "--no-run",
    "--workspace",
    "--exclude=coracle-pod",
    "--message-format=json-render-diagnostics",
    "--quiet",
];

/// The words that leave out tests which cannot run here: those with `as_root` in their names without root, and those with
/// `with_tools` before `tests/tools/install` has brought anything.
pub(crate) fn left_out() -> Vec<&'static str> {
    let mut words = Vec::new();
    if !is_root() {
        words.extend(["--skip", "as_root"]);
    }
    if !Path::new("target/tools/seccomp").exists() {
        words.extend(["--skip", "with_tools"]);
    }
    words
}

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// The name of its target: `lifecycle`, or the crate for unit tests.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// The directory of its package, in which it is run as by cargo.
    pub(crate) package: PathBuf,
}

impl Program {
    /// The programs in cargo's messages.
    pub(crate) fn all(messages: &str) -> Vec<Program> {
        messages.lines().filter_map(Program::of_message).collect()
    }

    /// The test program of a message `compiler-artifact`; programs that tests start have such messages, too. Paths with quotes
    /// are not expected.
    fn of_message(line: &str) -> Option<Program> {
        let (_, target) = line.split_once("\"target\":")?;
        let (target, profile) = target.split_once("\"profile\":")?;
        let path = string_field(line, "executable").filter(|_| profile.contains("\"test\":true"))?;
        let package = Path::new(string_field(line, "manifest_path")?).parent()?;
        Some(Program {
            name: string_field(target, "name")?.to_owned(),
            path: path.into(),
            package: package.to_owned(),
        })
    }

    /// Whether the test program is one of the suites of `tests/`.
    pub(crate) fn is_suite(&self) -> bool {
        steps::suite_names().contains(&self.name.as_str())
    }

    /// The command that runs the test program with these arguments.
    pub(crate) fn command(&self, threads: Threads, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.path);
        // It is for the tables of this program; tests that write pages would change them while others read them.
        command.env_remove("UPDATE");
        command
            .args(["-Z", "unstable-options", "--report-time"])
            .args(arguments)
            .current_dir(&self.package)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_MANIFEST_DIR", &self.package)
            .stdin(Stdio::null());
        if std::env::var_os("RUST_TEST_THREADS").is_none() {
            command.env("RUST_TEST_THREADS", threads.count().to_string());
        }
        command
    }
}

/// `"NAME":"VALUE"` in a line of JSON.
fn string_field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

impl Threads {
    fn count(self) -> usize {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        match self {
            Threads::Idle => 4 * processors,
            Threads::Waiting => 2 * processors,
            Threads::Working => processors,
        }
    }
}

/// Returns whether this process is root, without a system call of our own.
pub(crate) fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|about| about.uid() == 0)
}

/// Lets both streams of a command go into a file.
///
/// # Errors
/// Those of [`File::try_clone`].
pub(crate) fn into_file(command: &mut Command, log: &File) -> io::Result<()> {
    command.stdout(log.try_clone()?).stderr(log.try_clone()?);
    Ok(())
}

/// `make t`: the tests of these suites whose name contains `name`, one suite after the other, with their output.
pub(crate) fn only(name: &str, suites: &[&str]) -> ExitCode {
    let mut failed = false;
    for suite in suites {
        println!("== {suite}");
        let status = Command::new("cargo")
            .args(["test", "-q", "-p", "coracle-tests", "--test", suite, "--", "--nocapture", name])
            .status();
        failed |= !status.is_ok_and(|status| status.success());
    }
    ExitCode::from(u8::from(failed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_the_messages_of_cargo() {
        let artifact = r#"{"reason":"compiler-artifact","package_id":"path+file:///w/tests#coracle-tests@0.1.0","manifest_path":"/w/tests/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"lifecycle","src_path":"/w/tests/lifecycle/main.rs","test":true},"profile":{"test":true},"filenames":["/w/target/debug/deps/lifecycle-1"],"executable":"/w/target/debug/deps/lifecycle-1","fresh":true}"#;
        let started = artifact.replace("{\"test\":true}", "{\"test\":false}");
        let library = r#"{"reason":"compiler-artifact","manifest_path":"/w/nri/Cargo.toml","target":{"name":"coracle_nri"},"executable":null,"fresh":true}"#;
        let program = Program {
            name: "lifecycle".into(),
            path: "/w/target/debug/deps/lifecycle-1".into(),
            package: "/w/tests".into(),
        };
        assert_eq!(
            Program::all(&format!("{artifact}\n{started}\n{library}\n{{\"reason\":\"build-finished\"}}\n")),
            [program]
        );
    }
}
