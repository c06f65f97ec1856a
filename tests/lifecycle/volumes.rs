//! Volumes other than plain directories: images (KEP-4639), volumes that an image declares, mount options.

use coracle_tests::cri::proto::{ContainerConfig, ImageSpec, Mount, RemoveImageRequest};
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, exec, security};
use serde_json::json;

fn layer(entries: &[Entry]) -> Layer {
    Layer::new(entries, Compression::Gzip)
}

/// Imports an image with two layers, the upper one with a replaced and a removed file; returns its ID.
#[track_caller]
fn import_data(fixture: &PodFixture) -> String {
    let probe = fixture.node.probe();
    let lower = layer(&[
        Entry::directory("bin", 0o755),
        Entry::program("bin/tool", &probe),
        Entry::directory("etc", 0o755),
        Entry::file("etc/name", b"lower"),
        Entry::file("etc/gone", b"lower"),
        Entry::symlink("way-out", "/../../../etc"),
    ]);
    let upper = layer(&[Entry::file("etc/name", b"upper"), Entry::whiteout("etc", "gone")]);
    let image = Image::of(vec![lower, upper]);
    fixture.node.try_import(&image.oci_archive("example.test/data:1")).expect("import");
    image.id()
}

fn image_mount(config: &mut ContainerConfig, image: &str, sub_path: &str) {
    config.mounts.push(Mount {
        container_path: "/volume".into(),
        readonly: true,
        image: Some(ImageSpec { image: image.into(), ..Default::default() }),
        image_sub_path: sub_path.into(),
        ..Default::default()
    });
}

/// Output of the probe in a container with this image mounted at /volume.
#[track_caller]
fn says(fixture: &PodFixture, image: &str, sub_path: &str, words: &[&str]) -> String {
    fixture.output(words, |config| image_mount(config, image, sub_path))
}

#[test]
fn an_image_can_be_mounted_as_a_volume() {
    let fixture = PodFixture::start();
    let id = import_data(&fixture);
    assert_eq!(says(&fixture, &id, "", &["cat", "/volume/etc/name"]), "upper\n");
    assert_eq!(says(&fixture, &id, "", &["ls", "/volume/etc"]), "name\n");
    assert_eq!(says(&fixture, "example.test/data:1", "etc", &["cat", "/volume/name"]), "upper\n");
    assert_eq!(says(&fixture, &id, "bin/tool", &["stat", "/volume"]).split(' ').next(), Some("100755"));
    assert_eq!(
        says(&fixture, &id, "way-out", &["cat", "/volume/name"]),
        "upper\n",
        "links end at the image's root"
    );
    let mounts = says(&fixture, &id, "", &["see", "mounts"]);
    let line = mounts.lines().find(|line| line.starts_with("mounts /volume ")).expect("a mount").to_owned();
    for option in ["ro", "nosuid", "nodev"] {
        assert!(line.contains(option), "{line}");
    }
    assert!(!line.contains("noexec"), "{line}");
    // Its programs can be executed, and it is read-only.
    let mut config = fixture.config("runs", &[]);
    image_mount(&mut config, &id, "");
    config.command = vec!["/volume/bin/tool".into(), "sleep".into(), "forever".into()];
    let container = fixture.run(&config);
    let refused =
        fixture.node.exec_sync(exec(&container, &["write", "/volume/etc/name", "x"], 10)).expect("exec");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("Read-only file system"));
    // A mounted image stays usable after its removal, and the status has its ID.
    let image = Some(ImageSpec { image: id.clone(), ..Default::default() });
    fixture.node.remove_image(RemoveImageRequest { image }).expect("removed");
    let PodFixture { mut node, image, pod, pod_id } = fixture;
    node.restart();
    let fixture = PodFixture { node, image, pod, pod_id };
    let answer = fixture.node.exec_sync(exec(&container, &["cat", "/volume/etc/name"], 10)).expect("exec");
    assert_eq!(answer.stdout, b"upper");
    let mounts = fixture.node.container(&container).mounts;
    let image = mounts[0].image.clone().expect("an image");
    assert_eq!((mounts.len(), image.image_ref, mounts[0].host_path.as_str()), (1, id, ""));
    fixture.node.stop();
}

