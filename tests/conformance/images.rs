//! The images of critest, built locally without downloads. All have one layer with Debian's busybox, whose
//! shell executes applets as programs (the static one does not, so a masked /bin/ls would still work), and
//! the probe with the names of programs that Debian's busybox lacks.

use std::fs;
use std::path::Path;

use coracle_tests::image::{self, ARCHITECTURE, Image};
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::registry::Registry;
use serde_json::json;

/// The registries of these images.
pub(crate) const REGISTRIES: [&str; 3] = ["registry.k8s.io", "k8s.gcr.io", "gcr.io"];

/// Programs that critest's containers execute.
const APPLETS: &[&str] = &[
    "sh", "[", "brctl", "cat", "chmod", "dd", "echo", "grep", "hostname", "id", "ip", "ls", "mkdir", "mount",
    "nc", "netstat", "pidof", "ping", "seq", "sleep", "stty", "sync", "top", "touch", "true",
];

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var/www:/bin/sh\n\
                      nobody:x:65534:65534::/home:/bin/false\n";
const GROUP: &str = "root:x:0:\nwww-data:x:33:\n";

/// Pushes all images that critest uses.
pub(crate) fn push(registry: &Registry, binaries: &Path, tools: &Path) {
    let probe = image::program(binaries);
    let base = Base { layer: busybox(&probe, &tools.join("busybox")) };
    let e2e = |name: &str| format!("e2e-test-images/{name}");
    let cri = |name: &str| format!("k8s-staging-cri-tools/{name}");
    let put = |image: Image, repository: &str, tag: &str| {
        registry.push(&image, repository, tag);
    };
    put(base.image(), &e2e("busybox"), "1.29-2");
    let web = |words: &[&str]| {
        let server = [Entry::program("usr/sbin/nginx", &probe), Entry::directory("var/run", 0o755)];
        base.plus(&server).with("Entrypoint", json!(["nginx"])).with("Cmd", json!(words))
    };
    put(web(&["master process"]), &e2e("nginx"), "1.14-2");
    put(web(&["master process", "12003"]), &cri(&format!("hostnet-nginx-{ARCHITECTURE}")), "latest");
    let httpd =
        base.plus(&[Entry::program("usr/sbin/httpd", &probe)]).with("Cmd", json!(["/usr/sbin/httpd"]));
    put(httpd, &e2e("httpd"), "2.4.39-4");
    let setuid =
        Image::of(vec![Layer::new(&[Entry::program("nonewprivs", &probe).mode(0o4755)], Compression::Gzip)]);
    put(setuid.with("Entrypoint", json!(["/nonewprivs"])), &e2e("nonewprivs"), "1.3");
    // Names on two registries, which are the same repository of the mirror.
    put(base.marked("pause").with("Cmd", json!(["sleep", "1000000"])), "pause", "3.9");
    put(base.marked("latest"), &cri("test-image-latest"), "latest");
    put(base.marked("tag"), &cri("test-image-tag"), "test");
    put(base.marked("all"), &cri("test-image-tag"), "all");
    for number in ["1", "2", "3"] {
        put(base.marked(&format!("image {number}")), &cri(&format!("test-image-{number}")), "latest");
        put(base.marked("one image, three tags"), &cri("test-image-tags"), number);
    }
    for (name, user) in [
        ("test-image-user-uid", "1002"),
        ("test-image-user-username", "www-data"),
        ("test-image-user-uid-group", "1003:1004"),
        ("test-image-user-username-group", "www-data:1004"),
    ] {
        put(base.marked(name).with("User", json!(user)), &cri(name), "latest");
    }
    let passwd = format!("{PASSWD}default-user:x:1000:1000::/:/bin/sh\n");
    let group = format!("{GROUP}default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n");
    let users = [Entry::file("etc/passwd", passwd.as_bytes()), Entry::file("etc/group", group.as_bytes())];
    put(base.plus(&users).with("User", json!("1000")), &cri("test-image-predefined-group"), "latest");
}

struct Base {
    layer: Layer,
}

impl Base {
    fn image(&self) -> Image {
        Image::of(vec![self.layer.clone()])
            .with("Env", json!(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]))
            .with("Cmd", json!(["sh"]))
    }

    fn plus(&self, entries: &[Entry]) -> Image {
        self.image().plus(Layer::new(entries, Compression::Gzip))
    }

    /// The image with one more file, which changes its ID.
    fn marked(&self, marker: &str) -> Image {
        self.plus(&[Entry::file("marker", marker.as_bytes())])
    }
}

/// The common layer. Applets are hard links, as in the image that critest expects: a mask on a symbolic link
/// would cover them all.
fn busybox(probe: &[u8], package: &Path) -> Layer {
    let program = package.join("bin/busybox");
    let read = |path: &Path| {
        fs::read(path)
            .unwrap_or_else(|error| panic!("{}: {error}; tests/tools/install brings it", path.display()))
    };
    let mut entries = vec![
        Entry::directory("etc", 0o755),
        Entry::file("etc/passwd", PASSWD.as_bytes()),
        Entry::file("etc/group", GROUP.as_bytes()),
        Entry::directory("root", 0o700),
        Entry::directory("tmp", 0o1777),
        Entry::directory("var", 0o755),
        Entry::directory("bin", 0o755),
        Entry::program("bin/busybox", &read(&program)),
    ];
    entries.extend(APPLETS.iter().map(|applet| Entry::hard_link(&format!("bin/{applet}"), "bin/busybox")));
    entries.extend(["ipcs", "pgrep"].map(|name| Entry::program(&format!("bin/{name}"), probe)));
    // Debian's program needs Debian's libraries; the path of the dynamic loader is part of the program.
    let (folder, loader) = match ARCHITECTURE {
        "arm64" => ("/lib/aarch64-linux-gnu", "/lib/ld-linux-aarch64.so.1"),
        _ => ("/lib/x86_64-linux-gnu", "/lib64/ld-linux-x86-64.so.2"),
    };
    for path in [loader, &format!("{folder}/libc.so.6"), &format!("{folder}/libresolv.so.2")] {
        entries.push(Entry::program(path.trim_start_matches('/'), &read(Path::new(path))));
    }
    Layer::new(&entries, Compression::Gzip)
}
