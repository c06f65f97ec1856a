//! The interface between the dispatcher and the runtime: tasks, time, the existing pods, and changes of containers.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use smol::io::{AsyncRead, AsyncWrite};

use crate::api;

/// A future that runs on this thread.
pub type Task<T = ()> = Pin<Box<dyn Future<Output = T>>>;

/// The two directions of a plugin's socket.
pub struct Stream {
    /// The bytes from the plugin.
    pub reader: Box<dyn AsyncRead + Unpin>,
    /// The bytes to the plugin.
    pub writer: Box<dyn AsyncWrite + Unpin>,
}

/// All existing pods and containers, for a plugin that joins (NRI 2.5).
#[derive(Default)]
pub struct Snapshot {
    /// Pods that are ready or stopped and not being removed.
    pub pods: Vec<api::PodSandbox>,
    /// Containers of these pods that are created or running.
    pub containers: Vec<api::Container>,
}

/// Result of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The update is applied.
    Applied,
    /// The container no longer exists, or has exited.
    Skipped,
    /// The update failed, with the reason.
    Failed(String),
}

/// Level of a log message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Messages for developers of plugins.
    Debug,
    /// Messages about connects and disconnects of plugins.
    Info,
    /// Messages about misbehaving plugins.
    Warn,
    /// Messages about failures.
    Error,
}

/// The interface of the runtime that the dispatcher uses.
pub trait Host {
    /// Runs a task concurrently.
    fn spawn(&self, task: Task);

    /// Completes after `duration`.
    fn sleep(&self, duration: Duration) -> Task;

    /// All existing pods and containers; called while no event is in progress.
    fn snapshot(&self) -> Snapshot;

    /// Changes the resources of a container: immediately if it is running, at its start if it is created. Absent fields
    /// are not changed. The implementation must not wait for an event.
    fn update(&self, update: api::ContainerUpdate) -> Task<Verdict>;

    /// Stops a container without a grace period, in the background.
    fn evict(&self, eviction: api::ContainerEviction);

    /// Logs a message; `plugin` is the plugin's name, or empty.
    fn log(&self, level: Level, plugin: &str, text: &str);
}
