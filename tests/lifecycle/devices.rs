//! Devices: nodes given by path, and CDI devices given by name.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use coracle_tests::cri::proto::{CdiDevice, ContainerConfig, Device, Int64Value, Mount, PodSandboxConfig};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, exec, host_pod, mapped, pod_namespaces, security, user_namespace};
use coracle_tests::vendor;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use tonic::Code;

fn device(host_path: &str, container_path: &str, permissions: &str) -> Device {
    Device {
        host_path: host_path.into(),
        container_path: container_path.into(),
        permissions: permissions.into(),
    }
}

fn names(config: &mut ContainerConfig, names: &[&str]) {
    config.cdi_devices = names.iter().map(|name| CdiDevice { name: (*name).into() }).collect();
}

/// A spec file of one vendor, whose library is in the directory LIBRARY. The host has no nodes of the device `numbered`.
const SPEC: &str = "cdiVersion: '0.8.0'
kind: vendor.test/radio
devices:
- name: one
  containerEdits:
    env: [RADIO=one, OVERRIDDEN=cdi]
    deviceNodes: [{path: /dev/radio, hostPath: /dev/kmsg, permissions: rw}]
    mounts: [{hostPath: LIBRARY/library, containerPath: /usr/lib/radio, options: [ro, nosuid]}]
    additionalGids: [4711]
- name: numbered
  containerEdits:
    deviceNodes:
    - {path: /dev/radio-log, type: c, major: 1, minor: 11, permissions: w}
    - {path: /tmp/radio-disk, type: b, major: 7, minor: 201, permissions: r}
- name: owned
  containerEdits:
    deviceNodes:
    - {path: /dev/named, hostPath: /dev/kmsg, fileMode: 0640, uid: 5, gid: 6}
    - {path: /dev/default, type: c, major: 1, minor: 11}
    - {path: /dev/both, hostPath: /dev/kmsg, fileMode: 0400}
    - {path: /dev/both, hostPath: /dev/kmsg, fileMode: 8576, uid: 0}
";

/// A node with a CDI directory that is named after the test, which contains one vendor's file.
struct Vendor {
    fixture: PodFixture,
    folder: PathBuf,
}

impl Vendor {
    fn new(test: &str, pod: PodSandboxConfig) -> Vendor {
        let folder = std::env::temp_dir().join(format!("coracle-cdi-{test}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a directory");
        fs::write(folder.join("library"), "of the vendor\n").expect("a file");
        let spec = SPEC.replace("LIBRARY", &folder.display().to_string());
        fs::write(folder.join("radio.yaml"), spec).expect("a file");
        fs::write(folder.join("broken.json"), "{").expect("a file");
        let config = format!("[cdi]\nspec_dirs = [{:?}]\n", folder.display().to_string());
        let fixture = PodFixture::on(Node::with(Options { config, ..Options::default() }), pod);
        Vendor { fixture, folder }
    }

    /// Output of the probe in the container, and its error.
    fn says(&self, container: &str, words: &[&str]) -> String {
        let answer = self.fixture.node.exec_sync(exec(container, words, 10)).expect("exec");
        String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned()
    }

    fn stop(self) {
        self.fixture.node.stop();
        fs::remove_dir_all(&self.folder).expect("it is ours");
    }
}

#[test]
fn a_cdi_device_applies_its_container_edits() {
    let vendor = Vendor::new("edits", host_pod("devices"));
    let fixture = &vendor.fixture;
    let mut config = fixture.config("one", &["sleep", "forever"]);
    names(&mut config, &["vendor.test/radio=one"]);
    let id = fixture.run(&config);
    let says = |words: &[&str]| vendor.says(&id, words);
    assert!(says(&["stat", "/dev/radio"]).starts_with("20"), "a character device");
    assert_eq!(says(&["cat", "/usr/lib/radio"]), "of the vendor\n");
    let seen = says(&["see", "env", "ids"]);
    for line in ["RADIO=one", "OVERRIDDEN=cdi", "4711"] {
        assert!(seen.contains(line), "no {line} in {seen}");
    }
    // The status contains only what was requested.
    assert!(fixture.node.container(&id).mounts.is_empty());
    // The older way, with an annotation.
    let mut config = fixture.config("two", &["stat", "/dev/radio"]);
    config.annotations.insert("cdi.k8s.io/plugin".into(), "vendor.test/radio=one".into());
    let id = fixture.run(&config);
    assert_eq!(fixture.node.exited(&id).exit_code, 0, "{}", fixture.node.output(&id));
    // An unknown device, or one that was removed from the file: the file is read each time.
    let mut config = fixture.config("three", &["true"]);
    names(&mut config, &["vendor.test/radio=two"]);
    let refused =
        fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err("absent");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("unresolvable CDI devices vendor.test/radio=two"), "{refused}");
    vendor.stop();
}

