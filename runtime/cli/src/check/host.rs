//! Requirements on the host in addition to its kernel: programs, directories on disk, network, clock, limits, and no
//! conflicting runtime. Each requirement is a pure function of data that is read first.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use coracle_base::settings::Selinux;
use coracle_control::socket as control_socket;
use coracle_sandbox::lsm;
use coracle_sandbox::probe::{self, Need, State};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::fs::{StatVfsMountFlags, statvfs};

use coracle_config::Config;
use coracle_preflight::{self as preflight, lock, network_options, program, refused_driver};

/// 2026-01-01 in seconds since 1970: a clock with an earlier time has not been set yet, on a node without a real-time clock.
const CLOCK_MIN: u64 = 1_767_225_600;

/// Free space in bytes that the images and pods of a small node need.
const FREE_BYTES_MIN: u64 = 256 << 20;

/// Limit of open files that a hundred pods with streams need; the units in packaging/ set a much higher limit.
const FILES_MIN: u64 = 16_384;

/// Entropy in bits below which the random generator has not been initialised (Linux before 5.18 counts up to
/// 4096, later versions up to 256).
const RANDOM_BITS_MIN: u64 = 128;

/// Sockets of other runtimes that a kubelet may use: name of the runtime, path.
const OTHERS: [(&str, &str); 4] = [
    ("containerd", "/run/containerd/containerd.sock"),
    ("the containerd of k3s", "/run/k3s/containerd/containerd.sock"),
    ("CRI-O", "/run/crio/crio.sock"),
    ("cri-dockerd", "/run/cri-dockerd.sock"),
];

/// File systems that support image layers and writable layers.
const GOOD: [&str; 8] = ["ext4", "xfs", "btrfs", "f2fs", "tmpfs", "ubifs", "bcachefs", "ext3"];

/// File systems that cannot be writable layers, or do not store owners and modes.
const BAD: [&str; 11] =
    ["overlay", "nfs", "nfs4", "vfat", "exfat", "ntfs3", "cifs", "smb3", "9p", "squashfs", "erofs"];

/// All requirements of the host, in the order in which a node is set up.
pub(super) fn needs(config: &Config) -> Vec<Need> {
    let mounts = text("/proc/self/mounts");
    let (root, state) = (DataDirectory::of(&config.root, &mounts), DataDirectory::of(&config.state, &mounts));
    let survey = network_options(config)
        .map_err(|error| error.to_string())
        .and_then(|options| coracle_network::survey(&options));
    let alive = |path: &Path| UnixStream::connect(path).is_ok();
    let is_serving = alive(&config.listen);
    // A daemon creates its control socket itself, also if another process listens for it at `listen`.
    let others = others(server(&control_socket(&config.state)), &server);
    let nri = (!is_serving && alive(&config.nri.socket_path)).then_some(config.nri.socket_path.as_path());
    vec![
        configuration(config),
        programs(config),
        writable_cgroups(&mounts),
        cgroup_driver(refused_driver(config.cgroup.driver)),
        file_system_of_root(&root),
        state_is_writable(&state),
        space(&root),
        state_on_tmpfs(&state),
        idmapped(&root),
        cni_network(&survey),
        cni_plugins(&survey),
        registries(config),
        streaming_certificate(config),
        site_key(config),
        image_policy(config),
        sysctl("ip_forward", number("/proc/sys/net/ipv4/ip_forward")),
        bridge_sysctl(number("/proc/sys/net/bridge/bridge-nf-call-iptables")),
        clock(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())),
        randomness(number("/proc/sys/kernel/random/entropy_avail")),
        open_files(getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard)),
        selinux(config.security.selinux, lsm::has_selinux().then(lsm::Policy::find)),
        no_other_runtime(&others, nri),
        daemon(is_serving, lock::holder(&config.root, &config.state), &config.listen),
    ]
}

