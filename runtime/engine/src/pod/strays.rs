//! Processes of pods that are found without their cgroups: a privileged container or an administrator's tool can move a
//! process to another cgroup, and a kill of its cgroup does not reach it then.
//!
//! | source | finds |
//! |---|---|
//! | the monitor's process | every process of the pod: orphans become the monitor's children (PR_SET_CHILD_SUBREAPER), or those of the first process of their PID namespace |
//! | the root of a process, an overlay whose upper directory is a container's (/proc/PID/mountinfo) | which container it belongs to; without a monitor, also that it belongs to the pod |
//!
//! Not found: a process that has changed its root, once its monitor has ended.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use coracle_base::error::{Error, Kind, failed};
use coracle_base::reactor::{self, Slice};
use coracle_base::store::is_shortage;
use coracle_base::{log, time};
use coracle_sandbox::cgroup::CgroupPath;
use coracle_sandbox::{ContainerId, PodId, disk, monitor, process};
use nix::errno::Errno;

use crate::Pod;
use crate::pod::KILL_LIMIT;
use crate::pod::unlisted_containers::{children, created_ms, is_running, parent};

/// The first pause before the processes are read again, and the maximum.
const PAUSE: Duration = Duration::from_micros(200);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// A process of a pod.
struct Stray {
    pid: i32,
    /// PID of its parent; 0 if it was found by its root.
    parent: i32,
    /// The container in whose root it runs; `None` if it runs in another root.
    container: Option<ContainerId>,
}

impl Pod {
    /// PID of the pod's monitor, whether or not the daemon is connected to it; 0 if there is none.
    ///
    /// # Errors
    /// No memory or descriptor is free to read its PID file.
    pub(crate) fn monitor_pid(&self) -> Result<i32, Error> {
        match self.pid() {
            0 => Ok(unless_unreadable(monitor::pid(&self.node().paths.pod_state(self.id)))?.unwrap_or(0)),
            pid => Ok(pid),
        }
    }

    /// Kills the processes of a container, in its cgroup and outside of it, and removes the cgroup when they have ended.
    ///
    /// # Errors
    /// A process that could not be killed or has not ended, or the cgroup that could not be removed.
    pub(crate) async fn kill_container(&self, id: ContainerId, cgroup: &CgroupPath) -> Result<(), Error> {
        self.node().cgroups.kill(cgroup)?;
        // Before the cgroup is removed, which a process that is still in one of several hierarchies prevents.
        self.end_strays(|container| container == Some(id)).await?;
        self.node().clear_cgroup(cgroup).await
    }

    /// Kills the pod's processes whose container `is_wanted` selects, and waits for their end; see [`end`].
    pub(crate) async fn end_strays(
        &self,
        is_wanted: impl Fn(Option<ContainerId>) -> bool,
    ) -> Result<(), Error> {
        end(self.id, || self.monitor_pid(), is_wanted).await
    }
}

/// The answer of the PID file of a monitor; `None` for an error that may last, such as EIO, because other sources lead to
/// the processes of a pod, which could not be removed otherwise.
pub(crate) fn unless_unreadable<T>(
    answer: Result<Option<T>, coracle_sandbox::Error>,
) -> Result<Option<T>, Error> {
    match answer {
        Ok(answer) => Ok(answer),
        Err(error) if error.errno().is_some_and(is_shortage) => Err(error.into()),
        Err(error) => {
            log::warn!("cannot find out which process is a pod's monitor, its cgroup alone is used"; error = error);
            Ok(None)
        }
    }
}

