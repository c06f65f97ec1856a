//! Known attacks by images or requests, in addition to those of escapes.rs, named by the CVEs of runc,
//! containerd, CRI-O and BuildKit (docs/security.md has the table).

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use coracle_tests::cri::proto::{
    CdiDevice, ContainerConfig, ContainerFilter, ImageSpec, Int64Value, ListContainersRequest, Mount,
    StartContainerRequest,
};
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, host_pod, run, security};
use coracle_tests::vendor;
use serde_json::{Value, json};
use tonic::Code;

use crate::{Rights, armed, says};

/// Imports the probe's image with one more layer and one more field of its configuration; returns its ID.
#[track_caller]
fn import(fixture: &PodFixture, name: &str, entries: &[Entry], key: &str, value: Value) -> String {
    let mut image = Image::probe(&fixture.node.probe(), name).with(key, value);
    if !entries.is_empty() {
        image = image.plus(Layer::new(entries, Compression::Gzip));
    }
    fixture.node.try_import(&image.oci_archive(&format!("example.test/{name}:1"))).expect("import");
    image.id()
}

fn from_image(fixture: &PodFixture, id: &str, name: &str, words: &[&str]) -> ContainerConfig {
    let mut config = armed(fixture, name, Rights::Default, words);
    config.image = Some(ImageSpec { image: id.into(), ..Default::default() });
    config
}

/// Creates a directory of the node with a file that no container may see.
fn secret(fixture: &PodFixture) -> PathBuf {
    let folder = fixture.node.folder().join("secrets");
    fs::create_dir_all(&folder).expect("a directory");
    fs::write(folder.join("secret"), "of the node").expect("a file");
    folder
}

/// Names in a directory of the node.
fn names(folder: &PathBuf) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("it is there").flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A volume whose path leads out of the image is filled from inside the image, or refused.
#[test]
fn cve_2022_23648_image_volumes_copy_nothing_of_the_node() {
    let fixture = PodFixture::start();
    let folder = secret(&fixture);
    let path = folder.display().to_string();
    let up = "/../../../../../../../..";
    let links = [Entry::symlink("data", &path), Entry::symlink("more", &format!("{up}{path}"))];
    for (number, volume) in
        ["/data".to_owned(), "/more".to_owned(), format!("{up}{path}"), path.clone()].into_iter().enumerate()
    {
        let name = format!("volume{number}");
        let id = import(&fixture, &name, &links, "Volumes", json!({ &volume: {} }));
        let config = from_image(&fixture, &id, &name, &["sleep", "forever"]);
        let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        let Ok(made) = made else { continue };
        let start = StartContainerRequest { container_id: made.container_id.clone() };
        if fixture.node.start_container(start).is_err() {
            continue;
        }
        for place in [&volume, &path] {
            let said = says(&fixture, &made.container_id, &["cat", &format!("{place}/secret")]);
            assert!(!said.contains("of the node"), "{volume}: {said}");
        }
        says(&fixture, &made.container_id, &["write", &format!("{volume}/planted"), "x"]);
        assert_eq!(names(&folder), ["secret"], "{volume}");
    }
    fixture.node.stop();
}

/// Files that the runtime creates in a container (hosts, resolv.conf, mtab in other runtimes) do not follow
/// the image's links out of it.
#[test]
fn cve_2024_5154_links_in_place_of_etc_are_not_followed() {
    let fixture = PodFixture::start();
    let folder = secret(&fixture);
    let path = folder.display().to_string();
    let cases: [&[Entry]; 3] = [
        &[Entry::whiteout("", "etc"), Entry::symlink("etc", &format!("/../../../..{path}"))],
        &[
            Entry::symlink("etc/mtab", &format!("{path}/mtab")),
            Entry::symlink("etc/hosts", &format!("{path}/hosts")),
            Entry::symlink("etc/resolv.conf", &format!("/../../../../../..{path}/resolv.conf")),
            Entry::symlink("etc/hostname", &format!("../../../../../..{path}/hostname")),
        ],
        &[Entry::symlink("dev", &path)],
    ];
    for (number, entries) in cases.into_iter().enumerate() {
        let name = format!("links{number}");
        let id = import(&fixture, &name, entries, "StopSignal", json!("SIGTERM"));
        let config = from_image(&fixture, &id, &name, &["sleep", "forever"]);
        let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        if let Ok(made) = made {
            let start = StartContainerRequest { container_id: made.container_id };
            let _ = fixture.node.start_container(start);
        }
        assert_eq!(names(&folder), ["secret"], "case {number}");
        assert_eq!(fs::read_to_string(folder.join("secret")).expect("it is there"), "of the node");
    }
    fixture.node.stop();
}