/// The runtimes among [`OTHERS`] that serve. The process `own` serves containerd's socket for cAdvisor.
fn others(own: Option<i32>, server: &dyn Fn(&Path) -> Option<i32>) -> Vec<(&'static str, &'static str)> {
    let is_other = |path: &str| server(Path::new(path)).is_some_and(|pid| own != Some(pid));
    OTHERS.into_iter().filter(|(_, path)| is_other(path)).collect()
}

/// PID of the process that listens on a socket; `None` if none answers.
fn server(path: &Path) -> Option<i32> {
    let stream = UnixStream::connect(path).ok()?;
    getsockopt(&stream, PeerCredentials).ok().map(|credentials| credentials.pid())
}

fn need(name: &'static str, without: &'static str, fix: &'static str, is_met: bool, found: String) -> Need {
    let state = if is_met { State::Have } else { State::Missing };
    Need { name, is_required: false, state, found, without, fix }
}

fn required(need: Need) -> Need {
    Need { is_required: true, ..need }
}

fn programs(config: &Config) -> Need {
    let absent: Vec<String> = [preflight::beside(preflight::DAEMON)]
        .into_iter()
        .chain(["coracle-pod", coracle_job::WORKER].map(|name| program(config, name)))
        .filter(|path| !path.is_file())
        .map(|path| format!("no {}", path.display()))
        .collect();
    let fix = "install coracled, coracle-pod and coracle-worker beside coracle; program_dir names another place of the last two";
    required(need("programs", "no pod can be started", fix, absent.is_empty(), absent.join(", ")))
}

fn writable_cgroups(mounts: &str) -> Need {
    let mut cgroups = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let is_writable = cgroups.any(|fields| {
        matches!(fields.get(2), Some(&("cgroup" | "cgroup2")))
            && fields.get(3).is_some_and(|options| options.split(',').any(|option| option == "rw"))
    });
    let fix = "run outside a container, or with its cgroups writable";
    required(need("writable cgroups", "no pod can be made", fix, is_writable, String::new()))
}

fn cgroup_driver(refused: Option<String>) -> Need {
    let fix = "cgroup.driver = \"cgroupfs\", also in the kubelet";
    required(need(
        "cgroup driver",
        "the daemon does not start",
        fix,
        refused.is_none(),
        refused.unwrap_or_default(),
    ))
}

/// A directory, which may not exist yet, and its file system.
struct DataDirectory {
    path: PathBuf,
    kind: String,
    is_read_only: bool,
    bytes: u64,
    bytes_free: u64,
    inodes: u64,
    inodes_free: u64,
}

impl DataDirectory {
    fn of(path: &Path, mounts: &str) -> DataDirectory {
        let path = path.ancestors().find(|one| one.is_dir()).unwrap_or(Path::new("/"));
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let kind = kind_of(&path, mounts);
        // If the free space is unknown it counts as full; the line names the error.
        let Ok(about) = statvfs(&path) else {
            let (bytes, bytes_free, inodes, inodes_free) = (0, 0, 0, 0);
            return DataDirectory { path, kind, is_read_only: true, bytes, bytes_free, inodes, inodes_free };
        };
        DataDirectory {
            is_read_only: about.f_flag.contains(StatVfsMountFlags::RDONLY),
            bytes: about.f_blocks.saturating_mul(about.f_frsize),
            bytes_free: about.f_bavail.saturating_mul(about.f_frsize),
            inodes: about.f_files,
            inodes_free: about.f_favail,
            path,
            kind,
        }
    }

    fn describe(&self) -> String {
        let mode = if self.is_read_only { ", read-only" } else { "" };
        format!("{} on {}{mode}", self.kind, self.path.display())
    }
}

/// The type of the mount that contains `path`: the last one with the longest matching mount point.
fn kind_of(path: &Path, mounts: &str) -> String {
    let mut best = (0, "");
    for line in mounts.lines() {
        let mut fields = line.split(' ').skip(1);
        let (Some(point), Some(kind)) = (fields.next(), fields.next()) else { continue };
        // Spaces in mount points are written as \040.
        let point = point.replace("\\040", " ");
        if path.starts_with(&point) && point.len() >= best.0 {
            best = (point.len(), kind);
        }
    }
    best.1.to_owned()
}

