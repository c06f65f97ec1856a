//! Compiles a container's launch record. Security depends on the order of the operations; each step documents what it
//! relies on.

use std::ffi::{CStr, CString};

use coracle_wire::{Op, Propagation, Text};

use super::mount_plan::MountPlan;
use super::mounts::link;
use super::record::{LaunchRecord, Record, c_string};
use super::request::{ContainerPlan, DeviceKind, DeviceNode, NamespaceKind, ProcessPlan, Waits};
use super::{overlay, path, process, sysctl};
use crate::Error;
use crate::userns::{IdRange, UserMappings};

/// Flag CLONE_NEWNS of `unshare(2)`.
const NEW_MOUNT_NAMESPACE: u32 = 0x0002_0000;
/// Flag CLONE_NEWCGROUP of `unshare(2)`.
const NEW_CGROUP_NAMESPACE: u32 = 0x0200_0000;

const S_IFCHR: u32 = 0o020_000;
const S_IFBLK: u32 = 0o060_000;

/// Device nodes of every container: path, major, minor; all are character devices with mode 0666 (CRI 3.13).
const NODES: [(&str, u32, u32); 6] = [
    ("/dev/null", 1, 3),
    ("/dev/zero", 1, 5),
    ("/dev/full", 1, 7),
    ("/dev/random", 1, 8),
    ("/dev/urandom", 1, 9),
    ("/dev/tty", 5, 0),
];

/// Links in /dev of every container: path, target (CRI 4.3).
const LINKS: [(&str, &str); 5] = [
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
    (PTMX, "pts/ptmx"),
];
const PTMX: &str = "/dev/ptmx";
/// Link that is created only if the kernel has its target.
const CORE_LINK: (&str, &str) = ("/dev/core", "/proc/kcore");

pub(super) fn compile(
    plan: &ContainerPlan,
    main: &ProcessPlan,
    mut record: Record,
    waits: Waits,
) -> Result<LaunchRecord, Error> {
    let mut mounts = MountPlan::of(plan)?;
    // 1. The cgroup: from here on, everything counts against its limits and is killed with it.
    process::join_cgroups(&mut record, &plan.cgroup_joins)?;
    on_the_host(&mut record, plan, main)?;
    // 2. All host files that the container will see are opened as descriptors, while paths still refer to the host.
    mounts.open(&mut record)?;
    // 3. New namespaces. The cgroup namespace comes only now, because its root is the process's current cgroup.
    new_namespaces(&mut record, plan, waits)?;
    mounts.open_images(&mut record, &plan.root)?;
    // 4. The root. After pivot_root no path can refer to the host, so it comes before the mounts if it can. Hooks that run
    //    before it need the mounts below the root's path (runc: prepareRootfs): only then it comes after them.
    let root_path = overlay(&mut record, plan)?;
    let opened = Op::OpenRoot { path: Text::new(&root_path) };
    let hooks_see_mounts = waits == Waits::BeforeRootAndUser && record.supports(&opened);
    let is_shared = mounts.is_shared();
    if hooks_see_mounts {
        record.push(&opened)?;
    } else {
        enter_root(&mut record, &root_path, waits, is_shared)?;
    }
    let mappings = plan.user_namespace.as_ref();
    if let Some((uid, gid)) = mappings.map(UserMappings::root) {
        // Mount points, device nodes and in-memory file systems belong to the container's root user.
        record.push(&Op::ActAs { uid, gid })?;
    }
    // 5. The mounts. Device nodes are created as soon as /dev is mounted, because volumes may be mounted on them.
    let (in_dev, elsewhere) = devices(plan)?;
    nodes(&mut record, &elsewhere, mappings)?;
    let links = links(plan, &mounts);
    let mounts = mounts.attach(&mut record, |record, mount| {
        if mount.is_default && mount.target == "/dev" {
            nodes(record, &in_dev, mappings)?;
            links.iter().try_for_each(|(path, content)| link(record, content, path))?;
        }
        Ok(())
    })?;
    if hooks_see_mounts {
        enter_root(&mut record, &root_path, waits, is_shared)?;
    }
    // The terminal is mounted on /dev/console.
    process::terminal(&mut record, main)?;
    // 6. Masked and read-only paths come after all mounts, because a later mount could uncover them (CRI 3.5).
    let mounts = mounts.cover(&mut record)?;
    process::limits(&mut record, &main.limits)?;
    // 7. The working directory comes after the masks, because otherwise it could refer to a directory below one; and
    //    before the root becomes read-only, because it is created if the image lacks it.
    process::working_directory(&mut record, &main.process, true)?;
    if plan.root.read_only {
        record.push(&Op::ReadOnlyRoot)?;
    }
    mounts.verify(&mut record)?;
    if let Some(mappings) = mappings {
        enter_user_namespace(&mut record, mappings, main)?;
    }
    // 8. The change from root to the requested user, and exec.
    if waits != Waits::Never {
        record.push(&Op::Wait)?;
    }
    process::become_user_and_exec(&mut record, main)?;
    Ok(record.finish())
}

