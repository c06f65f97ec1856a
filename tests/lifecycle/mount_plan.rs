//! The order of a container's mounts, which images must not defeat: image volumes, links at the targets of
//! mounts, masks (findings 1, 5 and 16 in docs/results/0.1.0.md).

use std::fs;
use std::path::PathBuf;

use coracle_tests::cri::proto::{
    ContainerConfig, DnsConfig, ImageSpec, Mount, MountPropagation, StartContainerRequest,
};
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, exec, fresh, host_pod, mapped, security};
use serde_json::{Map, json};
use tonic::{Code, Status};

/// A container of the probe's image with these additional entries and these image volumes. It has the
/// kubelet's masked and read-only paths.
#[track_caller]
fn crafted(
    fixture: &PodFixture,
    entries: &[Entry],
    volumes: &[&str],
    change: impl FnOnce(&mut ContainerConfig),
) -> ContainerConfig {
    let name = format!("crafted-{}", fresh());
    let volumes: Map<_, _> = volumes.iter().map(|path| ((*path).to_owned(), json!({}))).collect();
    let image = Image::probe(&fixture.node.probe(), &name)
        .plus(Layer::new(entries, Compression::Gzip))
        .with("Volumes", volumes.into());
    fixture.node.try_import(&image.oci_archive(&format!("example.test/{name}:1"))).expect("import");
    let mut config = fixture.config(&name, &["sleep", "forever"]);
    config.image = Some(ImageSpec { image: image.id(), ..Default::default() });
    let context = security(&mut config);
    context.masked_paths = ["/proc/kcore", "/proc/keys", "/proc/interrupts", "/proc/scsi", "/sys/firmware"]
        .map(String::from)
        .to_vec();
    context.readonly_paths = ["/proc/sys", "/proc/sysrq-trigger"].map(String::from).to_vec();
    change(&mut config);
    config
}

fn read_only_root(config: &mut ContainerConfig) {
    security(config).readonly_rootfs = true;
}

/// Mounts a directory of the node at `target`.
fn mount(fixture: &PodFixture, config: &mut ContainerConfig, target: &str) -> PathBuf {
    let path = fixture.node.folder().join(format!("volume-{}", fresh()));
    fs::create_dir_all(&path).expect("a directory");
    let host_path = path.display().to_string();
    config.mounts.push(Mount { container_path: target.into(), host_path, ..Default::default() });
    path
}

/// Output and errors of the probe in a running container.
#[track_caller]
fn says(fixture: &PodFixture, container: &str, words: &[&str]) -> String {
    let answer = fixture.node.exec_sync(exec(container, words, 10)).expect("exec");
    String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned()
}

#[track_caller]
fn refused_at_create(fixture: &PodFixture, config: &ContainerConfig) -> Status {
    fixture.node.create_container(create(&fixture.pod_id, config, &fixture.pod)).expect_err("it is created")
}

/// Starts a container and asserts that the start is refused, or that the masks hold.
#[track_caller]
fn refused_at_start(fixture: &PodFixture, config: &ContainerConfig) -> Status {
    let id = fixture.create(config);
    match fixture.node.start_container(StartContainerRequest { container_id: id.clone() }) {
        Err(status) => status,
        Ok(_) => {
            let swappiness = fs::read_to_string("/proc/sys/vm/swappiness").expect("a sysctl");
            let write = says(fixture, &id, &["write", "/proc/sys/vm/swappiness", swappiness.trim()]);
            let keys = says(fixture, &id, &["stat", "/proc/keys"]);
            let mounts = says(fixture, &id, &["see", "mounts"]);
            panic!("it starts; writing swappiness: {write:?}, /proc/keys: {keys}, mounts:\n{mounts}");
        }
    }
}

/// Finding 1. An image volume on the kernel's directories is refused, whatever the root is. Regression: with
/// a read-only root, one on /proc was a second, writable procfs without masks.
#[test]
fn image_volumes_on_the_kernels_directories_are_refused() {
    let fixture = PodFixture::start();
    for volume in ["/proc", "/proc/", "proc", "//x/../proc/sys", "/sys", "/sys/firmware", "/dev", "/dev/x"] {
        for change in [|_: &mut ContainerConfig| (), read_only_root] {
            let config = crafted(&fixture, &[], &[volume], change);
            let refused = refused_at_create(&fixture, &config);
            assert_eq!(refused.code(), Code::InvalidArgument, "{volume}: {refused}");
            let text = refused.message();
            assert!(text.contains("image volume") && text.contains("the kernel's"), "{volume}: {text}");
        }
    }
    // A mount of the pod replaces the image volume of its path.
    let config = crafted(&fixture, &[], &["/sys/firmware/", "/dev"], |config| {
        read_only_root(config);
        mount(&fixture, config, "/sys/firmware");
        config.mounts.push(Mount {
            container_path: "/dev".into(),
            host_path: "/dev".into(),
            ..Default::default()
        });
    });
    let id = fixture.run(&config);
    assert_eq!(says(&fixture, &id, &["ls", "/sys/firmware"]), "");
    fixture.node.stop();
}

