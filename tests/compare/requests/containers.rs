//! Changes of a container's configuration.

use coracle_tests::cri::proto::{
    Capability, CdiDevice, ContainerConfig, ContainerMetadata, Device, HugepageLimit, IdMapping, ImageSpec,
    Int64Value, KeyValue, LinuxContainerResources, Mount, NamespaceMode, NamespaceOption, SeLinuxOption,
    SecurityProfile,
};
use coracle_tests::request::{id_mapping, image_spec, namespaces, security, user_namespace};

use super::Row;

type Config = ContainerConfig;

/// All rows for this machine: with cgroup v1 runc refuses each `unified`, and coracle has no use for it.
pub(super) fn rows() -> impl Iterator<Item = &'static Row<Config>> {
    let is_v2 = super::has_cgroup_v2();
    ROWS.iter().filter(move |(name, _)| is_v2 || !name.starts_with("unified"))
}

const ROWS: &[Row<Config>] = &[
    ("unchanged", |_| ()),
    // Metadata.
    ("metadata missing", |c| c.metadata = None),
    ("metadata.name empty", |c| metadata(c).name.clear()),
    ("metadata.name very long", |c| metadata(c).name = "n".repeat(5000)),
    ("metadata.name with a slash", |c| metadata(c).name = "a/../b".into()),
    ("metadata.name with an underscore", |c| metadata(c).name = "a_b_0".into()),
    ("metadata.name with NUL", |c| metadata(c).name = "a\0b".into()),
    ("metadata.name of letters outside ASCII", |c| metadata(c).name = "größe".into()),
    ("metadata.attempt of the maximum", |c| metadata(c).attempt = u32::MAX),
    // Image.
    ("image missing", |c| c.image = None),
    ("image empty", |c| c.image = Some(ImageSpec::default())),
    ("image unknown", |c| c.image = Some(image_spec("localhost/unknown:1"))),
    ("image not a reference", |c| c.image = Some(image_spec("UPPER CASE://"))),
    ("image of an unknown id", |c| c.image = Some(image_spec(&format!("sha256:{}", "0".repeat(64))))),
    ("image handler unknown", |c| c.image.get_or_insert_default().runtime_handler = "unknown".into()),
    ("image user_specified_image empty", |c| c.image.get_or_insert_default().user_specified_image.clear()),
    ("image user_specified_image other", |c| {
        c.image.get_or_insert_default().user_specified_image = "other:tag".into();
    }),
    // Command.
    ("command missing program", |c| c.command = words(&["/no/such/program"])),
    ("command not in PATH", |c| c.command = words(&["nosuchprogram"])),
    ("command empty word", |c| c.command = words(&[""])),
    ("command directory", |c| c.command = words(&["/etc"])),
    ("command not executable", |c| c.command = words(&["/plain"])),
    ("command without slash", |c| c.command = words(&["probe"])),
    ("command relative with dot", |c| c.command = words(&["./probe"])),
    ("command with NUL", |c| c.command = words(&["/probe\0x"])),
    ("command very long", |c| c.command = words(&[&"/".repeat(5000)])),
    ("args empty", |c| c.args.clear()),
    ("args with NUL", |c| c.args = words(&["print", "a\0b"])),
    ("args with an empty word", |c| c.args = words(&["print", ""])),
    ("args very long", |c| c.args = vec!["true".into(), "x".repeat(200_000)]),
    ("args exit 7", |c| c.args = words(&["exit", "7"])),
    ("args exit 128", |c| c.args = words(&["exit", "128"])),
    ("args killed by itself", |c| c.args = words(&["raise", "9"])),
    ("args aborted", |c| c.args = words(&["raise", "6"])),
    ("args sleep", |c| c.args = words(&["sleep", "forever"])),
    ("working_dir relative", |c| c.working_dir = "etc".into()),
    ("working_dir dot", |c| c.working_dir = ".".into()),
    ("working_dir with ..", |c| c.working_dir = "/etc/../tmp".into()),
    ("working_dir above the root", |c| c.working_dir = "/../../tmp".into()),
    ("working_dir a file", |c| c.working_dir = "/etc/passwd".into()),
    ("working_dir missing", |c| c.working_dir = "/new/one".into()),
    ("working_dir missing as a user", |c| {
        c.working_dir = "/new/one".into();
        security(c).run_as_user = int(1000);
    }),
    ("working_dir below a file", |c| c.working_dir = "/etc/passwd/x".into()),
    ("working_dir with NUL", |c| c.working_dir = "/a\0b".into()),
    ("working_dir very long", |c| c.working_dir = format!("/{}", "a".repeat(300))),
    ("working_dir closed for the user", |c| {
        c.working_dir = "/root".into();
        security(c).run_as_user = int(1000);
        capabilities(c, &[], &["ALL"]);
    }),
    // Environment.
    ("envs empty key", |c| env(c, "", "value")),
    ("envs key with =", |c| env(c, "A=B", "value")),
    ("envs key with blank", |c| env(c, "A B", "value")),
    ("envs value with NUL", |c| env(c, "A", "a\0b")),
    ("envs key with NUL", |c| env(c, "A\0", "a")),
    ("envs value with line break", |c| env(c, "A", "a\nb")),
    ("envs twice", |c| {
        env(c, "A", "1");
        env(c, "A", "2");
    }),
    ("envs very long", |c| env(c, "A", &"x".repeat(200_000))),
    ("envs PATH empty", |c| {
        env(c, "PATH", "");
        c.command = words(&["probe"]);
    }),
    // Mounts.
    ("mount missing host path", |c| mount(c, "/PLACES/missing/deep", "/data")),
    ("mount empty host path", |c| mount(c, "", "/data")),
    ("mount relative host path", |c| mount(c, "etc", "/data")),
    ("mount host path with ..", |c| mount(c, "/PLACES/folder/../folder", "/data")),
    ("mount host path with NUL", |c| mount(c, "/tmp\0x", "/data")),
    ("mount file", |c| mount(c, "/PLACES/file", "/data")),
    ("mount file below a file's path", |c| mount(c, "/PLACES/file/x", "/data")),
    ("mount link", |c| mount(c, "/PLACES/link", "/data")),
    ("mount dangling link", |c| mount(c, "/PLACES/dangling", "/data")),
    ("mount loop of links", |c| mount(c, "/PLACES/loop", "/data")),
    ("mount FIFO", |c| mount(c, "/PLACES/fifo", "/data")),
    ("mount socket", |c| mount(c, "/PLACES/socket", "/data")),
    ("mount device", |c| mount(c, "/dev/null", "/data")),
    ("mount file on directory", |c| mount(c, "/PLACES/file", "/tmp")),
    ("mount directory on file", |c| mount(c, "/PLACES/folder", "/etc/passwd")),
    ("mount empty target", |c| mount(c, "/PLACES/folder", "")),
    ("mount relative target", |c| mount(c, "/PLACES/folder", "data")),
    ("mount target with ..", |c| mount(c, "/PLACES/folder", "/data/../other")),
    ("mount target above the root", |c| mount(c, "/PLACES/folder", "/../../data")),
    ("mount target is the root", |c| mount(c, "/PLACES/folder", "/")),
    ("mount target below a file", |c| mount(c, "/PLACES/folder", "/etc/passwd/x")),
    ("mount target with NUL", |c| mount(c, "/PLACES/folder", "/a\0b")),
    ("mount target very long", |c| mount(c, "/PLACES/folder", &format!("/{}", "a".repeat(300)))),
    ("mount target on proc", |c| mount(c, "/PLACES/folder", "/proc")),
    ("mount target inside proc", |c| mount(c, "/PLACES/file", "/proc/version")),
    ("mount target a directory of proc", |c| mount(c, "/PLACES/folder", "/proc/sys")),
    ("mount target on sys", |c| mount(c, "/PLACES/folder", "/sys")),
    ("mount target on dev", |c| mount(c, "/PLACES/folder", "/dev")),
    ("mount target in dev", |c| mount(c, "/PLACES/folder", "/dev/data")),
    ("mount target on dev/shm", |c| mount(c, "/PLACES/folder", "/dev/shm")),
    ("mount target twice", |c| {
        mount(c, "/PLACES/folder", "/data");
        mount(c, "/PLACES/file", "/data");
    }),
    ("mount same target twice, of one kind", |c| {
        mount(c, "/PLACES/folder", "/data");
        mount(c, "/PLACES/folder", "/data/");
    }),
    ("mount child before parent", |c| {
        mount(c, "/PLACES/file", "/data/file");
        mount(c, "/PLACES/folder", "/data");
    }),
    ("mount host's root", |c| mount(c, "/", "/host")),
    ("mount host's proc", |c| mount(c, "/proc", "/host")),
    ("mount propagation unknown", |c| changed_mount(c, |m| m.propagation = 77)),
    ("mount propagation negative", |c| changed_mount(c, |m| m.propagation = -1)),
    ("mount propagation host to container", |c| changed_mount(c, |m| m.propagation = 1)),
    ("mount propagation bidirectional", |c| changed_mount(c, |m| m.propagation = 2)),
    ("mount recursive_read_only without readonly", |c| changed_mount(c, |m| m.recursive_read_only = true)),
    ("mount recursive_read_only", |c| {
        changed_mount(c, |m| {
            m.recursive_read_only = true;
            m.readonly = true;
        });
    }),
    ("mount recursive_read_only with propagation", |c| {
        changed_mount(c, |m| {
            m.recursive_read_only = true;
            m.readonly = true;
            m.propagation = 1;
        });
    }),
    ("mount readonly", |c| changed_mount(c, |m| m.readonly = true)),
    ("mount selinux_relabel", |c| changed_mount(c, |m| m.selinux_relabel = true)),
    ("mount uid_mappings without a user namespace", |c| {
        changed_mount(c, |m| m.uid_mappings = vec![id_mapping(100_000)]);
    }),
    ("mount mappings without a user namespace", |c| {
        changed_mount(c, |m| {
            m.uid_mappings = vec![id_mapping(100_000)];
            m.gid_mappings = vec![id_mapping(100_000)];
        });
    }),
    ("mount image unknown", |c| image_mount(c, "localhost/unknown:1", "")),
    ("mount image empty", |c| image_mount(c, "", "")),
    ("mount image", |c| {
        let image = c.image.clone().unwrap_or_default().image;
        image_mount(c, &image, "");
    }),
    ("mount image with image_sub_path", |c| {
        let image = c.image.clone().unwrap_or_default().image;
        image_mount(c, &image, "etc");
    }),
    ("mount image with image_sub_path missing", |c| {
        let image = c.image.clone().unwrap_or_default().image;
        image_mount(c, &image, "missing");
    }),
    ("mount image with image_sub_path absolute", |c| {
        let image = c.image.clone().unwrap_or_default().image;
        image_mount(c, &image, "/etc");
    }),
    ("mount image with image_sub_path ..", |c| {
        let image = c.image.clone().unwrap_or_default().image;
        image_mount(c, &image, "../etc");
    }),
    ("mount image and host path", |c| {
        let image = c.image.clone().unwrap_or_default().image;
        image_mount(c, &image, "");
        c.mounts.last_mut().expect("just pushed").host_path = "/PLACES/folder".into();
    }),
    // Devices.
    ("device missing", |c| device(c, "/dev/no-such-device", "/dev/x", "rwm")),
    ("device is a file", |c| device(c, "/etc/hostname", "/dev/x", "rwm")),
    ("device is a directory", |c| device(c, "/dev/pts", "/dev/x", "rwm")),
    ("device host path empty", |c| device(c, "", "/dev/x", "rwm")),
    ("device target empty", |c| device(c, "/dev/null", "", "rwm")),
    ("device target relative", |c| device(c, "/dev/null", "dev/x", "rwm")),
    ("device target outside of dev", |c| device(c, "/dev/null", "/x", "rwm")),
    ("device target with ..", |c| device(c, "/dev/null", "/dev/../x", "rwm")),
    ("device permissions empty", |c| device(c, "/dev/null", "/dev/x", "")),
    ("device permissions unknown", |c| device(c, "/dev/null", "/dev/x", "rwx")),
    ("device permissions upper case", |c| device(c, "/dev/null", "/dev/x", "RWM")),
    ("device permissions repeated", |c| device(c, "/dev/null", "/dev/x", "rr")),
    ("device twice", |c| {
        device(c, "/dev/null", "/dev/x", "rwm");
        device(c, "/dev/zero", "/dev/x", "rwm");
    }),
    ("CDI device unknown", |c| c.cdi_devices = vec![CdiDevice { name: "vendor.example/class=x".into() }]),
    ("CDI device not a name", |c| c.cdi_devices = vec![CdiDevice { name: "nonsense".into() }]),
    ("CDI device empty", |c| c.cdi_devices = vec![CdiDevice::default()]),
    ("CDI annotation unknown", |c| annotate(c, "cdi.k8s.io/x", "vendor.example/class=x")),
    ("CDI annotation not a name", |c| annotate(c, "cdi.k8s.io/x", "nonsense")),
    // Labels and annotations.
    ("labels none", |c| c.labels.clear()),
    ("labels empty key", |c| label(c, "", "value")),
    ("labels very long", |c| label(c, "key", &"v".repeat(10_000))),
    ("labels odd characters", |c| label(c, "ключ \n", "\u{7f}\t")),
    ("labels with NUL", |c| label(c, "a\0b", "c\0d")),
    ("labels of the runtime", |c| label(c, "io.cri-containerd.kind", "sandbox")),
    ("annotations empty key", |c| annotate(c, "", "value")),
    ("annotations very long", |c| annotate(c, "key", &"v".repeat(300_000))),
    ("annotations with NUL", |c| annotate(c, "a\0b", "c\0d")),
    ("annotations of the runtime", |c| annotate(c, "io.kubernetes.cri.container-type", "sandbox")),
    // Logs and streams.
    ("log_path empty", |c| c.log_path.clear()),
    ("log_path absolute", |c| c.log_path = "/absolute.log".into()),
    ("log_path with ..", |c| c.log_path = "../outside.log".into()),
    ("log_path with .. inside", |c| c.log_path = "one/../two.log".into()),
    ("log_path directory", |c| c.log_path = "./".into()),
    ("log_path with NUL", |c| c.log_path = "a\0b".into()),
    ("log_path very long", |c| c.log_path = "l".repeat(300)),
    ("log_path deep", |c| c.log_path = "a/b/c/d/e.log".into()),
    ("log_path with slash at the end", |c| c.log_path = "one/".into()),
    ("stdin", |c| c.stdin = true),
    ("stdin_once without stdin", |c| c.stdin_once = true),
    ("stdin and stdin_once", |c| {
        c.stdin = true;
        c.stdin_once = true;
    }),
    ("tty", |c| c.tty = true),
    ("tty and stdin", |c| {
        c.tty = true;
        c.stdin = true;
    }),
    ("stop_signal SIGKILL", |c| c.stop_signal = 13),
    ("stop_signal SIGRTMAX", |c| c.stop_signal = 65),
    ("stop_signal unknown", |c| c.stop_signal = 999),
    ("stop_signal negative", |c| c.stop_signal = -1),
    // Resources.
    ("linux missing", |c| c.linux = None),
    ("security_context missing", |c| c.linux.get_or_insert_default().security_context = None),
    ("resources empty", |c| resources(c, |_| ())),
    ("cpu_period too small", |c| resources(c, |r| r.cpu_period = 1)),
    ("cpu_period too big", |c| resources(c, |r| r.cpu_period = 10_000_000)),
    ("cpu_period negative", |c| resources(c, |r| r.cpu_period = -1)),
    ("cpu_quota without period", |c| resources(c, |r| r.cpu_quota = 50_000)),
    ("cpu_quota too small", |c| {
        resources(c, |r| {
            r.cpu_quota = 1;
            r.cpu_period = 100_000;
        });
    }),
    ("cpu_quota -1", |c| {
        resources(c, |r| {
            r.cpu_quota = -1;
            r.cpu_period = 100_000;
        });
    }),
    ("cpu_quota -5", |c| resources(c, |r| r.cpu_quota = -5)),
    ("cpu_quota of the maximum", |c| resources(c, |r| r.cpu_quota = i64::MAX)),
    ("cpu_shares 1", |c| resources(c, |r| r.cpu_shares = 1)),
    ("cpu_shares 2", |c| resources(c, |r| r.cpu_shares = 2)),
    ("cpu_shares too many", |c| resources(c, |r| r.cpu_shares = 1 << 40)),
    ("cpu_shares negative", |c| resources(c, |r| r.cpu_shares = -1)),
    ("memory 1 byte", |c| resources(c, |r| r.memory_limit_in_bytes = 1)),
    ("memory 4 MiB", |c| resources(c, |r| r.memory_limit_in_bytes = 4 << 20)),
    ("memory negative", |c| resources(c, |r| r.memory_limit_in_bytes = -1)),
    ("memory -5", |c| resources(c, |r| r.memory_limit_in_bytes = -5)),
    ("memory of the maximum", |c| resources(c, |r| r.memory_limit_in_bytes = i64::MAX)),
    ("memory exceeded", |c| {
        resources(c, |r| r.memory_limit_in_bytes = 16 << 20);
        c.args = words(&["burn", "64"]);
    }),
    ("memory exceeded by a child", |c| {
        resources(c, |r| r.memory_limit_in_bytes = 16 << 20);
        c.args = words(&["hungry-child", "64", "3"]);
    }),
    ("swap less than memory", |c| {
        resources(c, |r| {
            r.memory_limit_in_bytes = 64 << 20;
            r.memory_swap_limit_in_bytes = 32 << 20;
        });
    }),
    ("swap without memory", |c| resources(c, |r| r.memory_swap_limit_in_bytes = 64 << 20)),
    ("swap -1", |c| resources(c, |r| r.memory_swap_limit_in_bytes = -1)),
    ("swap more than memory", |c| {
        resources(c, |r| {
            r.memory_limit_in_bytes = 64 << 20;
            r.memory_swap_limit_in_bytes = 128 << 20;
        });
    }),
    ("oom_score_adj 1000", |c| resources(c, |r| r.oom_score_adj = 1000)),
    ("oom_score_adj 1001", |c| resources(c, |r| r.oom_score_adj = 1001)),
    ("oom_score_adj too big", |c| resources(c, |r| r.oom_score_adj = i64::MAX)),
    ("cpuset_cpus 0", |c| resources(c, |r| r.cpuset_cpus = "0".into())),
    ("cpuset_cpus missing ones", |c| resources(c, |r| r.cpuset_cpus = "900-901".into())),
    ("cpuset_cpus some missing", |c| resources(c, |r| r.cpuset_cpus = "0,900".into())),
    ("cpuset_cpus nonsense", |c| resources(c, |r| r.cpuset_cpus = "zero".into())),
    ("cpuset_cpus backwards", |c| resources(c, |r| r.cpuset_cpus = "1-0".into())),
    ("cpuset_cpus with blanks", |c| resources(c, |r| r.cpuset_cpus = " 0 , 1 ".into())),
    ("cpuset_cpus with a comma at the end", |c| resources(c, |r| r.cpuset_cpus = "0,".into())),
    ("cpuset_mems 0", |c| resources(c, |r| r.cpuset_mems = "0".into())),
    ("cpuset_mems missing", |c| resources(c, |r| r.cpuset_mems = "7".into())),
    ("hugepages 2MB", |c| hugepages(c, &["2MB"])),
    ("hugepages twice", |c| hugepages(c, &["2MB", "2MB"])),
    ("hugepages unknown size", |c| hugepages(c, &["3MB"])),
    ("hugepages of another spelling", |c| hugepages(c, &["2048kB"])),
    ("hugepages empty size", |c| hugepages(c, &[""])),
    ("hugepages with a path", |c| hugepages(c, &["../x"])),
    ("unified memory.high", |c| unified(c, "memory.high", "67108864")),
    ("unified unknown file", |c| unified(c, "memory.nonsense", "1")),
    ("unified bad value", |c| unified(c, "memory.high", "many")),
    ("unified with a path", |c| unified(c, "../memory.high", "max")),
    ("unified without a dot", |c| unified(c, "nonsense", "1")),
    ("unified empty key", |c| unified(c, "", "1")),
    ("unified cgroup.procs", |c| unified(c, "cgroup.freeze", "0")),
    ("unified pids.max", |c| unified(c, "pids.max", "50")),
    // Users.
    ("run_as_user 0", |c| security(c).run_as_user = int(0)),
    ("run_as_user negative", |c| security(c).run_as_user = int(-1)),
    ("run_as_user of the maximum", |c| security(c).run_as_user = int(4_294_967_294)),
    ("run_as_user 2^32-1", |c| security(c).run_as_user = int(4_294_967_295)),
    ("run_as_user too big", |c| security(c).run_as_user = int(1 << 40)),
    ("run_as_user of i64's maximum", |c| security(c).run_as_user = int(i64::MAX)),
    ("run_as_user unknown", |c| security(c).run_as_user = int(4242)),
    ("run_as_username root", |c| security(c).run_as_username = "root".into()),
    ("run_as_username unknown", |c| security(c).run_as_username = "nobody-here".into()),
    ("run_as_username number", |c| security(c).run_as_username = "1000".into()),
    ("run_as_username with a group", |c| security(c).run_as_username = "alice:crew".into()),
    ("run_as_username with NUL", |c| security(c).run_as_username = "al\0ice".into()),
    ("run_as_username odd", |c| security(c).run_as_username = "../ :x".into()),
    ("run_as_user and run_as_username", |c| {
        security(c).run_as_user = int(1001);
        security(c).run_as_username = "alice".into();
    }),
    ("run_as_group alone", |c| security(c).run_as_group = int(3000)),
    ("run_as_group with user", |c| {
        security(c).run_as_user = int(1000);
        security(c).run_as_group = int(3000);
    }),
    ("run_as_group with username", |c| {
        security(c).run_as_username = "alice".into();
        security(c).run_as_group = int(3000);
    }),
    ("run_as_group negative", |c| {
        security(c).run_as_user = int(1000);
        security(c).run_as_group = int(-1);
    }),
    ("run_as_group too big", |c| {
        security(c).run_as_user = int(1000);
        security(c).run_as_group = int(1 << 40);
    }),
    ("supplemental_groups", |c| security(c).supplemental_groups = vec![2000, 0, 2000]),
    ("supplemental_groups negative", |c| security(c).supplemental_groups = vec![-1]),
    ("supplemental_groups too big", |c| security(c).supplemental_groups = vec![1 << 40]),
    ("supplemental_groups many", |c| security(c).supplemental_groups = (1..1000).collect()),
    ("supplemental_groups_policy strict", |c| {
        security(c).run_as_username = "alice".into();
        security(c).supplemental_groups = vec![5000];
        security(c).supplemental_groups_policy = 1;
    }),
    ("supplemental_groups_policy merge of a user by number", |c| {
        security(c).run_as_user = int(1000);
        security(c).supplemental_groups = vec![5000];
    }),
    ("supplemental_groups_policy unknown", |c| security(c).supplemental_groups_policy = 9),
    // Capabilities and confinement.
    ("capability unknown", |c| capabilities(c, &["FLY"], &[])),
    ("capability lower case", |c| capabilities(c, &["net_admin"], &[])),
    ("capability with CAP_", |c| capabilities(c, &["CAP_NET_ADMIN"], &[])),
    ("capability empty", |c| capabilities(c, &[""], &[])),
    ("capability all in lower case", |c| capabilities(c, &["all"], &[])),
    ("capability dropped unknown", |c| capabilities(c, &[], &["FLY"])),
    ("capability dropped with CAP_", |c| capabilities(c, &[], &["CAP_CHOWN"])),
    ("capability dropped in lower case", |c| capabilities(c, &[], &["chown"])),
    ("capability added and dropped", |c| capabilities(c, &["CHOWN"], &["CHOWN"])),
    ("capability ALL added and dropped", |c| capabilities(c, &["ALL"], &["ALL"])),
    ("capability ALL with one dropped", |c| capabilities(c, &["ALL"], &["CHOWN"])),
    ("capability twice", |c| capabilities(c, &["NET_ADMIN", "NET_ADMIN"], &[])),
    ("capability ambient unknown", |c| ambient(c, &["FLY"])),
    ("capability ambient", |c| ambient(c, &["CHOWN"])),
    ("capability ambient of a user", |c| {
        ambient(c, &["CHOWN"]);
        security(c).run_as_user = int(1000);
    }),
    ("privileged in a pod that is not", |c| security(c).privileged = true),
    ("seccomp unknown type", |c| seccomp(c, 9, "")),
    ("seccomp localhost missing", |c| seccomp(c, 2, "/no/such/profile.json")),
    ("seccomp localhost empty", |c| seccomp(c, 2, "")),
    ("seccomp localhost relative", |c| seccomp(c, 2, "profile.json")),
    ("seccomp localhost of no JSON", |c| seccomp(c, 2, "/etc/hostname")),
    ("seccomp localhost a directory", |c| seccomp(c, 2, "/etc")),
    ("seccomp default with a reference", |c| seccomp(c, 0, "/etc/hostname")),
    ("seccomp unconfined", |c| seccomp(c, 1, "")),
    ("seccomp_profile_path unconfined", |c| security(c).seccomp_profile_path = "unconfined".into()),
    ("seccomp_profile_path runtime/default", |c| security(c).seccomp_profile_path = "runtime/default".into()),
    ("seccomp_profile_path localhost missing", |c| {
        security(c).seccomp_profile_path = "localhost//no/such.json".into();
    }),
    ("seccomp_profile_path nonsense", |c| security(c).seccomp_profile_path = "nonsense".into()),
    ("apparmor unconfined", |c| apparmor(c, 1, "")),
    ("apparmor default", |c| apparmor(c, 0, "")),
    ("apparmor localhost missing", |c| apparmor(c, 2, "no-such-profile")),
    ("apparmor unknown type", |c| apparmor(c, 9, "")),
    ("apparmor_profile runtime/default", |c| security(c).apparmor_profile = "runtime/default".into()),
    ("apparmor_profile nonsense", |c| security(c).apparmor_profile = "nonsense".into()),
    ("selinux level only", |c| selinux(c, "", "", "", "s0:c1,c2")),
    ("selinux all", |c| selinux(c, "system_u", "system_r", "container_t", "s0:c1,c2")),
    ("selinux nonsense level", |c| selinux(c, "", "", "", "nonsense")),
    ("no_new_privs", |c| security(c).no_new_privs = true),
    ("readonly_rootfs", |c| security(c).readonly_rootfs = true),
    ("readonly_rootfs with a new working_dir", |c| {
        security(c).readonly_rootfs = true;
        c.working_dir = "/new/one".into();
    }),
    ("masked_paths relative", |c| security(c).masked_paths = words(&["proc/kcore"])),
    ("masked_paths empty word", |c| security(c).masked_paths = words(&[""])),
    ("masked_paths root", |c| security(c).masked_paths = words(&["/"])),
    ("masked_paths with ..", |c| security(c).masked_paths = words(&["/tmp/../home"])),
    ("masked_paths missing", |c| security(c).masked_paths = words(&["/no/such"])),
    ("readonly_paths relative", |c| security(c).readonly_paths = words(&["proc/sys"])),
    ("readonly_paths empty word", |c| security(c).readonly_paths = words(&[""])),
    ("readonly_paths missing", |c| security(c).readonly_paths = words(&["/no/such"])),
    ("readonly_paths a file", |c| security(c).readonly_paths = words(&["/etc/passwd"])),
    // Namespaces.
    ("namespaces missing", |c| security(c).namespace_options = None),
    ("namespaces pid unknown", |c| options(c).pid = 9),
    ("namespaces pid node", |c| options(c).pid = NamespaceMode::Node.into()),
    ("namespaces pid pod", |c| options(c).pid = NamespaceMode::Pod.into()),
    ("namespaces pid target without id", |c| options(c).pid = NamespaceMode::Target.into()),
    ("namespaces pid target unknown", |c| {
        options(c).pid = NamespaceMode::Target.into();
        options(c).target_id = "0123456789abcdef".into();
    }),
    ("namespaces target_id without target", |c| options(c).target_id = "0123456789abcdef".into()),
    ("namespaces network pod in a host's pod", |c| options(c).network = NamespaceMode::Pod.into()),
    ("namespaces network container", |c| options(c).network = NamespaceMode::Container.into()),
    ("namespaces network unknown", |c| options(c).network = 9),
    ("namespaces ipc node", |c| options(c).ipc = NamespaceMode::Node.into()),
    ("namespaces ipc container", |c| options(c).ipc = NamespaceMode::Container.into()),
    ("namespaces ipc unknown", |c| options(c).ipc = 9),
    ("namespaces user in a pod without", |c| options(c).userns_options = Some(user_namespace(1_000_000))),
    ("namespaces user mode node", |c| {
        let namespace = options(c).userns_options.get_or_insert_default();
        namespace.mode = NamespaceMode::Node.into();
    }),
    ("namespaces user mode node with mappings", |c| {
        let mapping = IdMapping { host_id: 5, container_id: 0, length: 1 };
        let namespace = options(c).userns_options.get_or_insert_default();
        namespace.mode = NamespaceMode::Node.into();
        namespace.uids = vec![mapping];
        namespace.gids = vec![mapping];
    }),
    ("namespaces user mode unknown", |c| options(c).userns_options.get_or_insert_default().mode = 9),
];

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[expect(clippy::unnecessary_wraps, reason = "a field of a message")]
fn int(value: i64) -> Option<Int64Value> {
    Some(Int64Value { value })
}

