//! A guest whose tables of connections and neighbours are full: `tests/inside/tables.rs`.

use std::time::Duration;

use crate::disk::Tree;
use crate::guest::Guest;
use crate::target::Arch;

/// A boot, a dozen pods, and what the kernel takes to forget connections.
const LIMIT: Duration = Duration::from_secs(30 * 60);

#[test]
#[ignore = "minutes until the kernel forgets connections: make test-all PARTS=more-guests"]
fn full_tables_of_the_kernel() {
    let guest = Guest::with("tables", Arch::X86_64, 256, &["inside"], Tree::add_tools);
    let report = guest.boot("CORACLE_SUITE=inside CORACLE_TESTS=tables::", LIMIT);
    println!("{}", report.console);
    report.expect_good("full tables of the kernel");
    assert_eq!(report.passed, 2, "{}", report.console);
}
