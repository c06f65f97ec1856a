//! Named histories about pods whose creation a power cut interrupted.

use std::time::Duration;

use coracle_base::error::Kind;
use coracle_base::reactor;
use nix::errno::Errno;

use crate::engine::pod_spec;
use crate::named::Stage;

/// Fails if RunPodSandbox joins the creation that was interrupted by a power cut, and returns the ID of that pod, which
/// cannot become ready any more: it is known that the boot is another one only when all records of the pod were read.
#[test]
fn run_pod_never_returns_a_pod_of_an_earlier_boot() {
    let (mut joined, mut calls) = (0, 0);
    loop {
        let stage = Stage::new(11);
        stage.kill_daemon_after(calls);
        let survived = stage.daemon_that_may_be_killed(async |pods| pods.run(pod_spec(0)).await);
        stage.clients.node.world.borrow_mut().lose_power();
        stage.refuse("read", "/record", Errno::ENOMEM, 1);
        stage.refuse("list", "/containers", Errno::ENOMEM, 1);
        stage.daemon(async |pods| {
            reactor::sleep(Duration::from_millis(1500)).await;
            match pods.run(pod_spec(0)).await {
                Ok(id) => {
                    let state = pods.pod(&id.to_string()).expect("it is listed").record().state.clone();
                    assert!(state.is_ready(), "killed after {calls} calls: {state:?}");
                }
                Err(error) => {
                    let expected = if survived.is_some() { Kind::AlreadyExists } else { Kind::Unavailable };
                    assert_eq!(error.kind(), expected, "killed after {calls} calls: {error}");
                    joined += u32::from(error.to_string().contains("restarted while"));
                }
            }
            stage.remove_all(pods).await;
        });
        if survived.is_some() {
            break;
        }
        calls += 1;
    }
    assert!(joined > 0);
}