fn metadata(config: &mut Config) -> &mut ContainerMetadata {
    config.metadata.get_or_insert_with(|| ContainerMetadata { name: "one".into(), attempt: 0 })
}

fn env(config: &mut Config, key: &str, value: &str) {
    config.envs.push(KeyValue { key: key.into(), value: value.into() });
}

fn mount(config: &mut Config, host: &str, target: &str) {
    config.mounts.push(Mount { container_path: target.into(), host_path: host.into(), ..Default::default() });
}

fn changed_mount(config: &mut Config, change: fn(&mut Mount)) {
    mount(config, "/PLACES/folder", "/data");
    change(config.mounts.last_mut().expect("just pushed"));
}

fn image_mount(config: &mut Config, image: &str, sub_path: &str) {
    mount(config, "", "/image");
    let mount = config.mounts.last_mut().expect("just pushed");
    mount.image = Some(image_spec(image));
    mount.image_sub_path = sub_path.into();
    mount.readonly = true;
}

fn device(config: &mut Config, host: &str, target: &str, permissions: &str) {
    config.devices.push(Device {
        container_path: target.into(),
        host_path: host.into(),
        permissions: permissions.into(),
    });
}

fn label(config: &mut Config, key: &str, value: &str) {
    config.labels.insert(key.into(), value.into());
}