/// Finding 1 through a link. Regression: with a read-only root, the container had a writable procfs at /proc.
#[test]
fn links_do_not_lead_image_volumes_to_the_kernels_directories() {
    let fixture = PodFixture::start();
    let deep = [Entry::symlink("one", "/two"), Entry::symlink("two", "proc/sys")];
    let cases: [(&str, Vec<Entry>); 6] = [
        ("/data", vec![Entry::symlink("data", "/proc")]),
        ("/data", vec![Entry::symlink("data", "../../sys")]),
        ("/data", vec![Entry::symlink("data", "/sys/firmware")]),
        ("/data", vec![Entry::symlink("data", "/dev")]),
        ("/one", deep.to_vec()),
        ("/data/sys", vec![Entry::symlink("data", "/proc")]),
    ];
    for (volume, entries) in cases {
        let config = crafted(&fixture, &entries, &[volume], read_only_root);
        let refused = refused_at_start(&fixture, &config);
        assert_eq!(refused.code(), Code::InvalidArgument, "{volume}: {refused}");
        let text = refused.message();
        assert!(text.contains(&format!("image volume {volume}")), "{entries:?}: {text}");
    }
    fixture.node.stop();
}

/// Finding 5. A volume of the pod below an image volume is visible and written to. Regression: with a
/// read-only root, the image volume hid it and its data was lost with the container.
#[test]
fn image_volumes_do_not_hide_volumes_below_them() {
    let fixture = PodFixture::start();
    for change in [|_: &mut ContainerConfig| (), read_only_root] {
        let mut volume = PathBuf::new();
        let postgres = [
            Entry::directory("var/lib/postgresql", 0o755),
            Entry::file("var/lib/postgresql/of-image", b"from the image"),
        ];
        let config = crafted(&fixture, &postgres, &["/var/lib/postgresql"], |config| {
            change(config);
            volume = mount(&fixture, config, "/var/lib/postgresql/data");
        });
        let id = fixture.run(&config);
        assert_eq!(says(&fixture, &id, &["write", "/var/lib/postgresql/data/row", "kept"]), "");
        assert_eq!(fs::read_to_string(volume.join("row")).expect("in the volume"), "kept");
        assert_eq!(says(&fixture, &id, &["write", "/var/lib/postgresql/beside", "text"]), "");
        assert_eq!(says(&fixture, &id, &["cat", "/var/lib/postgresql/of-image"]), "from the image");
    }
    // Nor if the image's links make the image volume's own path a longer one.
    let mut volume = PathBuf::new();
    let linked =
        [Entry::directory("x/d", 0o755), Entry::directory("a/b", 0o755), Entry::symlink("a/b/c", "/x")];
    let config = crafted(&fixture, &linked, &["/a/b/c/d"], |config| {
        read_only_root(config);
        volume = mount(&fixture, config, "/x/d/v");
    });
    let id = fixture.run(&config);
    assert_eq!(says(&fixture, &id, &["write", "/x/d/v/row", "kept"]), "");
    assert_eq!(fs::read_to_string(volume.join("row")).expect("in the volume"), "kept");
    fixture.node.stop();
}

/// Finding 5: image volumes on directories in which the pod's own files are mounted.
#[test]
fn image_volumes_do_not_hide_the_pods_files() {
    let mut pod = host_pod("files");
    pod.dns_config = Some(DnsConfig { servers: vec!["192.0.2.53".into()], ..Default::default() });
    let fixture = PodFixture::with(pod);
    let entries = [Entry::directory("run", 0o755), Entry::symlink("var/run", "/run")];
    let config = crafted(&fixture, &entries, &["/etc", "/run", "/var/run", "/etc/hosts"], |config| {
        read_only_root(config);
        let token = mount(&fixture, config, "/var/run/secrets/kubernetes.io/serviceaccount");
        fs::write(token.join("token"), "secret").expect("a file");
    });
    let id = fixture.run(&config);
    assert_eq!(says(&fixture, &id, &["cat", "/run/secrets/kubernetes.io/serviceaccount/token"]), "secret");
    let resolver = says(&fixture, &id, &["cat", "/etc/resolv.conf"]);
    assert!(resolver.contains("192.0.2.53"), "{resolver}");
    let hosts = says(&fixture, &id, &["cat", "/etc/hosts"]);
    assert!(hosts.contains("127.0.0.1"), "{hosts}");
    assert!(says(&fixture, &id, &["cat", "/etc/passwd"]).contains("alice"), "the image's own file");
    for path in ["/etc/new", "/run/new"] {
        assert_eq!(says(&fixture, &id, &["write", path, "text"]), "", "{path}");
    }
    fixture.node.stop();
}

