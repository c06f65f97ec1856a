//! Counts the OOM kills of containers. The kernel counts a kill before it sends SIGKILL, so the counter is complete
//! when the process has ended.
//!
//! A container's own counter is exact, but it cannot be read after its cgroup was removed: systemd removes the cgroup of
//! a scope after its last process, often before the monitor reads. Then the counter of the pod's cgroup is read, the
//! parent, which on v2 includes its descendants. Kills in the pod that belong to no other container and have not been
//! attributed before are those of the container that has ended. On v1 counters do not include descendants, and the kills
//! of a removed cgroup are unknown.

use coracle_sys::{Fd, FdRef, fs};

use crate::table::Table;

/// The OOM counter of a container.
pub(crate) struct Counter {
    file: Fd,
    /// The value at the start of the container.
    before: u64,
}

impl Counter {
    /// Reads the value at the start from `memory.events` (v2) or `memory.oom_control` (v1).
    pub(crate) fn new(file: Fd) -> Self {
        let before = oom_kills(file.borrow()).unwrap_or(0);
        Self { file, before }
    }
}

/// The OOM counter of the pod's cgroup.
pub(crate) struct PodCounter {
    file: Fd,
    /// The kills that belong to none of the running containers.
    attributed: u64,
}

impl PodCounter {
    /// Opens the counter of the parent of a container's cgroup; `None` on v1 and without the memory controller.
    fn open(cgroup: FdRef<'_>) -> Option<Self> {
        let file = fs::open(cgroup, c"../memory.events", fs::O_RDONLY, 0).ok()?;
        Some(Self { file, attributed: 0 })
    }
}

impl Table {
    /// Prepares for the start of a container in `cgroup`, before its process exists: attributes the kills so far. A
    /// parent that is not the pod's alone contains kills of others, so this is repeated at each start.
    pub(crate) fn count_oom_kills(&mut self, cgroup: Option<FdRef<'_>>) {
        if self.pod_oom.is_none() {
            self.pod_oom = cgroup.and_then(PodCounter::open);
        }
        // While a counter cannot be read, an end of a container is not handled yet, whose kills must not be attributed.
        let running = self.running_oom_kills(|kills| kills);
        if let (Some(pod), Some(running)) = (&mut self.pod_oom, running)
            && let Some(all) = oom_kills(pod.file.borrow())
        {
            pod.attributed = all.saturating_sub(running);
        }
    }

    /// Whether the kernel killed a process of the container at `index`, which has ended, because of a memory limit.
    pub(crate) fn had_oom_kill(&mut self, index: usize) -> bool {
        let Some(own) = self.containers.get_mut(index).and_then(|container| container.oom.take()) else {
            return false;
        };
        let kills = match (oom_kills(own.file.borrow()), &self.pod_oom) {
            (Some(kills), _) => kills,
            (None, Some(pod)) => {
                // Read before the others: a kill in another container at this moment must not be counted for this one.
                let all = oom_kills(pod.file.borrow()).unwrap_or(0);
                let running = self.running_oom_kills(|kills| Some(kills.unwrap_or(0))).unwrap_or(0);
                all.saturating_sub(pod.attributed).saturating_sub(running)
            }
            (None, None) => 0,
        };
        if let Some(pod) = &mut self.pod_oom {
            pod.attributed = pod.attributed.saturating_add(kills);
        }
        kills > own.before
    }

    /// The sum of the counters of all containers that have not ended; `each` replaces a counter that cannot be read.
    fn running_oom_kills(&self, each: impl Fn(Option<u64>) -> Option<u64>) -> Option<u64> {
        let counters = self.containers.iter().filter_map(|container| container.oom.as_ref());
        counters.map(|counter| each(oom_kills(counter.file.borrow()))).sum()
    }
}

/// Number of OOM kills in a memory cgroup: the line `oom_kill N` of `memory.events` (v2) or `memory.oom_control` (v1,
/// Linux 4.13). `None` if the file cannot be read, because the cgroup was removed.
fn oom_kills(counter: FdRef<'_>) -> Option<u64> {
    let mut text = [0; 512];
    fs::read_from_start(counter, &mut text).ok().map(|length| parse_oom_kills(&text[..length]))
}

