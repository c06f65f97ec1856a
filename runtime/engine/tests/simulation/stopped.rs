//! Named histories about pods that are stopped while their monitor does not respond.

use coracle_sandbox::Exit;
use nix::errno::Errno;

use crate::engine::container_spec;
use crate::named::{Fixture, exit_code, start_one};
use crate::world::{MS, S};

/// Fails if a container is killed only after the exit record of the one before it has been awaited: a monitor that works
/// again meanwhile would then have too little time for the records of the last ones.
#[test]
fn containers_of_a_pod_that_is_stopped_are_killed_together() {
    let fixture = Fixture::new(7);
    fixture.daemon(async |pods| {
        let id = start_one(pods).await.expect("a container is started");
        let pod = pods.pod(&id).expect("it is listed");
        for number in 1..4 {
            let id = pod.create_container(container_spec(number)).await.expect("a container");
            let container = pods.container(&id.to_string()).expect("it is listed");
            container.start().await.expect("it is started");
        }
    });
    fixture.freeze_monitors(60 * S);
    fixture.daemon(async |pods| {
        let pod = pods.pods().pop().expect("it is listed");
        pod.stop().await.expect("it is stopped");
        let ids: Vec<_> = pods.containers().iter().map(|container| container.id).collect();
        // Some containers have ended by themselves before.
        let mut killed_ns: Vec<u64> = {
            let world = fixture.clients.node.world.borrow();
            let facts = ids.iter().map(|id| &world.facts[id]);
            facts.filter(|facts| facts.end == Some(Exit::Signal(9))).map(|facts| facts.ended_ns).collect()
        };
        killed_ns.sort_unstable();
        assert!(killed_ns.len() > 1, "{killed_ns:?}");
        assert!(killed_ns[killed_ns.len() - 1] - killed_ns[0] < 100 * MS, "{killed_ns:?}");
        fixture.remove_all(pods).await;
    });
}

/// Regression (seed 8009115081): a monitor whose PID could not be read was taken for one that had ended, and the exit
/// code of the container, whose record it wrote a moment later, stayed unknown.
#[test]
fn a_monitor_whose_pid_cannot_be_read_is_not_taken_for_one_that_has_ended() {
    let fixture = Fixture::new(12);
    let id = fixture.daemon(async |pods| start_one(pods).await.expect("a container is started"));
    fixture.refuse("connect to monitor", "", Errno::EMFILE, 1);
    fixture.daemon(async |pods| {
        fixture.freeze_monitors(300 * MS);
        fixture.refuse("read monitor.pid", "", Errno::EMFILE, 1);
        pods.pod(&id).expect("it is listed").stop().await.expect("it is stopped");
        assert_eq!(fixture.refusals_left(), 0);
        assert_eq!(exit_code(&pods.containers()[0]), Some(137));
        fixture.remove_all(pods).await;
    });
}
