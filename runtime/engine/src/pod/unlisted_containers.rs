//! Running containers that are not listed, because their directory or record was lost. The daemon finds them
//! through the kernel and the state directory, and kills them through their cgroup and the monitor, because
//! the kubelet would start them a second time. A process that another program has moved out of its cgroup is found by its
//! root (`pod::strays`).
//!
//! | source | data |
//! |---|---|
//! | the kernel | children of the monitor, and the cgroup of each |
//! | `STATE/pods/POD/{launch,stopping,records}` | IDs of containers that were created |

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use coracle_base::error::{Error, Kind, failed};
use coracle_base::{log, store};
use coracle_sandbox::cgroup::{self, CgroupPath};
use coracle_sandbox::{ContainerId, PodId, Request, disk};

use crate::Pod;
use crate::paths::Paths;
use crate::pod::strays::{self, Root};

/// Time limit of the request `Forget` to a monitor.
const FORGET_LIMIT: Duration = Duration::from_secs(5);

/// IDs of containers with their cgroup; `None` if the cgroup is unknown.
pub(crate) type Traces = BTreeMap<ContainerId, Option<CgroupPath>>;

impl Pod {
    /// Kills running containers of a pod that are not listed, also if the pod's monitor does not answer.
    pub(crate) async fn end_unlisted(&self) -> Result<(), Error> {
        let Some(pods) = self.engine().pods() else { return Ok(()) };
        let mut outcome = Ok(());
        let monitor = self.monitor_pid()?;
        // Only the cgroup that the container would have: another program may have moved the process, and a runtime inside a
        // listed container may have created cgroups whose names are IDs, too.
        let is_own = |id: &ContainerId, cgroup: &CgroupPath| {
            self.record().cgroup(id).is_ok_and(|own| own == *cgroup) && !pods.may_be_known(id)
        };
        for (id, cgroup) in traces(&self.node().paths, self.id, monitor, is_own)? {
            if pods.table.containers.borrow().contains_key(&id) {
                continue;
            }
            // Notes alone are what an interrupted removal leaves: it takes the record first. Without a known
            // monitor its children are unknown, and a process may be there.
            if cgroup.is_some() || monitor == 0 {
                log::error!("ending a container without a record"; pod = self.id, ctr = id);
            } else {
                log::info!("removing the notes of a removed container"; pod = self.id, ctr = id);
            }
            let ended = self.end_one_unlisted(id, cgroup).await;
            outcome = outcome.and(
                ended.map_err(|error| error.context(format!("container {id:.13}, which has no record"))),
            );
        }
        outcome
    }

    async fn end_one_unlisted(&self, id: ContainerId, cgroup: Option<CgroupPath>) -> Result<(), Error> {
        let cgroup = match cgroup {
            Some(cgroup) => cgroup,
            None => self.record().cgroup(&id)?,
        };
        self.kill_container(id, &cgroup).await?;
        if self.unknown().is_some_and(|unknown| unknown.is_unread) {
            // It may have a record that cannot be read now: its exit record and its notes belong to it.
            return Ok(());
        }
        if let Ok(link) = self.link() {
            // EBUSY until the monitor has reaped it; its entry is then removed with the pod.
            if let Err(error) = link.ask(Request::Forget { container: id }, &[], FORGET_LIMIT).await {
                log::debug!("cannot remove a container from the monitor"; ctr = id, error = error);
            }
        }
        forget_notes(&self.node().paths, self.id, id)
    }
}

