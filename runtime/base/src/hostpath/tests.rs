//! What is looked at here, what by workers, and where that ends. Shell scripts stand in the worker's place; what really hangs is in
//! tests/faults/hang.rs.

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

/// Never there, so that it is a worker's to look for.
const ABSENT: &str = "/absent/of/a/test";

fn paths(program: PathBuf, limit: Duration) -> Rc<HostPaths> {
    HostPaths::with_limit(Workers::new(program), Path::new("/"), limit)
}

#[test]
fn a_worker_that_says_nothing_is_given_up_and_the_path_named() {
    let dir = TestDir::new("hostpath");
    reactor::run(async {
        let paths = paths(dir.script("worker", "exec sleep 100"), Duration::from_millis(50));
        let refused = paths.source(Path::new(ABSENT), false, &mut Mounts::default()).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::DeadlineExceeded);
        assert_eq!(refused.message(), format!("{ABSENT}: its file system did not answer within 50ms"));
        // This one could be killed: it counts no more as soon as it is reaped.
        for _ in 0..STUCK_ON_A_PATH_MAX {
            while paths.looks.borrow().iter().any(|look| look.strong_count() > 0) {
                reactor::sleep(Duration::from_millis(5)).await;
            }
            let refused = paths.read(Path::new(ABSENT), 1).await.unwrap_err();
            assert!(refused.message().ends_with("did not answer within 50ms"), "{refused}");
        }
    });
}

fn stuck(paths: &HostPaths, path: &str) -> Rc<Look> {
    let look = Rc::new(Look { path: path.into(), is_given_up: Cell::new(true) });
    paths.looks.borrow_mut().push(Rc::downgrade(&look));
    look
}

#[test]
fn workers_that_hang_are_few_and_hold_up_no_other_path() {
    let dir = TestDir::new("hostpath");
    reactor::run(async {
        let paths = paths(dir.script("worker", "exec sleep 100"), Duration::from_millis(50));
        let mut held: Vec<_> = (0..STUCK_ON_A_PATH_MAX).map(|_| stuck(&paths, ABSENT)).collect();
        let asked = paths.source(Path::new(ABSENT), true, &mut Mounts::default()).await.unwrap_err();
        assert_eq!(asked.kind(), Kind::DeadlineExceeded);
        assert!(asked.message().contains("still does not answer; 3 workers wait for it"), "{asked}");
        let other = paths.source(Path::new("/absent/other"), false, &mut Mounts::default()).await;
        assert!(other.unwrap_err().message().ends_with("within 50ms"));
        held.extend((held.len()..STUCK_MAX).map(|number| stuck(&paths, &format!("/absent/{number}"))));
        let refused = paths.devices(Path::new("/absent/x"), "/dev/x", &mut Mounts::default()).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), Kind::ResourceExhausted);
        assert!(refused.message().contains(ABSENT) && refused.message().contains("/absent/15"), "{refused}");
        // The file systems answer again.
        held.clear();
        assert!(paths.refuse_if_stuck(Path::new(ABSENT)).is_ok());
    });
}

/// No worker for what a kubelet has just made on a disk: there is none to start here.
#[test]
fn what_is_known_and_local_is_looked_at_here() {
    let dir = TestDir::new("hostpath");
    let path = dir.path().join("volume");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(dir.path().join("profile"), "{}").unwrap();
    reactor::run(async {
        let paths = paths("/no/such/worker".into(), Duration::from_secs(5));
        if paths.local(&path, &mut Mounts::default()).is_none() {
            return; // Linux before 5.12, or a temporary directory on a network
        }
        let mut mounts = Mounts::default();
        let real = paths.source(&path, true, &mut mounts).await.unwrap();
        assert_eq!(real, path.canonicalize().unwrap());
        assert_eq!(paths.read(&dir.path().join("profile"), 2).await.unwrap(), b"{}");
        let devices = paths.devices(Path::new("/dev/null"), "/dev/mine", &mut mounts).await.unwrap();
        assert_eq!((devices[0].path.as_str(), devices[0].major, devices[0].minor), ("/dev/mine", 1, 3));
        let log = dir.path().join("0.log");
        drop(paths.open_log(&log, &mut mounts).await.unwrap());
        assert_eq!(std::fs::read(&log).unwrap(), b"");
        let error = paths.source(Path::new(ABSENT), true, &mut mounts).await.unwrap_err();
        assert!(error.message().contains("/no/such/worker"), "{error}");
    });
}
