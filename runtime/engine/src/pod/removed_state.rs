//! State directories of pods that another program removes while the daemon runs (`rm -rf /run/coracle`, a cleaner of
//! temporary files). Without their sockets the next daemon would not find the monitors, and would end the pods. They are
//! made again at once, and each monitor gets its new socket and directory.
//!
//! What only these directories had is lost: the confinement of execs, plans of containers that were not started,
//! and the mount of the pod's /dev/shm. Such calls fail with an error that names the file, until the pod is created again.
//!
//! The kernel reports removals, so an idle node causes no work.

use std::os::fd::AsFd;
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_base::error::{Error, Kind, failed};
use coracle_base::log;
use coracle_base::reactor::{self, Removals};
use coracle_sandbox::{Request, disk, monitor};

use crate::link::LinkError;
use crate::record::DurableRecord;
use crate::{Container, Node, Pod, Pods, filesystem, state};

/// The version of monitors since which they support [`Request::ReplaceState`].
const REPLACE_STATE_SINCE: u16 = 7;

/// Time limit for a monitor's answer.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// Pause after a removal, so that a program that removes a tree can finish.
const PAUSE: Duration = Duration::from_millis(200);
/// Pause before another attempt; each further one is twice as long, up to the maximum.
const AGAIN_PAUSE: Duration = Duration::from_secs(2);
const AGAIN_PAUSE_MAX: Duration = Duration::from_secs(15);

impl Pods {
    /// Follows removals in the state directory from now on. Called once, after the recovery.
    pub fn follow_state_directory(self: &Rc<Self>) {
        reactor::spawn(follow(Rc::downgrade(self))).detach();
    }

    /// Makes the missing state directories of pods again; returns whether all are there. Otherwise a pod is being made, stopped
    /// or removed, or its monitor is not reached yet.
    ///
    /// # Errors
    /// The first error, which was not logged; the rest is tried again.
    async fn remake_state(&self) -> Result<bool, Error> {
        // The daemon's own directory is made again with its socket, accessible to monitors in user namespaces.
        let paths = &self.node().paths;
        if !disk::exists(&paths.state).map_err(|error| failed("inspect", &paths.state, &error))? {
            return Ok(false);
        }
        filesystem::make_private_directory(&paths.pods_state())?;
        let (mut outcomes, mut remade) = (Vec::new(), Vec::new());
        for pod in self.every_pod() {
            match pod.need() {
                Ok(Need::Nothing) => {}
                Ok(Need::LookAgain) => outcomes.push(Ok(false)),
                // At the same time, because a monitor that is frozen is waited for.
                Ok(Need::Remake) => remade.push(reactor::spawn(async move {
                    let remade = pod.remake_state().await;
                    remade.map_err(|error| error.context(format!("state of pod sandbox {:.13}", pod.id)))
                })),
                Err(error) => outcomes.push(Err(error)),
            }
        }
        for task in remade {
            outcomes.push(task.await);
        }
        outcomes.into_iter().try_fold(true, |all, outcome| Ok(outcome? && all))
    }
}

/// The need of a pod's state directory.
enum Need {
    Nothing,
    /// A later daemon would find neither the monitor, which serves this one, nor the notes.
    Remake,
    /// The files are missing, and the pod is being made or its monitor is not reached yet.
    LookAgain,
}

impl Pod {
    fn need(&self) -> Result<Need, Error> {
        let directory = self.node().paths.pod_state(self.id);
        let state = self.record().state.clone();
        let is_of_this_boot = self.record().boot == self.node().kernel.boot;
        let is_there = match state {
            state::Pod::Creating { .. } | state::Pod::Ready { .. } => monitor::has_files(&directory),
            // Later notes make the directory again, without this one.
            state::Pod::NotReady { .. } if is_of_this_boot => {
                disk::exists(&self.node().paths.stopping(self.id))
            }
            // A pod of an earlier boot has only the note that it is one, and is found to be one without it.
            state::Pod::NotReady { .. } | state::Pod::Removing | state::Pod::Gone => Ok(true),
        };
        if is_there.map_err(|error| failed("inspect", &directory, &error))? {
            return Ok(Need::Nothing);
        }
        Ok(match (state, self.link()) {
            (state::Pod::Ready { .. }, Ok(link)) if link.version() < REPLACE_STATE_SINCE => Need::Nothing,
            (state::Pod::Creating { .. }, _) | (state::Pod::Ready { .. }, Err(_)) => Need::LookAgain,
            _ => Need::Remake,
        })
    }