fn file_system_of_root(root: &DataDirectory) -> Need {
    let is_bad = root.is_read_only || BAD.contains(&root.kind.as_str());
    let fix = match root.is_read_only {
        true => "see dmesg (the kernel remounts after an I/O error), repair it, mount it writable",
        false => "set root to a directory on a writable ext4, xfs, btrfs or f2fs",
    };
    let mut need =
        need("file system of root", "no container has a writable root", fix, !is_bad, root.describe());
    if !is_bad && !GOOD.contains(&root.kind.as_str()) {
        need.state = State::Unknown;
    }
    required(need)
}

fn state_is_writable(state: &DataDirectory) -> Need {
    let fix = "set state to a writable directory";
    required(need("file system of state", "no pod can be made", fix, !state.is_read_only, state.describe()))
}

fn space(root: &DataDirectory) -> Need {
    // Some file systems allocate inodes dynamically and report a total of zero.
    let has_inodes = root.inodes == 0 || root.inodes_free >= root.inodes / 20;
    let has_bytes = root.bytes_free >= FREE_BYTES_MIN && root.bytes_free >= root.bytes / 20;
    let found = format!(
        "{} of {} MiB and {} of {} inodes are free on {}",
        root.bytes_free >> 20,
        root.bytes >> 20,
        root.inodes_free,
        root.inodes,
        root.path.display()
    );
    let without = "pulls will fail and the kubelet will evict pods";
    let fix = "make room: 256 MiB, and a twentieth of bytes and inodes (`coracle image prune`)";
    need("space in root", without, fix, has_bytes && has_inodes, found)
}

fn state_on_tmpfs(state: &DataDirectory) -> Need {
    let fix = "set state to a directory of a tmpfs: /run";
    need(
        "state in memory",
        "flash wears by what no reboot needs",
        fix,
        state.kind == "tmpfs",
        state.describe(),
    )
}

/// Checks idmapped mounts by creating one with a short-lived process, as the daemon does at its start.
fn idmapped(root: &DataDirectory) -> Need {
    let answer = probe::user_namespaces(&root.path);
    let fix = "Linux 5.19 and a file system that maps owners: ext4, xfs, btrfs, f2fs";
    let found = answer.as_ref().err().cloned().unwrap_or_default();
    need("mapped owners in root", "no pods with hostUsers=false", fix, answer.is_ok(), found)
}

fn cni_network(survey: &Result<coracle_network::Survey, String>) -> Need {
    let found = match survey {
        Ok(coracle_network::Survey { name, file: Some(file), .. }) => {
            format!("network {name} of {}", file.display())
        }
        Ok(network) => network.name.clone(),
        Err(why) => why.clone(),
    };
    let problem = survey.as_ref().ok().and_then(|network| network.problem.as_deref());
    let found = problem.map_or(found.clone(), |problem| format!("{found}, but {problem}"));
    let without = "NetworkReady is false: the kubelet runs only pods on the node's network";
    let fix = "install the cluster's network (a file in cni.conf_dir), or network.default = \"builtin\"";
    need("CNI network", without, fix, survey.is_ok(), found)
}

fn cni_plugins(survey: &Result<coracle_network::Survey, String>) -> Need {
    let missing = survey.as_ref().map_or(Vec::new(), |network| network.missing.clone());
    let found = if missing.is_empty() { String::new() } else { format!("no {}", missing.join(", ")) };
    let fix = "install them in a directory of cni.bin_dirs";
    let mut need = need("CNI plugins", "no pod gets a network of its own", fix, missing.is_empty(), found);
    if survey.is_err() {
        need.state = State::Unknown;
    }
    need
}