/// All containers of which the kernel, the state directory or the root directory has a trace. `monitor`: its PID, 0 if unknown.
/// `is_own`: whether a process that runs in the root of no container belongs to the container after which its cgroup is named.
///
/// # Errors
/// A directory cannot be read: the result would be incomplete.
pub(crate) fn traces(
    paths: &Paths,
    pod: PodId,
    monitor: i32,
    is_own: impl Fn(&ContainerId, &CgroupPath) -> bool,
) -> Result<Traces, Error> {
    let mut found = Traces::new();
    for directory in notes(paths, pod) {
        found.extend(ids::<ContainerId>(&directory)?.into_iter().map(|id| (id, None)));
    }
    for child in children(monitor) {
        let text = cgroup_file(child);
        let mut by_cgroup = containers_of(&text, pod);
        let root = strays::root(child, pod);
        // Another program may have moved it out of its cgroup, or into that of another container or pod.
        let in_root = match root {
            Ok(Root::Container(id)) => Some(id),
            Ok(Root::Other | Root::Ended) | Err(_) => None,
        };
        let is_it = |(named, cgroup): &(ContainerId, CgroupPath)| {
            in_root.map_or_else(|| is_own(named, cgroup), |id| *named == id)
        };
        match (by_cgroup.find(is_it), in_root) {
            (Some((id, cgroup)), _) => _ = found.insert(id, Some(cgroup)),
            (None, Some(id)) => _ = found.entry(id).or_insert(None),
            (None, None) => _ = root?,
        }
    }
    // Of a container whose notes another program has removed the root directory has a trace.
    match ids::<ContainerId>(&paths.containers(pod)) {
        Ok(ids) => ids.into_iter().for_each(|id| _ = found.entry(id).or_insert(None)),
        Err(error) if error.kind() == Kind::ResourceExhausted => return Err(error),
        // A disk that fails must not keep a pod from being removed.
        Err(error) => log::warn!("cannot find out which containers a pod has had"; pod = pod, error = error),
    }
    Ok(found)
}

fn notes(paths: &Paths, pod: PodId) -> [std::path::PathBuf; 4] {
    [paths.plans(pod), paths.confinement(pod), paths.stopping(pod), paths.records(pod)]
}

pub(crate) fn forget_notes(paths: &Paths, pod: PodId, id: ContainerId) -> Result<(), Error> {
    notes(paths, pod).iter().try_for_each(|directory| store::remove_note(directory, &id.to_string()))
}

/// The child processes of a process; of a monitor, including execs. Without CONFIG_PROC_CHILDREN all processes are
/// checked.
pub(crate) fn children(of: i32) -> Vec<i32> {
    if of <= 0 {
        return Vec::new();
    }
    let task = format!("/proc/{of}/task");
    let threads = match disk::entries(Path::new(&task)) {
        Ok(entries) => numbers(entries),
        Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(), // it has ended
        Err(_) => Vec::new(),
    };
    let (mut found, mut is_complete) = (Vec::new(), false);
    for thread in threads {
        match disk::read_to_string(Path::new(&format!("{task}/{thread}/children"))) {
            Ok(list) => {
                is_complete = true;
                found.extend(list.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {} // the thread has ended
            Err(_) => {
                is_complete = false;
                break;
            }
        }
    }
    if is_complete {
        return found;
    }
    let all = disk::entries(Path::new("/proc")).map(numbers).unwrap_or_default();
    all.into_iter().filter(|pid| parent(*pid) == Some(of)).collect()
}

/// The names in a directory that are numbers.
fn numbers(entries: disk::Entries) -> Vec<i32> {
    entries.flatten().filter_map(|entry| entry.name.to_str()?.parse().ok()).collect()
}

pub(crate) fn parent(pid: i32) -> Option<i32> {
    stat_field(pid, 4)?.parse().ok()
}

/// Whether a process runs: it exists, is not a zombie, and its state can be read.
pub(crate) fn is_running(pid: i32) -> bool {
    stat_field(pid, 3).is_some_and(|state| !matches!(state.as_str(), "Z" | "X"))
}

/// Creation time of a process in milliseconds since boot; `None` if the process has been reaped.
pub(crate) fn created_ms(pid: i32) -> Option<u64> {
    /// Milliseconds per clock tick in files of procfs (USER_HZ, 100 on all supported architectures).
    const TICK_MS: u64 = 10;
    stat_field(pid, 22)?.parse::<u64>().ok().map(|ticks| ticks * TICK_MS)
}

/// A field of proc_pid_stat(5) after field 2, the process name, which may contain any characters; `None` if
/// the process does not exist.
fn stat_field(pid: i32, number: usize) -> Option<String> {
    let stat = disk::read_to_string(Path::new(&format!("/proc/{pid}/stat"))).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(number.checked_sub(3)?).map(str::to_owned)
}

/// The PID of a container's main process according to the kernel, for a monitor that does not answer: the
/// oldest of the monitor's children in the container's root, or of those in its cgroup that run in the root of no
/// container. Execs and orphaned processes are younger. `None` if there is none.
pub(crate) fn main_process(monitor: i32, pod: PodId, id: ContainerId, cgroup: &CgroupPath) -> Option<i32> {
    let is_inside = |pid: i32| paths_in(&cgroup_file(pid)).any(|path| cgroup.contains(path));
    let is_own = |pid: &i32| match strays::root(*pid, pod) {
        Ok(Root::Container(found)) => found == id,
        Ok(Root::Ended) => false,
        Ok(Root::Other) | Err(_) => is_inside(*pid),
    };
    children(monitor).into_iter().filter(is_own).min_by_key(|pid| created_ms(*pid).unwrap_or(u64::MAX))
}

/// The text of /proc/PID/cgroup; empty for a process that has ended.
fn cgroup_file(pid: i32) -> String {
    disk::read_to_string(Path::new(&format!("/proc/{pid}/cgroup"))).unwrap_or_default()
}

/// The paths in the text of /proc/PID/cgroup, one for each hierarchy.
fn paths_in(text: &str) -> impl Iterator<Item = &str> {
    // HIERARCHY:CONTROLLERS:PATH
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2))
}

