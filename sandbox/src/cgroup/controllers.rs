//! The cgroup controllers of Linux, in one table: it distinguishes the controllers of v1 mounts from their other options, lists the
//! controllers that are enabled for containers on v2, and limits which files a request may write by `unified`. A new
//! controller is a row here and, if it has limits of its own, a field of `Resources`.

/// A controller with its name, which is also the prefix of its files.
struct Controller {
    name: &'static str,
    /// Whether a v1 hierarchy can have this controller.
    in_v1: bool,
    /// Whether the v2 file `cgroup.controllers` can list this controller.
    in_v2: bool,
}

const fn both(name: &'static str) -> Controller {
    Controller { name, in_v1: true, in_v2: true }
}

const fn v1(name: &'static str) -> Controller {
    Controller { name, in_v1: true, in_v2: false }
}

const fn v2(name: &'static str) -> Controller {
    Controller { name, in_v1: false, in_v2: true }
}

/// All controllers up to Linux 6.17 (include/linux/cgroup_subsys.h), those of v2 in the order in which they are enabled.
const CONTROLLERS: [Controller; 16] = [
    both("cpuset"),
    both("cpu"),
    v2("io"),
    both("memory"),
    both("hugetlb"),
    both("pids"),
    both("rdma"),
    both("misc"),
    v2("dmem"),
    v1("blkio"),
    v1("cpuacct"),
    v1("devices"),
    v1("freezer"),
    v1("net_cls"),
    v1("net_prio"),
    v1("perf_event"),
];

/// Whether `name` is a controller of v1.
pub(super) fn is_v1(name: &str) -> bool {
    CONTROLLERS.iter().any(|controller| controller.in_v1 && controller.name == name)
}

/// The controllers of v2, in the order in which they are enabled.
pub(super) fn of_v2() -> impl Iterator<Item = &'static str> {
    CONTROLLERS.iter().filter(|controller| controller.in_v2).map(|controller| controller.name)
}