fn parse_oom_kills(text: &[u8]) -> u64 {
    let digits =
        text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"oom_kill ")).unwrap_or(b"");
    digits
        .iter()
        .take_while(|digit| digit.is_ascii_digit())
        .fold(0, |sum: u64, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs as files;
    use std::os::unix::ffi::OsStrExt;
    use std::path::{Path, PathBuf};

    use coracle_wire::ContainerId;

    use super::*;
    use crate::log::Writer;
    use crate::namespaces::ContainerNamespaces;
    use crate::table::{Container, ContainerState};

    /// A directory with one counter for a pod and one for each of its containers, as in the cgroups of a pod on v2.
    struct Pod(PathBuf);

    impl Pod {
        fn new(name: &str) -> Pod {
            let pod = Pod(std::env::temp_dir().join(format!("coracle-oom-{name}-{}", std::process::id())));
            pod.set("", 5); // of earlier containers, or of others below a common parent
            pod
        }

        fn set(&self, container: &str, kills: u64) {
            let directory = self.0.join(container);
            files::create_dir_all(&directory).unwrap();
            files::write(directory.join("memory.events"), format!("oom 9\noom_kill {kills}\n")).unwrap();
        }

        fn start(&self, table: &mut Table, container: &str) {
            self.set(container, 0);
            let directory = open(&self.0.join(container));
            table.count_oom_kills(Some(directory.borrow()));
            let counter = Counter::new(open(&self.0.join(container).join("memory.events")));
            push(table, counter);
        }
    }

    impl Drop for Pod {
        fn drop(&mut self) {
            let _ = files::remove_dir_all(&self.0);
        }
    }

    fn open(path: &Path) -> Fd {
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        fs::open(FdRef::WORKING_DIRECTORY, &path, fs::O_RDONLY, 0).unwrap()
    }

    fn push(table: &mut Table, counter: Counter) {
        let container = Container {
            id: ContainerId::from_bytes([0; 32]),
            slot: 0,
            pid: 1,
            pidfd: open(Path::new("/dev/null")),
            state: ContainerState::Running,
            has_own_pids: true,
            home: ContainerNamespaces::default(),
            outputs: [None, None],
            log: None,
            writer: Writer::default(),
            stdin: None,
            oom: Some(counter),
        };
        assert!(table.containers.push(container).is_ok());
    }

    /// Makes the counter of a container unreadable, as the removal of its cgroup does.
    fn remove_cgroup(table: &mut Table, index: usize) {
        table.containers[index].oom.as_mut().unwrap().file = open(Path::new("/"));
    }

    #[test]
    fn a_kill_in_a_removed_cgroup_is_found_in_the_counter_of_the_pod() {
        let (pod, mut table) = (Pod::new("removed"), Table::new());
        pod.start(&mut table, "one");
        pod.start(&mut table, "two");
        pod.set("", 6);
        remove_cgroup(&mut table, 0);
        assert!(table.had_oom_kill(0));
        assert!(!table.had_oom_kill(0), "a container ends once");
        remove_cgroup(&mut table, 1);
        assert!(!table.had_oom_kill(1), "the kill was that of the first");
    }

    #[test]
    fn kills_of_others_are_not_those_of_a_removed_cgroup() {
        let (pod, mut table) = (Pod::new("others"), Table::new());
        pod.start(&mut table, "one");
        pod.start(&mut table, "two");
        pod.start(&mut table, "three");
        // Of a container that runs, and of one that has ended with a counter that can be read.
        pod.set("two", 3);
        pod.set("three", 1);
        pod.set("", 5 + 3 + 1);
        assert!(table.had_oom_kill(2));
        remove_cgroup(&mut table, 0);
        assert!(!table.had_oom_kill(0));
        assert!(table.had_oom_kill(1));
        // A kill before the start of a container, in a parent that others use too.
        pod.set("", 20);
        pod.start(&mut table, "four");
        remove_cgroup(&mut table, 3);
        assert!(!table.had_oom_kill(3));
    }

    #[test]
    fn a_start_attributes_no_kill_of_a_container_whose_end_is_not_handled_yet() {
        let (pod, mut table) = (Pod::new("late"), Table::new());
        pod.start(&mut table, "one");
        pod.set("", 6);
        remove_cgroup(&mut table, 0);
        pod.start(&mut table, "two");
        assert!(table.had_oom_kill(0));
        assert!(!table.had_oom_kill(1));
    }

    #[test]
    fn without_a_counter_of_the_pod_only_the_own_counter_counts() {
        let mut table = Table::new();
        let null = open(Path::new("/dev"));
        table.count_oom_kills(Some(null.borrow()));
        assert!(table.pod_oom.is_none(), "the parent is no cgroup");
        let path = std::env::temp_dir().join(format!("coracle-oom-own-{}", std::process::id()));
        files::write(&path, "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n").unwrap();
        for _ in 0..2 {
            push(&mut table, Counter { file: open(&path), before: 1 });
        }
        assert!(table.had_oom_kill(0), "it grew from 1 to 2");
        remove_cgroup(&mut table, 1);
        assert!(!table.had_oom_kill(1));
        files::remove_file(&path).unwrap();
    }

    #[test]
    fn the_oom_counter_of_both_cgroup_versions_is_parsed() {
        let cases: [(&[u8], u64); 4] = [
            (b"low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 7\n", 3),
            (b"oom_kill_disable 1\nunder_oom 0\noom_kill 12\n", 12),
            (b"oom_kill_disable 1\n", 0),
            (b"oom_kill x", 0),
        ];
        for (text, kills) in cases {
            assert_eq!(parse_oom_kills(text), kills, "{text:?}");
        }
    }
}
