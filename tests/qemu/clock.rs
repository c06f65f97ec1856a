//! A guest whose clock is in 1970: `tests/inside/clock.rs`.

use std::time::Duration;

use crate::disk::Tree;
use crate::guest::Guest;
use crate::target::Arch;

/// A boot takes some seconds, the test some more; many times as long if the machine is busy.
const LIMIT: Duration = Duration::from_secs(15 * 60);

#[test]
fn a_clock_in_1970() {
    let guest = Guest::with("clock", Arch::X86_64, 256, &["inside"], Tree::add_tools);
    let report = guest.boot("CORACLE_SUITE=inside CORACLE_TESTS=clock::", LIMIT);
    report.expect_good("a clock in 1970");
    assert_eq!(report.passed, 1, "{}", report.console);
}
