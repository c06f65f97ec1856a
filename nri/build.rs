//! Compiles the two .proto files with protox. Maps become ordered ones: one adjustment always encodes to the same bytes.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTOS: [&str; 2] = ["proto/nri.proto", "proto/ttrpc.proto"];
    for proto in PROTOS {
        println!("cargo::rerun-if-changed={proto}");
    }
    prost_build::Config::new().btree_map(["."]).compile_fds(protox::compile(PROTOS, ["proto"])?)?;
    Ok(())
}
