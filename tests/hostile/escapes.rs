//! Known container escapes: one test for each public mechanism, named by its CVE number (docs/security.md
//! describes each defence, and how each test failed without it).

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use coracle_tests::cri::proto::{ContainerConfig, ContainerState, ImageSpec, Mount, StartContainerRequest};
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::binaries;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, exec, host_pod, security};

/// Imports the probe's image with one more layer; returns its ID.
#[track_caller]
fn crafted(fixture: &PodFixture, name: &str, entries: &[Entry]) -> String {
    let layer = Layer::new(entries, Compression::Gzip);
    let image = Image::probe(&fixture.node.probe(), name).plus(layer);
    fixture.node.try_import(&image.oci_archive(&format!("example.test/{name}:1"))).expect("import");
    image.id()
}

fn from_image(fixture: &PodFixture, id: &str, name: &str, words: &[&str]) -> ContainerConfig {
    let mut config = fixture.config(name, words);
    config.image = Some(ImageSpec { image: id.into(), ..Default::default() });
    config
}

/// Mounts a directory of the node.
fn mount(fixture: &PodFixture, config: &mut ContainerConfig, name: &str, target: &str) -> PathBuf {
    let path = fixture.node.folder().join(name);
    fs::create_dir_all(&path).expect("a directory");
    let host_path = path.display().to_string();
    config.mounts.push(Mount { container_path: target.into(), host_path, ..Default::default() });
    path
}

/// Sets the kubelet's default masked and read-only paths.
fn protected(config: &mut ContainerConfig) {
    security(config).masked_paths =
        ["/proc/interrupts", "/proc/keys", "/sys/firmware"].map(String::from).to_vec();
    security(config).readonly_paths = ["/proc/sys", "/proc/sysrq-trigger"].map(String::from).to_vec();
}

/// Output and errors of the probe in a running container.
#[track_caller]
fn says(fixture: &PodFixture, container: &str, words: &[&str]) -> String {
    let answer = fixture.node.exec_sync(exec(container, words, 10)).expect("exec");
    String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned()
}

/// The runtime's program cannot be overwritten through /proc/PID/exe from inside: neither the monitor that is
/// PID 1 of a shared PID namespace nor what is executed as `/proc/self/exe`.
#[test]
fn cve_2019_5736_the_program_cannot_be_overwritten_from_inside() {
    use coracle_tests::cri::proto::NamespaceMode;
    let mut pod = host_pod("shared");
    let linux = pod.linux.as_mut().expect("set");
    let options = linux.security_context.as_mut().and_then(|context| context.namespace_options.as_mut());
    options.expect("set").pid = NamespaceMode::Pod.into();
    let fixture = PodFixture::with(pod);
    let before = fs::read(binaries().join("coracle-pod")).expect("the program");
    let mut config = fixture.config("itself", &[]);
    config.command = vec!["/proc/self/exe".into()];
    let itself = fixture.create(&config);
    let _ = fixture.node.start_container(StartContainerRequest { container_id: itself.clone() });
    let mut config = fixture.config("attacker", &["sleep", "forever"]);
    security(&mut config).capabilities = Some(coracle_tests::cri::proto::Capability {
        add_capabilities: vec!["ALL".into()],
        ..Default::default()
    });
    let attacker = fixture.run(&config);
    for pid in ["1", "self"] {
        let said = says(&fixture, &attacker, &["write", &format!("/proc/{pid}/exe"), "#!/bin/sh\n"]);
        assert!(said.contains("write /proc/"), "{said}");
    }
    // Even through a descriptor of the host's root the monitor's program cannot be written.
    for monitor in fixture.node.monitors() {
        let exe = PathBuf::from(format!("/proc/{}/exe", monitor.pid));
        let target = fs::read_link(&exe).expect("it runs");
        assert!(target.display().to_string().contains("memfd"), "{target:?} is a file");
        assert!(fs::OpenOptions::new().write(true).open(&exe).is_err(), "it can be written");
    }
    assert_eq!(fs::read(binaries().join("coracle-pod")).expect("the program"), before);
    fixture.node.stop();
}

/// No descriptor of the host is open that could be used as the working directory.
#[test]
fn cve_2024_21626_no_descriptor_as_working_directory() {
    let fixture = PodFixture::start();
    for number in 0..24 {
        let mut config = fixture.config(&format!("fd{number}"), &["ls", "."]);
        config.working_dir = format!("/proc/self/fd/{number}");
        let id = fixture.create(&config);
        let refused = fixture.node.start_container(StartContainerRequest { container_id: id });
        assert!(refused.is_err(), "descriptor {number} is a directory to start in");
    }
    // Only the standard streams are open.
    let report = fixture.output(&["see", "fds"], |_| ());
    assert_eq!(report.lines().filter(|line| line.starts_with("fds ")).count(), 3, "{report}");
    fixture.node.stop();
}

