//! Tests `Op::Verify` with the kernel: records that lack one mask, or have an additional mount, must fail. Each record
//! is that of a complete plan with one change, which must be the reason of the failure.

use std::ffi::CStr;
use std::os::unix::ffi::OsStringExt;

use nix::sys::stat::{Mode, SFlag};

use coracle_wire::{Block, Failure, Op, Propagation, Text, walk};

use super::*;

/// Replaces operations of a record: `change` is called with each one.
fn changed(record: &[u8], mut change: impl FnMut(Op<'static>, &mut Vec<Op<'static>>)) -> Vec<u8> {
    // Operations borrow from the record, which the test leaks.
    let record: &'static [u8] = Box::leak(record.to_vec().into_boxed_slice());
    let mut ops = Vec::new();
    for op in walk(record).unwrap() {
        change(op.unwrap(), &mut ops);
    }
    fixture::record(&ops)
}

/// The record without the operations for which `is_out` is true.
fn without(record: &[u8], is_out: impl Fn(&Op<'_>) -> bool) -> Vec<u8> {
    let mut left_out = 0;
    let record = changed(record, |op, ops| match is_out(&op) {
        true => left_out += 1,
        false => ops.push(op),
    });
    assert_eq!(left_out, 1, "one operation is left out");
    record
}

/// The record with the operations `more` inserted before the verification.
fn with(record: &[u8], more: &[Op<'static>]) -> Vec<u8> {
    changed(record, |op, ops| {
        if matches!(op, Op::Verify { .. }) {
            ops.extend_from_slice(more);
        }
        ops.push(op);
    })
}

fn fresh(kind: &'static CStr, target: &'static CStr) -> Op<'static> {
    let options = Block { count: 0, bytes: b"" };
    Op::Filesystem { kind: Text::new(kind), options, attributes: 0, target: Text::new(target) }
}

/// The record with the file `path` of the host attached over the mask of /proc/keys.
fn over_the_mask(record: &[u8], path: &'static CStr) -> Vec<u8> {
    changed(record, |op, ops| {
        let open = Op::OpenTree { slot: 200, path: Text::new(path), recursive: false, from_host: false };
        let attach = Op::Attach {
            slot: 200,
            target: Text::new(c"/proc/keys"),
            attributes: 0,
            attributes_recursive: false,
            propagation: Propagation::Private,
            skip_missing: false,
        };
        match op {
            Op::Unshare { .. } => ops.extend([open, op]),
            Op::Verify { .. } => ops.extend([attach, op]),
            op => ops.push(op),
        }
    })
}

/// A node of /dev/null on a writable mount.
fn writable_null(directory: &Path) -> &'static CStr {
    let path = std::ffi::CString::new(directory.join("null").into_os_string().into_vec()).unwrap();
    let device = nix::sys::stat::makedev(1, 3);
    nix::sys::stat::mknod(path.as_c_str(), SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), device).unwrap();
    Box::leak(path.into_boxed_c_str())
}

fn start_request(number: u8) -> Request {
    Request::Start {
        container: ContainerId::from_bytes([number; 32]),
        streams: Streams { stdin: false, tty: false, log: false },
        pid: PidNamespace::New,
        has_cgroup: false,
        has_oom_counter: false,
    }
}

/// Removes the mark of the previous mount of an overlay with `volatile`, as the daemon does before each start.
fn remove_volatile_mark(directory: &Path) {
    match fs::remove_dir_all(directory.join("work/work/incompat")) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("the mark: {error}"),
        Ok(()) | Err(_) => {}
    }
}

/// The outcome of a record: `None` if the process starts, otherwise the error text.
fn outcome(monitor: &Monitor, directory: &Path, number: u8, record: &[u8]) -> Option<String> {
    remove_volatile_mark(directory);
    let launch = monitor::memfd(record).unwrap();
    match ask(monitor, start_request(number), &[launch.as_fd()]) {
        Reply::Started => None,
        Reply::Failed(Failure::Operation { index, errno }) => Some(plan::explain(record, index, errno)),
        other => panic!("{other:?}"),
    }
}

