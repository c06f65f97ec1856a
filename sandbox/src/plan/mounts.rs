//! Which mounts a container gets, what each one is made of, and what a mount that was asked for does to the default ones.
//! Their order is [`super::mount_plan`]'s. Rules: CRI 3.11 (replacement), 4.1 and 4.3 (the default mounts).

use std::path::{Path, PathBuf};

use coracle_wire::{Op, Propagation, Text};

use super::record::{Record, Strings, c_string};
use super::request::{CgroupMount, ContainerPlan, FreshKind, Mount, Root, Source};
use super::{overlay, path};
use crate::Error;

/// `MOUNT_ATTR_…` of mount_setattr(2).
pub(super) mod attribute {
    pub(crate) const READ_ONLY: u64 = 0x1;
    pub(crate) const NO_SUID: u64 = 0x2;
    pub(crate) const NO_DEV: u64 = 0x4;
    pub(crate) const NO_EXEC: u64 = 0x8;
    pub(crate) const STRICT_ATIME: u64 = 0x20;
}
use attribute::{NO_DEV, NO_EXEC, NO_SUID, READ_ONLY, STRICT_ATIME};

/// What a runtime may let be bound below /proc: files that LXCFS and its like answer per container (the list is
/// runc's). Everything else there would hide the kernel's own answers, which is how escapes were built.
const PROC_FILES: [&str; 10] = [
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/net/dev",
    "/proc/slabinfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/uptime",
];

const CGROUP_TARGET: &str = "/sys/fs/cgroup";

/// One mount of the container.
pub(super) struct Planned {
    /// Container path, clean.
    pub(super) target: String,
    pub(super) what: What,
    /// Made by us rather than asked for.
    pub(super) is_default: bool,
}