/// Adds the operations that enter the pod's user namespace. It locks all mounts, so they are complete now; limits have been
/// raised before.
fn enter_user_namespace(
    record: &mut Record,
    mappings: &UserMappings,
    main: &ProcessPlan,
) -> Result<(), Error> {
    process::check_groups(mappings, &main.process)?;
    process::give_streams(record, mappings, &main.process)?;
    record.push(&Op::ActAs { uid: 0, gid: 0 })?;
    record.push(&Op::UserNamespace)
}

/// Adds operations that create the namespaces of the container, and that idmap the layers of images in them.
fn new_namespaces(record: &mut Record, plan: &ContainerPlan, waits: Waits) -> Result<(), Error> {
    if waits == Waits::BeforeRootAndUser {
        // Hooks see the host's mounts, which the monitor's own mount namespace lacks.
        let path = Text::new(coracle_wire::HOST_NAMESPACE);
        record.push(&Op::JoinNamespace { path, flag: NEW_MOUNT_NAMESPACE })?;
    }
    let cgroup = if plan.has_cgroup_namespace { NEW_CGROUP_NAMESPACE } else { 0 };
    record.push(&Op::Unshare { flags: NEW_MOUNT_NAMESPACE | cgroup })?;
    // Slave rather than private: mounts made here do not propagate to the host, but the host's mounts still propagate
    // to trees that need them.
    record.push(&Op::RootPropagation { propagation: Propagation::Slave })?;
    if plan.user_namespace.is_some() {
        let layers = path::host("root", &plan.root.layers_directory)?;
        record.push(&Op::IdmapOver { path: Text::new(&layers) })?;
    }
    Ok(())
}

/// Adds operations that need the host: files written through the node's procfs, and namespaces that replace the pod's.
fn on_the_host(record: &mut Record, plan: &ContainerPlan, main: &ProcessPlan) -> Result<(), Error> {
    process::oom_score(record, main.process.oom_score_adj)?;
    process::labels(record, &main.confinement)?;
    process::scheduling(record, &plan.scheduling)?;
    for (kind, path) in &plan.namespaces {
        join(record, *kind, path)?;
    }
    for (name, value) in &plan.sysctls {
        let path = c_string("sysctls", sysctl::path(name, plan.own_namespaces)?.as_bytes())?;
        let data = sysctl::value(name, value)?.as_bytes();
        record.push(&Op::WriteFile { path: Text::new(&path), data, optional: false })?;
    }
    Ok(())
}

/// Adds an operation that joins the namespace at `path` in place of the pod's; an empty path creates a new namespace.
fn join(record: &mut Record, kind: NamespaceKind, path: &std::path::Path) -> Result<(), Error> {
    if path.as_os_str().is_empty() {
        return record.push(&Op::Unshare { flags: kind.flag() });
    }
    let path = path::host("namespaces", path)?;
    record.push(&Op::JoinNamespace { path: Text::new(&path), flag: kind.flag() })
}

/// Adds the operation that mounts the root; returns its path on the host.
fn overlay(record: &mut Record, plan: &ContainerPlan) -> Result<CString, Error> {
    let directory = path::host("root", &plan.root.layers_directory)?;
    let target = path::host("root", &plan.root.mountpoint)?;
    let options = overlay::options(&plan.root)?;
    record.push(&Op::Overlay {
        directory: Text::new(&directory),
        options: Text::new(&options),
        target: Text::new(&target),
    })?;
    Ok(target)
}

/// Adds the operations that wait for the hooks which need the host's files, and that make `path` the root directory.
fn enter_root(record: &mut Record, path: &CStr, waits: Waits, is_shared: bool) -> Result<(), Error> {
    if waits == Waits::BeforeRootAndUser {
        record.push(&Op::Wait)?;
    }
    record.push(&Op::PivotRoot { new_root: Text::new(path) })?;
    if is_shared {
        // Mounts that a nested namespace makes below a bidirectional volume must propagate to it (CRI 3.10). pivot_root
        // refuses a root that is shared already. Mounts that exist by now become shared, too, as in runc with `rshared`:
        // each propagates as before, and to copies of itself.
        record.push(&Op::RootPropagation { propagation: Propagation::Shared })?;
    }
    Ok(())
}