/// The container of a process in each hierarchy according to its /proc/PID/cgroup: the last path component that is an ID. A
/// process that has not joined its cgroup yet is in the monitor's, whose name is the pod's ID.
fn containers_of(text: &str, pod: PodId) -> impl Iterator<Item = (ContainerId, CgroupPath)> {
    paths_in(text).filter_map(move |path| {
        let (end, id) = ids_in(path).last()?;
        let is_pods_own = id.to_string() == pod.to_string();
        let path = CgroupPath::parse(&path[..end]).ok()?;
        (!is_pods_own).then_some((id, path))
    })
}

/// The IDs among the components of a cgroup path, each with the length of the path up to its end in bytes.
fn ids_in(path: &str) -> impl Iterator<Item = (usize, ContainerId)> {
    let mut end = 0;
    path.split_inclusive('/').filter_map(move |part| {
        end += part.len();
        let name = part.trim_end_matches('/');
        let id = cgroup::id_of_scope(name).unwrap_or(name).parse().ok()?;
        Some((end - (part.len() - name.len()), id))
    })
}

/// The IDs among the names in a directory; other names are ignored, and temporary files that a crash left are
/// removed. A missing directory is empty.
///
/// # Errors
/// The directory cannot be listed completely.
pub(crate) fn ids<T: std::str::FromStr>(directory: &Path) -> Result<Vec<T>, Error> {
    list(directory).map_err(|error| failed("list", directory, &error))
}

/// [`ids`] with the error of the kernel.
///
/// # Errors
/// The I/O error.
pub(crate) fn list<T: std::str::FromStr>(directory: &Path) -> std::io::Result<Vec<T>> {
    match store::entries(directory) {
        Err(error) if is_absent(&error) => Ok(Vec::new()),
        names => Ok(names?.iter().filter_map(|name| name.parse().ok()).collect()),
    }
}

/// Whether the error means that the directory does not exist, or that the path is not a directory.
fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
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
            (format!("0::/k/{id}/n/{other}/a\n"), Some(format!("/k/{id}/n/{other}"))),
            (format!("0::/docker/{other}/coracle/{id}\n"), Some(format!("/docker/{other}/coracle/{id}"))),
            (format!("0::/a.slice/coracle-{id}.scope\n"), Some(format!("/a.slice/coracle-{id}.scope"))),
            (format!("0::/coracle/{pod}\n"), None),
            ("0::/\n".to_owned(), None),
            (String::new(), None),
        ] {
            let found = containers_of(&text, pod).next().map(|(_, path)| path.to_string());
            assert_eq!(found, expected, "{text:?}");
        }
    }

    #[test]
    fn a_directory_that_cannot_be_listed_is_not_empty() {
        let dir = coracle_base::testdir::TestDir::new("unlisted");
        let id = ContainerId::from_bytes([2; 32]);
        std::fs::create_dir(dir.path().join(id.to_string())).unwrap();
        std::fs::write(dir.path().join("other"), "").unwrap();
        std::fs::write(dir.path().join(format!(".new-{id}")), "").unwrap();
        assert_eq!(ids::<ContainerId>(dir.path()).unwrap(), [id]);
        assert!(!dir.path().join(format!(".new-{id}")).exists(), "a crash left it");
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
        let age_ms = coracle_base::time::boot_ms() - created_ms(pid).unwrap();
        assert!(age_ms < 60_000, "{age_ms}");
        assert!(children(0).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