/// Containers with hooks have their mounts made before pivot_root, when the node's files have paths: links of the image lead there no
/// more than afterwards, and are refused with the same errors.
#[test]
fn links_of_images_lead_no_mount_to_the_node_before_pivot_root() {
    let specs = std::env::temp_dir().join(format!("coracle-cdi-links-{}", std::process::id()));
    let config = format!("[cdi]\nspec_dirs = [{:?}]\n", specs.display().to_string());
    let node = Node::with(Options { config, ..Options::default() });
    let fixture = PodFixture::on(node, host_pod("fixture"));
    let folder = secret(&fixture);
    vendor::write(&specs, fixture.node.folder(), true);
    let (path, up) = (folder.display().to_string(), format!("../../../../../../../..{}", folder.display()));
    let links = [
        ("dev", "/"),
        ("dev", "/etc"),
        ("dev", &path),
        ("proc", "/etc"),
        ("proc", &path),
        ("sys", &up),
        ("opt", &path),
        ("opt", &up),
        ("opt", "/proc/1/root/etc"),
        ("opt/library", &path),
        ("data", &path),
        ("data", &up),
        ("data", "/"),
        ("data", "/dev"),
        ("data", "/proc/self/cwd"),
        ("dev/null", &path),
        ("etc/hosts", &format!("{path}/hosts")),
    ];
    let mounts = || fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let node_has = |text: &str| mounts().contains(text);
    for (number, (link, target)) in links.into_iter().enumerate() {
        let entries = match link.split_once('/') {
            None => vec![Entry::whiteout("", link), Entry::symlink(link, target)],
            Some((above, _)) => vec![Entry::directory(above, 0o755), Entry::symlink(link, target)],
        };
        let image = import(&fixture, &format!("links{number}"), &entries, "StopSignal", json!("SIGTERM"));
        let outcome = [false, true].map(|has_hooks| {
            let name = format!("links{number}-{has_hooks}");
            let mut config = from_image(&fixture, &image, &name, &["sleep", "forever"]);
            let mount = |container_path: &str| Mount {
                container_path: container_path.into(),
                host_path: fixture.node.folder().join("vendor-library").display().to_string(),
                ..Default::default()
            };
            config.mounts = vec![mount("/data/planted")];
            match has_hooks {
                true => config.cdi_devices = vec![CdiDevice { name: vendor::DEVICE.into() }],
                false => config.mounts.push(mount("/opt/library")),
            }
            let id = fixture.create(&config);
            let started = fixture.node.start_container(StartContainerRequest { container_id: id });
            started
                .map(|_| ())
                .map_err(|status| status.message().split_once(&name).expect("named").1.to_owned())
        });
        assert_eq!(outcome[0], outcome[1], "{link} -> {target}");
        assert_eq!(names(&folder), ["secret"], "{link} -> {target}");
        assert!(!Path::new("/etc/planted").exists() && !node_has("/planted"), "{link} -> {target}");
    }
    fixture.node.stop();
    fs::remove_dir_all(&specs).expect("ours");
}

/// A missing mount point below a directory that another container exchanges for a link is created inside, and
/// no file or directory appears on the node.
#[test]
fn cve_2024_45310_mount_points_are_created_inside_the_root() {
    let fixture = PodFixture::start();
    let folder = secret(&fixture);
    let shared = fixture.node.folder().join("shared");
    fs::create_dir_all(shared.join("target")).expect("a directory");
    symlink(&folder, shared.join("other")).expect("a link");
    let share = |config: &mut ContainerConfig| {
        config.mounts.push(Mount {
            container_path: "/shared".into(),
            host_path: shared.display().to_string(),
            ..Default::default()
        });
    };
    let mut config = fixture.config("swapper", &["swap", "/shared/target", "/shared/other"]);
    share(&mut config);
    fixture.run(&config);
    let mut started = 0;
    for round in 0..30 {
        let mut config = fixture.config(&format!("victim{round}"), &["true"]);
        share(&mut config);
        config.mounts.push(Mount {
            container_path: format!("/shared/target/deep{round}/made"),
            host_path: folder.display().to_string(),
            ..Default::default()
        });
        let id = fixture.create(&config);
        started +=
            u32::from(fixture.node.start_container(StartContainerRequest { container_id: id }).is_ok());
        assert_eq!(names(&folder), ["secret"], "round {round}");
    }
    assert!(started > 0, "no container ever started: nothing was shown");
    fixture.node.stop();
}