/// Device nodes below /dev, and device nodes at other paths. A requested device replaces the default node or link at its
/// path, as in runc, except at /dev/ptmx. If a volume is mounted on /dev, no nodes are created in it.
fn devices(plan: &ContainerPlan) -> Result<(Vec<DeviceNode>, Vec<DeviceNode>), Error> {
    let mut asked: Vec<DeviceNode> = Vec::new();
    for device in &plan.devices {
        let path = path::container("devices", &device.path)?;
        if path != PTMX && !asked.iter().any(|other| other.path == path) {
            asked.push(DeviceNode { path, ..device.clone() });
        }
    }
    let defaults: Vec<DeviceNode> = NODES
        .iter()
        .filter(|(path, ..)| !asked.iter().any(|device| device.is_at(path)))
        .map(|(path, major, minor)| DeviceNode {
            path: (*path).into(),
            kind: DeviceKind::Character,
            major: *major,
            minor: *minor,
            mode: 0o666,
            owner: (0, 0),
        })
        .collect();
    Ok(defaults.into_iter().chain(asked).partition(|device| path::is_within(&device.path, "/dev")))
}

impl DeviceNode {
    /// Whether the node's path is `path`, which has no `.`, `..` or repeated slash.
    pub(crate) fn is_at(&self, path: &str) -> bool {
        path::container("devices", &self.path).is_ok_and(|clean| clean == path)
    }
}

/// The default links. A volume on a link or below it replaces it, as in runc, which mounts volumes first.
fn links(plan: &ContainerPlan, mounts: &MountPlan) -> Vec<(&'static str, &'static str)> {
    let all = LINKS.into_iter().chain(plan.has_kcore.then_some(CORE_LINK));
    all.filter(|(path, _)| !mounts.has_mount_within(path)).collect()
}

/// Adds operations that create device nodes and give them to their owners. They are executed as the root user of the
/// container, but with the IDs of the host: `mappings` are those of the pod's user namespace.
fn nodes(record: &mut Record, devices: &[DeviceNode], mappings: Option<&UserMappings>) -> Result<(), Error> {
    for device in devices {
        if device.major >= 1 << 12 || device.minor >= 1 << 20 || device.mode > 0o7777 {
            return Err(Error::invalid("devices", format!("{} has impossible numbers", device.path)));
        }
        let kind = match device.kind {
            DeviceKind::Character => S_IFCHR,
            DeviceKind::Block => S_IFBLK,
        };
        match device.path.rsplit_once('/') {
            Some(("" | "/dev", name)) if !name.is_empty() => {}
            Some((parent, name)) if !name.is_empty() => {
                let parent = c_string("devices", parent.as_bytes())?;
                record.push(&Op::Directory { path: Text::new(&parent), mode: 0o755 })?;
            }
            _ => return Err(Error::invalid("devices", format!("{:?} is no path for a node", device.path))),
        }
        let path = c_string("devices", device.path.as_bytes())?;
        record.push(&Op::Node {
            path: Text::new(&path),
            mode: kind | device.mode,
            device: encode_device(device.major, device.minor),
        })?;
        if let (uid, gid) = device.owner
            && (uid, gid) != (0, 0)
        {
            let host_id = |range: fn(&UserMappings) -> &IdRange, id| match mappings.map(range) {
                Some(range) => range.host_id(id).ok_or_else(|| process::unmapped("devices", id)),
                None => Ok(id),
            };
            let (uid, gid) = (host_id(|one| &one.users, uid)?, host_id(|one| &one.groups, gid)?);
            record.push(&Op::Owner { path: Text::new(&path), uid, gid })?;
        }
    }
    Ok(())
}

/// Encodes a device number in the kernel's 32-bit format (include/linux/kdev_t.h, `new_encode_dev`): low byte of minor,
/// major, rest of minor.
fn encode_device(major: u32, minor: u32) -> u64 {
    u64::from((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
}

#[cfg(test)]
mod tests {
    use super::encode_device;

    #[test]
    fn device_numbers_are_encoded_like_those_of_stat() {
        // The last one is what `stat` shows for the 256th partition of the first extended block device.
        for (major, minor, expected) in
            [(1, 3, 0x103), (5, 2, 0x502), (136, 0, 0x8800), (259, 256, 0x0011_0300)]
        {
            assert_eq!(encode_device(major, minor), expected, "{major}:{minor}");
        }
    }
}
