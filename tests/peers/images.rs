//! The images of containerd's tests, made here: Debian's static busybox with what each test looks for. The suite gets their names
//! from a file.

use std::fs;
use std::path::PathBuf;

use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use serde_json::json;

/// Debian's package busybox-static, which is installed for all suites.
const BUSYBOX: &str = "/bin/busybox";

const APPLETS: &[&str] = &[
    "cat", "dd", "echo", "grep", "id", "ip", "ls", "mkdir", "mount", "printf", "pwd", "readlink", "rm", "sh",
    "sleep", "stat", "tail", "top", "touch",
];

/// root is in a second group, which TestAdditionalGids looks for.
const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1::/usr/sbin:/bin/false\n";
const GROUP: &str = "root:x:0:\ndaemon:x:1:\nwheel:x:10:root\n";

/// Holds 110 MB for half a minute, whatever its arguments: dd has read its block, and cannot write it.
const STRESS: &str = "#!/bin/sh\ndd if=/dev/zero bs=110M count=1 | sleep 30\n";

/// Writes to the file of its standard error, as nginx does when it serves.
const NGINX: &str = "echo 'start worker processes' >/dev/stderr; exec sleep 1d";

/// Pushes all images, and writes the file with their names; returns its path.
pub(crate) fn push(registry: &Registry, node: &Node) -> PathBuf {
    let content = "test_content\n".as_bytes();
    let volumes = json!({ "/test_dir": {}, "C:/weird_test_dir": {}, "/:colon_prefixed": {} });
    let pause = Image::of(vec![Layer::new(&[Entry::program("pause", &node.probe())], Compression::Gzip)]);
    let images = [
        ("Alpine", plus(&[Entry::file("etc/os-release", b"ID=alpine\n")])),
        ("BusyBox", plus(&[])),
        ("Pause", pause.with("Entrypoint", json!(["/pause", "sleep", "forever"]))),
        (
            "ResourceConsumer",
            plus(&[Entry::program("bin/stress", STRESS.as_bytes())]).with("Cmd", json!(["sleep", "1d"])),
        ),
        (
            "VolumeCopyUp",
            plus(&[
                Entry::directory("test_dir", 0o755),
                Entry::file("test_dir/test_file", content),
                Entry::directory("C:", 0o755),
                Entry::directory("C:/weird_test_dir", 0o755),
                Entry::file("C:/weird_test_dir/weird_test_file", content),
                Entry::directory(":colon_prefixed", 0o755),
                Entry::file(":colon_prefixed/colon_prefixed_file", content),
            ])
            .with("Volumes", volumes),
        ),
        (
            "VolumeOwnership",
            plus(&[Entry::directory("test_dir", 0o755).owned(65534, 65534)])
                .with("Volumes", json!({ "/test_dir": {} })),
        ),
        ("Nginx", plus(&[]).with("Cmd", json!(["sh", "-c", NGINX]))),
    ];
    let push = |(key, image): (&str, Image)| {
        let repository = key.to_lowercase();
        registry.push(&image, &repository, "1");
        format!("{key} = \"{}\"\n", registry.name(&repository, "1"))
    };
    let file = node.folder().join("images.toml");
    fs::write(&file, images.map(push).concat()).expect("the list of images");
    file
}

/// busybox with these entries.
fn plus(entries: &[Entry]) -> Image {
    let program =
        fs::read(BUSYBOX).unwrap_or_else(|error| panic!("{BUSYBOX}: {error}; tests/tools/install packages"));
    let mut base = vec![
        Entry::directory("etc", 0o755),
        Entry::file("etc/passwd", PASSWD.as_bytes()),
        Entry::file("etc/group", GROUP.as_bytes()),
        Entry::directory("root", 0o700),
        Entry::directory("tmp", 0o1777),
        Entry::directory("bin", 0o755),
        Entry::program("bin/busybox", &program),
    ];
    base.extend(APPLETS.iter().map(|applet| Entry::symlink(&format!("bin/{applet}"), "/bin/busybox")));
    base.extend_from_slice(entries);
    Image::of(vec![Layer::new(&base, Compression::Gzip)])
        .with("Env", json!(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]))
        .with("Cmd", json!(["sh"]))
}
