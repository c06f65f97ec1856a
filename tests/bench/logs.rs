//! A container that logs as fast as its log is written.

use std::fs;
use std::time::{Duration, Instant};

use coracle_tests::host;
use coracle_tests::pod_fixture::PodFixture;

use crate::Row;
use crate::time::median;

/// Size of the output, which has lines of 100 bytes.
pub(crate) const MEBIBYTES: u64 = 200;
/// Number of containers, whose median is reported.
const RUNS: usize = 3;

/// Measures the time from the start of a container to its end, and the CPU time of its monitor.
pub(crate) fn measure() -> Vec<Row> {
    let fixture = PodFixture::start();
    let monitor = fixture.node.monitors().first().expect("the pod's monitor").pid;
    let (mut times, mut cpu) = (Vec::new(), Vec::new());
    for run in 0..RUNS {
        let before = host::cpu_time(monitor);
        let begun = Instant::now();
        let id = fixture.run(&fixture.config(&format!("log{run}"), &["chatter", &MEBIBYTES.to_string()]));
        let status = fixture.node.exited(&id);
        times.push(begun.elapsed());
        cpu.push(host::cpu_time(monitor) - before);
        let log = fs::metadata(&status.log_path).expect("a log").len();
        let lines = (MEBIBYTES << 20).div_ceil(100);
        assert!(log > (MEBIBYTES << 20) + 40 * (lines - 1), "{log} bytes of log for {lines} lines");
        fs::remove_file(status.log_path).expect("remove the log");
    }
    fixture.node.stop();
    let middle = |times: Vec<Duration>| median(times.iter().map(Duration::as_secs_f64).collect());
    let measured = format!("{:.2} s, CPU of the monitor {:.2} s", middle(times), middle(cpu));
    vec![Row {
        what: "200 MiB of log in lines of 100 bytes",
        budget: "0.8 s, CPU 0.5 s",
        measured,
        floor: None,
    }]
}