pub(super) enum What {
    /// A file system that is mounted afresh.
    Fresh { kind: &'static std::ffi::CStr, options: Vec<String>, attributes: u64 },
    /// A tree of the host.
    Bind(Bind),
    /// The slot's number is in the bind.
    Image { lowers: Vec<String>, sub_path: String, empty: PathBuf, bind: Bind },
    /// Those of cgroup v1.
    Cgroups {
        binds: Vec<(String, Bind)>,
        links: Vec<(String, String)>,
        read_only: bool,
        options: Vec<String>,
    },
    /// The container's own directory, mounted on itself.
    ImageVolume,
    /// The host's /dev/null on a file, an empty directory on a directory.
    Mask {
        /// Where the tree of /dev/null is kept: one for each, as a tree can be attached once.
        slot: u16,
    },
    /// What is there, mounted on itself read-only.
    ReadOnly,
}

impl What {
    /// Labels the files of a new file system, where these are the container's own; those of procfs, sysfs and cgroups have
    /// labels of the policy, and an mqueue file system is one for all mounts in its IPC namespace.
    fn label(&mut self, label: &str) {
        match self {
            What::Fresh { kind, options, .. } if matches!(kind.to_bytes(), b"tmpfs" | b"devpts") => {
                options.retain(|option| !option.starts_with("context="));
                options.push(format!("context={label}"));
            }
            What::Cgroups { options, .. } => options.push(format!("context={label}")),
            _ => {}
        }
    }
}

/// A tree of the host, attached somewhere.
pub(super) struct Bind {
    source: PathBuf,
    recursive: bool,
    /// Taken in the host's mount namespace, not in the pod's.
    from_host: bool,
    propagation: Propagation,
    attributes: u64,
    attributes_recursive: bool,
    maps_owners: bool,
    /// Where the tree is kept between [`Planned::open`] and [`Planned::attach`].
    slot: u16,
}

/// The default mounts, then those asked for, as asked.
pub(super) fn of(plan: &ContainerPlan) -> Result<Vec<Planned>, Error> {
    let mut asked = Vec::new();
    for (index, mount) in plan.mounts.iter().enumerate() {
        asked.push(asked_mount(index, mount)?);
    }
    let has_own_dev = asked.iter().any(|mount| mount.target == "/dev");
    let mut all: Vec<Planned> = defaults(plan)
        .into_iter()
        .filter(|default| !asked.iter().any(|mount| mount.target == default.target))
        .filter(|default| !plan.without_mounts.contains(&default.target))
        .filter(|default| !(has_own_dev && path::is_within(&default.target, "/dev")))
        .collect();
    all.append(&mut asked);
    if let Some(label) = &plan.root.label {
        all.iter_mut().for_each(|mount| mount.what.label(label));
    }
    Ok(all)
}

fn defaults(plan: &ContainerPlan) -> Vec<Planned> {
    let locked = NO_SUID | NO_DEV | NO_EXEC;
    let read_only = if plan.privileged { 0 } else { READ_ONLY };
    let file_attributes = if plan.root.read_only { READ_ONLY } else { 0 };
    let dev = ["mode=755", "size=65536k"].as_slice();
    let mut pts = ["newinstance", "ptmxmode=0666", "mode=0620"].map(str::to_owned).to_vec();
    // Group tty, where there is one.
    let tty = plan.user_namespace.as_ref().map_or(Some(5), |mappings| mappings.groups.host_id(5));
    pts.extend(tty.map(|gid| format!("gid={gid}")));
    let mut defaults = vec![
        fresh("/proc", c"proc", &[], locked),
        fresh("/dev", c"tmpfs", dev, NO_SUID | STRICT_ATIME),
        Planned {
            target: "/dev/pts".into(),
            what: What::Fresh { kind: c"devpts", options: pts, attributes: NO_SUID | NO_EXEC },
            is_default: true,
        },
        // Its flags come with it: the pod's tmpfs was mounted with them, the host's keeps its own.
        bind("/dev/shm", &plan.shm, 0),
        fresh("/dev/mqueue", c"mqueue", &[], locked),
        fresh("/sys", c"sysfs", &[], locked | read_only),
        bind("/etc/hosts", &plan.files.hosts, file_attributes),
        bind("/etc/hostname", &plan.files.host_name, file_attributes),
        bind("/etc/resolv.conf", &plan.files.resolv_conf, file_attributes),
    ];
    let cgroups_read_only = if plan.is_cgroup_mount_writable { 0 } else { read_only };
    defaults.extend(cgroups(plan, locked | cgroups_read_only));
    defaults
}

fn cgroups(plan: &ContainerPlan, attributes: u64) -> Option<Planned> {
    let what = match &plan.cgroup_mount {
        CgroupMount::None => return None,
        CgroupMount::Namespaced => What::Fresh { kind: c"cgroup2", options: Vec::new(), attributes },
        CgroupMount::Host(directory) => What::Bind(Bind {
            recursive: true,
            attributes_recursive: false,
            ..Bind::plain(directory, attributes)
        }),
        CgroupMount::Legacy { directories, links } => What::Cgroups {
            binds: directories
                .iter()
                .map(|(name, path)| (name.clone(), Bind::plain(path, attributes)))
                .collect(),
            links: links.clone(),
            read_only: attributes & READ_ONLY != 0,
            options: vec!["mode=755".to_owned()],
        },
    };
    Some(Planned { target: CGROUP_TARGET.into(), what, is_default: true })
}

fn fresh(target: &str, kind: &'static std::ffi::CStr, options: &[&str], attributes: u64) -> Planned {
    let options = options.iter().map(|option| (*option).to_owned()).collect();
    Planned { target: target.into(), what: What::Fresh { kind, options, attributes }, is_default: true }
}

fn bind(target: &str, source: &Path, attributes: u64) -> Planned {
    Planned { target: target.into(), what: What::Bind(Bind::plain(source, attributes)), is_default: true }
}

fn asked_mount(index: usize, mount: &Mount) -> Result<Planned, Error> {
    let field = format!("mounts[{index}]");
    let target = path::container(&field, &mount.target)?;
    if target == "/" {
        return Err(Error::invalid(field, "would cover the root of the container"));
    }
    if path::is_within(&target, "/proc") && !PROC_FILES.contains(&target.as_str()) {
        return Err(Error::invalid(field, format!("{target} is in /proc, which must stay the kernel's own")));
    }
    if mount.recursive_read_only && !(mount.read_only && mount.propagation == Propagation::Private) {
        let why = "recursive_read_only needs readonly and private propagation";
        return Err(Error::invalid(field, format!("{target}: {why}")));
    }
    let attributes = [
        (mount.read_only, READ_ONLY),
        (mount.no_suid, NO_SUID),
        (mount.no_dev, NO_DEV),
        (mount.no_exec, NO_EXEC),
    ];
    let attributes = attributes.iter().filter(|(is_set, _)| *is_set).map(|(_, bit)| bit).sum();
    let source = match &mount.source {
        Source::Host(path) => path,
        Source::Fresh { kind, options } => {
            let (options, kind) = (options.clone(), fresh_kind(*kind));
            return Ok(Planned {
                target,
                what: What::Fresh { kind, options, attributes },
                is_default: false,
            });
        }
        Source::Image { lowers, sub_path, empty } => {
            // Nothing in an image can be given rights here.
            let bind = Bind::plain(empty, attributes | READ_ONLY | NO_SUID | NO_DEV);
            let (lowers, sub_path, empty) = (lowers.clone(), sub_path.clone(), empty.clone());
            return Ok(Planned {
                target,
                what: What::Image { lowers, sub_path, empty, bind },
                is_default: false,
            });
        }
    };
    let bind = Bind {
        recursive: true,
        // The pod's own mount namespace is a copy: where the host's root is private it lacks what was mounted since, and
        // a tree taken in it is never the host's peer, so what the container mounts below would not come out.
        from_host: true,
        propagation: mount.propagation,
        attributes_recursive: mount.recursive_read_only,
        maps_owners: mount.maps_owners,
        ..Bind::plain(source, attributes)
    };
    path::host(&field, source)?;
    Ok(Planned { target, what: What::Bind(bind), is_default: false })
}

fn fresh_kind(kind: FreshKind) -> &'static std::ffi::CStr {
    match kind {
        FreshKind::Tmpfs => c"tmpfs",
        FreshKind::Proc => c"proc",
        FreshKind::Sysfs => c"sysfs",
        FreshKind::Mqueue => c"mqueue",
        FreshKind::Devpts => c"devpts",
    }
}

