//! Tests of the order of mounts, image volumes and masks, and of the input of the verification.

use coracle_wire::{Block, KernelDirectory, Mismatch};

use super::*;
use crate::Error;
use crate::plan::path::{container as clean, is_within};

fn text(text: Text<'_>) -> String {
    text.as_cstr().expect("a whole text").to_str().expect("UTF-8").to_owned()
}

fn all(block: Block<'_>) -> Vec<String> {
    block.iter().map(|text| text.to_str().expect("UTF-8").to_owned()).collect()
}

/// The source and target of the mount that an operation attaches in the root; `None` for other operations.
fn attaches(op: &Op<'_>) -> Option<String> {
    match op {
        Op::Attach { target, .. } | Op::Filesystem { target, .. } => Some(text(*target)),
        Op::BindSelf { path } | Op::Node { path, .. } | Op::Symlink { path, .. } => Some(text(*path)),
        Op::Terminal => Some("/dev/console".into()),
        _ => None,
    }
}

fn image_volumes(record: &[u8]) -> Vec<String> {
    let all = ops(record);
    all.iter()
        .filter_map(|op| if let Op::BindSelf { path } = op { Some(text(*path)) } else { None })
        .collect()
}

#[test]
fn image_volumes_come_before_what_they_could_hide() {
    let mut plan = container_plan();
    plan.root.read_only = true;
    plan.image_volumes = ["/var/lib/postgresql", "/etc", "/run/", "//a/../run", "/", "/data/", "/etc/hosts"]
        .map(String::from)
        .to_vec();
    plan.mounts = vec![mount("/h/pg", "/var/lib/postgresql/data"), mount("/h/data", "/data")];
    let record = container(&plan).unwrap();
    assert_eq!(image_volumes(&record), ["/etc", "/run", "/var/lib/postgresql"]);
    let words = words(&record);
    let at = |word: &str| words.iter().position(|other| other == word).expect(word);
    let order = [
        "mount sysfs on /sys",
        "mount image volume /etc",
        "mount image volume /var/lib/postgresql",
        "bind /h/data on /data",
        "bind /p/hosts on /etc/hosts",
        "bind /h/pg on /var/lib/postgresql/data",
        "mask /proc/kcore",
        "make root read-only",
        "verify the mounts",
    ];
    assert!(order.map(at).is_sorted(), "{words:#?}");
    // The result is the same with a writable root.
    plan.root.read_only = false;
    assert_eq!(image_volumes(&container(&plan).unwrap()).len(), 3);
}

#[test]
fn image_volumes_of_the_kernels_directories_are_refused() {
    let volumes =
        ["/proc", "proc/", "/proc/sys", "/x/../sys", "/sys/fs/cgroup", "/dev", "/dev/shm", "/dev/mine/x"];
    for volume in volumes {
        let plan = ContainerPlan { image_volumes: vec![volume.into()], ..container_plan() };
        match container(&plan) {
            Err(Error::Invalid { field, why }) => {
                assert_eq!(field, format!("image volume {volume}"));
                assert!(why.contains("must stay the kernel's own"), "{why}");
            }
            other => panic!("{volume}: {other:?}"),
        }
    }
    let many = (0..257).map(|number| format!("/v{number}")).collect();
    let refused = container(&ContainerPlan { image_volumes: many, ..container_plan() }).unwrap_err();
    assert_eq!(refused.to_string(), "image volumes: the image declares 257, more than 256");
    // It is allowed if the pod has a volume there.
    let mut plan = container_plan();
    plan.image_volumes = vec!["/sys/fs/cgroup".into(), "/dev/mine".into(), "/process".into()];
    plan.mounts = vec![mount("/h", "/sys/fs/cgroup/"), mount("/dev", "/dev")];
    assert_eq!(image_volumes(&container(&plan).unwrap()), ["/process"]);
}