/// Kills the processes of a pod whose container `is_wanted` selects (`None`: a process in the root of no container), and
/// waits until they have ended. `monitor`: the PID of the pod's monitor, 0 if there is none.
///
/// # Errors
/// `DeadlineExceeded`, naming a process that does not end; an error of looking for processes or of the kill.
pub(crate) async fn end(
    pod: PodId,
    monitor: impl Fn() -> Result<i32, Error>,
    is_wanted: impl Fn(Option<ContainerId>) -> bool,
) -> Result<(), Error> {
    let (limit, mut pause) = (time::now() + KILL_LIMIT, PAUSE);
    // PIDs with their creation times.
    let mut killed: Vec<(i32, Option<u64>)> = Vec::new();
    loop {
        let is_wanted = |stray: &Stray| is_wanted(stray.container);
        let monitor = monitor()?;
        let mut found = below(monitor, pod)?;
        // Below a monitor that has ended, perhaps just now, are none, because init has adopted them.
        if !found.iter().any(is_wanted) && !is_running(monitor) {
            found = on_the_node(pod).await?;
        }
        let wanted: Vec<_> = found.into_iter().filter(is_wanted).collect();
        // A process that has left its namespaces has no root any more, but may still have to close files of volumes.
        killed.retain(|(pid, created)| is_running(*pid) && created_ms(*pid) == *created);
        let first = wanted.first().map(|stray| stray.pid).or(killed.first().map(|(pid, _)| *pid));
        let Some(first) = first else { return Ok(()) };
        if time::now() >= limit {
            let text = format!("process {first} does not end after SIGKILL");
            return Err(Error::new(Kind::DeadlineExceeded, text));
        }
        for stray in &wanted {
            log::debug!("killing a process by its PID"; pod = pod, pid = stray.pid);
            let is_it = || match stray.parent {
                0 => matches!(root(stray.pid, pod), Ok(Root::Container(id)) if Some(id) == stray.container),
                parent_pid => parent(stray.pid) == Some(parent_pid),
            };
            process::kill(stray.pid, is_it)?;
            if !killed.iter().any(|(pid, _)| *pid == stray.pid) {
                killed.push((stray.pid, created_ms(stray.pid)));
            }
        }
        reactor::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Kills the monitor of a state directory to which the daemon is not connected, and waits for its end.
///
/// # Errors
/// `DeadlineExceeded` if it does not end; an error of the kill.
pub(crate) async fn end_monitor(directory: &Path) -> Result<(), Error> {
    let (limit, mut pause) = (time::now() + KILL_LIMIT, PAUSE);
    // An error of the kill is not one of reading: the monitor lives on.
    while let Some(pid) = unless_unreadable(monitor::pid(directory))? {
        if time::now() >= limit {
            return Err(unended_monitor(pid));
        }
        if monitor::kill(directory)?.is_none() {
            break;
        }
        reactor::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
    Ok(())
}

/// The error for a monitor that does not end.
pub(crate) fn unended_monitor(pid: i32) -> Error {
    Error::new(
        Kind::DeadlineExceeded,
        format!("the pod's monitor, process {pid}, does not end after SIGKILL"),
    )
}

/// The living processes below the monitor.
fn below(monitor: i32, pod: PodId) -> Result<Vec<Stray>, Error> {
    let mut tree: Vec<(i32, i32)> = children(monitor).into_iter().map(|pid| (pid, monitor)).collect();
    let (mut found, mut next) = (Vec::new(), 0);
    while let Some(&(pid, parent)) = tree.get(next) {
        next += 1;
        tree.extend(children(pid).into_iter().map(|child| (child, pid)));
        match root(pid, pod)? {
            Root::Ended => {}
            Root::Other => found.push(Stray { pid, parent, container: None }),
            Root::Container(id) => found.push(Stray { pid, parent, container: Some(id) }),
        }
    }
    Ok(found)
}

/// The living processes of the node that run in the root of one of the pod's containers.
async fn on_the_node(pod: PodId) -> Result<Vec<Stray>, Error> {
    let proc = Path::new("/proc");
    let entries = disk::entries(proc).map_err(|error| failed("list", proc, &error))?;
    let (mut found, mut slice) = (Vec::new(), Slice::new());
    for entry in entries {
        let entry = entry.map_err(|error| failed("list", proc, &error))?;
        let Some(pid) = entry.name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Root::Container(id) = root(pid, pod)? {
            found.push(Stray { pid, parent: 0, container: Some(id) });
        }
        slice.share().await;
    }
    Ok(found)
}

/// The root directory of a process.
pub(crate) enum Root {
    /// The process has ended, or does not exist.
    Ended,
    Container(ContainerId),
    Other,
}

/// Finds the root of a process.
///
/// # Errors
/// The file of the process cannot be read for the moment.
pub(crate) fn root(pid: i32, pod: PodId) -> Result<Root, Error> {
    let path = format!("/proc/{pid}/mountinfo");
    match disk::read(Path::new(&path)) {
        Ok(text) if text.is_empty() => Ok(Root::Ended),
        Ok(text) => {
            Ok(container_of(&String::from_utf8_lossy(&text), pod).map_or(Root::Other, Root::Container))
        }
        Err(error) => match error.raw_os_error().map(Errno::from_raw) {
            _ if error.kind() == ErrorKind::NotFound => Ok(Root::Ended),
            // A process that ends has left its mount namespace (fs/proc_namespace.c).
            Some(Errno::ESRCH | Errno::EINVAL) => Ok(Root::Ended),
            _ => Err(failed("read", Path::new(&path), &error)),
        },
    }
}

/// The container whose writable layer is the root in this mountinfo (proc_pid_mountinfo(5)). Other mounts do not count: a
/// privileged container can mount any overlay in the node's mount namespace.
fn container_of(text: &str, pod: PodId) -> Option<ContainerId> {
    // ID PARENT DEVICE ROOT PLACE OPTIONS … - TYPE SOURCE OPTIONS
    let top = text.lines().rfind(|line| line.split(' ').nth(4) == Some("/"))?;
    let (_, rest) = top.split_once(" - overlay ")?;
    let upper = rest.split([' ', ',']).find_map(|option| option.strip_prefix("upperdir="))?;
    let (above, name) = upper.strip_suffix("/upper")?.rsplit_once('/')?;
    let owner = above.strip_suffix("/containers")?.rsplit_once('/')?.1;
    if owner == pod.to_string() { name.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_names_its_container() {
        let (pod, id) = (PodId::from_bytes([1; 32]), ContainerId::from_bytes([2; 32]));
        let line = |place: &str, kind: &str, pod: PodId| {
            format!(
                "30 1 0:40 / {place} ro,relatime shared:1 - {kind} overlay rw,lowerdir=a:b,upperdir=/r/pods/{pod}/containers/{id}/upper,workdir=/r/w,volatile\n"
            )
        };
        let proc = "31 30 0:41 / /proc rw - proc proc rw\n";
        let other = PodId::from_bytes([3; 32]);
        for (text, expected) in [
            (line("/", "overlay", pod) + proc, Some(id)),
            (format!("29 1 8:1 / / rw - ext4 /dev/sda rw\n{}", line("/", "overlay", pod)), Some(id)),
            (format!("{}32 1 0:5 / / rw - tmpfs tmpfs rw\n", line("/", "overlay", pod)), None),
            (line("/mnt", "overlay", pod), None),
            (line("/", "tmpfs", pod), None),
            (line("/", "overlay", other), None),
            (proc.to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(container_of(&text, pod), expected, "{text}");
        }
    }

    #[test]
    fn the_descendants_of_a_process_are_found_and_ended() {
        let child = std::process::Command::new("/bin/sh")
            .args(["-c", "sleep 1000 & exec sleep 1000"])
            .spawn()
            .unwrap();
        let (pid, pod) = (child.id() as i32, PodId::from_bytes([1; 32]));
        let found = || below(pid, pod).unwrap();
        while found().is_empty() {
            std::thread::yield_now();
        }
        reactor::run(async {
            let one =
                end(pod, || Ok(pid), |container| container == Some(ContainerId::from_bytes([2; 32]))).await;
            assert!(one.is_ok() && found().len() == 1, "no process of another container is killed");
            end(pod, || Ok(pid), |_| true).await.unwrap();
        });
        assert!(found().is_empty());
        process::kill(pid, || true).unwrap();
        let mut child = child;
        child.wait().unwrap();
    }
}