impl Bind {
    fn plain(source: &Path, attributes: u64) -> Self {
        Self {
            source: source.to_path_buf(),
            recursive: false,
            from_host: false,
            propagation: Propagation::Private,
            attributes,
            attributes_recursive: false,
            maps_owners: false,
            slot: 0,
        }
    }

    fn open(&mut self, record: &mut Record) -> Result<(), Error> {
        self.slot = record.slot()?;
        let path = path::host("mount source", &self.source)?;
        record.push(&Op::OpenTree {
            slot: self.slot,
            path: Text::new(&path),
            recursive: self.recursive,
            from_host: self.from_host,
        })?;
        if self.maps_owners {
            record.push(&Op::Idmap { slot: self.slot })?;
        }
        Ok(())
    }

    fn attach(&self, record: &mut Record, target: &str) -> Result<(), Error> {
        let target = c_string("mount target", target.as_bytes())?;
        record.push(&Op::Attach {
            slot: self.slot,
            target: Text::new(&target),
            attributes: self.attributes,
            attributes_recursive: self.attributes_recursive,
            propagation: self.propagation,
            skip_missing: false,
        })
    }
}

impl Planned {
    pub(super) fn asked(target: String, what: What) -> Self {
        Self { target, what, is_default: false }
    }

    /// Whether it is the file system that /proc, /sys or /dev is without a volume there.
    pub(super) fn is_fresh_for(&self, directory: &str) -> bool {
        let expected = match directory {
            "/proc" => c"proc",
            "/sys" => c"sysfs",
            _ => c"tmpfs",
        };
        matches!(&self.what, What::Fresh { kind, .. } if *kind == expected)
    }

    /// Whether nobody can write to it, by its own flags.
    pub(super) fn is_read_only(&self) -> bool {
        match &self.what {
            What::Fresh { attributes, .. } => attributes & READ_ONLY != 0,
            What::Bind(bind) | What::Image { bind, .. } => bind.attributes & READ_ONLY != 0,
            What::Cgroups { read_only, .. } => *read_only,
            What::ReadOnly | What::Mask { .. } => true,
            What::ImageVolume => false,
        }
    }

