//! Links the monitor without any start-up object or libc, so that the plain `cargo build -p coracle-pod --release
//! --target …` is enough. The compiler driver (x86_64) and a bare linker (aarch64) spell the same things differently.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_ENV").as_deref() != Ok("musl") {
        return;
    }
    let linker = env::var("RUSTC_LINKER").unwrap_or_default();
    let is_bare = linker.ends_with("lld") || linker.ends_with("ld");
    // rustc adds musl's own start files, whose `_start` wants libc: ours has another name, and what it does not reach
    // is dropped. Segments share pages and nothing is kept for a later re-protection: a page is 4 of 20 KiB.
    let ours =
        ["--entry=coracle_pod_start", "--gc-sections", "-znoseparate-code", "-znorelro", "--build-id=none"];
    for argument in ours {
        let argument = if is_bare { argument.to_owned() } else { format!("-Wl,{argument}") };
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    if !is_bare {
        println!("cargo:rustc-link-arg-bins=-nostartfiles");
        println!("cargo:rustc-link-arg-bins=-nostdlib");
    }
}