    /// Makes the state directory again, with the files of the monitor, and writes all records, which may have been notes there.
    /// Returns whether this is done.
    async fn remake_state(&self) -> Result<bool, Error> {
        // An operation may take as long as a plugin does, and other pods would wait for the next look.
        let Some(_operation) = self.operation.try_lock() else { return Ok(false) };
        // One may have ended since the look.
        if !matches!(self.need()?, Need::Remake) {
            return Ok(false);
        }
        let paths = &self.node().paths;
        let directory = paths.pod_state(self.id);
        keep(self.node(), &*self.record())?;
        for container in self.containers() {
            container.keep_record()?;
        }
        // Only now: while one of them is missing, all of this is tried again.
        for directory in [paths.plans(self.id), paths.stopping(self.id)] {
            filesystem::make_directory(&directory)?;
        }
        if !self.record().state.is_ready() {
            return Ok(true);
        }
        let link = self.link()?;
        let files = monitor::remake_files(&directory, link.pid())?;
        let descriptors = files.each_ref().map(AsFd::as_fd);
        match link.ask(Request::ReplaceState, &descriptors, ASK_LIMIT).await {
            Ok(_) => {}
            // Sent: a frozen monitor takes them when it continues, and the next daemon waits for it.
            Err(LinkError::Silent { .. }) => {
                log::warn!("the pod's monitor does not answer, it will use its new state directory when it continues"; pod = self.id);
            }
            Err(error) => {
                // Otherwise the next daemon would wait for an answer on a socket without a listener.
                monitor::remove_files(&directory);
                return Err(Error::new(Kind::Internal, format!("pod's monitor: {error}")));
            }
        }
        log::warn!("another program removed the state directory of a pod: it is made again, but execs and new containers of the pod will fail";
            pod = self.id, name = self.name());
        Ok(true)
    }
}

impl Container {
    fn keep_record(&self) -> Result<(), Error> {
        let paths = &self.node().paths;
        // One without a directory is being removed.
        if filesystem::is_missing(&paths.container(self.pod.id, self.id)) {
            return Ok(());
        }
        let record = self.record();
        // A start has committed Running in advance, which this would undo.
        match record.state.ahead_ns() {
            Some(_) => record.note(paths),
            None => keep(self.node(), &*record),
        }
    }
}

/// Makes a record durable, whose note may be lost. On a full disk it becomes a note again.
fn keep(node: &Node, record: &impl DurableRecord) -> Result<(), Error> {
    record.commit(node).or_else(|error| {
        log::warn!("cannot write a record to the disk, it is kept in the state directory until the next boot"; error = error);
        record.note(&node.paths)
    })
}

async fn follow(pods: Weak<Pods>) {
    let (removals, mut pause) = (Removals::default(), AGAIN_PAUSE);
    loop {
        let Some(alive) = pods.upgrade() else { return };
        // First the watch, so that nothing that is removed after the look is missed.
        let watched = removals.watch(&alive.node().paths.pods_state());
        let remade = alive.remake_state().await;
        drop(alive);
        let watched =
            watched.map_err(|error| Error::from(error).context("watch the state directories of pods"));
        match remade.and_then(|is_complete| watched.map(|()| is_complete)) {
            Ok(true) => {
                let _ = removals.next().await; // after an error the pods are looked at, too
                reactor::sleep(PAUSE).await;
                pause = AGAIN_PAUSE;
                continue;
            }
            Ok(false) => {}
            Err(error) if pause == AGAIN_PAUSE => {
                log::error!("cannot make state directories of pods again, will retry; a restart may end pods"; error = error);
            }
            Err(_) => {} // logged before
        }
        reactor::sleep(pause).await;
        pause = (pause * 2).min(AGAIN_PAUSE_MAX);
    }
}