#[test]
fn the_verification_covers_the_mounts_of_the_plan() {
    let checked = |plan: &ContainerPlan| {
        let record = container(plan).expect("a plan");
        let found = ops(&record).into_iter().find_map(|op| match op {
            Op::Verify { kernel, root_read_only, masked, read_only } => {
                Some((kernel, root_read_only, all(masked), all(read_only)))
            }
            _ => None,
        });
        found.expect("it is checked")
    };
    use KernelDirectory::{Fresh, Unchecked, Volume};
    let plain = checked(&container_plan());
    let read_only = ["/sys", "/sys/fs/cgroup", "/proc/sys"].map(String::from).to_vec();
    assert_eq!(plain, ([Fresh; 3], false, vec!["/proc/kcore".to_owned()], read_only));
    let mut plan = ContainerPlan { privileged: true, ..container_plan() };
    plan.root.read_only = true;
    let (kernel, root_read_only, masked, read_only) = checked(&plan);
    assert_eq!((kernel, root_read_only, masked), ([Fresh; 3], true, vec![]));
    assert_eq!(read_only, [""; 0]);
    let mut plan = container_plan();
    plan.mounts = vec![mount("/sys", "/sys"), mount("/dev", "/dev/")];
    plan.without_mounts = vec!["/proc".into()];
    assert_eq!(checked(&plan).0, [Unchecked, Volume, Volume]);
    let mut plan = container_plan();
    plan.masked_paths = vec!["/sys".into()];
    assert_eq!(checked(&plan).0, [Fresh, Unchecked, Fresh]);
}

#[test]
fn a_record_takes_no_mount_after_the_covers() {
    let mut record = record::Record::new(VERSION);
    let path = Text::new(c"/data");
    let mounting = [
        Op::BindSelf { path },
        Op::Terminal,
        Op::ReadOnly { target: path },
        Op::Symlink { content: path, path },
        Op::Node { path, mode: 0, device: 0 },
    ];
    for op in &mounting {
        assert!(record.push(op).is_ok(), "{op:?}");
    }
    record.seal_mounts();
    for op in &mounting {
        assert!(matches!(record.push(op), Err(Error::Invalid { .. })), "{op:?}");
    }
    assert!(record.push(&Op::ReadOnlyRoot).is_ok());
}

#[test]
fn older_monitors_get_no_check() {
    let record = container(&container_plan()).unwrap();
    let older = launch(&container_plan(), 3, Waits::Never).unwrap();
    let without: Vec<Op<'_>> =
        ops(&record).into_iter().filter(|op| !matches!(op, Op::Verify { .. } | Op::Keyring)).collect();
    assert_eq!(ops(&older.bytes), without);
    assert_eq!(without.len() + 2, ops(&record).len());
}

#[test]
fn a_failed_verification_names_the_path() {
    let record = container(&container_plan()).unwrap();
    let index = ops(&record).iter().position(|op| matches!(op, Op::Verify { .. })).unwrap() as u16;
    let table = [
        (0, 0, "/proc is not the procfs that was mounted there"),
        (2, 0, "/dev is not the mount that was made there"),
        (3, 0, "/ is not read-only"),
        (4, 0, "/proc/kcore is not masked"),
        (4, 5, "/proc/kcore: I/O error"),
        (5, 0, "/sys is not read-only"),
        (7, 0, "/proc/sys is not read-only"),
        (99, 0, "path 94 is not read-only"),
    ];
    for (item, errno, expected) in table {
        let number = Mismatch { item, errno }.to_number();
        assert_eq!(explain(&record, index, number), format!("verify the mounts: {expected}"));
    }
}

#[test]
fn an_error_of_a_link_at_a_mount_point_names_the_image() {
    const EIO: i32 = 5;
    const ENOTDIR: i32 = 20;
    const ELOOP: i32 = 40;
    let mut plan = container_plan();
    plan.image_volumes = vec!["/data".into()];
    let record = container(&plan).unwrap();
    let is_fault = |word: &str, errno: i32| {
        let index = words(&record).iter().position(|other| other == word).expect(word);
        is_fault_of_image(&record, index as u16, errno)
    };
    for word in ["mount image volume /data", "mount tmpfs on /dev", "bind /p/hosts on /etc/hosts"] {
        assert!(is_fault(word, ELOOP) && is_fault(word, ENOTDIR), "{word}");
        assert!(!is_fault(word, EIO), "{word}");
    }
    assert!(!is_fault("overlay root", ELOOP) && !is_fault("verify the mounts", 1 << 28));
}

/// A deterministic generator of random numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % end
    }

    fn is(&mut self) -> bool {
        self.below(2) == 0
    }

    fn path(&mut self) -> String {
        const PARTS: [&str; 14] = [
            "a", "b", "c", "etc", "hosts", "proc", "sys", "dev", "shm", "fs", "cgroup", "..", ".", "cpuinfo",
        ];
        (0..=self.below(4)).map(|_| ["/", PARTS[self.below(PARTS.len())]].concat()).collect()
    }

    fn paths(&mut self) -> Vec<String> {
        (0..self.below(6)).map(|_| self.path()).collect()
    }
}

