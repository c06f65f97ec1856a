//! A small machine: the daemon, its workers, and thirty pods with monitors and containers in a memory cgroup of 64 MiB. Images
//! are pulled whose files are several times as large, so that the page cache fills the cgroup and each start has to reclaim
//! memory. The same is measured without the limit. Every call must succeed, and nothing may be killed for lack of memory.
//!
//! The limit is that of cgroup v1, in which the memory of the kernel, of the page cache and of the tmpfs below `--state` counts.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ListContainerStatsRequest, ListContainersRequest, ListPodSandboxRequest, ListPodSandboxStatsRequest,
    RemoveImageRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::{host_pod, image_spec, pull};

use crate::beside::MIDDLING;
use crate::crowds::timed;
use crate::life::{Lives, SERIES};
use crate::time::{Percentiles, median};
use crate::{Row, measure, pulls};

/// The limit in bytes.
const LIMIT: u64 = 64 << 20;
/// Number of pods with one container each.
const PODS: usize = 30;

/// Measures nodes with and without the limit, by turns.
pub(crate) fn measure() -> Vec<Row> {
    if Account::hierarchy().is_none() {
        eprintln!("the part `small` needs the memory controller of cgroup v1");
        return Vec::new();
    }
    let home = Node::start();
    let registry = Registry::start(home.folder());
    pulls::push(&registry, "middling", 1, &MIDDLING);
    let name = registry.name("middling", "1");
    let (mut limited, mut free) = (Vec::new(), Vec::new());
    for _ in 0..SERIES {
        limited.push(round(&name, Some(LIMIT)));
        free.push(round(&name, None));
    }
    drop(registry);
    home.stop();
    let row = |what, budget, pick: fn(&Round) -> &Vec<Duration>| {
        let middle = |rounds: &[Round]| {
            Percentiles::middle(&rounds.iter().map(|round| pick(round).clone()).collect::<Vec<_>>())
        };
        let measured = format!("{}, {} without the limit", middle(&limited), middle(&free));
        Row { what, budget, measured, floor: None }
    };
    let pull = |rounds: &[Round]| {
        median(rounds.iter().flat_map(|round| &round.pulls).map(Duration::as_secs_f64).collect())
    };
    let pulled = format!("{:.2} s, {:.2} s without the limit", pull(&limited), pull(&free));
    vec![
        row("30 pods, all in 64 MiB: pod up, host network, p50 / p99", "no error", |round| &round.lives.up),
        row("the same: pod down, p50 / p99", "no error", |round| &round.lives.down),
        row("the same: ExecSync(true), p50 / p99", "no error", |round| &round.lives.execs),
        Row { what: "the same: pull of 494 MB unpacked", budget: "no error", measured: pulled, floor: None },
        Row { what: "the same: memory", budget: "no OOM kill", measured: memory(&limited), floor: None },
    ]
}

/// The memory of the round with the most memory that cannot be reclaimed.
fn memory(rounds: &[Round]) -> String {
    let round = rounds.iter().max_by_key(|round| round.full.kept()).expect("a round");
    format!(
        "peak {:.1} MB, limit reached {} times, no OOM kill; with 30 pods {}; at the end {}",
        mb(round.peak),
        round.failures,
        round.full,
        round.end
    )
}

fn mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// Results of one node.
struct Round {
    lives: Lives,
    pulls: Vec<Duration>,
    /// With all pods, after a pull.
    full: Use,
    /// After all pods and the image were removed.
    end: Use,
    /// The most that was in use, in bytes.
    peak: u64,
    /// Number of charges that found the limit reached.
    failures: u64,
}

/// Measures one node.
fn round(name: &str, limit: Option<u64>) -> Round {
    let mut node = measure::node("");
    node.terminate();
    let account = Account::new(&node, limit);
    node.wrap(account.wrapper());
    node.launch();
    assert!(host::is_in_cgroup(node.pid(), &node.cgroup_parent()), "the daemon is in the cgroup");
    let image = node.import_probe();
    let take = || timed(|| drop(node.pull_image(pull(name)).expect("pull")));
    let remove = || {
        node.remove_image(RemoveImageRequest { image: Some(image_spec(name)) }).expect("remove image");
        host::wait_until("its files are removed", || node.workers().is_empty());
    };
    // The first pull fills the cgroup with page cache.
    let mut pulls = vec![take()];
    let mut lives = Lives::default();
    let up = |index| lives.up(&node, &host_pod(&format!("small{index}")), &image);
    let pods: Vec<(String, String)> = (0..PODS).map(up).collect();
    pods.iter().for_each(|(_, id)| lives.execs(&node, id));
    look(&node);
    remove();
    pulls.push(take());
    look(&node);
    pods.iter().for_each(|(_, id)| lives.execs(&node, id));
    let full = account.used();
    account.assert_no_kill();
    pods.into_iter().for_each(|(pod_id, id)| lives.down(&node, pod_id, id));
    remove();
    account.assert_no_kill();
    let round =
        Round { lives, pulls, full, end: account.used(), peak: account.peak(), failures: account.failures() };
    node.stop();
    round
}

