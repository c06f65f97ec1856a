//! Archives of images: the names and IDs that result from an import.

use std::fs;
use std::process::Command;
use std::time::Duration;

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{ImageSpec, ListImagesRequest, RemoveImageRequest};
use coracle_tests::host::wait_within;
use coracle_tests::image::{ARCHITECTURE, INDEX, Image, MANIFEST, descriptor};
use coracle_tests::layer::{Compression, Entry, Layer, digest};
use coracle_tests::node::base;
use serde_json::{Value, json};

use crate::Run;
use crate::pair::Both;

/// A kind of archive.
struct Kind {
    name: String,
    bytes: Vec<u8>,
}

/// The images of one side, one a line.
type Listed = Vec<String>;

pub(super) fn run(run: &mut Run<'_>, layer: &Layer) {
    for kind in kinds(layer) {
        run.begin_case();
        // Each archive has an image of its own: containerd keeps names that its CRI does not know.
        let before = run.pair.each(list);
        let file = run.pair.ours().folder().join("compared.tar");
        fs::write(&file, &kind.bytes).expect("the archive");
        let imported = run.pair.theirs().import_command().arg(&file).output().expect("ctr runs");
        let ours = run.pair.ours().try_import(&kind.bytes);
        let both = run.pair.both();
        let new = |cri: &Cri, before: &Listed| -> Listed {
            let ids: Vec<&str> = before.iter().map(|line| id_of(line)).collect();
            list(cri).into_iter().filter(|line| !ids.contains(&id_of(line))).collect()
        };
        let seen = || Both { ours: new(both.ours, &before.ours), theirs: new(both.theirs, &before.theirs) };
        // containerd's CRI is notified of the images a little later.
        let equal =
            wait_within(Duration::from_millis(500), || Some(seen()).filter(|seen| seen.ours == seen.theirs));
        let found = equal.unwrap_or_else(seen);
        let said = |is_ok: bool| if is_ok { "accepted" } else { "refused" };
        let errors = format!(
            "\n    coracle: {ours:?}\n    containerd: {}",
            String::from_utf8_lossy(&imported.stderr).escape_debug()
        );
        let what = |fact: &str| format!("import, {}: {fact}", kind.name);
        run.compare(&what("import"), said(ours.is_ok()), said(imported.status.success()), &errors);
        if ours.is_ok() == imported.status.success() {
            let without_digests = |lines: &Listed| {
                let cut = |line: &String| line.split(" digests").next().unwrap_or_default().to_owned();
                lines.iter().map(cut).collect::<Vec<_>>().join(" | ")
            };
            let (our_names, their_names) = (without_digests(&found.ours), without_digests(&found.theirs));
            run.compare(&what("names"), &our_names, &their_names, &errors);
            if our_names == their_names {
                run.compare(&what("digests"), &found.ours.join(" | "), &found.theirs.join(" | "), &errors);
            }
        }
        let left = run.pair.both();
        remove(left.ours, &before.ours);
        remove(left.theirs, &before.theirs);
    }
}

fn list(cri: &Cri) -> Listed {
    let images = cri.list_images(ListImagesRequest::default()).expect("a list").images;
    let mut lines: Vec<String> = images
        .into_iter()
        .map(|mut image| {
            image.repo_tags.sort_unstable();
            image.repo_digests.sort_unstable();
            format!(
                "{} names [{}] digests [{}]",
                image.id,
                image.repo_tags.join(" "),
                image.repo_digests.join(" ")
            )
        })
        .collect();
    lines.sort_unstable();
    lines
}

/// The ID in a line.
fn id_of(line: &str) -> &str {
    line.split(' ').next().unwrap_or_default()
}

/// Removes what was not there before.
fn remove(cri: &Cri, before: &Listed) {
    for line in list(cri).iter().filter(|line| !before.contains(line)) {
        let image = Some(ImageSpec { image: id_of(line).into(), ..ImageSpec::default() });
        cri.remove_image(RemoveImageRequest { image }).expect("removed");
    }
}

fn kinds(layer: &Layer) -> Vec<Kind> {
    let plain = |marker: &str| {
        let entries = [Entry::file("marker", marker.as_bytes())];
        Image::of(vec![Layer::new(&entries, Compression::Plain)]).with("Cmd", json!([marker]))
    };
    // The same layers, and another ID for each archive.
    let number = std::cell::Cell::new(0);
    let own = |image: Image| {
        number.set(number.get() + 1);
        image.with("Labels", json!({ "number": number.get().to_string() }))
    };
    let image = || own(plain("one"));
    let packed = || own(Image::of(vec![layer.clone()]));
    let mut kinds = Vec::new();
    let mut add = |name: &str, bytes: Vec<u8>| kinds.push(Kind { name: name.to_owned(), bytes });
    const NAMES: [&str; 16] = [
        "example.com/a/b:1",
        "example.com/a/b",
        "busybox:1",
        "busybox",
        "library/busybox:2",
        "user/name:tag",
        "docker.io/busybox:3",
        "index.docker.io/library/busybox:4",
        "localhost/a:1",
        "localhost:5000/a:1",
        "example.com/A/b:1",
        "",
        "1",
        "latest",
        "example.com/a@sha256:0000000000000000000000000000000000000000000000000000000000000000",
        "not a name",
    ];
    for name in NAMES {
        add(&format!("docker, {name:?}"), image().docker_archive(&[name]));
        add(&format!("OCI, {name:?}"), packed().oci_archive(name));
    }
    add("docker, no name", image().docker_archive(&[]));
    add("docker, two names", image().docker_archive(&["example.com/a:1", "example.com/b:2"]));
    add("docker, the same name twice", image().docker_archive(&["example.com/a:1", "example.com/a:1"]));
    let (one, other) = (image(), own(plain("two")));
    let two = coracle_tests::image::docker_archive_of(&[
        (&one, &["example.com/a:1"]),
        (&other, &["example.com/b:1"]),
    ]);
    add("docker, two images", two);
    let (one, other) = (image(), own(plain("two")));
    let two = coracle_tests::image::docker_archive_of(&[
        (&one, &["example.com/a:1"]),
        (&other, &["example.com/a:1"]),
    ]);
    add("docker, two images of one name", two);
    add("nothing", vec![0; 1024]);
    add("no archive", b"text".to_vec());
    for (name, change) in changes() {
        add(&format!("OCI, {name}"), layout(&packed(), change));
    }
    kinds.extend(of_programs(&packed));
    kinds
}

