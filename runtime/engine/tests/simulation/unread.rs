//! Named histories about records that can never be read.

use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Kind;
use coracle_base::reactor;
use coracle_engine::Pods;
use nix::errno::Errno;

use crate::engine::{container_spec, pod_spec};
use crate::moved::fixture;
use crate::named::{Fixture, start_one};
use crate::world::{ROOT, Role};

/// The file or directory that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bad {
    Pod,
    Container,
    List,
}

/// A node with two pods, each with a running container; returns the IDs of the first one and its container.
fn two_pods(fixture: &Fixture) -> (String, String) {
    fixture.daemon(async |pods| {
        let id = start_one(pods).await.expect("a container is started");
        let container = pods.containers()[0].id.to_string();
        let other = pods.run(pod_spec(1)).await.expect("a pod");
        let other = pods.pod(&other.to_string()).expect("it is listed");
        let made = other.create_container(container_spec(1)).await.expect("a container");
        pods.container(&made.to_string()).expect("it is listed").start().await.expect("it is started");
        (id, container)
    })
}

fn spoil(fixture: &Fixture, bad: Bad, errno: Errno, pod: &str, container: &str) {
    let id = if bad == Bad::Pod { pod } else { container };
    fixture.clients.node.world.borrow_mut().spoiled.insert(id.to_owned());
    match bad {
        Bad::Pod => fixture.refuse("read", &format!("{ROOT}/pods/{pod}/record"), errno, u32::MAX),
        Bad::Container => fixture.refuse("read", &format!("/containers/{container}/record"), errno, u32::MAX),
        Bad::List => fixture.refuse("list", &format!("{ROOT}/pods/{pod}/containers"), errno, u32::MAX),
    }
}

fn runs(fixture: &Fixture, container: &str) -> bool {
    let is_it = |role: Role| matches!(role, Role::Main(id) if id.to_string() == container);
    fixture.clients.node.world.borrow().processes.values().any(|process| is_it(process.role))
}

fn quarantined(fixture: &Fixture) -> Vec<String> {
    fixture.clients.node.world.borrow().disk.containing(&format!("{ROOT}/quarantine/"))
}

/// The rest of the node is not affected: a new pod, and calls for containers that do not exist.
async fn require_others(pods: &Rc<Pods>, bad: Bad) {
    let new = pods.run(pod_spec(7)).await.unwrap_or_else(|error| panic!("{bad:?}: {error}"));
    pods.pod(&new.to_string()).expect("it is listed").remove().await.expect("it is removed");
}

fn kind<T>(found: Result<T, coracle_base::error::Error>) -> Option<Kind> {
    found.err().map(|error| error.kind())
}

/// Fails without an end of the retries: the container runs for ever unlisted, and the state of its pod stays unknown.
#[test]
fn a_record_that_can_never_be_read_is_set_aside_with_what_it_describes() {
    for bad in [Bad::Pod, Bad::Container, Bad::List] {
        let fixture = fixture(51);
        let (pod, container) = two_pods(&fixture);
        spoil(&fixture, bad, Errno::EIO, &pod, &container);
        fixture.daemon(async |pods| {
            reactor::sleep(Duration::from_secs(61)).await;
            require_others(pods, bad).await;
            let (count, reason) = pods.unknown().expect("it is not known");
            assert_eq!(count, 1, "{bad:?}");
            let names = [&pod[..13], "I/O error", "`mv` it away", ROOT];
            assert!(names.iter().all(|part| reason.contains(part)), "{bad:?}: {reason}");
            assert_eq!(kind(pods.container(&container)), Some(Kind::Unavailable), "{bad:?}: it runs");
            if bad != Bad::List {
                let absent = "ab".repeat(32);
                assert_eq!(
                    kind(pods.container(&absent)),
                    Some(Kind::NotFound),
                    "{bad:?}: it can be of no pod"
                );
            }
            reactor::sleep(Duration::from_secs(500)).await;
            assert!(runs(&fixture, &container) && quarantined(&fixture).is_empty(), "{bad:?}: too early");
            reactor::sleep(Duration::from_secs(90)).await;
            assert!(!runs(&fixture, &container), "{bad:?}");
            assert!(pods.unknown().is_none(), "{bad:?}: {:?}", pods.unknown());
            assert!(!quarantined(&fixture).is_empty(), "{bad:?}");
            assert_eq!(kind(pods.container(&container)), Some(Kind::NotFound), "{bad:?}");
            assert_eq!(pods.pods().len(), if bad == Bad::Pod { 1 } else { 2 }, "{bad:?}: others are listed");
            fixture.clients.node.world.borrow_mut().refusals.clear();
            if bad != Bad::Pod {
                let pod = pods.pod(&pod).expect("it is listed");
                assert!(pod.record().state.is_ready(), "{bad:?}");
                pod.create_container(container_spec(9)).await.expect("the pod is usable");
            }
            fixture.require(pods);
            fixture.remove_all(pods).await;
        });
        // The next daemon finds nothing of it.
        fixture.daemon(async |pods| assert!(pods.unknown().is_none() && pods.pods().is_empty(), "{bad:?}"));
    }
}

