//! Finds the cgroup hierarchies of this host and their mount points in /proc/self/mountinfo. Paths of cgroups are
//! relative to these mounts, also if coracle runs in a container in which a mount shows only a part of the host's tree.

use std::path::{Path, PathBuf};

use super::controllers;
use crate::mountinfo;

/// A v1 hierarchy: its mount point and controllers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hierarchy {
    pub(super) mount: PathBuf,
    /// Controllers of the hierarchy; empty for a named hierarchy.
    pub(super) controllers: Vec<String>,
}

/// The cgroup hierarchies that are mounted on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Only a cgroup v2 hierarchy.
    Unified { mount: PathBuf },
    /// v1 hierarchies, with or without a cgroup2 mount that has no controllers ("hybrid").
    Legacy { hierarchies: Vec<Hierarchy>, unified: Option<PathBuf> },
}

/// The usual mount point of v2 without v1.
const UNIFIED_MOUNT: &str = "/sys/fs/cgroup";

impl Layout {
    /// Parses the text of mountinfo; `None` if no cgroup file system is mounted.
    pub(super) fn parse(mountinfo: &str) -> Option<Self> {
        let mut hierarchies: Vec<Hierarchy> = Vec::new();
        let mut unified: Option<PathBuf> = None;
        for line in mountinfo::lines(mountinfo) {
            if line.kind == "cgroup2" {
                // Other mounts (Cilium's /run/cilium/cgroupv2) show the same tree.
                if unified.is_none() || line.mount == Path::new(UNIFIED_MOUNT) {
                    unified = Some(line.mount);
                }
            } else if line.kind == "cgroup" {
                add(&mut hierarchies, line.mount, line.super_options);
            }
        }
        let is_pure = unified.as_deref() == Some(Path::new(UNIFIED_MOUNT));
        let has_controllers = hierarchies.iter().any(|hierarchy| !hierarchy.controllers.is_empty());
        match unified {
            // A single v1 mount (for example net_cls) in addition to v2 at its usual place does not make this a v1
            // host.
            Some(mount) if is_pure || !has_controllers => Some(Self::Unified { mount }),
            unified if has_controllers => Some(Self::Legacy { hierarchies, unified }),
            _ => None,
        }
    }

    /// The mount point of the v1 hierarchy with `controller`.
    pub(super) fn hierarchy(&self, controller: &str) -> Option<&Path> {
        match self {
            Self::Unified { .. } => None,
            Self::Legacy { hierarchies, .. } => hierarchies
                .iter()
                .find(|hierarchy| hierarchy.controllers.iter().any(|one| one == controller))
                .map(|hierarchy| hierarchy.mount.as_path()),
        }
    }

    /// The hierarchy in which the processes of a cgroup are listed and killed: cgroup2 if mounted, because it has
    /// `cgroup.kill` and supports CLONE_INTO_CGROUP; otherwise freezer or pids, which only container runtimes use.
    pub(super) fn tracking(&self) -> Tracking<'_> {
        match self {
            Self::Unified { mount } | Self::Legacy { unified: Some(mount), .. } => Tracking::Unified(mount),
            Self::Legacy { hierarchies, .. } => {
                let found = self.hierarchy("freezer").or_else(|| self.hierarchy("pids"));
                Tracking::Legacy(found.unwrap_or(&hierarchies[0].mount))
            }
        }
    }
}

/// The mount of the hierarchy in which processes are tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tracking<'a> {
    /// The mount point of a cgroup2 hierarchy.
    Unified(&'a Path),
    /// The mount point of a v1 hierarchy.
    Legacy(&'a Path),
}

/// Adds a v1 mount, unless its hierarchy is already in the list (it may be mounted twice) or is a named hierarchy that
/// containers do not use.
fn add(hierarchies: &mut Vec<Hierarchy>, mount: PathBuf, options: &str) {
    let controllers: Vec<String> =
        options.split(',').filter(|option| controllers::is_v1(option)).map(ToString::to_string).collect();
    let is_wanted = !controllers.is_empty() || options.split(',').any(|option| option == "name=systemd");
    if is_wanted && !hierarchies.iter().any(|known| known.controllers == controllers) {
        hierarchies.push(Hierarchy { mount, controllers });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn legacy(mount: &str, controllers: &[&str]) -> Hierarchy {
        Hierarchy { mount: mount.into(), controllers: controllers.iter().map(ToString::to_string).collect() }
    }

    #[test]
    fn a_host_with_cgroup_v2_has_one_hierarchy() {
        let text = "22 1 0:1 / / rw - ext4 /dev/vda rw\n\
            25 23 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n\
            90 23 0:22 / /run/cilium/cgroupv2 rw - cgroup2 none rw\n\
            91 23 0:50 / /sys/fs/cgroup/net_cls rw - cgroup cgroup rw,net_cls\n";
        let layout = Layout::parse(text).unwrap();
        assert_eq!(layout, Layout::Unified { mount: "/sys/fs/cgroup".into() });
        assert_eq!(layout.tracking(), Tracking::Unified(Path::new("/sys/fs/cgroup")));
        let nested = "25 23 0:22 /docker/abc /cg rw - cgroup2 cgroup rw\n";
        assert_eq!(Layout::parse(nested), Some(Layout::Unified { mount: "/cg".into() }));
    }

    #[test]
    fn hosts_with_v1_and_hybrid_have_their_hierarchies() {
        let v1 = "31 1 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
            32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n\
            33 31 0:30 /docker/x /sys/fs/cgroup/with\\040space rw - cgroup cgroup rw,memory\n\
            34 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
            35 31 0:32 / /sys/fs/cgroup/openrc rw - cgroup cgroup rw,name=openrc\n\
            36 31 0:30 / /elsewhere/memory rw - cgroup cgroup rw,memory\n";
        let hierarchies = vec![
            legacy("/sys/fs/cgroup/cpu,cpuacct", &["cpu", "cpuacct"]),
            legacy("/sys/fs/cgroup/with space", &["memory"]),
            legacy("/sys/fs/cgroup/systemd", &[]),
        ];
        let layout = Layout::parse(v1).unwrap();
        assert_eq!(layout, Layout::Legacy { hierarchies: hierarchies.clone(), unified: None });
        assert_eq!(layout.hierarchy("cpuacct"), Some(Path::new("/sys/fs/cgroup/cpu,cpuacct")));
        assert_eq!(layout.hierarchy("pids"), None);
        assert_eq!(layout.tracking(), Tracking::Legacy(Path::new("/sys/fs/cgroup/cpu,cpuacct")));
        let hybrid = format!("{v1}41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
        let unified = Some(PathBuf::from("/sys/fs/cgroup/unified"));
        let layout = Layout::parse(&hybrid).unwrap();
        assert_eq!(layout, Layout::Legacy { hierarchies, unified });
        assert_eq!(layout.tracking(), Tracking::Unified(Path::new("/sys/fs/cgroup/unified")));
    }

    #[test]
    fn without_a_mounted_hierarchy_there_is_no_layout() {
        for text in [
            "",
            "\n - \n",
            "1 2 3 4 5",
            "1 2 3 4 /x rw - cgroup2",
            "1 1 0:1 / /x rw - cgroup cgroup rw,name=systemd",
        ] {
            assert_eq!(Layout::parse(text), None, "{text:?}");
        }
    }
}