/// Lists and statistics, which must be complete.
fn look(cri: &Cri) {
    let pods = cri.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list");
    let containers = cri.list_containers(ListContainersRequest::default()).expect("list");
    let stats = cri.list_container_stats(ListContainerStatsRequest::default()).expect("stats");
    let pod_stats = cri.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).expect("stats");
    let counts = [pods.items.len(), containers.containers.len(), stats.stats.len(), pod_stats.stats.len()];
    assert_eq!(counts, [PODS; 4], "pods, containers, and statistics of both");
}

/// Memory in use, in bytes.
struct Use {
    /// Page cache and tmpfs.
    cache: u64,
    /// The part of the cache in tmpfs, which cannot be reclaimed without swap.
    shmem: u64,
    /// Anonymous memory of processes.
    rss: u64,
    kernel: u64,
}

impl Use {
    /// Memory that is not reclaimed, if the whole memory of the kernel is counted as such.
    fn kept(&self) -> u64 {
        self.shmem + self.rss + self.kernel
    }
}

impl std::fmt::Display for Use {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "cache {:.1} MB, of it tmpfs {:.1}, rss {:.1} MB, kernel {:.1} MB",
            mb(self.cache),
            mb(self.shmem),
            mb(self.rss),
            mb(self.kernel)
        )
    }
}

/// The memory cgroup of a node: the parent of its pods' cgroups. The daemon is in a child of it. [`Node::stop`] removes both.
struct Account {
    folder: PathBuf,
}

impl Account {
    /// The mount point of cgroup v1's memory controller.
    fn hierarchy() -> Option<PathBuf> {
        host::cgroup_roots().into_iter().find(|root| root.join("memory.limit_in_bytes").exists())
    }

    fn new(node: &Node, limit: Option<u64>) -> Account {
        let hierarchy = Self::hierarchy().expect("its presence was checked");
        let account = Account { folder: hierarchy.join(node.cgroup_parent()) };
        fs::create_dir_all(account.daemon()).expect("a cgroup");
        if let Some(limit) = limit {
            fs::write(account.folder.join("memory.limit_in_bytes"), limit.to_string()).expect("a limit");
        }
        account
    }

    fn daemon(&self) -> PathBuf {
        self.folder.join("daemon")
    }

    /// Starts a program in the daemon's cgroup.
    fn wrapper(&self) -> Vec<String> {
        let script = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.daemon().display());
        ["sh", "-c", &script, "sh"].map(str::to_owned).into()
    }

    fn number(&self, file: &str) -> u64 {
        let text = fs::read_to_string(self.folder.join(file)).expect("a file of the memory controller");
        text.trim().parse().expect("a number")
    }

    fn peak(&self) -> u64 {
        self.number("memory.max_usage_in_bytes")
    }

    fn failures(&self) -> u64 {
        self.number("memory.failcnt")
    }

    fn used(&self) -> Use {
        let text = fs::read_to_string(self.folder.join("memory.stat")).expect("the cgroup's memory");
        let of = |key: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once(' '));
            let value = lines.find(|(name, _)| *name == key).and_then(|(_, value)| value.parse().ok());
            value.unwrap_or_else(|| panic!("{key} in memory.stat"))
        };
        Use {
            cache: of("total_cache"),
            shmem: of("total_shmem"),
            rss: of("total_rss"),
            kernel: self.number("memory.kmem.usage_in_bytes"),
        }
    }

    /// Panics if a process was killed for lack of memory. The kernel counts it in the cgroup of the process.
    fn assert_no_kill(&self) {
        let name = self.folder.file_name().and_then(|name| name.to_str()).expect("a name");
        let folders = host::cgroups_below(name).into_iter().chain([self.folder.clone()]);
        for folder in folders.filter(|folder| folder.starts_with(&self.folder)) {
            let text = fs::read_to_string(folder.join("memory.oom_control")).expect("its OOM counter");
            assert!(text.lines().any(|line| line == "oom_kill 0"), "{}: {text}", folder.display());
        }
    }
}
