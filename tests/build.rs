//! Compiles the daemon's `cri.proto` for the client of the tests, independently of the daemon's generated
//! code.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const FOLDER: &str = "../runtime/daemon/proto";
    const PROTO: &str = "../runtime/daemon/proto/cri.proto";
    println!("cargo::rerun-if-changed={PROTO}");
    let files = protox::compile([PROTO], [FOLDER])?;
    tonic_prost_build::configure().build_server(false).build_transport(false).compile_fds(files)?;
    // The test plugin's ttrpc envelope is a second implementation; the daemon uses the ttrpc crate.
    const FOLDERS: [&str; 2] = ["../nri/proto", "proto"];
    const PROTOS: [&str; 2] = ["../nri/proto/nri.proto", "proto/ttrpc.proto"];
    for proto in PROTOS {
        println!("cargo::rerun-if-changed={proto}");
    }
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .compile_fds(protox::compile(PROTOS, FOLDERS)?)?;
    Ok(())
}
