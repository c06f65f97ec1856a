//! What the dispatcher needs of the program around it: tasks, time, the pods, and hands to change containers.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use smol::io::{AsyncRead, AsyncWrite};

use crate::api;

/// A future of this thread.
pub type Task<T = ()> = Pin<Box<dyn Future<Output = T>>>;

/// Both directions of a plugin's socket.
pub struct Stream {
    /// What the plugin says.
    pub reader: Box<dyn AsyncRead + Unpin>,
    /// What it is told.
    pub writer: Box<dyn AsyncWrite + Unpin>,
}

/// Everything that exists, for a plugin that joins (NRI 2.5).
#[derive(Default)]
pub struct Snapshot {
    /// Pods that are up or stopped and not being removed.
    pub pods: Vec<api::PodSandbox>,
    /// Their containers, created or running.
    pub containers: Vec<api::Container>,
}

/// What became of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds.
    Applied,
    /// There is no such container any more, or it has ended.
    Skipped,
    /// It could not be applied, and why.
    Failed(String),
}

/// How much a line of the log matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// For whoever develops a plugin.
    Debug,
    /// Plugins come and go.
    Info,
    /// A plugin did what it should not have.
    Warn,
    /// Something is lost.
    Error,
}

/// The program around.
pub trait Host {
    /// Runs a task beside the others.
    fn spawn(&self, task: Task);

    /// A clock.
    fn sleep(&self, duration: Duration) -> Task;

    /// What exists now; asked while no event is under way.
    fn snapshot(&self) -> Snapshot;

    /// Changes the resources of a container: of a running one at once, of a created one for its start. Fields that are
    /// absent stay as they are. Must not wait for any event.
    fn update(&self, update: api::ContainerUpdate) -> Task<Verdict>;

    /// Stops a container without grace, in the background.
    fn evict(&self, eviction: api::ContainerEviction);

    /// A line for the log; `plugin` may be empty.
    fn log(&self, level: Level, plugin: &str, text: &str);
}