#[test]
fn invalid_image_volumes_are_refused_at_create() {
    let fixture = PodFixture::start();
    let id = import_data(&fixture);
    type Change = fn(&mut Mount);
    let changes: [(&str, Change); 7] = [
        ("readonly", |mount| mount.readonly = false),
        ("host_path", |mount| mount.host_path = "/srv".into()),
        ("image_sub_path", |mount| mount.image_sub_path = "../etc".into()),
        ("has no \"nothing\"", |mount| mount.image_sub_path = "nothing".into()),
        ("has no \"etc/gone\"", |mount| mount.image_sub_path = "etc/gone".into()),
        ("has no \"etc/name/x\"", |mount| mount.image_sub_path = "etc/name/x".into()),
        ("not found", |mount| mount.image = Some(ImageSpec { image: "absent".into(), ..Default::default() })),
    ];
    for (expected, change) in changes {
        let mut config = fixture.config("refused", &["true"]);
        image_mount(&mut config, &id, "");
        change(&mut config.mounts[0]);
        let refused = fixture
            .node
            .create_container(create(&fixture.pod_id, &config, &fixture.pod))
            .expect_err(expected);
        assert!(refused.message().contains("ImageVolumeMountFailed"), "{refused}");
        assert!(refused.message().contains(expected), "expected {expected:?} in {refused}");
    }
    fixture.node.stop();
}

/// Volumes that an image declares are writable below a read-only root and have the image's files; all other paths are read-only.
#[test]
fn declared_volumes_are_writable_below_a_read_only_root() {
    let fixture = PodFixture::start();
    let image = Image::probe(&fixture.node.probe(), "volumes")
        .plus(layer(&[
            Entry::directory("srv", 0o755),
            Entry::directory("srv/data", 0o750).owned(7, 8),
            Entry::file("srv/data/old", b"from the image").owned(7, 8),
        ]))
        .with("Volumes", json!({"/srv/data": {}, "/made": {}}));
    fixture.node.try_import(&image.oci_archive("example.test/volumes:1")).expect("import");
    let mut config = fixture.config("volumes", &["sleep", "forever"]);
    config.image = Some(ImageSpec { image: image.id(), ..Default::default() });
    security(&mut config).readonly_rootfs = true;
    let id = fixture.run(&config);
    let says = |words: &[&str]| {
        let answer = fixture.node.exec_sync(exec(&id, words, 10)).expect("exec");
        String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned()
    };
    assert_eq!(says(&["cat", "/srv/data/old"]), "from the image");
    assert!(says(&["stat", "/srv/data"]).starts_with("40750 7 8 "));
    for path in ["/srv/data/new", "/made/new"] {
        says(&["write", path, "text"]);
        assert_eq!(says(&["cat", path]), "text", "{path}");
    }
    assert!(says(&["write", "/srv/new", "text"]).contains("Read-only file system"));
    fixture.node.stop();
}

#[test]
fn options_of_a_mount_apply() {
    let fixture = PodFixture::start();
    let report = fixture.output(&["see", "mounts"], |config| {
        for (path, options) in [("/open", &[][..]), ("/strict", &["noexec", "nosuid", "nodev"])] {
            config.mounts.push(Mount {
                container_path: path.into(),
                host_path: fixture.node.folder().join("volume").display().to_string(),
                mount_options: options.iter().map(|option| (*option).to_owned()).collect(),
                ..Default::default()
            });
        }
    });
    let options = |path: &str| {
        let line = report.lines().find(|line| line.starts_with(&format!("mounts {path} "))).expect("a mount");
        ["noexec", "nosuid", "nodev"].map(|option| line.contains(option))
    };
    assert_eq!((options("/open"), options("/strict")), ([false; 3], [true; 3]));
    fixture.node.stop();
}