/// The daemon lacks descriptors or the right to read, or nothing can be written to the disk: the record may be whole.
#[test]
fn a_record_is_not_set_aside_for_an_error_of_the_daemon_or_of_the_whole_disk() {
    for (errno, is_disk_dead) in
        [(Errno::EMFILE, false), (Errno::ENOMEM, false), (Errno::EACCES, false), (Errno::EIO, true)]
    {
        let fixture = fixture(52);
        let (pod, container) = two_pods(&fixture);
        spoil(&fixture, Bad::Pod, errno, &pod, &container);
        if is_disk_dead {
            fixture.refuse("create", &format!("{ROOT}/quarantine/"), Errno::EROFS, u32::MAX);
        }
        fixture.daemon(async |pods| {
            reactor::sleep(Duration::from_secs(3600)).await;
            assert!(runs(&fixture, &container), "{errno}");
            assert_eq!(kind(pods.pod(&pod)), Some(Kind::Unavailable), "{errno}");
            fixture.clients.node.world.borrow_mut().refusals.clear();
            reactor::sleep(Duration::from_secs(40)).await;
            assert!(pods.pod(&pod).expect("it was read").record().state.is_ready(), "{errno}");
            assert!(runs(&fixture, &container), "{errno}");
            fixture.require(pods);
            fixture.remove_all(pods).await;
        });
    }
}

/// The errors of one record pass just before the end of the time, and those of another begin: each has its own time.
#[test]
fn a_record_that_is_read_at_last_is_kept() {
    let fixture = fixture(53);
    let (pod, container) = two_pods(&fixture);
    spoil(&fixture, Bad::Container, Errno::EIO, &pod, &container);
    fixture.daemon(async |pods| {
        reactor::sleep(Duration::from_secs(580)).await;
        fixture.clients.node.world.borrow_mut().refusals.clear();
        reactor::sleep(Duration::from_secs(40)).await;
        assert!(runs(&fixture, &container));
        assert!(pods.container(&container).expect("it was read").record().state.is_running());
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
}

/// Fails if such a pod waits for the end of the long time: it could not be removed.
#[test]
fn a_pod_whose_record_cannot_be_read_can_be_removed() {
    for errors in [0, 1] {
        let fixture = fixture(54);
        let (pod, container) = two_pods(&fixture);
        spoil(&fixture, Bad::Pod, Errno::EIO, &pod, &container);
        fixture.daemon(async |pods| {
            pods.remove_unread(&pods.pods()[0].id.to_string()).await.expect("nothing to do");
            assert_eq!(pods.pods().len(), 1, "a pod that is known is left alone");
            assert_eq!(kind(pods.remove_unread(&pod).await), Some(Kind::Unavailable), "it may be read again");
            assert!(runs(&fixture, &container));
            reactor::sleep(Duration::from_secs(20)).await;
            fixture.refuse("kill cgroup", "", Errno::ENOMEM, errors);
            let removed = pods.remove_unread(&pod).await;
            if errors > 0 {
                assert_eq!(kind(removed), Some(Kind::Unavailable));
                reactor::sleep(Duration::from_secs(40)).await;
                pods.remove_unread(&pod).await.expect("it is removed now");
            }
            assert_eq!(kind(pods.pod(&pod)), Some(Kind::NotFound));
            assert!(!runs(&fixture, &container) && pods.unknown().is_none());
            fixture.clients.node.world.borrow_mut().refusals.clear();
            fixture.require(pods);
            fixture.remove_all(pods).await;
        });
    }
}

/// Regression (seed 344386): the second request joined the first one's attempt to read the record, and was answered before the pod
/// was removed.
#[test]
fn two_removals_of_a_pod_whose_record_could_not_be_read_remove_it() {
    let fixture = fixture(55);
    let (pod, container) = two_pods(&fixture);
    fixture.refuse("read", &format!("/{pod}/record"), Errno::ENOMEM, 1);
    fixture.daemon(async |pods| {
        let second = async {
            reactor::sleep(Duration::from_micros(100)).await;
            pods.pod(&pod).expect("its record was read").remove().await
        };
        let (first, second) = smol::future::zip(pods.remove_unread(&pod), second).await;
        first.and(second).expect("it is removed");
        assert_eq!(kind(pods.pod(&pod)), Some(Kind::NotFound));
        assert!(!runs(&fixture, &container));
        fixture.remove_all(pods).await;
    });
}

/// Any of them may have the record of a pod that a power cut has left there, so that each unknown ID could be its own.
#[test]
fn spare_files_that_can_never_be_read_are_set_aside() {
    let fixture = fixture(55);
    let (_, container) = two_pods(&fixture);
    // The files are made in the background.
    fixture.daemon(async |pods| {
        pods.run(pod_spec(2)).await.expect("a pod");
        reactor::sleep(Duration::from_secs(10)).await;
    });
    let spare = fixture.clients.node.world.borrow().disk.containing(&format!("{ROOT}/spare/"));
    assert!(!spare.is_empty());
    spare.iter().for_each(|file| fixture.refuse("read", file, Errno::EIO, u32::MAX));
    fixture.daemon(async |pods| {
        let absent = "ab".repeat(32);
        reactor::sleep(Duration::from_secs(500)).await;
        let (_, reason) = pods.unknown().expect("it is not known");
        assert!(reason.contains("/spare/") && reason.contains("`mv` it away"), "{reason}");
        assert_eq!(kind(pods.container(&absent)), Some(Kind::Unavailable));
        assert!(quarantined(&fixture).is_empty(), "too early");
        reactor::sleep(Duration::from_secs(150)).await;
        assert!(pods.unknown().is_none(), "{:?}", pods.unknown());
        assert_eq!(kind(pods.container(&absent)), Some(Kind::NotFound));
        assert!(!quarantined(&fixture).is_empty());
        assert!(runs(&fixture, &container) && pods.pods().len() == 3, "records at their places are used");
        fixture.clients.node.world.borrow_mut().refusals.clear();
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
}