/// The record of a plan with paths that no kernel has: below a path that a mount could hide, inside a mask, outside of
/// the kernel's file systems.
fn right_record(directory: &Path) -> Vec<u8> {
    let mut plan = container_plan(directory);
    let missing = ["/proc/fs/coracle/nothing", "/sys/firmware/nothing", "/nothing"];
    plan.masked_paths.extend(missing.map(String::from));
    plan.readonly_paths.push("/proc/sys/nothing".into());
    plan::container(&plan, &process_plan("exec sleep 100"), VERSION, Waits::Never).unwrap().bytes
}

fn is_mask(op: &Op<'_>, path: &CStr) -> bool {
    matches!(op, Op::Mask { target, .. } if *target == Text::new(path))
}

fn is_read_only(op: &Op<'_>, path: &CStr) -> bool {
    matches!(op, Op::ReadOnly { target } if *target == Text::new(path))
}

fn is_fresh(op: &Op<'_>, path: &CStr) -> bool {
    matches!(op, Op::Filesystem { target, .. } if *target == Text::new(path))
}

/// Name, record and expected error of each case; `None`: the process starts.
type Cases = Vec<(&'static str, Vec<u8>, Option<&'static str>)>;

#[track_caller]
fn check_all(name: &str, cases: impl FnOnce(&[u8], &Path) -> Cases) {
    let directory = make_directory(name);
    let monitor = start_monitor(&directory);
    let _rests = CleanUp(&monitor, &directory);
    assert_eq!(ask(&monitor, Request::Hello { version: VERSION }, &[]), Reply::Hello { version: VERSION });
    let right = right_record(&directory);
    assert_eq!(outcome(&monitor, &directory, 0, &right), None, "as planned");
    for (number, (what, record, expected)) in (1..).zip(cases(&right, &directory)) {
        let found = outcome(&monitor, &directory, number, &record);
        let is_expected = match (&found, expected) {
            (Some(found), Some(expected)) => found.contains(expected),
            (found, expected) => found.is_none() && expected.is_none(),
        };
        assert!(is_expected, "{what}: {found:?}, expected {expected:?}");
    }
}

/// For a record that lacks one mask, the process must not start.
#[test]
fn a_container_that_differs_from_its_plan_does_not_start_as_root() {
    check_all("lacking", |right, _| {
        let exchanged = |path: &CStr, other: Op<'static>| {
            let is_it = |op: &Op<'_>| is_fresh(op, path) || is_mask(op, path);
            changed(right, |op, ops| ops.push(if is_it(&op) { other } else { op }))
        };
        let no_keys = without(right, |op| is_mask(op, c"/proc/keys"));
        let no_firmware = without(right, |op| is_mask(op, c"/sys/firmware"));
        let no_sys = without(right, |op| is_read_only(op, c"/proc/sys"));
        let writable_mask = exchanged(c"/sys/firmware", fresh(c"tmpfs", c"/sys/firmware"));
        vec![
            ("a file's mask", no_keys, Some("/proc/keys is not masked")),
            ("a directory's mask", no_firmware, Some("/sys/firmware is not masked")),
            ("a writable mask", writable_mask, Some("/sys/firmware is not masked")),
            ("a read-only path", no_sys, Some("/proc/sys is not read-only")),
            ("the root", without(right, |op| *op == Op::ReadOnlyRoot), Some("/ is not read-only")),
            ("procfs", without(right, |op| is_fresh(op, c"/proc")), Some("/proc")),
            (
                "a tmpfs for procfs",
                exchanged(c"/proc", fresh(c"tmpfs", c"/proc")),
                Some("/proc is not the procfs"),
            ),
            (
                "a tmpfs for sysfs",
                exchanged(c"/sys", fresh(c"tmpfs", c"/sys")),
                Some("/sys is not the mount"),
            ),
            ("a writable sysfs", exchanged(c"/sys", fresh(c"sysfs", c"/sys")), Some("/sys is not read-only")),
        ]
    });
}