/// Checks the registry configuration files with a worker, which also reads them for a pull, because this program has no parser
/// for them.
fn registries(config: &Config) -> Need {
    let without = "its bad entries do not count, and pulls with a bad certificate fail";
    let fix = "correct it; [registry] says where the files are";
    let path = &config.registry.config;
    let checked = preflight::registries(config);
    let found = match &checked {
        Ok(()) if path.exists() => path.display().to_string(),
        Ok(()) => format!("no {}: registries are asked directly", path.display()),
        Err(why) => why.clone(),
    };
    need("registries file", without, fix, checked.is_ok(), found)
}

fn streaming_certificate(config: &Config) -> Need {
    let checked = preflight::streaming_certificate(config);
    let found = match (&checked, &config.streaming.certificate) {
        (Ok(()), Some(path)) => path.display().to_string(),
        (Ok(()), None) => {
            "none is configured: exec, attach and port-forward are served on plain HTTP".to_owned()
        }
        (Err(why), _) => why.clone(),
    };
    let fix = "correct streaming.tls_cert_file and streaming.tls_key_file";
    need("streaming certificate", "exec, attach and port-forward fail", fix, checked.is_ok(), found)
}

fn site_key(config: &Config) -> Need {
    let checked = preflight::site_key(config);
    let found = match (&checked, &config.mirror.key_file) {
        (Ok(()), Some(path)) => path.display().to_string(),
        (Ok(()), None) => "none is configured".to_owned(),
        (Err(why), _) => why.clone(),
    };
    let without = "the node passes no images to its neighbours and gets none from them";
    need("key of the site", without, "correct mirror.key_file", checked.is_ok(), found)
}

fn image_policy(config: &Config) -> Need {
    let checked = preflight::image_policy(config);
    let policy = &config.image.policy;
    let paths: Vec<_> = [&policy.file, &policy.verifiers].into_iter().flatten().collect();
    let found = match &checked {
        Ok(()) if paths.is_empty() => "none is configured: images are not judged".to_owned(),
        Ok(()) => paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
        Err(why) => why.clone(),
    };
    let fix = "correct what image.policy names";
    need("image policy", "no image is pulled, or imported", fix, checked.is_ok(), found)
}

/// Checks the configuration for values that the daemon refuses on any host.
fn configuration(config: &Config) -> Need {
    let mistakes = preflight::mistakes(config);
    let fix = "correct it; coracle config check names the same";
    required(need(
        "configuration",
        "the daemon does not start",
        fix,
        mistakes.is_empty(),
        mistakes.join("; "),
    ))
}

fn sysctl(name: &'static str, value: Option<u64>) -> Need {
    let fix = "sysctl net.ipv4.ip_forward=1";
    need(name, "pods reach nothing beyond their node", fix, value == Some(1), String::new())
}

/// Checks the sysctl of bridges. A missing file means that the module is missing, which is a separate requirement.
fn bridge_sysctl(value: Option<u64>) -> Need {
    let without = "services do not reach pods of their own node";
    let fix = "modprobe br_netfilter, sysctl net.bridge.bridge-nf-call-iptables=1";
    need("bridge-nf-call-iptables", without, fix, value == Some(1), String::new())
}

fn clock(seconds: u64) -> Need {
    let found = if seconds < CLOCK_MIN { "it is before 2026" } else { "" };
    let without = "certificates of registries look not yet valid, so pulls fail";
    need("clock", without, "set it: NTP, or a real-time clock", seconds >= CLOCK_MIN, found.into())
}

fn randomness(bits: Option<u64>) -> Need {
    let is_seeded = bits.is_none_or(|bits| bits >= RANDOM_BITS_MIN);
    let fix = "a hardware generator, or CONFIG_RANDOM_TRUST_CPU";
    need("random numbers", "the first ids wait for the kernel's generator", fix, is_seeded, String::new())
}

fn open_files(hard: u64) -> Need {
    let found = format!("{hard} at most, for this shell");
    let without = "pods and streams at once are bounded by it";
    need("open files", without, "LimitNOFILE= of the unit, ulimit -Hn", hard >= FILES_MIN, found)
}

