//! A guest whose first process is Debian's systemd: coracle as a unit, and whatever depends on the manager of cgroups.
//! The tests themselves are `tests/inside/systemd.rs`, run by a unit of their own after coracle's.

use std::time::Duration;

use crate::guest::Guest;

/// systemd's own boot takes a quarter of a minute under emulation.
const LIMIT: Duration = Duration::from_secs(5 * 60);

#[test]
fn coracle_as_a_unit_of_systemd() {
    let guest = Guest::systemd("systemd", 256, &["inside"]);
    let report = guest.boot("CORACLE_SUITE=inside CORACLE_TESTS=systemd::", LIMIT);
    report.expect_good("systemd");
    assert!(report.passed >= 5, "{}", report.console);
}