/// Archives that skopeo and umoci write; podman and buildah use the library of skopeo.
fn of_programs(image: &impl Fn() -> Image) -> Vec<Kind> {
    const LINES: [(&str, &str); 7] = [
        ("skopeo, docker-archive", "skopeo copy oci-archive:in docker-archive:out:example.com/skopeo:1"),
        ("skopeo, docker-archive without a name", "skopeo copy oci-archive:in docker-archive:out"),
        ("skopeo, oci-archive", "skopeo copy oci-archive:in oci-archive:out:example.com/skopeo:2"),
        ("skopeo, oci-archive of a tag", "skopeo copy oci-archive:in oci-archive:out:v3"),
        ("skopeo, oci-archive without a name", "skopeo copy oci-archive:in oci-archive:out"),
        ("skopeo, layout", "skopeo copy oci-archive:in oci:layout:v4 && tar -C layout -cf out ."),
        (
            "umoci, layout",
            "skopeo copy oci-archive:in oci:layout:v5 && umoci config --image layout:v5 --config.cmd x && umoci gc --layout layout \
             && tar -C layout -cf out .",
        ),
    ];
    let folder = base().join(format!("archives-{}", std::process::id()));
    let mut kinds = Vec::new();
    for (name, line) in LINES {
        let needed = ["skopeo", "umoci"].into_iter().filter(|program| line.contains(program));
        if let Some(missing) = needed.into_iter().find(|program| !crate::has_program(program)) {
            println!("configurations: without {name:?}: {missing} is not on this machine");
            continue;
        }
        fs::create_dir_all(&folder).expect("a directory");
        fs::write(folder.join("in"), image().oci_archive("example.com/in:1")).expect("an archive");
        let line = line.replace("skopeo copy", "skopeo --insecure-policy copy --quiet");
        let made = Command::new("sh").args(["-c", &line]).current_dir(&folder).output().expect("sh");
        assert!(made.status.success(), "{name}: {}", String::from_utf8_lossy(&made.stderr));
        kinds.push(Kind { name: name.to_owned(), bytes: fs::read(folder.join("out")).expect("the archive") });
        fs::remove_dir_all(&folder).expect("the directory is ours");
    }
    kinds
}

type Change = fn(&mut Value, &mut Value);

/// Changes of the layout's file and of its index.
fn changes() -> Vec<(&'static str, Change)> {
    const REF: &str = "org.opencontainers.image.ref.name";
    vec![
        ("as it is", |_, _| ()),
        ("no annotations", |_, index| index["manifests"][0]["annotations"] = json!(null)),
        ("a full name in ref.name", |_, index| {
            index["manifests"][0]["annotations"] = json!({ REF: "example.com/c:1" });
        }),
        ("a tag in ref.name", |_, index| index["manifests"][0]["annotations"] = json!({ REF: "v1" })),
        ("a platform", |_, index| {
            index["manifests"][0]["platform"] = json!({ "os": "linux", "architecture": ARCHITECTURE });
        }),
        ("another platform", |_, index| {
            index["manifests"][0]["platform"] = json!({ "os": "linux", "architecture": "s390x" });
        }),
        ("no manifests", |_, index| index["manifests"] = json!([])),
        ("the same twice with two names", |_, index| {
            let mut second = index["manifests"][0].clone();
            second["annotations"] = json!({ "io.containerd.image.name": "example.com/second:1" });
            index["manifests"].as_array_mut().expect("a list").push(second);
        }),
        ("no media type of the index", |_, index| index["mediaType"] = json!(null)),
        ("another layout version", |layout, _| layout["imageLayoutVersion"] = json!("2.0.0")),
        ("no layout version", |layout, _| *layout = json!({})),
        ("a wrong size", |_, index| index["manifests"][0]["size"] = json!(5)),
        ("a missing manifest", |_, index| {
            index["manifests"][0]["digest"] = json!(format!("sha256:{}", "0".repeat(64)));
        }),
    ]
}

fn layout(image: &Image, change: Change) -> Vec<u8> {
    let manifest = image.manifest();
    let mut entry = descriptor(MANIFEST, &manifest);
    entry["annotations"] = json!({
        "org.opencontainers.image.ref.name": "1", "io.containerd.image.name": "example.com/layout:1",
    });
    let mut index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [entry] });
    let mut file = json!({ "imageLayoutVersion": "1.0.0" });
    change(&mut file, &mut index);
    let mut entries = vec![
        Entry::file("oci-layout", file.to_string().as_bytes()),
        Entry::file("index.json", index.to_string().as_bytes()),
    ];
    let blobs = [image.config_blob(), manifest];
    for blob in blobs.into_iter().chain(image.layers.iter().map(|layer| layer.blob.clone())) {
        entries.push(Entry::file(&format!("blobs/{}", digest(&blob).replace(':', "/")), &blob));
    }
    Layer::new(&entries, Compression::Plain).blob
}
