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

use coracle_base::error::{Error, Kind, failed};
use coracle_base::{log, reactor};
use coracle_sandbox::{Request, disk, monitor};

use crate::record::DurableRecord;
use crate::{Node, Pod, Pods, filesystem, state};

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
        let is_there = disk::inspect(&paths.state).is_ok();
        if !is_there || filesystem::make_private_directory(&paths.pods_state()).is_err() {
            return false;
        }
        let (mut is_complete, mut remade) = (true, Vec::new());
        for pod in self.every_pod() {
            match pod.need() {
                Ok(Need::Nothing) => {}
                Ok(Need::LookAgain) => is_complete = false,
                // At the same time, because a monitor that is frozen is waited for.
                Ok(Need::Remake) => remade.push(reactor::spawn(async move {
                    let remade = pod.remake_state().await;
                    pod.report(remade)
                })),
                Err(error) => is_complete &= pod.report(Err(error)),
            }
        }
        for task in remade {
            is_complete &= task.await;
        }
        is_complete
    }
}

/// What is to be done about the state directory of a pod.
enum Need {
    Nothing,
    /// A later daemon would not find the monitor, which serves this one, or notes about a pod without a monitor.
    Remake,
    /// The directory is missing, and the pod is being made or its monitor is not reached yet.
    LookAgain,
}

impl Pod {
    /// Logs an error; returns whether there is none.
    fn report(&self, remade: Result<(), Error>) -> bool {
        if let Err(error) = &remade {
            log::error!("cannot make a pod's state directory again, will retry"; pod = self.id, error = error);
        }
        remade.is_ok()
    }

    fn need(&self) -> Result<Need, Error> {
        let directory = self.node().paths.pod_state(self.id);
        let state = self.record().state.clone();
        let is_there = match state {
            state::Pod::Creating | state::Pod::Ready => monitor::has_files(&directory),
            // Later notes make the directory again, without this one.
            state::Pod::NotReady { why } if why != state::Down::Rebooted => {
                disk::exists(&self.node().paths.stopping(self.id))
            }
            // There are no notes about a pod of an earlier boot.
            state::Pod::NotReady { .. } | state::Pod::Removing => Ok(true),
        };
        if is_there.map_err(|error| failed("inspect", &directory, &error))? {
            return Ok(Need::Nothing);
        }
        Ok(match (state, self.link()) {
            (state::Pod::Ready, Ok(link)) if link.version() < REPLACE_STATE_SINCE => Need::Nothing,
            (state::Pod::Creating, _) | (state::Pod::Ready, Err(_)) => Need::LookAgain,
            _ => Need::Remake,
        })
    }

    /// Makes the state directory again, with the files of the monitor, and writes all records, which may have been notes there.
    async fn remake_state(&self) -> Result<(), Error> {
        let _operation = self.operation.lock().await;
        // The pod may have been stopped meanwhile.
        if !matches!(self.need()?, Need::Remake) {
            return Ok(());
        }
        let paths = &self.node().paths;
        let directory = paths.pod_state(self.id);
        keep(self.node(), &*self.record())?;
        for container in self.containers() {
            // One without a directory is being removed.
            if !matches!(disk::exists(&paths.container(self.id, container.id)), Ok(false)) {
                keep(self.node(), &*container.record())?;
            }
        }
        // Only now: while they are missing, all of this is tried again.
        for directory in [paths.launch(self.id), paths.stopping(self.id)] {
            filesystem::make_directory(&directory)?;
        }
        if !self.record().state.is_ready() {
            return Ok(());
        }
        let link = self.link()?;
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

/// Makes a record durable, whose note may be lost. On a full disk it becomes a note again.
fn keep(node: &Node, record: &impl DurableRecord) -> Result<(), Error> {
    record.commit(node).or_else(|error| {
        log::warn!("cannot write a record, which is kept until the next boot"; error = error);
        record.note(&node.paths)
    })
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
