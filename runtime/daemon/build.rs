//! Compiles `proto/cri.proto` with protox, so that no `protoc` is needed (that of Debian 12 is too old for
//! the CRI). Only the server is generated; the tests generate their client from the same file. For the linker
//! options see `targets/link.inc`.

include!("../../targets/link.inc");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTO: &str = "proto/cri.proto";
    println!("cargo::rerun-if-changed={PROTO}");
    let files = protox::compile([PROTO], ["proto"])?;
    tonic_prost_build::configure().build_client(false).build_transport(false).compile_fds(files)?;
    name_the_build();
    leave_out_unwind_tables("../../targets/no-unwind.ld");
    Ok(())
}

/// Passes the commit and the target to the compiler, for `coracle version`; a source archive without git has
/// no commit.
#[expect(clippy::disallowed_methods, reason = "a build script has no event loop")]
fn name_the_build() {
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