/// NVIDIA's hooks make links to mounted libraries and the linker's cache of them before pivot_root. Regression: the mounts followed
/// later, and hooks of the runtime's namespaces found an empty directory instead of the root.
#[test]
fn hooks_of_a_cdi_device_find_its_mounts_below_the_root() {
    for (name, pod) in [("plain", host_pod("devices")), ("mapped", mapped(host_pod("devices"), 300_000))] {
        let vendor = Vendor::new(&format!("hooks-{name}"), pod.clone());
        vendor::write(&vendor.folder, &vendor.folder, false);
        let mut config = vendor.fixture.config("one", &["sleep", "forever"]);
        names(&mut config, &[vendor::DEVICE]);
        let volume = vendor.folder.join("volume");
        fs::create_dir(&volume).expect("a directory");
        config.mounts.push(Mount {
            container_path: "/volume".into(),
            host_path: volume.display().to_string(),
            ..Default::default()
        });
        config.tty = true;
        let context = security(&mut config);
        context.readonly_rootfs = true;
        context.masked_paths = vec!["/proc/keys".into()];
        context.readonly_paths = vec!["/proc/sys".into()];
        context.namespace_options = pod.linux.and_then(|linux| linux.security_context?.namespace_options);
        let id = vendor.fixture.run(&config);
        let root = PathBuf::from(format!("/proc/{}/root", vendor.fixture.node.container_pid(&id)));
        for (point, place) in [("createRuntime", "bundle"), ("createContainer", "root")] {
            let said = fs::read_link(root.join(format!("said-by-{point}"))).expect("the hook's link");
            let expected = format!("in the {place}: of the vendor, null 1:3, proc");
            assert_eq!(said.display().to_string(), expected, "{name}, {point}");
        }
        // What comes after the hooks is as without them.
        assert_eq!(vendor.says(&id, &["cat", "/opt/library"]), "of the vendor", "{name}");
        assert_eq!(vendor.says(&id, &["cat", "/proc/keys"]), "", "{name}: masked");
        for path in ["/file", "/proc/sys/kernel/domainname", "/opt/library"] {
            let refused = vendor.says(&id, &["write", path, "x"]);
            assert!(refused.contains("Read-only file system"), "{name}, {path}: {refused}");
        }
        vendor.stop();
    }
}

#[test]
fn a_cdi_device_with_kind_and_numbers_needs_no_node_on_the_host() {
    let vendor = Vendor::new("numbers", host_pod("devices"));
    let mut config = vendor.fixture.config("one", &["sleep", "forever"]);
    names(&mut config, &["vendor.test/radio=numbered"]);
    let id = vendor.fixture.run(&config);
    let says = |words: &[&str]| vendor.says(&id, words);
    assert_eq!(says(&["stat", "/dev/radio-log"]), "20666 0 0 0\n");
    assert_eq!(says(&["stat", "/tmp/radio-disk"]), "60666 0 0 0\n");
    assert_eq!(says(&["write", "/dev/radio-log", "coracle: a_cdi_device_with_kind_and_numbers"]), "");
    let refused = says(&["write", "/tmp/radio-disk", "x"]);
    assert!(refused.contains("Operation not permitted"), "by the device cgroup: {refused}");
    vendor.stop();
}

#[test]
fn a_cdi_device_has_the_mode_and_owner_of_its_spec() {
    for is_mapped in [false, true] {
        let userns_options = is_mapped.then(|| user_namespace(300_000));
        let mut pod = host_pod("devices");
        pod_namespaces(&mut pod).userns_options = userns_options.clone();
        let vendor = Vendor::new(&format!("owners-{is_mapped}"), pod);
        let mut config = vendor.fixture.config("one", &["sleep", "forever"]);
        names(&mut config, &["vendor.test/radio=owned"]);
        // A requested device with the path of one of CDI is replaced by it.
        config.devices = ["/dev/asked", "/dev/named"].map(|path| device("/dev/kmsg", path, "rw")).to_vec();
        let security = security(&mut config);
        security.namespace_options.get_or_insert_default().userns_options = userns_options;
        security.run_as_user = Some(Int64Value { value: 1000 });
        security.run_as_group = Some(Int64Value { value: 2000 });
        let id = vendor.fixture.run(&config);
        let on_host = fs::metadata("/dev/kmsg").expect("a device").mode();
        for (path, expected) in [
            ("/dev/asked", format!("{on_host:o} 0 0 0\n")),
            ("/dev/named", "20640 5 6 0\n".to_owned()),
            // Without an owner in the file: that of the process.
            ("/dev/default", "20666 1000 2000 0\n".to_owned()),
            // The last of several with one path; tools write the file's kind into the mode, too.
            ("/dev/both", "20600 0 2000 0\n".to_owned()),
        ] {
            assert_eq!(vendor.says(&id, &["stat", path]), expected, "{path}, mapped: {is_mapped}");
        }
        vendor.stop();
    }
}

