//! Compiles NRI's messages with protox. Maps become ordered ones: one adjustment always encodes to the same bytes.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTO: &str = "proto/nri.proto";
    println!("cargo::rerun-if-changed={PROTO}");
    prost_build::Config::new().btree_map(["."]).compile_fds(protox::compile([PROTO], ["proto"])?)?;
    Ok(())
}
