//! The store: its disk usage, kept blobs, verification and repair.

use std::fs;
use std::path::Path;

use coracle_tests::cri::proto::{ImageFsInfoRequest, RemoveImageRequest};
use coracle_tests::host::wait_until;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::{image_spec, pull};

/// Bytes and inodes below a directory, counted independently of the tested program; files that are removed
/// meanwhile do not count.
fn counted(path: &Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let Ok(about) = fs::symlink_metadata(path) else { return (0, 0) };
    let below = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| counted(&entry.path()));
    below.fold((about.blocks() * 512, 1), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// Bytes and inodes are those of the disk, with shared layers counted once; a pull and a removal show soon.
#[test]
fn image_fs_info_is_exact() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let base = Image::probe(&node.probe(), "shared");
    let top = |text: &str| Layer::new(&[Entry::file("top", text.as_bytes())], Compression::Gzip);
    registry.push(&base.clone().plus(top("one")), "one", "1");
    registry.push(&base.plus(top("two")), "two", "1");
    let told = || {
        let info = node.image_fs_info(ImageFsInfoRequest {}).expect("info").image_filesystems.remove(0);
        assert!(info.timestamp > 0 && Path::new(&info.fs_id.expect("an id").mountpoint).is_dir());
        (info.used_bytes.expect("bytes").value, info.inodes_used.expect("inodes").value)
    };
    let there = || {
        let parts = ["images", "layers"].map(|name| counted(&node.root().join(name)));
        (parts[0].0 + parts[1].0, parts[0].1 + parts[1].1)
    };
    let agrees = |what: &str| {
        wait_until(what, || told() == there());
        told()
    };
    let empty = agrees("an empty store");
    node.pull_image(pull(&registry.name("one", "1"))).expect("pull");
    let one = agrees("one image");
    node.pull_image(pull(&registry.name("two", "1"))).expect("pull");
    let two = agrees("two images");
    assert!(
        one.0 > empty.0 + 100_000 && two.0 < one.0 + 100_000,
        "{empty:?} {one:?} {two:?}: the base is shared"
    );
    for name in ["one", "two"] {
        node.remove_image(RemoveImageRequest { image: Some(image_spec(&registry.name(name, "1"))) })
            .expect("remove");
    }
    // Layers are removed a moment after their image.
    wait_until("the layers are gone", || there().1 <= empty.1);
    let gone = agrees("nothing");
    assert!(gone.1 <= empty.1, "{empty:?} {gone:?}");
    node.stop();
}

/// `coracle image check …`: whether it succeeded, and its output.
fn check(node: &Node, words: &[&str]) -> (bool, String) {
    let output = node.image_command(&[&["check"], words].concat());
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// The only file of this name in the unpacked layers.
fn unpacked(node: &Node, name: &str) -> std::path::PathBuf {
    let layers = fs::read_dir(node.root().join("layers")).expect("layers").flatten();
    layers.map(|layer| layer.path().join(name)).find(|path| path.exists()).expect("a layer has it")
}

#[test]
fn check_repairs_or_removes_damaged_images() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "checked");
    registry.push(&image, "checked", "1");
    let name = registry.name("checked", "1");
    node.pull_image(pull(&name)).expect("pull");
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));

    // A file with wrong bytes, as from a failing SD card: the kept blob has the right ones.
    let passwd = unpacked(&node, "etc/passwd");
    let right = fs::read(&passwd).expect("it reads");
    let wrong = right.iter().map(|byte| byte ^ 1).collect::<Vec<u8>>();
    fs::write(&passwd, &wrong).expect("ours to break");
    let (is_well, text) = check(&node, &[]);
    assert!(!is_well && text.contains("/etc/passwd: has other content"), "{text}");
    assert_eq!(fs::read(&passwd).expect("it reads"), wrong, "looking changes nothing");
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(is_well && text.starts_with(&format!("repaired {name}")), "{text}");
    assert_eq!(fs::read(unpacked(&node, "etc/passwd")).expect("it reads"), right);
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));

    // A blob, of which there is no other copy.
    let blob = node
        .root()
        .join("images/blobs")
        .join(coracle_tests::layer::digest(&image.layers[0].blob).replace(':', "/"));
    let length = fs::metadata(&blob).expect("it is kept").len();
    fs::File::options().write(true).open(&blob).and_then(|file| file.set_len(length - 1)).expect("cut");
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(!is_well && text.contains("has been removed: pull or import it again"), "{text}");
    assert!(crate::find(&node, &name).is_none());
    node.pull_image(pull(&name)).expect("pull again");
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    node.stop();
}

