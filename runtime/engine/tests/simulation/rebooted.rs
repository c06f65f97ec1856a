//! Named histories about repeated requests for pods of an earlier daemon.

use std::time::Duration;

use coracle_base::error::Kind;
use coracle_base::reactor;
use nix::errno::Errno;

use crate::engine::pod_spec;
use crate::named::Fixture;
use crate::world::S;

/// Fails if RunPodSandbox returns the ID of a pod whose creation was interrupted by a power cut: the pod cannot become
/// ready any more. Its record, or the directory of its containers, cannot be read at first, so the next daemon serves
/// requests before it knows the pod.
#[test]
fn run_pod_never_returns_a_pod_of_an_earlier_boot_as_root() {
    let (mut refused, mut calls) = (0, 0);
    loop {
        let fixture = Fixture::new(11);
        fixture.kill_daemon_after(calls);
        let survived = fixture.daemon_that_may_be_killed(async |pods| pods.run(pod_spec(0)).await);
        fixture.clients.node.world.borrow_mut().lose_power();
        fixture.refuse("read", "/record", Errno::ENOMEM, 1);
        fixture.refuse("list", "/containers", Errno::ENOMEM, 1);
        fixture.daemon(async |pods| {
            for pause_ms in [0, 1500] {
                reactor::sleep(Duration::from_millis(pause_ms)).await;
                match pods.run(pod_spec(0)).await {
                    Ok(id) => {
                        let state = pods.pod(&id.to_string()).expect("it is listed").record().state.clone();
                        assert!(state.is_ready(), "killed after {calls} calls: {state:?}");
                    }
                    Err(error) => {
                        let kinds = [Kind::AlreadyExists, Kind::Unavailable];
                        assert!(kinds.contains(&error.kind()), "killed after {calls} calls: {error}");
                        refused += 1;
                    }
                }
            }
            fixture.clients.node.world.borrow_mut().refusals.clear();
            fixture.remove_all(pods).await;
        });
        if survived.is_some() {
            break;
        }
        calls += 1;
    }
    assert!(refused > 0);
}

/// Fails if a pod whose record is still in its spare file, because the disk fails, counts as a pod without a record: its
/// directory is removed, and nothing leads to its network any more.
#[test]
fn a_pod_whose_record_cannot_be_moved_from_its_spare_file_is_not_lost() {
    for refused in ["fdatasync", "read"] {
        let unmoved = (0..20).filter(|seed| moves_a_record_after_errors(*seed, refused)).count();
        assert!(unmoved > 0, "no power cut undid a rename");
    }
}

/// Returns whether a record was in a spare file after a power cut.
fn moves_a_record_after_errors(seed: u64, refused: &'static str) -> bool {
    let fixture = Fixture::new(seed);
    let ids = fixture.daemon(async |pods| {
        let first = pods.run(pod_spec(0)).await.expect("a pod");
        // Spare files are made a second later.
        reactor::sleep(Duration::from_secs(5)).await;
        [first, pods.run(pod_spec(1)).await.expect("another pod")]
    });
    fixture.clients.node.world.borrow_mut().lose_power();
    fixture.refuse(refused, "/spare/", Errno::EIO, u32::MAX);
    fixture.daemon(async |pods| {
        let is_unmoved = pods.pods().len() < 2;
        // A client that hears NotFound takes the pod for stopped and removed.
        let errors = ids.iter().filter_map(|id| pods.pod(&id.to_string()).err());
        assert!(errors.into_iter().all(|error| error.kind() == Kind::Unavailable), "seed {seed}");
        reactor::sleep(Duration::from_secs(5)).await;
        fixture.clients.node.world.borrow_mut().refusals.clear();
        reactor::sleep(Duration::from_secs(100)).await;
        fixture.require(pods);
        assert_eq!(pods.pods().len(), 2, "seed {seed}");
        fixture.remove_all(pods).await;
        is_unmoved
    })
}

/// Regression (seed 568444): a repeated request was answered as if the pod ran.
#[test]
fn a_request_for_a_pod_whose_monitor_was_not_reached_is_not_answered_yet() {
    let fixture = Fixture::new(20);
    fixture.daemon(async |pods| pods.run(pod_spec(0)).await.expect("a pod"));
    fixture.kill_monitor();
    fixture.wait(S);
    fixture.refuse("connect to monitor", "", Errno::EMFILE, 1);
    fixture.daemon(async |pods| {
        let refused = async || pods.run(pod_spec(0)).await.expect_err("it does not run").kind();
        assert_eq!(refused().await, Kind::Unavailable);
        reactor::sleep(Duration::from_secs(5)).await;
        assert_eq!(refused().await, Kind::AlreadyExists, "its monitor has ended");
        fixture.remove_all(pods).await;
    });
    assert_eq!(fixture.refusals_left(), 0);
}