/// Inheritable and ambient capabilities would combine with file capabilities beyond the container's: there
/// are none, in containers and in execs, with and without a user.
#[test]
fn cve_2022_24769_and_2022_29162_no_capability_is_inheritable() {
    let fixture = PodFixture::start();
    for (name, user) in [("root", None), ("alice", Some(1000))] {
        for rights in [Rights::Default, Rights::AllUnfiltered] {
            let mut config = armed(&fixture, &format!("{name}{rights:?}"), rights, &["sleep", "forever"]);
            security(&mut config).run_as_user = user.map(|value| Int64Value { value });
            let id = fixture.run(&config);
            let pid = fixture.node.container_pid(&id);
            let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
            let said = says(&fixture, &id, &["see", "caps"]);
            for key in ["CapInh", "CapAmb"] {
                assert!(
                    status.contains(&format!("{key}:\t0000000000000000\n")),
                    "{name} {rights:?}: {status}"
                );
                assert!(said.contains(&format!("caps {key} 0000000000000000")), "{name} {rights:?}: {said}");
            }
            if user.is_some() {
                assert!(said.contains("caps CapEff 0000000000000000"), "{rights:?}: {said}");
            }
        }
    }
    fixture.node.stop();
}

/// A user ID that is out of range is refused and not truncated to root.
#[test]
fn cve_2024_40635_large_user_ids_do_not_become_root() {
    let fixture = PodFixture::start();
    for (number, user) in
        ["4294967296", "4294967295", "65536:4294967296", "18446744073709551616", "-1", "0x0"]
            .into_iter()
            .enumerate()
    {
        let name = format!("user{number}");
        let id = import(&fixture, &name, &[], "User", json!(user));
        let config = from_image(&fixture, &id, &name, &["see", "ids"]);
        let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        let Ok(made) = made else { continue };
        let start = StartContainerRequest { container_id: made.container_id.clone() };
        if fixture.node.start_container(start).is_ok() {
            fixture.node.exited(&made.container_id);
            let said = fixture.node.output(&made.container_id);
            panic!("{user} ran: {said}");
        }
    }
    fixture.node.stop();
}

/// The primary group is among the supplementary ones, so that a file that denies access to the group denies
/// it there, too.
#[test]
fn cve_2022_2995_and_2023_25173_the_primary_group_is_supplementary() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("alice", &["sleep", "forever"]);
    security(&mut config).run_as_username = "alice".into();
    let id = fixture.run(&config);
    let said = says(&fixture, &id, &["see", "ids"]);
    assert!(said.contains("ids Groups 1000 2000 2001"), "{said}");
    let mut config = fixture.config("number", &["sleep", "forever"]);
    security(&mut config).run_as_user = Some(Int64Value { value: 1234 });
    security(&mut config).supplemental_groups = vec![77];
    let id = fixture.run(&config);
    let said = says(&fixture, &id, &["see", "ids"]);
    assert!(said.contains("ids Groups 0 77"), "{said}");
    fixture.node.stop();
}

/// The name of a working directory adds no line to a file of the container.
#[test]
fn cve_2022_4318_a_working_directory_adds_no_user() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("liner", &["sleep", "forever"]);
    config.working_dir = "/tmp/a\nhacker::0:0::/:/probe\n".into();
    let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
    if let Ok(made) = made
        && fixture
            .node
            .start_container(StartContainerRequest { container_id: made.container_id.clone() })
            .is_ok()
    {
        let said = says(&fixture, &made.container_id, &["cat", "/etc/passwd"]);
        assert!(said.contains("root:x:0:0") && !said.contains("hacker"), "{said}");
    }
    fixture.node.stop();
}

