//! Links the monitor without start-up objects and libc, so that a plain `cargo build -p coracle-pod --release --target
//! …` works. A compiler driver (as `cross` names one) and the linker itself need different spellings of the same flags.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=pod.ld");
    if env::var("CARGO_CFG_TARGET_ENV").as_deref() != Ok("musl") {
        return;
    }
    let linker = env::var("RUSTC_LINKER").unwrap_or_default();
    let is_bare = linker.ends_with("lld") || linker.ends_with("ld");
    let script = format!("--script={}/pod.ld", env::var("CARGO_MANIFEST_DIR").unwrap_or_default());
    // rustc adds musl's start files, whose `_start` needs libc. The monitor's entry point has another name, and
    // unreachable code is dropped.
    for argument in [script.as_str(), "--gc-sections", "-znorelro", "--build-id=none", "--no-eh-frame-hdr"] {
        let argument = if is_bare { argument.to_owned() } else { format!("-Wl,{argument}") };
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    if !is_bare {
        println!("cargo:rustc-link-arg-bins=-nostartfiles");
        println!("cargo:rustc-link-arg-bins=-nostdlib");
    }
}