    pub(super) fn is_shared(&self) -> bool {
        matches!(&self.what, What::Bind(bind) if bind.propagation == Propagation::Shared)
    }

    /// While the host's files are in view: take what comes from there.
    pub(super) fn open(&mut self, record: &mut Record) -> Result<(), Error> {
        match &mut self.what {
            What::Fresh { .. } | What::Image { .. } | What::ImageVolume | What::ReadOnly => Ok(()),
            What::Bind(bind) => bind.open(record),
            What::Mask { slot } => {
                *slot = record.slot()?;
                let path = Text::new(c"/dev/null");
                record.push(&Op::OpenTree { slot: *slot, path, recursive: false, from_host: false })
            }
            What::Cgroups { binds, .. } => binds.iter_mut().try_for_each(|(_, bind)| bind.open(record)),
        }
    }

    /// In the container's mount namespace, while the layers are in view: puts an image together where the root will be
    /// mounted, over what may be there already, and takes what is asked of it.
    pub(super) fn open_image(&mut self, record: &mut Record, root: &Root) -> Result<(), Error> {
        let What::Image { lowers, sub_path, empty, bind } = &mut self.what else { return Ok(()) };
        let directory = path::host("root", &root.layers_directory)?;
        let target = path::host("root", &root.mountpoint)?;
        let options = overlay::read_only_options(lowers, empty, root.label.as_deref())?;
        record.push(&Op::Overlay {
            directory: Text::new(&directory),
            options: Text::new(&options),
            target: Text::new(&target),
        })?;
        bind.slot = record.slot()?;
        let path = path::container_c("image_sub_path", sub_path)?;
        record.push(&Op::OpenBelow { slot: bind.slot, base: Text::new(&target), path: Text::new(&path) })
    }

    /// Inside the container's root: put it in place.
    pub(super) fn attach(&self, record: &mut Record) -> Result<(), Error> {
        match &self.what {
            What::Fresh { kind, options, attributes } => {
                mount_fresh(record, kind, options, *attributes, &self.target)
            }
            What::Bind(bind) | What::Image { bind, .. } => bind.attach(record, &self.target),
            What::ImageVolume => {
                let path = c_string("image volume", self.target.as_bytes())?;
                record.push(&Op::BindSelf { path: Text::new(&path) })
            }
            What::Mask { slot } => {
                let target = c_string("masked_paths", self.target.as_bytes())?;
                record.push(&Op::Mask { slot: *slot, target: Text::new(&target) })
            }
            What::ReadOnly => {
                let target = c_string("readonly_paths", self.target.as_bytes())?;
                record.push(&Op::ReadOnly { target: Text::new(&target) })
            }
            What::Cgroups { binds, links, read_only, options } => {
                let attributes = NO_SUID | NO_DEV | NO_EXEC;
                mount_fresh(record, c"tmpfs", options, attributes, &self.target)?;
                for (name, bind) in binds {
                    bind.attach(record, &format!("{}/{name}", self.target))?;
                }
                for (name, content) in links {
                    link(record, content, &format!("{}/{name}", self.target))?;
                }
                if *read_only {
                    // Only now, as the names had to be made in it.
                    let target = c_string("cgroup mount", self.target.as_bytes())?;
                    record.push(&Op::ReadOnly { target: Text::new(&target) })?;
                }
                Ok(())
            }
        }
    }
}

fn mount_fresh(
    record: &mut Record,
    kind: &std::ffi::CStr,
    options: &[String],
    attributes: u64,
    target: &str,
) -> Result<(), Error> {
    let options = Strings::of("mount options", options)?;
    let target = c_string("mount target", target.as_bytes())?;
    record.push(&Op::Filesystem {
        kind: Text::new(kind),
        options: options.block(),
        attributes,
        target: Text::new(&target),
    })
}

pub(super) fn link(record: &mut Record, content: &str, path: &str) -> Result<(), Error> {
    let content = c_string("link", content.as_bytes())?;
    let path = c_string("link", path.as_bytes())?;
    record.push(&Op::Symlink { content: Text::new(&content), path: Text::new(&path) })
}