#[test]
fn a_device_node_has_the_requested_permissions() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("one", &["sleep", "forever"]);
    config.devices = vec![device("/dev/kmsg", "/dev/log-of-the-kernel", "r")];
    let id = fixture.run(&config);
    let about = fixture.node.exec_sync(exec(&id, &["stat", "/dev/log-of-the-kernel"], 10)).expect("exec");
    assert!(String::from_utf8_lossy(&about.stdout).starts_with("20"));
    let written =
        fixture.node.exec_sync(exec(&id, &["write", "/dev/log-of-the-kernel", "x"], 10)).expect("exec");
    assert!(String::from_utf8_lossy(&written.stderr).contains("not permitted"), "{written:?}");
    fixture.node.stop();
}

/// VPN programs open /dev/net/tun, which a pod has from a hostPath volume or makes itself: neither gives a device rule, so
/// the device is among the default ones, as in runc.
#[test]
fn the_tun_device_can_be_opened() {
    let fixture = PodFixture::start();
    let node = fixture.node.folder().join("tun");
    let (kind, mode) = (SFlag::S_IFCHR, Mode::from_bits_truncate(0o666));
    mknod(&node, kind, mode, makedev(10, 200)).expect("a node of the tun device");
    let mut config = fixture.config("vpn", &["cat", "/dev/net/tun"]);
    config.mounts = vec![Mount {
        host_path: node.display().to_string(),
        container_path: "/dev/net/tun".into(),
        ..Default::default()
    }];
    let id = fixture.run(&config);
    fixture.node.exited(&id);
    let said = fixture.node.output(&id);
    // Without an interface, reading gives EBADFD; the device cgroup refuses to open it with EPERM.
    assert!(said.contains("File descriptor in bad state"), "{said}");
    fixture.node.stop();
}

/// Regression: the default node was there in place of the requested one, and a requested "r" permitted writing.
#[test]
fn a_requested_device_replaces_the_default_node_or_link_at_its_path() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("one", &["sleep", "forever"]);
    config.devices = vec![
        device("/dev/urandom", "/dev/random", "rwm"),
        device("/dev/full", "/dev/full", "r"),
        device("/dev/zero", "/dev/stdin", "r"),
        device("/dev/zero", "/dev/ptmx", "rwm"),
    ];
    let id = fixture.run(&config);
    let says = |words: &[&str]| {
        let done = fixture.node.exec_sync(exec(&id, words, 10)).expect("exec");
        String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned()
    };
    let same = |path: &str, host: &str| {
        let pid = fixture.node.container_pid(&id);
        let inside = fs::symlink_metadata(format!("/proc/{pid}/root{path}")).expect("a node");
        assert_eq!(inside.rdev(), fs::metadata(host).expect("a device").rdev(), "{path}");
    };
    same("/dev/random", "/dev/urandom");
    same("/dev/full", "/dev/full");
    same("/dev/stdin", "/dev/zero");
    assert!(says(&["write", "/dev/full", "x"]).contains("Operation not permitted"));
    let pid = fixture.node.container_pid(&id);
    let ptmx = fs::read_link(format!("/proc/{pid}/root/dev/ptmx")).expect("a link");
    assert_eq!(ptmx, PathBuf::from("pts/ptmx"), "as in runc");
    fixture.node.stop();
}

/// Regression: the volume was refused, because the default link at its path leads to a process's own files.
#[test]
fn a_volume_replaces_the_default_link_at_its_path() {
    let fixture = PodFixture::start();
    let folder = fixture.node.folder().join("volume");
    fs::create_dir(&folder).expect("a volume");
    fs::write(folder.join("out"), "of the volume").expect("a file");
    let mount = |host: PathBuf, container: &str| Mount {
        host_path: host.display().to_string(),
        container_path: container.into(),
        ..Default::default()
    };
    let mut config = fixture.config("one", &["sleep", "forever"]);
    config.mounts = vec![mount(folder.join("out"), "/dev/stdout"), mount(folder, "/dev/fd")];
    let id = fixture.run(&config);
    for path in ["/dev/stdout", "/dev/fd/out"] {
        let done = fixture.node.exec_sync(exec(&id, &["cat", path], 10)).expect("exec");
        assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), "of the volume", "{path}: {done:?}");
    }
    fixture.node.stop();
}