/// The pod's mount has precedence on the path of the image volume (in any spelling) and above it.
#[test]
fn mounts_of_the_pod_replace_image_volumes() {
    let fixture = PodFixture::start();
    for change in [|_: &mut ContainerConfig| (), read_only_root] {
        let mut at = PathBuf::new();
        let mut above = PathBuf::new();
        let volumes = ["/data/./", "/x/../data", "/above/sub"];
        let config = crafted(&fixture, &[], &volumes, |config| {
            change(config);
            at = mount(&fixture, config, "/data");
            above = mount(&fixture, config, "/above");
            fs::create_dir(above.join("sub")).expect("a directory");
        });
        let id = fixture.run(&config);
        assert_eq!(says(&fixture, &id, &["write", "/data/file", "kept"]), "");
        assert_eq!(fs::read_to_string(at.join("file")).expect("in the volume"), "kept");
        assert_eq!(says(&fixture, &id, &["write", "/above/sub/file", "kept"]), "");
        assert_eq!(fs::read_to_string(above.join("sub/file")).expect("in the volume"), "kept");
    }
    fixture.node.stop();
}

/// An image volume is part of the container's writable layer: created if the image lacks it, writable, also
/// with a read-only root, and removed with the container.
#[test]
fn image_volumes_live_in_the_writable_layer() {
    let fixture = PodFixture::start();
    for change in [|_: &mut ContainerConfig| (), read_only_root] {
        let config = crafted(&fixture, &[], &["/made/here", "/made"], change);
        let id = fixture.run(&config);
        assert_eq!(says(&fixture, &id, &["write", "/made/here/file", "text"]), "");
        assert_eq!(says(&fixture, &id, &["write", "/made/file", "text"]), "");
        let other = fixture.run(&{
            let mut other = config.clone();
            other.metadata.as_mut().expect("set").name = format!("other-{}", fresh());
            other
        });
        assert_eq!(says(&fixture, &other, &["ls", "/made/here"]), "");
    }
    fixture.node.stop();
}

/// A bidirectional volume makes the root shared; a volume below an image volume is still mounted once.
#[test]
fn volumes_below_image_volumes_are_mounted_once() {
    let fixture = PodFixture::start();
    let shared = Shared::new(&fixture);
    let config = crafted(&fixture, &[], &["/data"], |config| {
        config.mounts.push(Mount {
            container_path: "/data/shared".into(),
            host_path: shared.0.display().to_string(),
            propagation: MountPropagation::PropagationBidirectional.into(),
            ..Default::default()
        });
        mount(&fixture, config, "/data/plain");
    });
    let id = fixture.run(&config);
    let mounts = says(&fixture, &id, &["see", "mounts"]);
    for path in ["/data", "/data/shared", "/data/plain"] {
        let count = mounts.lines().filter(|line| line.starts_with(&format!("mounts {path} "))).count();
        assert_eq!(count, 1, "{path}:\n{mounts}");
    }
    drop(shared);
    fixture.node.stop();
}

/// A directory of the node that is a shared mount until this value is dropped.
struct Shared(PathBuf);

