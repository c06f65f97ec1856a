//! Links the monitor without start-up objects and libc, so that a plain `cargo build -p coracle-pod --release --target
//! …` works. The compiler driver (x86_64) and the linker itself (the other targets) need different spellings of the same flags.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_ENV").as_deref() != Ok("musl") {
        return;
    }
    let linker = env::var("RUSTC_LINKER").unwrap_or_default();
    let is_bare = linker.ends_with("lld") || linker.ends_with("ld");
    // rustc adds musl's start files, whose `_start` needs libc. The monitor's entry point has another name, and
    // unreachable code is dropped. Segments share pages, without RELRO: a page is 4 of the monitor's 20 KiB.
    let ours =
        ["--entry=coracle_pod_start", "--gc-sections", "-znoseparate-code", "-znorelro", "--build-id=none"];
    for argument in ours {
        let argument = if is_bare { argument.to_owned() } else { format!("-Wl,{argument}") };
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("riscv64") {
        // Unwind tables of compiler_builtins name a function of std, which the monitor is not linked with; nothing unwinds.
        println!("cargo:rustc-link-arg-bins=--defsym=rust_eh_personality=0");
    }
    if !is_bare {
        println!("cargo:rustc-link-arg-bins=-nostartfiles");
        println!("cargo:rustc-link-arg-bins=-nostdlib");
        // The last page of .data is written at each start, because the kernel clears the rest of it. With this address
        // the few words from .init_array to .got.plt, .data and the first entries of the tables (.bss) are on one page: in
        // segments of their own they would cost a page fault in each process that the monitor clones.
        println!("cargo:rustc-link-arg-bins=-Wl,--section-start=.init_array=0x480000");
    }
}