fn selinux(wanted: Selinux, policy: Option<Result<lsm::Policy, String>>) -> Need {
    let without = "containers have no labels of their own, and what needs them is denied";
    let fix = "a policy with types for containers (container-selinux), or boot with selinux=0";
    let (is_met, found) = match (wanted, policy) {
        (Selinux::Off, Some(_)) => (false, "security.selinux is off".to_owned()),
        (Selinux::Required, None) => {
            (false, "security.selinux requires it, and this kernel has none".to_owned())
        }
        (_, None) => (true, "SELinux is not on".to_owned()),
        (_, Some(Ok(policy))) => (true, format!("{}, {}", policy.process_type(), policy.file_type())),
        (_, Some(Err(why))) => (false, why),
    };
    need("SELinux labels", without, fix, is_met, found)
}

fn no_other_runtime(others: &[(&str, &str)], nri: Option<&Path>) -> Need {
    let mut found: Vec<String> =
        others.iter().map(|(name, path)| format!("{name} serves at {path}")).collect();
    found.extend(nri.map(|path| format!("another runtime serves NRI plugins at {}", path.display())));
    let without = "two runtimes share CNI's addresses and the disk, and see nothing of each other";
    let fix = "stop what the kubelet does not use, or set nri.socket_path";
    need("no other runtime", without, fix, found.is_empty(), found.join(", "))
}

/// Checks for a running daemon: a daemon with this configuration is no problem; a daemon with the same root or state
/// directory and another socket prevents a start.
fn daemon(is_serving: bool, holder: Option<String>, listen: &Path) -> Need {
    let is_met = is_serving || holder.is_none();
    let found = match (is_serving, holder) {
        (true, _) => format!("a daemon answers at {}", listen.display()),
        (false, None) => "none runs".to_owned(),
        (false, Some(holder)) => format!("{holder} and does not answer at {}", listen.display()),
    };
    let (without, fix) = ("a second one does not start", "stop it, or give listen as it was given there");
    need("one daemon on root and state", without, fix, is_met, found)
}