/// For a record with an additional mount, the process must not start.
#[test]
fn a_container_with_an_unplanned_mount_does_not_start_as_root() {
    check_all("beside", |right, directory| {
        let zero = over_the_mask(right, c"/dev/zero");
        let null = over_the_mask(right, writable_null(directory));
        let more = |op: Op<'static>| with(right, &[op]);
        let image_volume = more(Op::BindSelf { path: Text::new(c"/proc") });
        vec![
            ("a device that is not null", zero, Some("/proc/keys is not masked")),
            ("a null that is writable", null, Some("/proc/keys is not masked")),
            ("a second procfs", more(fresh(c"proc", c"/proc")), Some("mount proc on /proc: too many")),
            ("one by another name", more(fresh(c"proc", c"/proc/.")), Some("/proc is not the procfs")),
            ("a tmpfs on /sys", more(fresh(c"tmpfs", c"/sys/.")), Some("/sys is not the mount")),
            ("a tmpfs on /dev", more(fresh(c"tmpfs", c"/dev/.")), Some("/dev is not the mount")),
            (
                "one on a read-only path",
                more(fresh(c"tmpfs", c"/proc/sys")),
                Some("/proc/sys is not read-only"),
            ),
            (
                "one above what is missing",
                more(fresh(c"tmpfs", c"/proc/fs")),
                Some("/proc/fs/coracle/nothing is not masked"),
            ),
            ("an image volume after the masks", image_volume, Some("mount image volume /proc: a link")),
            ("a tmpfs that hides no planned mount", more(fresh(c"tmpfs", c"/work")), None),
        ]
    });
}

/// The verification takes less than its budget of 0.1 ms (docs/performance.md). The test prints the CPU time of a
/// process whose record verifies a hundred times, less that of one whose record verifies once, each the best of twelve runs; it
/// fails at three times the budget, because tests share a machine.
#[test]
fn the_check_is_cheap_as_root() {
    const TIMES: u32 = 100;
    const LIMIT: Duration = Duration::from_micros(300);
    let directory = make_directory("cost");
    let monitor = start_monitor(&directory);
    let _rests = CleanUp(&monitor, &directory);
    assert_eq!(ask(&monitor, Request::Hello { version: VERSION }, &[]), Reply::Hello { version: VERSION });
    let once =
        plan::container(&container_plan(&directory), &process_plan("exec sleep 100"), VERSION, Waits::Never)
            .unwrap()
            .bytes;
    let often = changed(&once, |op, ops| {
        let times = if matches!(op, Op::Verify { .. }) { TIMES + 1 } else { 1 };
        ops.extend((0..times).map(|_| op));
    });
    let time = |number: u8, record: &[u8]| {
        remove_volatile_mark(&directory);
        let launch = monitor::memfd(record).unwrap();
        let request = start_request(number);
        monitor.send(&ToMonitor { number: 1, request }, &[launch.as_fd()]).unwrap();
        let (reply, descriptors) = next(&monitor);
        assert_eq!(reply, FromMonitor::Reply { number: 1, reply: Reply::Started });
        let pid = monitor::pid_of(descriptors[0].as_fd()).expect("it runs");
        // The first number is the CPU time in nanoseconds.
        let spent = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
        Duration::from_nanos(spent.split(' ').next().unwrap().parse().unwrap())
    };
    let runs = (0..12).map(|run| (time(2 * run + 1, &once), time(2 * run + 2, &often)));
    let best = runs.reduce(|best, run| (best.0.min(run.0), best.1.min(run.1)));
    let (once, often) = best.unwrap_or_default();
    let one = often.saturating_sub(once) / TIMES;
    println!("MEASURED one_check_of_mounts_us={}", one.as_micros());
    assert!(one < LIMIT, "{one:?}");
}
