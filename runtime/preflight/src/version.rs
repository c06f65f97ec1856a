//! The text of `coracle version` and `coracled --version`.

/// The version of a program, and of the interfaces of its release. It contains the commit if it was built in a git checkout.
pub fn version(program: &str) -> String {
    format!(
        "{program} {} (commit {}, {})\nmonitors: version {monitors} is started, 1 to {monitors} are controlled\n\
         interfaces: CRI v1, CNI {} to {}, NRI {}\n",
        env!("CARGO_PKG_VERSION"),
        env!("CORACLE_COMMIT"),
        env!("CORACLE_TARGET"),
        coracle_job::CNI_VERSIONS[0],
        coracle_job::CNI_VERSIONS[coracle_job::CNI_VERSIONS.len() - 1],
        coracle_nri::NRI_VERSION,
        monitors = coracle_wire::VERSION,
    )
}
