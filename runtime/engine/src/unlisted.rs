//! Containers that no list shows: their directory or record is gone while they run. The kernel and the state directory still know
//! them, and what is not listed is ended, by its cgroup and by the monitor: a kubelet would start it a second time.
//!
//! | who knows | what |
//! |---|---|
//! | the kernel | children of the monitor, and the cgroup each is in |
//! | `STATE/pods/POD/{launch,started,stopping,records}` | ids of containers that were made |

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Error;
use coracle_base::log;
use coracle_sandbox::cgroup::{self, CgroupPath};
use coracle_sandbox::{ContainerId, PodId, Request};

use crate::paths::Paths;
use crate::{Pod, Pods};
use coracle_base::error::failed;

/// Longest wait for a monitor that is to forget a container.
const FORGET_LIMIT: Duration = Duration::from_secs(5);

/// Containers, with their cgroup where the kernel tells it.
pub(crate) type Traces = BTreeMap<ContainerId, Option<CgroupPath>>;

impl Pods {
    /// Ends what runs in a pod and is not listed.
    pub(crate) async fn end_unlisted(self: &Rc<Self>, pod: &Rc<Pod>) -> Result<(), Error> {
        let mut outcome = Ok(());
        for (id, cgroup) in traces(&self.node.paths, pod.id, pod.pid())? {
            if self.table.containers.borrow().contains_key(&id) {
                continue;
            }
            log::error!("a container without a record is ended"; pod = pod.id, ctr = id);
            let ended = self.end_one_unlisted(pod, id, cgroup).await;
            outcome = outcome.and(
                ended.map_err(|error| error.context(format!("container {id:.13}, which has no record"))),
            );
        }
        outcome
    }

    async fn end_one_unlisted(
        &self,
        pod: &Rc<Pod>,
        id: ContainerId,
        cgroup: Option<CgroupPath>,
    ) -> Result<(), Error> {
        let cgroup = match cgroup {
            Some(cgroup) => cgroup,
            None => pod.record().cgroup(&id)?,
        };
        self.node.cgroups.kill(&cgroup)?;
        self.clear_cgroup(&cgroup).await?;
        if let Ok(link) = pod.link() {
            // EBUSY until the monitor has reaped it; its place goes with the pod then.
            if let Err(error) = link.ask(Request::Forget { container: id }, &[], FORGET_LIMIT).await {
                log::debug!("not forgotten"; ctr = id, error = error);
            }
        }
        forget_notes(&self.node.paths, pod.id, id)
    }
}

/// Every container that something knows of. `monitor`: its pid, 0 where it is not known.
///
/// # Errors
/// Where a directory cannot be read: nothing is concluded from what is not seen.
pub(crate) fn traces(paths: &Paths, pod: PodId, monitor: i32) -> Result<Traces, Error> {
    let mut found = Traces::new();
    for directory in notes(paths, pod) {
        found.extend(ids::<ContainerId>(&directory)?.into_iter().map(|id| (id, None)));
    }
    for child in children(monitor) {
        let text = std::fs::read_to_string(format!("/proc/{child}/cgroup")).unwrap_or_default(); // it has ended
        if let Some((id, cgroup)) = container_of(&text, pod) {
            found.insert(id, Some(cgroup));
        }
    }
    Ok(found)
}

fn notes(paths: &Paths, pod: PodId) -> [std::path::PathBuf; 4] {
    [paths.launch(pod), paths.started(pod), paths.stopping(pod), paths.records(pod)]
}

fn forget_notes(paths: &Paths, pod: PodId, id: ContainerId) -> Result<(), Error> {
    for path in notes(paths, pod).map(|directory| directory.join(id.to_string())) {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(failed("remove", &path, &error));
            }
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// The processes that a monitor has started, execs included. A kernel without CONFIG_PROC_CHILDREN is asked for every process.
fn children(monitor: i32) -> Vec<i32> {
    if monitor <= 0 {
        return Vec::new();
    }
    if let Ok(list) = std::fs::read_to_string(format!("/proc/{monitor}/task/{monitor}/children")) {
        return list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect();
    }
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| parent(*pid) == Some(monitor)).collect()
}