/// Neither a link nor a volume can replace the kernel's files, on which masks and limits depend.
#[test]
fn cve_2019_16884_and_2023_28642_images_cannot_replace_masks() {
    let fixture = PodFixture::start();
    let linked = [Entry::directory("elsewhere", 0o755), Entry::symlink("proc", "/elsewhere")];
    let id = crafted(&fixture, "linked", &linked);
    let mut config = from_image(&fixture, &id, "linked", &["sleep", "forever"]);
    protected(&mut config);
    let container = fixture.create(&config);
    let refused = fixture.node.start_container(StartContainerRequest { container_id: container });
    let refused = refused.expect_err("the kernel's files would be elsewhere");
    assert!(refused.message().contains("mount proc on /proc: not a directory"), "{refused}");
    // A volume cannot replace the kernel's files, either, however its path is written.
    for path in ["/proc", "/proc/sys", "/proc/self/attr", "/tmp/../proc", "/../proc/./sys", "//proc//1"] {
        let mut config = fixture.config("volume", &["true"]);
        mount(&fixture, &mut config, "fake", path);
        let refused =
            fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err(path);
        assert!(refused.message().contains("proc"), "{path}: {refused}");
    }
    // Nor can it replace the root directory.
    for path in ["/", "/.", "//", "/tmp/.."] {
        let mut config = fixture.config("root", &["true"]);
        mount(&fixture, &mut config, "fake", path);
        let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        let Ok(made) = made else { continue };
        let start = StartContainerRequest { container_id: made.container_id };
        assert!(fixture.node.start_container(start).is_err(), "{path:?} took a volume for the root");
    }
    fixture.node.stop();
}

/// Writes during the set-up go to the kernel's files and not to files of the image with the same names.
#[test]
fn cve_2025_52881_writes_cannot_be_redirected() {
    let fixture = PodFixture::start();
    let fakes = [
        Entry::directory("proc", 0o755),
        Entry::directory("proc/self", 0o755),
        Entry::file("proc/self/oom_score_adj", b"fake"),
        Entry::directory("proc/self/attr", 0o755),
        Entry::symlink("proc/self/attr/exec", "/proc/sysrq-trigger"),
    ];
    let id = crafted(&fixture, "fakes", &fakes);
    let mut config = from_image(&fixture, &id, "fakes", &["sleep", "forever"]);
    config.linux.as_mut().expect("set").resources =
        Some(coracle_tests::cri::proto::LinuxContainerResources { oom_score_adj: 777, ..Default::default() });
    let container = fixture.run(&config);
    let pid = fixture.node.container_pid(&container);
    let real = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("it lives");
    assert_eq!(real.trim(), "777");
    let layers = fs::read_dir(fixture.node.root().join("layers")).expect("layers");
    let fakes: Vec<String> = layers
        .flatten()
        .filter_map(|layer| fs::read_to_string(layer.path().join("proc/self/oom_score_adj")).ok())
        .collect();
    assert_eq!(fakes, ["fake"]);
    fixture.node.stop();
}

/// Two containers share a volume; one permanently exchanges a directory and a link to the root, while others
/// are started with a mount on that path. The mount is always within their own root.
#[test]
fn cve_2021_30465_a_race_for_the_mount_target_stays_inside() {
    let fixture = PodFixture::start();
    let shared = fixture.node.folder().join("shared");
    fs::create_dir_all(shared.join("target")).expect("a directory");
    symlink("/../../../../../..", shared.join("other")).expect("a link");
    let canary = fixture.node.folder().join("canary");
    fs::create_dir_all(&canary).expect("a directory");
    fs::write(canary.join("planted"), "x").expect("a file");
    let mut config = fixture.config("swapper", &["swap", "/shared/target", "/shared/other"]);
    mount(&fixture, &mut config, "shared", "/shared");
    fixture.run(&config);
    let host_mounts = host::mounts("canary").len();
    let mut started = 0;
    for round in 0..40 {
        let mut config = fixture.config(&format!("victim{round}"), &["sleep", "forever"]);
        mount(&fixture, &mut config, "shared", "/shared");
        mount(&fixture, &mut config, "canary", "/shared/target");
        let id = fixture.create(&config);
        if fixture.node.start_container(StartContainerRequest { container_id: id.clone() }).is_err() {
            continue; // it lost the race, which is fine
        }
        started += 1;
        // The link leads to the container's own root, which must not be covered.
        let said = says(&fixture, &id, &["ls", "/"]);
        assert!(said.contains("probe") && !said.contains("planted"), "round {round}: {said}");
        assert_eq!(host::mounts("canary").len(), host_mounts, "round {round}: a mount on the node");
        assert!(!Path::new("/planted").exists());
    }
    assert!(started > 0, "no container ever started: nothing was shown");
    fixture.node.stop();
}