fn text(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn number(path: &str) -> Option<u64> {
    text(path).trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "proc /proc proc rw 0 0\n/dev/vda / ext4 rw,relatime 0 0\ntmpfs /run tmpfs rw 0 0\n\
        /dev/sda /srv/two\\040words vfat rw 0 0\noverlay / overlay rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 ro,nosuid 0 0\n";

    fn directory(kind: &str, is_read_only: bool, mib_free: u64) -> DataDirectory {
        DataDirectory {
            path: "/x".into(),
            kind: kind.into(),
            is_read_only,
            bytes: 1 << 30,
            bytes_free: mib_free << 20,
            inodes: 100,
            inodes_free: 50,
        }
    }

    #[test]
    fn a_path_is_on_the_last_and_deepest_mount() {
        for (path, expected) in [
            ("/var", "overlay"),
            ("/run/coracle", "tmpfs"),
            ("/runner", "overlay"),
            ("/srv/two words/x", "vfat"),
        ] {
            assert_eq!(kind_of(Path::new(path), MOUNTS), expected, "{path}");
        }
        assert_eq!(kind_of(Path::new("/"), ""), "");
    }

    #[test]
    fn cgroups_must_be_writable() {
        assert_eq!(writable_cgroups(MOUNTS).state, State::Missing);
        let hybrid = format!("{MOUNTS}cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n");
        assert_eq!(writable_cgroups(&hybrid).state, State::Have);
    }

    #[test]
    fn a_driver_that_the_daemon_refuses_is_missing() {
        let refused = cgroup_driver(Some("no systemd".into()));
        assert_eq!((refused.state, refused.is_required), (State::Missing, true));
        assert_eq!(cgroup_driver(None).state, State::Have);
    }

    #[test]
    fn file_systems_are_supported_unsupported_or_unknown() {
        let cases = [
            (directory("ext4", false, 900), State::Have),
            (directory("ext4", true, 900), State::Missing),
            (directory("overlay", false, 900), State::Missing),
            (directory("zfs", false, 900), State::Unknown),
        ];
        for (directory, expected) in cases {
            let need = file_system_of_root(&directory);
            assert_eq!((need.state, need.is_required), (expected, true), "{}", need.found);
        }
        assert_eq!(file_system_of_root(&directory("ext4", true, 1)).found, "ext4 on /x, read-only");
        assert_eq!(state_on_tmpfs(&directory("tmpfs", false, 1)).state, State::Have);
        assert_eq!(state_on_tmpfs(&directory("ext4", false, 1)).state, State::Missing);
    }

    #[test]
    fn a_disk_without_free_bytes_or_inodes_is_reported() {
        assert_eq!(space(&directory("ext4", false, 900)).state, State::Have);
        let full = space(&directory("ext4", false, 255));
        assert_eq!(full.state, State::Missing);
        assert_eq!(full.found, "255 of 1024 MiB and 50 of 100 inodes are free on /x");
        assert_eq!(
            space(&DataDirectory { inodes_free: 4, ..directory("ext4", false, 900) }).state,
            State::Missing
        );
        assert_eq!(
            space(&DataDirectory { inodes: 0, inodes_free: 0, ..directory("btrfs", false, 900) }).state,
            State::Have
        );
    }

    #[test]
    fn limits_clock_and_other_runtimes_have_a_state() {
        let cases = [
            (clock(0), State::Missing),
            (clock(CLOCK_MIN), State::Have),
            (randomness(Some(17)), State::Missing),
            (randomness(Some(256)), State::Have),
            (randomness(None), State::Have),
            (open_files(1024), State::Missing),
            (open_files(1 << 20), State::Have),
            (sysctl("x", Some(0)), State::Missing),
            (sysctl("x", Some(1)), State::Have),
            (bridge_sysctl(None), State::Missing),
            (no_other_runtime(&[], None), State::Have),
            (no_other_runtime(&OTHERS[..1], None), State::Missing),
            (no_other_runtime(&[], Some(Path::new("/n"))), State::Missing),
            (daemon(true, Some("a daemon holds /x".into()), Path::new("/s")), State::Have),
            (daemon(false, None, Path::new("/s")), State::Have),
            (daemon(false, Some("a daemon holds /x".into()), Path::new("/s")), State::Missing),
        ];
        for (need, expected) in cases {
            assert_eq!(need.state, expected, "{} {}", need.name, need.found);
            assert!(!need.is_required, "{}", need.name);
        }
    }

    #[test]
    fn the_socket_for_cadvisor_is_not_another_runtime() {
        let dir = coracle_base::testdir::TestDir::new("server");
        let path = dir.path().join("sock");
        assert_eq!(server(&path), None);
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(server(&path), Some(std::process::id() as i32));
        let at_containerd = |pid: i32| move |path: &Path| (path == Path::new(OTHERS[0].1)).then_some(pid);
        assert_eq!(others(Some(7), &at_containerd(7)), []);
        assert_eq!(others(Some(7), &at_containerd(8)), OTHERS[..1]);
        assert_eq!(others(None, &at_containerd(8)), OTHERS[..1]);
    }

    #[test]
    fn the_page_on_check_lists_every_requirement() {
        let page = include_str!("../../../../docs/check.md");
        let rows = page
            .lines()
            .filter_map(|line| line.strip_prefix("| "))
            .map(|row| row.split(" | ").collect::<Vec<_>>());
        let listed: Vec<(String, bool)> = rows
            .skip_while(|row| row[0] != "requirement")
            .skip(1)
            .map(|row| (row[0].to_owned(), row[1] == "yes"))
            .collect();
        let own: Vec<(String, bool)> =
            needs(&Config::default()).iter().map(|need| (need.name.to_owned(), need.is_required)).collect();
        assert_eq!(listed, own);
    }
}