/// File capabilities whose value has the byte of a line break, and an attribute that only the worker may set.
#[test]
fn check_compares_extended_attributes() {
    let node = Node::start();
    let capability = [1, 0, 0, 2, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let tool = Entry::program("tool", b"x");
    let tool = tool.xattr("security.capability", &capability).xattr("security.boat", b"signed");
    let image = Image::probe(&node.probe(), "attributes").plus(Layer::new(&[tool], Compression::Gzip));
    let name = "localhost/attributes:1";
    node.try_import(&image.oci_archive(name)).expect("import");
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    let get = |name: &str| {
        let mut value = [0; 64];
        let path = unpacked(&node, "tool");
        rustix::fs::lgetxattr(path, name, &mut value[..]).map(|length| value[..length].to_vec())
    };
    assert_eq!(get("security.capability").as_deref(), Ok(&capability[..]));
    assert_eq!(get("security.boat").as_deref(), Ok(&b"signed"[..]));
    rustix::fs::lremovexattr(unpacked(&node, "tool"), "security.capability").expect("ours to break");
    let (is_well, text) = check(&node, &[]);
    assert!(!is_well && text.contains("/tool: has another extended attribute security.capability"), "{text}");
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(is_well && text.starts_with(&format!("repaired {name}")), "{text}");
    assert_eq!(get("security.capability").as_deref(), Ok(&capability[..]));
    node.stop();
}

/// Reloads the configuration with `keep_blobs = false`.
fn keep_no_blobs(node: &Node) {
    let text = fs::read_to_string(node.folder().join("config.toml")).expect("the configuration");
    let text = text.replace("[image]\n", "[image]\nkeep_blobs = false\n");
    fs::write(node.folder().join("config.toml"), text).expect("ours");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(node.pid()), nix::sys::signal::Signal::SIGHUP)
        .expect("the daemon is ours");
    wait_until("it is read", || node.log().contains("image.keep_blobs"));
}

#[test]
fn check_compares_the_layers_of_docker_archives() {
    let node = Node::start();
    let entries = coracle_tests::image::probe_entries(&node.probe());
    let image = Image::probe(&node.probe(), "docker").repacked(&entries, Compression::Plain);
    let name = "localhost/docker:1";
    node.try_import(&image.docker_archive(&[name])).expect("import");
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    let group = unpacked(&node, "etc/group");
    let right = fs::read(&group).expect("it reads");
    fs::write(&group, [right.as_slice(), b"xy"].concat()).expect("ours to break");
    let (is_well, text) = check(&node, &[]);
    assert!(!is_well && text.contains("/etc/group: ") && text.contains("bytes instead of"), "{text}");
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(is_well && text.starts_with(&format!("repaired {name}")), "{text}");
    assert_eq!(fs::read(unpacked(&node, "etc/group")).expect("it reads"), right);
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    node.stop();
}

#[test]
fn damaged_names_of_users_are_mended_by_check_and_by_create_container() {
    let node = Node::start();
    let name = node.import_probe();
    let pod = coracle_tests::request::host_pod("user");
    let users = fs::read_dir(node.root().join("images/users")).expect("users").flatten();
    let records: Vec<_> = users.map(|image| image.path().join("record")).collect();
    let [record] = &records[..] else { panic!("one image: {records:?}") };
    let right = fs::read(record).expect("it reads");
    let mut wrong = right.clone();
    wrong[right.len() / 2] ^= 4;
    let pod_id = node.run_pod(&pod);
    for (is_directory, is_by_create) in [(false, false), (true, false), (false, true), (true, true)] {
        fs::remove_file(record).expect("ours to break");
        if is_directory {
            fs::create_dir(record).expect("ours to break");
        } else {
            fs::write(record, &wrong).expect("ours to break");
        }
        let (is_well, text) = check(&node, &[]);
        assert!(!is_well && text.contains("names of users"), "{text}");
        if is_by_create {
            // Finding F7: each CreateContainer of the image failed.
            let config = coracle_tests::request::container(
                &format!("of-directory-{is_directory}"),
                &name,
                &["sleep", "forever"],
                &pod,
            );
            let id = node.create(&pod_id, &config, &pod);
            node.start_container(coracle_tests::cri::proto::StartContainerRequest { container_id: id })
                .expect("start");
        } else {
            let (is_well, text) = check(&node, &["--repair"]);
            assert!(is_well && text.starts_with(&format!("repaired {name}")), "{text}");
        }
        assert_eq!(fs::read(record).expect("it reads"), right);
    }
    node.remove_pod(&pod_id);
    node.stop();
}