impl Shared {
    fn new(fixture: &PodFixture) -> Self {
        let path = fixture.node.folder().join("shared");
        fs::create_dir_all(&path).expect("a directory");
        let name = path.display().to_string();
        for words in [&["-t", "tmpfs", "tmpfs", &name][..], &["--make-shared", &name]] {
            let status = std::process::Command::new("mount").args(words).status().expect("mount");
            assert!(status.success(), "mount {words:?}");
        }
        Self(path)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// In a pod with a user namespace an image volume belongs to its root, and its files to the owners in the
/// image.
#[test]
fn image_volumes_in_a_user_namespace() {
    let fixture = PodFixture::with(mapped(host_pod("mapped"), 200_000));
    let entries = [Entry::directory("data", 0o755), Entry::file("data/old", b"old").owned(7, 8)];
    let config = crafted(&fixture, &entries, &["/data", "/made"], read_only_root);
    let id = fixture.run(&config);
    for path in ["/data/new", "/made/new"] {
        assert_eq!(says(&fixture, &id, &["write", path, "text"]), "", "{path}");
        assert!(says(&fixture, &id, &["stat", path]).contains(" 0 0 "), "{path}");
    }
    assert!(says(&fixture, &id, &["stat", "/data/old"]).contains(" 7 8 "));
    let mounts = says(&fixture, &id, &["see", "mounts"]);
    assert!(mounts.lines().any(|line| line.starts_with("mounts /proc/sys ro,")), "{mounts}");
    let config = crafted(&fixture, &[Entry::symlink("data", "/proc")], &["/data"], read_only_root);
    let refused = refused_at_start(&fixture, &config);
    assert!(refused.message().contains("image volume /data"), "{refused}");
    fixture.node.stop();
}

/// Finding 16. A link instead of /dev would mount the runtime's tmpfs over /proc, and all masks of its paths
/// would be skipped as missing. Regression: such a container started.
#[test]
fn a_link_at_dev_is_refused() {
    let fixture = PodFixture::start();
    for target in ["/proc", "/sys", "/etc"] {
        let config = crafted(&fixture, &[Entry::symlink("dev", target)], &[], |_| ());
        let refused = refused_at_start(&fixture, &config);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("mount tmpfs on /dev: not a directory"), "{refused}");
    }
    fixture.node.stop();
}

/// A link of the image does not put a volume of the pod on the kernel's directories. Regression: one to /dev
/// replaced it with the volume, and one to a directory of /sys hid its files.
#[test]
fn links_do_not_lead_volumes_to_the_kernels_directories() {
    let fixture = PodFixture::start();
    for target in ["/proc", "/proc/sys", "/sys", "/sys/firmware", "/dev"] {
        let config = crafted(&fixture, &[Entry::symlink("data", target)], &[], |config| {
            mount(&fixture, config, "/data");
        });
        let refused = refused_at_start(&fixture, &config);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        let text = refused.message();
        assert!(text.contains("on /data: too many symbolic links"), "{target}: {text}");
    }
    fixture.node.stop();
}

/// A masked path whose link leads to /proc itself would hide all masks below it: the container does not
/// start. Regression: it started with the whole of /proc hidden.
#[test]
fn a_mask_through_a_link_does_not_replace_proc() {
    let fixture = PodFixture::start();
    let config = crafted(&fixture, &[Entry::symlink("data", "/proc")], &[], |config| {
        security(config).masked_paths.insert(0, "/data".into());
    });
    let refused = refused_at_start(&fixture, &config);
    assert!(refused.message().contains("/proc is not"), "{refused}");
    fixture.node.stop();
}

/// The verification before exec succeeds for all valid kinds of containers: plain, read-only, privileged,
/// with the node's /sys and /dev as volumes, with their own files below /proc, with a mask over the whole of
/// /sys.
#[test]
fn valid_containers_pass_the_verification() {
    let mut pod = host_pod("right");
    let linux = pod.linux.as_mut().expect("set");
    linux.security_context.as_mut().expect("set").privileged = true;
    let fixture = PodFixture::with(pod);
    let plain = |_: &mut ContainerConfig| ();
    let node = |config: &mut ContainerConfig, path: &str, target: &str| {
        config.mounts.push(Mount {
            container_path: target.into(),
            host_path: path.into(),
            ..Default::default()
        });
    };
    let nodes_own = |config: &mut ContainerConfig| {
        node(config, "/sys", "/sys");
        node(config, "/dev", "/dev");
        node(config, "/proc", "/node/proc");
    };
    let lxcfs = |config: &mut ContainerConfig| node(config, "/proc/uptime", "/proc/uptime");
    let masked = |config: &mut ContainerConfig| {
        let context = security(config);
        context.masked_paths.extend(["/sys", "/proc/uptime", "/proc/none/at/all"].map(String::from));
        context.readonly_paths.extend(["/proc", "/dev", "/etc", "/none"].map(String::from));
    };
    let privileged = |config: &mut ContainerConfig| security(config).privileged = true;
    let changes: [&dyn Fn(&mut ContainerConfig); 6] =
        [&plain, &read_only_root, &nodes_own, &lxcfs, &masked, &privileged];
    for (number, change) in changes.into_iter().enumerate() {
        for tty in [false, true] {
            let config = crafted(&fixture, &[], &["/data"], |config| {
                change(config);
                config.tty = tty && number != 2; // the node's devpts has no terminals for a container
            });
            let id = fixture.run(&config);
            let said = says(&fixture, &id, &["write", "/data/file", "text"]);
            assert_eq!(said, "", "change {number}, tty {tty}");
        }
    }
    fixture.node.stop();
}