/// For any volumes, image volumes, masked and read-only paths, no mount hides a planned mount below it, and no mount
/// follows the masked and read-only paths.
#[test]
fn the_order_holds_for_any_plan() {
    let mut numbers = Numbers(11);
    let mut compiled = 0;
    for round in 0..4000 {
        let mut plan = container_plan();
        plan.mounts = numbers.paths().iter().map(|target| mount("/h", target)).collect();
        plan.image_volumes = numbers.paths();
        plan.masked_paths = numbers.paths();
        plan.readonly_paths = numbers.paths();
        plan.root.read_only = numbers.is();
        let process = ProcessPlan { tty: numbers.is(), ..process_plan() };
        plan.privileged = numbers.below(4) == 0;
        plan.without_mounts = if numbers.is() { numbers.paths() } else { Vec::new() };
        plan.cgroup_mount = match numbers.below(3) {
            0 => CgroupMount::None,
            1 => CgroupMount::Namespaced,
            _ => CgroupMount::Legacy { directories: vec![("memory".into(), "/c".into())], links: vec![] },
        };
        // Plans are refused because of one of their paths, which other tests cover.
        let Ok(record) = compile(&plan, &process) else { continue };
        compiled += 1;
        check_order(&ops(&record), &plan).unwrap_or_else(|why| panic!("round {round}: {why}: {plan:#?}"));
    }
    assert!(compiled > 500, "{compiled} plans were compiled");
}

fn check_order(ops: &[Op<'_>], plan: &ContainerPlan) -> Result<(), String> {
    // The read-only operation for cgroup v1 is part of a mount.
    let is_cover = |op: &Op<'_>| match op {
        Op::Mask { .. } => true,
        Op::ReadOnly { target } => {
            text(*target) != "/sys/fs/cgroup" || !matches!(plan.cgroup_mount, CgroupMount::Legacy { .. })
        }
        _ => false,
    };
    let first_cover = ops.iter().position(is_cover).unwrap_or(ops.len());
    let attached: Vec<(usize, String)> =
        ops.iter().enumerate().filter_map(|(at, op)| Some((at, attaches(op)?))).collect();
    if let Some((at, target)) = attached.last()
        && *at > first_cover
    {
        return Err(format!("{target} is attached after a cover"));
    }
    for (index, (_, target)) in attached.iter().enumerate() {
        for (_, earlier) in &attached[..index] {
            if is_within(earlier, target) && earlier != target {
                return Err(format!("{target} hides {earlier}"));
            }
        }
    }
    let targets: Vec<String> =
        plan.mounts.iter().map(|mount| clean("", &mount.target).expect("clean")).collect();
    for volume in &plan.image_volumes {
        let volume = clean("", volume).expect("clean");
        let is_replaced = volume == "/" || targets.iter().any(|target| is_within(&volume, target));
        let of_image = |op: &&Op<'_>| matches!(op, Op::BindSelf { path } if text(*path) == volume);
        let is_pods_file = volume.starts_with("/etc/hosts");
        match ops.iter().filter(of_image).count() {
            0 if is_replaced || is_pods_file => {}
            1 if !is_replaced => {}
            count => return Err(format!("image volume {volume} is mounted {count} times")),
        }
    }
    let verify = ops.iter().position(|op| matches!(op, Op::Verify { .. })).ok_or("nothing is checked")?;
    let Op::Verify { masked, read_only, .. } = ops[verify] else { return Err("no".into()) };
    let after = ops.iter().rposition(|op| is_cover(op) || attaches(op).is_some() || *op == Op::ReadOnlyRoot);
    if after > Some(verify) {
        return Err("something is made after the check".into());
    }
    let (masked, read_only) = (all(masked), all(read_only));
    for (paths, checked) in [(&plan.masked_paths, masked), (&plan.readonly_paths, read_only)] {
        let missed = paths.iter().find(|path| !checked.contains(&clean("", path).expect("clean")));
        if let (Some(missed), false) = (missed, plan.privileged) {
            return Err(format!("{missed} is not checked"));
        }
    }
    Ok(())
}
