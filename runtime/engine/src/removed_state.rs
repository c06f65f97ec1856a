//! State directories of pods that another program removes while the daemon runs (`rm -rf /run/coracle`, a cleaner of
//! temporary files). Without their sockets the next daemon would not find the monitors, and would end the pods. They are
//! made again at once, and each monitor gets its new socket and directory.
//!
//! What only these directories had is lost: the confinement of execs, launch records of containers that were not started,
//! and the mount of the pod's /dev/shm. Such calls fail with an error that names the file, until the pod is created again.
//!
//! The kernel reports removals, so an idle node causes no work.

use std::os::fd::AsFd;
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};
use coracle_sandbox::{Request, monitor};

use crate::record::DurableRecord;
use crate::{Pod, Pods, filesystem};

/// The version of monitors since which they support [`Request::ReplaceState`].
const REPLACE_STATE_SINCE: u16 = 7;

/// Time limit for a monitor's answer.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// Pause after a removal, so that a program that removes a tree can finish, and before another attempt.
const PAUSE: Duration = Duration::from_millis(200);
const AGAIN_PAUSE: Duration = Duration::from_secs(2);

impl Pods {
    /// Follows removals in the state directory from now on. Called once, after the recovery.
    pub fn follow_state_directory(self: &Rc<Self>) {
        reactor::spawn(follow(Rc::downgrade(self))).detach();
    }

    /// Makes the missing state directories of running pods again; returns whether all are there.
    async fn remake_state(&self) -> bool {
        // The daemon's own directory is made again with its socket, accessible to monitors in user namespaces.
        let paths = &self.node().paths;
        let is_there =
            paths.state.exists() && filesystem::make_private_directory(&paths.pods_state()).is_ok();
        if !is_there {
            return false;
        }
        let mut is_complete = true;
        for pod in self.pods() {
            if pod.has_lost_state()
                && let Err(error) = pod.remake_state().await
            {
                log::error!("cannot make a pod's state directory again, will retry"; pod = pod.id, error = error);
                is_complete = false;
            }
        }
        is_complete
    }
}

impl Pod {
    /// Whether the pod's monitor serves this daemon, and a later one would not find it.
    fn has_lost_state(&self) -> bool {
        let link = self.connection.link.borrow();
        let is_served = link.as_ref().is_some_and(|link| link.version() >= REPLACE_STATE_SINCE);
        is_served && !monitor::has_files(&self.node().paths.pod_state(self.id))
    }

    /// Makes the state directory again, with the files of the monitor and all records, which may have been notes there.
    async fn remake_state(&self) -> Result<(), Error> {
        // The files of a pod that is being made or removed appear and disappear.
        let _operation = self.operation.lock().await;
        if !self.has_lost_state() {
            return Ok(());
        }
        let (paths, link) = (&self.node().paths, self.link()?);
        let directory = paths.pod_state(self.id);
        for directory in [directory.clone(), paths.launch(self.id), paths.stopping(self.id)] {
            filesystem::make_directory(&directory)?;
        }
        self.record().commit(self.node())?;
        for container in self.containers() {
            container.record().commit(self.node())?;
        }
        let files = monitor::remake_files(&directory, link.pid())?;
        let descriptors = files.each_ref().map(AsFd::as_fd);
        link.ask(Request::ReplaceState, &descriptors, ASK_LIMIT).await.map_err(|error| {
            // Otherwise the next daemon would wait for an answer on a socket without a listener.
            monitor::remove_files(&directory);
            Error::new(Kind::Internal, format!("pod's monitor: {error}"))
        })?;
        log::warn!("another program removed the state directory of a pod: it is made again, but execs and new containers of the pod will fail";
            pod = self.id, name = self.name());
        Ok(())
    }
}

async fn follow(pods: Weak<Pods>) {
    loop {
        let Some(alive) = pods.upgrade() else { return };
        let directory = alive.node().paths.pods_state();
        // Armed first, so that nothing that is removed after the look is missed.
        let armed = reactor::arm_removals(&directory);
        let is_complete = alive.remake_state().await;
        drop(alive);
        match armed {
            Ok(armed) if is_complete => {
                let _ = armed.readable().await; // after an error the pods are looked at, too
                reactor::sleep(PAUSE).await;
            }
            Ok(_) | Err(_) => reactor::sleep(AGAIN_PAUSE).await,
        }
    }
}
