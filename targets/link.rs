// What the build scripts of the daemon and the worker have in common: included there, as a build script has no crate of ours
// to use.

/// Leaves out what only unwinding reads: release builds abort at a panic, and say where (no-unwind.ld).
fn leave_out_unwind_tables(script: &str) {
    let variable = |name| std::env::var(name).unwrap_or_default();
    println!("cargo::rerun-if-changed={script}");
    if variable("PROFILE") != "release" || variable("CARGO_CFG_TARGET_ENV") != "musl" {
        return;
    }
    let path = std::path::Path::new(&variable("CARGO_MANIFEST_DIR")).join(script);
    // A linker that is called by itself takes its flags as they are; a compiler that calls one has to be told which are whose.
    let through = if variable("RUSTC_LINKER").ends_with("lld") { "" } else { "-Wl," };
    println!("cargo::rustc-link-arg-bins={through}--no-eh-frame-hdr");
    println!("cargo::rustc-link-arg-bins={through}--script={}", path.display());
}
