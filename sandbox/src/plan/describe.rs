//! Describes an operation of a record in error messages: the child reports the number of the operation and an error
//! number, and the user reads `bind /srv/data on /data: no such file or directory`.

use coracle_wire::{Block, Mismatch, Op, Propagation, Text, walk};
use nix::errno::Errno;

use crate::error::describe_errno;

/// Describes operation `index` of `record` (from 0), without the error.
pub fn describe(record: &[u8], index: u16) -> String {
    match find(record, index) {
        Some(op) => words(&op, record),
        None => format!("operation {index} of the launch record"),
    }
}

/// Describes the failure of operation `index` with `errno` (0: the record itself could not be read). For an exec the
/// text is in the form that CRI clients expect: `exec: "nope": executable file not found in $PATH`. An index after the
/// last operation, an exec, is that of the candidate that exists: its interpreter is missing.
pub fn explain(record: &[u8], index: u16, errno: i32) -> String {
    if errno == 0 {
        return format!("operation {index} of the launch record: not readable by this pod's monitor");
    }
    if let (Some(mismatch), Some(op)) = (Mismatch::from_number(errno), find(record, index)) {
        return format!("{}: {}", describe(record, index), mismatch_words(mismatch, &op));
    }
    let errno = Errno::from_raw(errno);
    match find(record, index) {
        Some(Op::BindSelf { .. }) if errno == Errno::ELOOP => {
            let why = "a link of the image leads there to /, /proc, /sys or /dev";
            format!("{}: {why}", describe(record, index))
        }
        Some(Op::Exec { arguments, .. }) => {
            let command = arguments.iter().next().map(|name| name.to_string_lossy()).unwrap_or_default();
            match errno {
                Errno::ENOENT if !command.contains('/') => {
                    format!("exec: {command:?}: executable file not found in $PATH")
                }
                errno => format!("exec: {command:?}: {}", describe_errno(errno)),
            }
        }
        Some(Op::Attach { attributes_recursive: true, .. }) if errno == Errno::ENOSYS => {
            format!("{}: recursive read-only mounts need Linux 5.12", describe(record, index))
        }
        // mount_setattr(2): EINVAL means that a file system of this mount or a submount does not support it.
        Some(Op::Idmap { .. } | Op::IdmapOver { .. }) if matches!(errno, Errno::EINVAL | Errno::ENOSYS) => {
            format!("{}: the file system or the kernel cannot do it", describe(record, index))
        }
        None => match found(record, index) {
            Some(path) => format!(
                "exec: {path:?}: {}: the file's interpreter or dynamic loader is missing",
                describe_errno(errno)
            ),
            None => format!("{}: {}", describe(record, index), describe_errno(errno)),
        },
        _ => format!("{}: {}", describe(record, index), describe_errno(errno)),
    }
}

/// The path of the exec's candidate with this index after the last operation.
fn found(record: &[u8], index: u16) -> Option<String> {
    let ops: Vec<Op<'_>> = walk(record).ok()?.map_while(Result::ok).collect();
    let Some(Op::Exec { candidates, .. }) = ops.last() else { return None };
    let number = usize::from(index).checked_sub(ops.len())?;
    candidates.iter().nth(number).map(|path| path.to_string_lossy().into_owned())
}

/// Describes the [`Mismatch`] that `Op::Verify` found.
fn mismatch_words(mismatch: Mismatch, op: &Op<'_>) -> String {
    let Op::Verify { masked, read_only, .. } = *op else { return format!("{mismatch:?}") };
    let nth = |block: Block<'_>, index: u32| {
        let path = block.iter().nth(index as usize);
        path.map_or_else(|| format!("path {index}"), |path| path.to_string_lossy().into_owned())
    };
    let (path, expected) = match (mismatch.item, mismatch.item.checked_sub(Mismatch::FIRST_PATH)) {
        (0, _) => ("/proc".into(), "the procfs that was mounted there"),
        (1, _) => ("/sys".into(), "the mount that was made there"),
        (2, _) => ("/dev".into(), "the mount that was made there"),
        (_, None) => ("/".into(), "read-only"),
        (_, Some(index)) => match u32::from(index).checked_sub(masked.count) {
            None => (nth(masked, index.into()), "masked"),
            Some(index) => (nth(read_only, index), "read-only"),
        },
    };
    match mismatch.errno {
        0 => format!("{path} is not {expected}"),
        errno => format!("{path}: {}", describe_errno(Errno::from_raw(errno.into()))),
    }
}

fn find(record: &[u8], index: u16) -> Option<Op<'_>> {
    walk(record).ok()?.nth(usize::from(index))?.ok()
}

/// Host path of the tree in `slot`, for error messages.
fn source(record: &[u8], slot: u16) -> String {
    let found = walk(record).into_iter().flatten().flatten().find_map(|op| match op {
        Op::OpenTree { slot: other, path, .. } if other == slot => Some(show(path)),
        Op::OpenBelow { slot: other, path, .. } if other == slot => {
            Some(format!("{} of the image", show(path)))
        }
        _ => None,
    });
    found.unwrap_or_else(|| format!("tree {slot}"))
}