fn annotate(config: &mut Config, key: &str, value: &str) {
    config.annotations.insert(key.into(), value.into());
}

fn resources(config: &mut Config, change: fn(&mut LinuxContainerResources)) {
    change(config.linux.get_or_insert_default().resources.get_or_insert_default());
}

fn hugepages(config: &mut Config, sizes: &[&str]) {
    let limits = sizes.iter().map(|size| HugepageLimit { page_size: (*size).into(), limit: 4 << 20 });
    config.linux.get_or_insert_default().resources.get_or_insert_default().hugepage_limits = limits.collect();
}

fn unified(config: &mut Config, key: &str, value: &str) {
    let resources = config.linux.get_or_insert_default().resources.get_or_insert_default();
    resources.unified.insert(key.into(), value.into());
}

fn capabilities(config: &mut Config, add: &[&str], drop: &[&str]) {
    security(config).capabilities = Some(Capability {
        add_capabilities: words(add),
        drop_capabilities: words(drop),
        ..Default::default()
    });
}

fn ambient(config: &mut Config, add: &[&str]) {
    security(config).capabilities =
        Some(Capability { add_ambient_capabilities: words(add), ..Default::default() });
}

fn seccomp(config: &mut Config, kind: i32, reference: &str) {
    security(config).seccomp = Some(SecurityProfile { profile_type: kind, localhost_ref: reference.into() });
}

fn apparmor(config: &mut Config, kind: i32, reference: &str) {
    security(config).apparmor = Some(SecurityProfile { profile_type: kind, localhost_ref: reference.into() });
}

fn selinux(config: &mut Config, user: &str, role: &str, kind: &str, level: &str) {
    security(config).selinux_options = Some(SeLinuxOption {
        user: user.into(),
        role: role.into(),
        r#type: kind.into(),
        level: level.into(),
    });
}

fn options(config: &mut Config) -> &mut NamespaceOption {
    security(config).namespace_options.get_or_insert_with(|| namespaces(NamespaceMode::Node))
}