/// Field 4 of proc_pid_stat(5). Field 2, the name, may hold anything.
fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// The container whose cgroup a process of this pod is in, by the text of its /proc/PID/cgroup: the last name of a path that is an
/// id. A process that has not joined yet is in the monitor's, whose name is the pod's id.
fn container_of(text: &str, pod: PodId) -> Option<(ContainerId, CgroupPath)> {
    // HIERARCHY:CONTROLLERS:PATH
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find_map(|path| {
        let names: Vec<&str> = path.split('/').collect();
        let (index, id) = names.iter().enumerate().rev().find_map(|(index, name)| {
            let id: ContainerId = cgroup::id_of_scope(name).unwrap_or(name).parse().ok()?;
            Some((index, id))
        })?;
        let is_pods_own = id.to_string() == pod.to_string();
        let path = CgroupPath::parse(&names[..=index].join("/")).ok()?;
        (!is_pods_own).then_some((id, path))
    })
}

/// The ids that name the entries of a directory; other names are none of ours. A missing directory holds nothing.
///
/// # Errors
/// Where it cannot be listed to its end.
pub(crate) fn ids<T: std::str::FromStr>(directory: &Path) -> Result<Vec<T>, Error> {
    let listed = || {
        let mut ids = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            ids.extend(entry?.file_name().to_str().and_then(|name| name.parse().ok()));
        }
        Ok(ids)
    };
    match listed() {
        Err(error) if is_absent(&error) => Ok(Vec::new()),
        listed => listed.map_err(|error: std::io::Error| failed("list", directory, &error)),
    }
}

/// Something else in a directory's place holds none of ours, either.
fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_names_its_container() {
        let (pod, id) = (PodId::from_bytes([1; 32]), ContainerId::from_bytes([2; 32]));
        let other = "03".repeat(32);
        for (text, expected) in [
            (format!("0::/coracle/{id}\n"), Some(format!("/coracle/{id}"))),
            (format!("4:memory:/k/{id}/exec-7\n0::/\n"), Some(format!("/k/{id}"))),
            (format!("0::/docker/{other}/coracle/{id}\n"), Some(format!("/docker/{other}/coracle/{id}"))),
            (format!("0::/a.slice/coracle-{id}.scope\n"), Some(format!("/a.slice/coracle-{id}.scope"))),
            (format!("0::/coracle/{pod}\n"), None),
            ("0::/\n".to_owned(), None),
            (String::new(), None),
        ] {
            let found = container_of(&text, pod).map(|(_, path)| path.to_string());
            assert_eq!(found, expected, "{text:?}");
        }
    }

    #[test]
    fn a_directory_that_cannot_be_listed_is_not_empty() {
        let dir = coracle_base::testdir::TestDir::new("unlisted");
        let id = ContainerId::from_bytes([2; 32]);
        std::fs::create_dir(dir.path().join(id.to_string())).unwrap();
        std::fs::write(dir.path().join("other"), "").unwrap();
        assert_eq!(ids::<ContainerId>(dir.path()).unwrap(), [id]);
        assert!(ids::<ContainerId>(&dir.path().join("none")).unwrap().is_empty());
        assert!(ids::<ContainerId>(&dir.path().join("other")).unwrap().is_empty());
        let looped = dir.path().join("loop");
        std::os::unix::fs::symlink(&looped, &looped).unwrap();
        assert!(ids::<ContainerId>(&looped).is_err());
    }

    #[test]
    fn children_are_found_without_the_kernels_list_too() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let (own, pid) = (std::process::id() as i32, child.id() as i32);
        assert_eq!(parent(pid), Some(own));
        assert!(children(0).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
