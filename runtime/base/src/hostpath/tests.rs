//! Tests which paths are accessed directly, which by workers, and the limits. Shell scripts act as workers;
//! tests/faults/hang.rs tests file systems that really block.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use coracle_sandbox::hostpath::Mounts;

use super::{HostPaths, Look, STUCK_MAX, STUCK_ON_A_PATH_MAX};
use crate::error::Kind;
use crate::reactor;
use crate::testdir::TestDir;
use crate::workers::Workers;

/// A path that does not exist, so that a worker has to access it.
const ABSENT: &str = "/absent/of/a/test";

fn paths(program: PathBuf, limit: Duration) -> Rc<HostPaths> {
    HostPaths::with_limit(Workers::new(program), Path::new("/"), limit)
}

#[test]
fn a_silent_worker_times_out_and_the_error_names_the_path() {
    let dir = TestDir::new("hostpath");
    reactor::run(async {
        let paths = paths(dir.script("worker", "exec sleep 100"), Duration::from_millis(50));
        let refused = paths.source(Path::new(ABSENT), false, &mut Mounts::default()).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::DeadlineExceeded);
        assert_eq!(refused.message(), format!("{ABSENT}: the file system did not respond within 50ms"));
        // This worker could be killed: it no longer counts once it is reaped.
        for _ in 0..STUCK_ON_A_PATH_MAX {
            while paths.looks.borrow().iter().any(|look| look.strong_count() > 0) {
                reactor::sleep(Duration::from_millis(5)).await;
            }
            let refused = paths.read(Path::new(ABSENT), 1).await.unwrap_err();
            assert!(refused.message().ends_with("did not respond within 50ms"), "{refused}");
        }
    });
}

fn stuck(paths: &HostPaths, path: &str) -> Rc<Look> {
    let look = Rc::new(Look { path: path.into(), is_given_up: Cell::new(true) });
    paths.looks.borrow_mut().push(Rc::downgrade(&look));
    look
}

#[test]
fn blocked_workers_are_limited_and_do_not_affect_other_paths() {
    let dir = TestDir::new("hostpath");
    reactor::run(async {
        let paths = paths(dir.script("worker", "exec sleep 100"), Duration::from_millis(50));
        let mut held: Vec<_> = (0..STUCK_ON_A_PATH_MAX).map(|_| stuck(&paths, ABSENT)).collect();
        let asked = paths.source(Path::new(ABSENT), true, &mut Mounts::default()).await.unwrap_err();
        assert_eq!(asked.kind(), Kind::DeadlineExceeded);
        assert!(asked.message().contains("still does not respond; 3 workers are blocked on it"), "{asked}");
        let other = paths.source(Path::new("/absent/other"), false, &mut Mounts::default()).await;
        assert!(other.unwrap_err().message().ends_with("within 50ms"));
        held.extend((held.len()..STUCK_MAX).map(|number| stuck(&paths, &format!("/absent/{number}"))));
        let refused = paths.devices(Path::new("/absent/x"), "/dev/x", &mut Mounts::default()).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), Kind::ResourceExhausted);
        assert!(refused.message().contains(ABSENT) && refused.message().contains("/absent/15"), "{refused}");
        // The file systems respond again.
        held.clear();
        assert!(paths.refuse_if_stuck(Path::new(ABSENT)).is_ok());
    });
}

/// A kubelet's new directory on a local disk needs no worker: in this test no worker could be started.
#[test]
fn cached_paths_on_local_file_systems_are_accessed_without_a_worker() {
    let dir = TestDir::new("hostpath");
    let path = dir.path().join("volume");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(dir.path().join("profile"), "{}").unwrap();
    reactor::run(async {
        let paths = paths("/no/such/worker".into(), Duration::from_secs(5));
        if paths.local(&path, &mut Mounts::default()).is_none() {
            return; // Linux before 5.12, or the temporary directory is on a network file system
        }
        let mut mounts = Mounts::default();
        let real = paths.source(&path, true, &mut mounts).await.unwrap();
        assert_eq!(real, path.canonicalize().unwrap());
        assert_eq!(paths.read(&dir.path().join("profile"), 2).await.unwrap(), b"{}");
        let devices = paths.devices(Path::new("/dev/null"), "/dev/mine", &mut mounts).await.unwrap();
        assert_eq!((devices[0].path.as_str(), devices[0].major, devices[0].minor), ("/dev/mine", 1, 3));
        let log = dir.path().join("0.log");
        drop(paths.open_log(&log, dir.path(), &mut mounts).await.unwrap());
        assert_eq!(std::fs::read(&log).unwrap(), b"");
        let error = paths.source(Path::new(ABSENT), true, &mut mounts).await.unwrap_err();
        assert!(error.message().contains("/no/such/worker"), "{error}");
    });
}
