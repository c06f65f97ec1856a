//! Compiles NRI's messages with protox. Maps are ordered, so that an adjustment always has the same encoding.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTO: &str = "proto/nri.proto";
    println!("cargo::rerun-if-changed={PROTO}");
    prost_build::Config::new().btree_map(["."]).compile_fds(protox::compile([PROTO], ["proto"])?)?;
    Ok(())
}