/// A sysctl has one name and one value: neither names another file, and one outside of the pod's namespaces
/// is refused.
#[test]
fn cve_2022_0811_a_sysctl_cannot_set_another() {
    let fixture = PodFixture::start();
    let before = fs::read_to_string("/proc/sys/kernel/core_pattern").expect("the node's");
    let names = [
        ("kernel.core_pattern", "|/evil"),
        ("kernel/core_pattern", "|/evil"),
        ("net.ipv4.ip_forward/../../../kernel/core_pattern", "|/evil"),
        ("net/../kernel/core_pattern", "|/evil"),
        ("net...kernel.core_pattern", "|/evil"),
        ("fs.mqueue.msg_max/../../../kernel/core_pattern", "|/evil"),
        ("kernel.shm_rmid_forced", "1+kernel.core_pattern=|/evil"),
        ("kernel.shm_rmid_forced", "1\nkernel.core_pattern=|/evil"),
        ("vm.overcommit_memory", "1"),
    ];
    for (name, value) in names {
        let mut pod = host_pod("sysctl");
        pod.linux.as_mut().expect("set").sysctls = [(name.to_owned(), value.to_owned())].into();
        let refused = fixture.node.run_pod_sandbox(run(&pod));
        assert!(refused.is_err(), "{name}={value:?} was taken");
        assert_eq!(fs::read_to_string("/proc/sys/kernel/core_pattern").expect("the node's"), before);
    }
    fixture.node.stop();
}

/// Labels and annotations of an image are not those of the container for plugins.
#[test]
fn cve_2026_53488_labels_of_an_image_are_not_the_containers() {
    let fixture = PodFixture::start();
    let labels = json!({
        "containerd.io/restart.logpath": "binary:///evil",
        "io.kubernetes.container.name": "impostor",
        "io.kubernetes.pod.uid": "impostor",
    });
    let id = import(&fixture, "labels", &[], "Labels", labels);
    let container = fixture.run(&from_image(&fixture, &id, "labels", &["sleep", "forever"]));
    let filter = ContainerFilter { id: container.clone(), ..Default::default() };
    let listed = fixture.node.list_containers(ListContainersRequest { filter: Some(filter) }).expect("lists");
    let status = fixture.node.container(&container);
    let all = format!("{:?} {:?} {:?}", listed.containers, status.labels, status.annotations);
    assert!(!all.contains("evil") && !all.contains("impostor"), "{all}");
    fixture.node.stop();
}

/// Log paths stay below the pod's log directory.
#[test]
fn cve_2025_0750_a_log_is_below_the_pods_directory() {
    let fixture = PodFixture::start();
    for path in ["../escaped.log", "/tmp/escaped.log", "a/../../escaped.log", "a\0b"] {
        let mut config = fixture.config("log", &["true"]);
        config.log_path = path.into();
        let refused = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        let refused = refused.expect_err(path);
        assert_eq!(refused.code(), Code::InvalidArgument, "{path}: {refused}");
    }
    // A link instead of the log is not followed: root's file at its target does not change.
    let folder = secret(&fixture);
    let config = fixture.config("linked", &["print", "line"]);
    let log = PathBuf::from(&fixture.pod.log_directory).join(&config.log_path);
    fs::create_dir_all(log.parent().expect("a directory")).expect("the log's directory");
    symlink(folder.join("secret"), &log).expect("a link");
    let id = fixture.create(&config);
    if fixture.node.start_container(StartContainerRequest { container_id: id.clone() }).is_ok() {
        fixture.node.exited(&id);
    }
    assert_eq!(fs::read_to_string(folder.join("secret")).expect("it is there"), "of the node");
    fixture.node.stop();
}

/// The worker that unpacks reads files of users with limits, and the daemon does not grow.
#[test]
fn cve_2025_4437_and_2026_47262_large_files_of_users_do_not_fill_the_daemon() {
    let fixture = PodFixture::start();
    let before = host::anonymous_kib(fixture.node.pid());
    for name in ["etc/passwd", "etc/group"] {
        let mut text = b"root:x:0:0:root:/root:/probe\n".to_vec();
        text.resize(64 << 20, b'x');
        let layer = Layer::new(&[Entry::file(name, &text)], Compression::Gzip);
        let image = Image::probe(&fixture.node.probe(), name).plus(layer);
        // What is beyond the limit is left out, and the log says so.
        fixture.node.try_import(&image.oci_archive("example.test/large:1")).expect(name);
        assert!(fixture.node.log().contains(name), "{}", fixture.node.log());
    }
    let now = host::anonymous_kib(fixture.node.pid());
    assert!(now < before + (8 << 10), "the daemon had {before} KiB and has {now}");
    fixture.node.stop();
}