fn show(text: Text<'_>) -> String {
    text.as_cstr().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn words(op: &Op<'_>, record: &[u8]) -> String {
    match op {
        Op::WriteFile { path, data, .. } => write_words(&show(*path), data),
        Op::Unshare { .. } => "make namespaces of its own".into(),
        Op::RootPropagation { propagation } => format!("make the mounts {}", propagation_word(*propagation)),
        Op::OpenTree { path, .. } => format!("open {}", show(*path)),
        Op::Overlay { .. } => "overlay root".into(),
        Op::Tmpfs { target, .. } => format!("mount tmpfs on {}", show(*target)),
        Op::OpenRoot { path } => format!("open the root {}", show(*path)),
        Op::PivotRoot { new_root } => format!("change root to {}", show(*new_root)),
        Op::Filesystem { kind, target, .. } => format!("mount {} on {}", show(*kind), show(*target)),
        Op::Attach { slot, target, .. } => format!("bind {} on {}", source(record, *slot), show(*target)),
        Op::Mask { target, .. } => format!("mask {}", show(*target)),
        Op::ReadOnly { target } => format!("make {} read-only", show(*target)),
        Op::ReadOnlyRoot => "make root read-only".into(),
        Op::Node { path, .. } => format!("make device {}", show(*path)),
        Op::Symlink { content, path } => format!("link {} to {}", show(*path), show(*content)),
        Op::Directory { path, .. } => format!("make directory {}", show(*path)),
        Op::HostName { name } => format!("set host name {}", String::from_utf8_lossy(name)),
        Op::LoopbackUp => "bring up lo".into(),
        Op::Limit { resource, soft, hard } => format!("set limit {resource} to {soft}:{hard}"),
        Op::Terminal => "make the terminal".into(),
        Op::WorkingDirectory { path, .. } => format!("change directory to {}", show(*path)),
        Op::BoundingSet { keep } => format!("keep capabilities {keep:#x}"),
        Op::Groups { gids } => format!("set {} groups", gids.len() / 4),
        Op::User { uid, gid } => format!("become user {uid}:{gid}"),
        Op::Capabilities { permitted, .. } => format!("set capabilities {permitted:#x}"),
        Op::NoNewPrivileges => "set no_new_privs".into(),
        Op::Seccomp { program, .. } => format!("load a seccomp filter of {} instructions", program.len() / 8),
        Op::Umask { mask } => format!("set umask {mask:04o}"),
        Op::ActAs { uid, gid } => format!("act as {uid}:{gid}"),
        Op::IdmapOver { path } => format!("map the owners of files in {}", show(*path)),
        Op::Idmap { slot } => format!("map the owners of files in {}", source(record, *slot)),
        Op::OpenBelow { path, .. } => format!("open {} of the image", show(*path)),
        Op::BindSelf { path } => format!("mount image volume {}", show(*path)),
        Op::GiveStreams { uid } => format!("give the standard streams to {uid}"),
        Op::UserNamespace => "enter the pod's user namespace".into(),
        Op::Wait => "wait for the daemon".into(),
        Op::JoinNamespace { path, .. } => format!("join the namespace {}", show(*path)),
        Op::Schedule { policy, .. } => format!("set scheduling policy {policy}"),
        Op::IoPriority { class, level } => format!("set I/O class {class}, priority {level}"),
        Op::MemoryPolicy { mode, .. } => format!("set memory policy {:#x}", mode),
        Op::Owner { path, uid, gid } => format!("give {} to {uid}:{gid}", show(*path)),
        Op::SpareOwnCalls => "prepare the seccomp filter".into(),
        Op::Keyring => "join the session keyring".into(),
        Op::SharedPidNamespace => "make the pod's PID namespace".into(),
        Op::Verify { .. } => "verify the mounts".into(),
        Op::Exec { arguments, .. } => {
            let command = arguments.iter().next().map(|name| name.to_string_lossy().into_owned());
            format!("exec {}", command.unwrap_or_default())
        }
    }
}

fn write_words(path: &str, data: &[u8]) -> String {
    let data = String::from_utf8_lossy(data);
    match (path.strip_suffix("/tasks"), path.strip_prefix("/proc/sys/")) {
        (Some(cgroup), _) => format!("join cgroup {cgroup}"),
        (None, Some(sysctl)) => format!("set sysctl {sysctl} to {data:?}"),
        (None, None) => format!("write {data:?} to {path}"),
    }
}

fn propagation_word(propagation: Propagation) -> &'static str {
    match propagation {
        Propagation::Private => "private",
        Propagation::Slave => "slaves of the host's",
        Propagation::Shared => "shared",
    }
}
