//! Compiles `proto/cri.proto` with protox, so that no `protoc` is needed (that of Debian 12 is too old for
//! the CRI). Only messages are generated; the tests generate their client from the same file. For the linker
//! options see `targets/link.inc`.

include!("../../targets/link.inc");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTO: &str = "proto/cri.proto";
    println!("cargo::rerun-if-changed={PROTO}");
    let files = protox::compile([PROTO], ["proto"])?;
    prost_build::Config::new().compile_fds(files)?;
    link_with(&["../../targets/no-unwind.ld", "../../targets/hot-code.ld"]);
    Ok(())
}