/// A volume on /dev with a link instead of `null`: masks use the node's own device.
#[test]
fn cve_2025_31133_masks_do_not_come_from_the_container() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("masked", &["sleep", "forever"]);
    protected(&mut config);
    let dev = mount(&fixture, &mut config, "dev", "/dev");
    symlink("/proc/sys/kernel/core_pattern", dev.join("null")).expect("a link");
    let container = fixture.run(&config);
    // The mask is device 1:3 and not the target of the link.
    let masked = says(&fixture, &container, &["stat", "/proc/interrupts"]);
    assert!(masked.starts_with("20666 "), "{masked}");
    assert_eq!(says(&fixture, &container, &["cat", "/proc/keys"]), "");
    let said = says(&fixture, &container, &["write", "/proc/sys/kernel/core_pattern", "|/evil"]);
    assert!(said.contains("Read-only file system"), "{said}");
    fixture.node.stop();
}

/// A link instead of /dev/console: nothing is mounted at its target.
#[test]
fn cve_2025_52565_a_link_at_the_console_is_not_followed() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("console", &["sleep", "forever"]);
    protected(&mut config);
    config.tty = true;
    let dev = mount(&fixture, &mut config, "dev", "/dev");
    symlink("/proc/sys/kernel/core_pattern", dev.join("console")).expect("a link");
    // The terminals are the container's own, on a volume that contains only their directory.
    fs::create_dir_all(dev.join("pts")).expect("a directory");
    config.mounts.push(Mount {
        container_path: "/dev/pts".into(),
        host_path: "/dev/pts".into(),
        ..Default::default()
    });
    let container = fixture.create(&config);
    let refused = fixture.node.start_container(StartContainerRequest { container_id: container.clone() });
    let refused = refused.expect_err("the terminal would cover the kernel's file");
    assert!(refused.message().contains("make the terminal: too many symbolic links"), "{refused}");
    assert_ne!(fixture.node.container(&container).state, i32::from(ContainerState::ContainerRunning));
    fixture.node.stop();
}

/// Root in a container without further capabilities cannot make the kernel execute a program through a
/// cgroup.
#[test]
fn cve_2022_0492_release_agents_cannot_be_set() {
    let fixture = PodFixture::start();
    let container = fixture.run(&fixture.config("agent", &["sleep", "forever"]));
    let names = says(&fixture, &container, &["ls", "/sys/fs/cgroup"]);
    let mut tried = 0;
    for name in names.lines() {
        for file in ["release_agent", "notify_on_release", "cgroup.procs"] {
            let path = format!("/sys/fs/cgroup/{name}/{file}");
            let said = says(&fixture, &container, &["write", &path, "1"]);
            assert!(!said.is_empty(), "{path} was written");
            tried += 1;
        }
    }
    assert!(tried > 0, "there is a cgroup file system");
    fixture.node.stop();
}

/// A container on the node's network can see its abstract sockets: coracle has none.
#[test]
fn cve_2020_15257_coracle_has_no_abstract_sockets() {
    let fixture = PodFixture::start();
    let container = fixture.run(&fixture.config("net", &["sleep", "forever"]));
    let ours: Vec<String> = fixture
        .node
        .monitors()
        .into_iter()
        .map(|monitor| monitor.pid)
        .chain([fixture.node.pid()])
        .flat_map(host::open_files)
        .filter_map(|(_, link)| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    assert!(!ours.is_empty(), "they hold sockets");
    let seen = says(&fixture, &container, &["cat", "/proc/net/unix"]);
    assert!(seen.lines().count() > 1, "it is on the node's network: {seen}");
    for line in seen.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (inode, name) = (words.get(6).copied().unwrap_or(""), words.get(7).copied().unwrap_or(""));
        assert!(!(name.starts_with('@') && ours.iter().any(|own| own == inode)), "{line}");
    }
    // Sockets with paths are accessible to root only.
    for socket in [fixture.node.socket(), fixture.node.state().join("control.sock")] {
        if let Ok(about) = fs::metadata(&socket) {
            assert_eq!((about.uid(), about.permissions().mode() & 0o007), (0, 0), "{}", socket.display());
        }
    }
    fixture.node.stop();
}