#[test]
fn a_store_without_kept_blobs_compares_layers_with_their_lists() {
    let node = Node::start();
    keep_no_blobs(&node);
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "unkept");
    registry.push(&image, "unkept", "1");
    let name = registry.name("unkept", "1");
    node.pull_image(pull(&name)).expect("pull");
    node.try_import(&image.clone().with("Cmd", serde_json::json!(["x"])).oci_archive("localhost/unkept:2"))
        .expect("import");
    let blobs = fs::read_dir(node.root().join("images/blobs/sha256")).expect("blobs").flatten();
    let longest = blobs.map(|blob| blob.metadata().expect("it is there").len()).max();
    assert!(longest.is_some_and(|bytes| bytes < 10_000), "configs and manifests only: {longest:?}");
    assert_eq!(fs::read_dir(node.root().join("images/parts")).expect("parts").count(), 0);
    let (is_well, text) = check(&node, &[]);
    assert!(is_well && text.lines().filter(|line| line.starts_with("whole ")).count() == 2, "{text}");
    // Of a build that made no lists.
    let lists = fs::read_dir(node.root().join("images/lists")).expect("lists").flatten();
    let lists: Vec<_> = lists.map(|list| list.path()).collect();
    assert_eq!(lists.len(), 1);
    fs::remove_file(&lists[0]).expect("ours to break");
    let (is_well, text) = check(&node, &[]);
    let said = text.lines().filter(|line| line.contains(": 1 layers not compared")).count();
    assert!(is_well && said == 2 && !text.contains("whole"), "{text}");
    // The registry has the layer for both images.
    fs::remove_dir_all(unpacked(&node, "etc").parent().expect("a layer")).expect("ours to break");
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(is_well && text.contains("no such file") && text.contains("repaired"), "{text}");
    assert_eq!(crate::listed(&node).len(), 2);
    assert!(check(&node, &[]).1.lines().all(|line| line.starts_with("whole ")));
    drop(registry);
    fs::remove_dir_all(unpacked(&node, "etc").parent().expect("a layer")).expect("ours to break");
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(!is_well && text.contains("no such file") && text.contains("pull or import it again"), "{text}");
    assert!(crate::listed(&node).is_empty(), "both contain that layer");
    node.try_import(&image.oci_archive(&name)).expect("import again");
    assert_eq!(node.once(&name, &["true"], |_| ()).1.exit_code, 0);
    node.stop();
}

#[test]
fn an_exported_archive_can_be_imported_by_another_node() {
    let (node, other) = (Node::start(), Node::start());
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "exported");
    let foreign =
        Image { architecture: "s390x".into(), ..image.clone().with("Cmd", serde_json::json!(["z"])) };
    let index = registry.push_index(&[foreign, image.clone()], "exported", "1");
    let name = registry.name("exported", "1");
    node.pull_image(pull(&name)).expect("pull");
    let file = node.folder().join("exported.tar");
    let export = |words: &[&str]| {
        let output = node.image_command(&[&["export"], words].concat());
        (
            output.status.success(),
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
        )
    };
    let path = file.display().to_string();
    assert_eq!(export(&[&name, "-o", &path]), (true, format!("exported {path}\n")));
    let output = other.image_command(&["import", &path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let there = crate::find(&other, &name).expect("it came along");
    assert_eq!(there.id, image.id());
    assert!(there.repo_digests[0].ends_with(&index), "the name's own digest: {:?}", there.repo_digests);
    assert_eq!(other.once(&name, &["true"], |_| ()).1.exit_code, 0);
    // An archive of `docker save` has no manifest: it gets one, and its layers stay as they were.
    let plain = image.repacked(&coracle_tests::image::probe_entries(&node.probe()), Compression::Plain);
    node.try_import(&plain.docker_archive(&["localhost/docker:1"])).expect("import");
    let docker = node.folder().join("docker.tar");
    let docker_path = docker.display().to_string();
    assert_eq!(
        export(&["localhost/docker:1", "-o", &docker_path]),
        (true, format!("exported {docker_path}\n"))
    );
    let output = other.image_command(&["import", &docker_path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(crate::find(&other, "localhost/docker:1").expect("it came along").id, plain.id());
    assert_eq!(other.once("localhost/docker:1", &["true"], |_| ()).1.exit_code, 0);
    fs::remove_file(&docker).expect("ours");
    // What is not kept cannot be written; what is not there neither. Neither leaves a file.
    keep_no_blobs(&node);
    let unkept = plain.with("Cmd", serde_json::json!(["unkept"]));
    node.try_import(&unkept.docker_archive(&["localhost/unkept:1"])).expect("import");
    let before = fs::read_dir(node.folder()).expect("it lists").count();
    for (words, expected) in [
        (["localhost/unkept:1", "-o", "/nonexistent/x.tar"], "layers were not kept"),
        (["localhost/none:1", "-o", &path], "not found"),
        ([name.as_str(), "-o", "/nonexistent/x.tar"], "no such file"),
    ] {
        let (is_well, text) = export(&words);
        assert!(!is_well && text.contains(expected), "{words:?}: {text}");
    }
    assert_eq!(fs::read_dir(node.folder()).expect("it lists").count(), before);
    node.stop();
    other.stop();
}
