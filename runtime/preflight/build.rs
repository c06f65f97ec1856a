//! Passes the commit and the target to the compiler, for the text about the version; a source archive without git has no
//! commit.

#[expect(clippy::disallowed_methods, reason = "a build script has no event loop")]
fn main() {
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=CORACLE_COMMIT={commit}");
    println!("cargo::rustc-env=CORACLE_TARGET={}", std::env::var("TARGET").unwrap_or_default());
    // Written at each commit and at each change of the branch.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
