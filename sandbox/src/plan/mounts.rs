//! The mounts of a container, their sources, and the replacement of default mounts by requested ones.
//! [`super::mount_plan`] determines their order. Rules: CRI 3.11 (replacement), 4.1 and 4.3 (the default mounts).

use std::path::{Path, PathBuf};

use coracle_wire::{Op, Propagation, Text};

use super::record::{Record, Strings, c_string};
use super::request::{CgroupMount, ContainerPlan, FreshKind, Mount, Root, Source};
use super::{overlay, path};
use crate::Error;

/// The flags `MOUNT_ATTR_…` of mount_setattr(2).
pub(super) mod attribute {
    pub(crate) const READ_ONLY: u64 = 0x1;
    pub(crate) const NO_SUID: u64 = 0x2;
    pub(crate) const NO_DEV: u64 = 0x4;
    pub(crate) const NO_EXEC: u64 = 0x8;
    pub(crate) const STRICT_ATIME: u64 = 0x20;
}
use attribute::{NO_DEV, NO_EXEC, NO_SUID, READ_ONLY, STRICT_ATIME};

/// Files below /proc on which volumes are allowed: those that LXCFS provides for each container, and one for FIPS mode
/// (runc's `validProcMounts`). Other mounts there would hide the kernel's files, which has been used for escapes.
const PROC_FILES: [&str; 10] = [
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/slabinfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/sys/crypto/fips_enabled",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/uptime",
];

const CGROUP_TARGET: &str = "/sys/fs/cgroup";

/// One mount of the container.
pub(super) struct Planned {
    /// Container path, absolute and without `.` and `..`.
    pub(super) target: String,
    pub(super) what: What,
    /// Whether the mount is a default mount and not a requested one.
    pub(super) is_default: bool,
}

pub(super) enum What {
    /// A new file system.
    Fresh { kind: &'static std::ffi::CStr, options: Vec<String>, attributes: u64 },
    /// A tree of the host.
    Bind(Bind),
    /// An image; `bind` contains the slot of its tree.
    Image { lowers: Vec<String>, sub_path: String, empty: PathBuf, bind: Bind },
    /// The hierarchies of cgroup v1.
    Cgroups {
        binds: Vec<(String, Bind)>,
        links: Vec<(String, String)>,
        read_only: bool,
        options: Vec<String>,
    },
    /// The container's own directory at the target, bind-mounted on itself.
    ImageVolume,
    /// A mask: the host's /dev/null, read-only, on a file; an empty tmpfs on a directory.
    Mask {
        /// Slot of the tree of /dev/null: one for each mask, because a tree can be attached only once.
        slot: u16,
    },
    /// The existing path, bind-mounted on itself read-only.
    ReadOnly,
}

impl What {
    /// Sets the SELinux label of a new file system that only this container uses. Not for procfs, sysfs and cgroups,
    /// whose files are labelled by the policy, and mqueue, because all mounts in an IPC namespace share one file
    /// system.
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

/// A tree of the host that is attached in the container.
pub(super) struct Bind {
    source: PathBuf,
    recursive: bool,
    /// Whether the source is opened in the host's mount namespace instead of the pod's.
    from_host: bool,
    propagation: Propagation,
    attributes: u64,
    attributes_recursive: bool,
    maps_owners: bool,
    /// Slot of the detached tree between [`Planned::open`] and [`Planned::attach`].
    slot: u16,
}

/// The default mounts, followed by the requested ones in their order.
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
    // The group tty, if it is mapped.
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
        // It keeps its flags: those of the pod's tmpfs, or those of the host's.
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
            // Set-user-ID programs and devices of an image volume have no effect.
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
        // The pod's mount namespace is a copy: if the host's root is private, it lacks later mounts, and a tree opened
        // in it is never a peer of the host's mount, so mounts made in the container would not propagate.
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

    /// Whether the mount is the default file system of /proc, /sys or /dev.
    pub(super) fn is_fresh_for(&self, directory: &str) -> bool {
        let expected = match directory {
            "/proc" => c"proc",
            "/sys" => c"sysfs",
            _ => c"tmpfs",
        };
        matches!(&self.what, What::Fresh { kind, .. } if *kind == expected)
    }

    /// Whether the mount's own flags make it read-only.
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

    /// Adds the operation that opens the source on the host; at this point the host's files are accessible.
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

    /// Adds the operations that mount an image's layers on the future root's mount point, possibly over an earlier
    /// mount, and open the requested path in it. They run in the container's mount namespace; at this point the layers
    /// are accessible.
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

    /// Adds the operation that attaches the mount inside the container's root.
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
                    // Made read-only only now, because the names had to be created in it.
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