/// Finding S3 in the lists of a configuration: an empty string is one byte of a message or three of a document, and 24 bytes of
/// memory. Without the limit the daemon got all of them, and again with each container of the image.
#[test]
fn a_configuration_with_a_million_words_is_refused_and_does_not_fill_the_daemon() {
    let fixture = PodFixture::start();
    for (key, value) in [
        ("Env", json!(vec![""; 1_300_000])),
        ("Entrypoint", json!(vec![""; 1_300_000])),
        ("Cmd", json!(vec![""; 1_300_000])),
        ("Volumes", (0..200_000).map(|number| (format!("/{number:x}"), json!({}))).collect()),
        ("Labels", (0..200_000).map(|number| (format!("{number:x}"), json!(""))).collect()),
    ] {
        let image = Image::probe(&fixture.node.probe(), &key.to_lowercase()).with(key, value);
        let refused = fixture.node.try_import(&image.oci_archive("example.test/words:1")).expect_err(key);
        assert!(refused.contains(&format!("image config: {key}: more than 16384 entries")), "{refused}");
    }
    let peak = host::proc_value(fixture.node.pid(), "status", "VmHWM").expect("the highest resident size");
    assert!(peak < 24 << 10, "the daemon used {peak} KiB");
    fixture.node.stop();
}

/// A worker unpacks through open directories: a layer that replaces a directory by a link between two
/// entries, and one that changes modes through a link, change nothing outside.
#[test]
fn cve_2021_32760_and_2025_47290_unpacking_follows_no_link() {
    let fixture = PodFixture::start();
    let folder = secret(&fixture);
    let path = folder.display().to_string();
    let before = fs::metadata(folder.join("secret")).expect("it is there").mode();
    let up = format!("../../../../../../../../../..{path}");
    let cases: [&[Entry]; 4] = [
        &[Entry::symlink("way", &path), Entry::file("way/planted", b"x"), Entry::directory("way", 0o777)],
        &[Entry::symlink("way", &up), Entry::file("way/secret", b"x").mode(0o4777)],
        &[
            Entry::directory("way", 0o755),
            Entry::whiteout("", "way"),
            Entry::symlink("way", &path),
            Entry::whiteout("way", "secret"),
            Entry::whiteout("way", ".wh..opq"),
        ],
        &[Entry::hard_link("way", &format!("{path}/secret")), Entry::file("way", b"x").mode(0o4777)],
    ];
    for (number, entries) in cases.into_iter().enumerate() {
        let image = Image::probe(&fixture.node.probe(), &format!("unpack{number}"))
            .plus(Layer::new(entries, Compression::Gzip));
        // Refused or unpacked within the layer's own directory.
        let _ = fixture.node.try_import(&image.oci_archive(&format!("example.test/unpack{number}:1")));
        assert_eq!(names(&folder), ["secret"], "case {number}");
        assert_eq!(fs::read_to_string(folder.join("secret")).expect("it is there"), "of the node");
        assert_eq!(fs::metadata(folder.join("secret")).expect("it is there").mode(), before);
    }
    fixture.node.stop();
}

/// Checkpoint metadata is not evaluated, because restore is not supported: an image with checkpoint
/// annotations and files is an ordinary image (CVE-2026-50195, 53489, 53492; CVE-2024-8676).
#[test]
fn cve_2026_53489_and_53492_checkpoint_images_are_plain_images() {
    let fixture = PodFixture::start();
    let folder = secret(&fixture);
    let entries = [
        Entry::symlink("container.log", &folder.join("secret").display().to_string()),
        Entry::file("config.dump", br#"{"rootfsImageName":"localhost/probe:1"}"#),
        Entry::file("spec.dump", br#"{"annotations":{"cdi.k8s.io/evil":"vendor.test/device=all"}}"#),
    ];
    let labels = json!({ "io.kubernetes.cri-o.annotations.checkpoint.name": "checkpoint" });
    let id = import(&fixture, "checkpoint", &entries, "Labels", labels);
    let container = fixture.run(&from_image(&fixture, &id, "restored", &["print", "an ordinary start"]));
    fixture.node.exited(&container);
    assert_eq!(fixture.node.output(&container), "an ordinary start\n");
    fixture.node.stop();
}
