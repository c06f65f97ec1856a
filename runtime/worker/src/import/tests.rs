//! Imports archives of both formats into a temporary store. Requires root, because layers contain file
//! owners.

use std::io::Write;
use std::path::PathBuf;

use coracle_job::{Limits, UsersFiles};
use coracle_manifest::ARCHITECTURE;

use super::*;

mod signed;

fn run(job: &ImportJob, progress: &mut (dyn FnMut(u64, u64) + Send)) -> Result<Imported, Failure> {
    super::run(job, progress).map(|outcome| match outcome {
        Outcome::Imported { images, refused, .. } => (images, refused),
        other => panic!("{other:?}"),
    })
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(about: &str) -> Self {
        assert!(rustix::process::geteuid().is_root(), "unpacking changes owners: run as root");
        let root = std::env::temp_dir().join(format!("coracle-import-{about}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(&root).unwrap();
        Self(root)
    }

    fn import(&self, bytes: &[u8]) -> Result<Vec<ImageRecord>, Failure> {
        let archive = self.0.join("archive");
        std::fs::write(&archive, bytes).unwrap();
        let job = ImportJob {
            root: self.0.join("root"),
            source: ImportSource::Archive(archive),
            limits: Limits::default(),
            keep_blobs: true,
            is_background: false,
            serves_neighbours: false,
            policy: None,
        };
        run(&job, &mut |_, _| ()).map(|(records, refused)| {
            assert!(refused.is_empty(), "{refused:?}");
            records
        })
    }

    /// Temporary directories, which a failed import must remove.
    fn rests(&self) -> Vec<PathBuf> {
        let list = |path: &str| std::fs::read_dir(self.0.join(path)).into_iter().flatten().flatten();
        list("root/images/parts").chain(list("root/layers")).map(|entry| entry.path()).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn tar_of(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, &content[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

fn layer(text: &str) -> Vec<u8> {
    tar_of(&[("etc/passwd".to_owned(), text.as_bytes().to_vec())])
}

fn config(architecture: &str, layer: &[u8]) -> Vec<u8> {
    let diff_id = digest_of(layer);
    format!(r#"{{"os":"linux","architecture":"{architecture}","config":{{"Cmd":["x"]}},"rootfs":{{"diff_ids":["{diff_id}"]}}}}"#)
        .into_bytes()
}

fn docker(images: &[(&str, &str)]) -> Vec<u8> {
    let mut files = Vec::new();
    let mut entries = Vec::new();
    for (number, (architecture, tag)) in images.iter().enumerate() {
        let layer = layer(tag);
        files.push((format!("{number}.json"), config(architecture, &layer)));
        files.push((format!("{number}/layer.tar"), layer));
        entries.push(format!(
            r#"{{"Config":"{number}.json","RepoTags":["{tag}"],"Layers":["{number}/layer.tar"]}}"#
        ));
    }
    files.push(("manifest.json".to_owned(), format!("[{}]", entries.join(",")).into_bytes()));
    tar_of(&files)
}

/// An OCI layout with a nested index; `lie`: whether the layer's bytes are changed after the digests were
/// computed.
fn oci(architecture: &str, lie: bool) -> Vec<u8> {
    let mut blobs = Vec::new();
    let mut blob = |bytes: Vec<u8>| {
        let digest = digest_of(&bytes);
        blobs.push((format!("blobs/sha256/{}", &digest[7..]), bytes.clone()));
        format!(r#""digest":"{digest}","size":{}"#, bytes.len())
    };
    let layer = layer("oci");
    let config = blob(config(architecture, &layer));
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&layer).unwrap();
    let layer = blob(gzip.finish().unwrap());
    let kind = "application/vnd.oci.image.layer.v1.tar+gzip";
    let manifest = blob(
        format!(r#"{{"config":{{{config}}},"layers":[{{"mediaType":"{kind}",{layer}}}]}}"#).into_bytes(),
    );
    let platform = format!(r#""platform":{{"os":"linux","architecture":"{architecture}"}}"#);
    let nested = blob(format!(r#"{{"manifests":[{{{manifest},{platform}}}]}}"#).into_bytes());
    let names = r#""annotations":{"org.opencontainers.image.ref.name":"reg.example/app:1"}"#;
    let mut files =
        vec![("index.json".to_owned(), format!(r#"{{"manifests":[{{{nested},{names}}}]}}"#).into_bytes())];
    if lie {
        blobs[1].1[20] ^= 1;
    }
    files.extend(blobs);
    tar_of(&files)
}

#[test]
fn docker_archives_are_imported_for_this_platform_as_root() {
    let scratch = Scratch::new("docker");
    let records = scratch
        .import(&docker(&[(ARCHITECTURE, "app:1"), ("s390x", "other:1"), (ARCHITECTURE, "app:2")]))
        .unwrap();
    let tags: Vec<_> = records.iter().map(|record| record.tags[0].as_str()).collect();
    assert_eq!(tags, ["app:1", "app:2"]);
    assert_eq!(records[0].config.command, ["x"]);
    assert!(records[0].digests.is_empty() && records[0].size_bytes > 0);
    let root = scratch.0.join("root");
    assert!(root.join("layers").join(&records[0].layers[0].name).join("etc/passwd").is_file());
    let users = root.join("images/users").join(&records[0].id[7..]).join("record");
    assert_eq!(UsersFiles::decode(&std::fs::read(users).unwrap()).unwrap().passwd, b"app:1");
    assert_eq!(std::fs::read_dir(root.join("images/parts")).unwrap().count(), 0);
}

#[test]
fn nested_indexes_of_oci_layouts_are_followed_as_root() {
    let scratch = Scratch::new("oci");
    let mut zstd = b"\x5e\x2a\x4d\x18\x05\0\0\0frame".to_vec(); // as pzstd writes it
    zstd.extend(zstd::encode_all(&oci(ARCHITECTURE, false)[..], 1).unwrap());
    let records = scratch.import(&zstd).unwrap();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].tags, ["reg.example/app:1"]);
    assert!(records[0].digests[0].starts_with("reg.example/app@sha256:"), "{:?}", records[0].digests);
    for blob in &records[0].blobs {
        assert!(scratch.0.join("root/images/blobs/sha256").join(&blob[7..]).is_file(), "{blob}");
    }
}

#[test]
fn an_archive_of_another_platform_is_an_error_as_root() {
    let error = Scratch::new("platform").import(&oci("s390x", false)).unwrap_err();
    assert_eq!(error.kind, FailureKind::NotFound, "{error:?}");
    assert!(error.message.contains("no match for platform"), "{error:?}");
    // Only an index is filtered, as with containerd: the node may have binfmt_misc.
    let records = Scratch::new("named").import(&docker(&[("s390x", "a:1")])).unwrap();
    assert_eq!(records[0].tags, ["a:1"]);
}

/// The archives of `docker save`: the manifest.json counts if index.json names no image.
#[test]
fn manifest_json_is_used_if_index_json_has_no_image_as_root() {
    let absent = digest_of(b"absent");
    for index in [
        r#"{"schemaVersion":2,"manifests":null}"#.to_owned(),
        r#"{"manifests":[]}"#.to_owned(),
        format!(r#"{{"manifests":[{{"digest":"{absent}","size":1}}]}}"#),
        "[".to_owned(),
    ] {
        let layer = layer("app");
        let files = [
            ("index.json".to_owned(), index.clone().into_bytes()),
            ("0.json".to_owned(), config(ARCHITECTURE, &layer)),
            ("layer.tar".to_owned(), layer),
            (
                "manifest.json".to_owned(),
                br#"[{"Config":"0.json","RepoTags":null,"Layers":["layer.tar"]}]"#.to_vec(),
            ),
        ];
        let records = Scratch::new("both").import(&tar_of(&files)).unwrap();
        assert_eq!((records.len(), records[0].layers.len()), (1, 1), "{index}");
    }
}

/// Null is absent as in Go; an entry that Go would refuse concerns no other image here.
#[test]
fn an_unusual_entry_does_not_refuse_the_archive_as_root() {
    let scratch = Scratch::new("entries");
    let mut oci = Oci::default();
    let manifest = oci.image(&ARCHITECTURE.to_uppercase(), "one");
    let platform = format!(r#""platform":{{"os":"linux","architecture":"{ARCHITECTURE}","variant":null}}"#);
    oci.named.push(format!(
        r#"{{{manifest},{platform},"annotations":{{"x":null,"{OCI_NAME}":"reg.example/a:1"}}}}"#
    ));
    let archive = scratch.import(&oci.tar()).unwrap();
    assert_eq!(archive[0].tags, ["reg.example/a:1"]);
    oci.named.insert(0, r#"{"digest":5}"#.to_owned());
    std::fs::write(scratch.0.join("archive"), oci.tar()).unwrap();
    let job = ImportJob {
        root: scratch.0.join("root"),
        source: ImportSource::Archive(scratch.0.join("archive")),
        limits: Limits::default(),
        keep_blobs: true,
        is_background: false,
        serves_neighbours: false,
        policy: None,
    };
    let (records, refused) = run(&job, &mut |_, _| ()).unwrap();
    assert_eq!((records.len(), refused.len()), (1, 1));
    assert!(refused[0].message.starts_with("archive: index.json: digest: invalid type"), "{refused:?}");
}

#[test]
fn wrong_digests_and_truncation_leave_no_files_as_root() {
    let whole = docker(&[(ARCHITECTURE, "app:1")]);
    let mut cases = vec![oci(ARCHITECTURE, true), b"garbage".to_vec(), tar_of(&[("x".into(), vec![1])])];
    // Truncated before the end marker; an archive that is truncated within it is complete.
    cases.extend((1..whole.len() - 2048).step_by(700).map(|cut| whole[..cut].to_vec()));
    for bytes in cases {
        let scratch = Scratch::new("lies");
        let error = scratch.import(&bytes).expect_err(&format!("{} bytes", bytes.len()));
        assert_eq!(error.kind, FailureKind::Invalid, "{error:?}");
        assert_eq!(scratch.rests(), Vec::<PathBuf>::new(), "{} bytes", bytes.len());
    }
}

/// The daemon adds the path, so the worker's text has none; a file of another kind is called one, and not quoted.
#[test]
fn errors_about_the_archive_itself_have_neither_its_path_nor_its_bytes_as_root() {
    let scratch = Scratch::new("kinds");
    let path = scratch.0.join("archive");
    let job = |path: PathBuf| ImportJob {
        root: scratch.0.join("root"),
        source: ImportSource::Archive(path),
        limits: Limits::default(),
        keep_blobs: true,
        is_background: false,
        serves_neighbours: false,
        policy: None,
    };
    let refused = |path: &Path| run(&job(path.to_owned()), &mut |_, _| ()).unwrap_err();
    let error = refused(&path);
    assert_eq!((error.kind, error.message.as_str()), (FailureKind::NotFound, "not found"));
    std::os::unix::fs::symlink(&path, &path).unwrap();
    let error = refused(&path);
    assert_eq!(error.kind, FailureKind::Internal);
    assert!(error.message.starts_with("open: ") && !error.message.contains("archive"), "{error:?}");
    std::fs::remove_file(&path).unwrap();
    for bytes in [&b"PK\x03\x04 a zip"[..], &[b'x'; 2048], &[0x1b; 700]] {
        std::fs::write(&path, bytes).unwrap();
        let error = refused(&path);
        let expected = "archive: it is no tar archive, plain or compressed with gzip or zstd";
        assert_eq!((error.kind, error.message.as_str()), (FailureKind::Invalid, expected));
    }
}

/// An OCI archive in parts; `index.json` is first, as containerd writes it.
#[derive(Default)]
struct Oci {
    named: Vec<String>,
    blobs: Vec<(String, Vec<u8>)>,
}

impl Oci {
    /// Adds a blob and returns the members of its descriptor as JSON text.
    fn blob(&mut self, bytes: Vec<u8>) -> String {
        let digest = digest_of(&bytes);
        let descriptor = format!(r#""digest":"{digest}","size":{}"#, bytes.len());
        self.blobs.push((format!("blobs/sha256/{}", &digest[7..]), bytes));
        descriptor
    }

    /// Adds an image with one layer that contains `text`; returns the members of its manifest's descriptor as
    /// JSON text.
    fn image(&mut self, architecture: &str, text: &str) -> String {
        let layer = layer(text);
        let config = self.blob(config(architecture, &layer));
        let layer = self.blob(layer);
        self.blob(format!(r#"{{"config":{{{config}}},"layers":[{{{layer}}}]}}"#).into_bytes())
    }

    /// Adds a name for a descriptor to the top index.
    fn name(&mut self, descriptor: &str, annotation: &str, name: &str) {
        self.named.push(format!(r#"{{{descriptor},"annotations":{{"{annotation}":"{name}"}}}}"#));
    }

    fn files(&self) -> Vec<(String, Vec<u8>)> {
        let index = format!(r#"{{"manifests":[{}]}}"#, self.named.join(","));
        let mut files = vec![
            ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
            ("index.json".to_owned(), index.into_bytes()),
        ];
        files.extend(self.blobs.iter().cloned());
        files
    }

    fn tar(&self) -> Vec<u8> {
        tar_of(&self.files())
    }
}

#[test]
fn truncation_between_entries_is_detected_as_root() {
    let mut oci = Oci::default();
    for name in ["reg.example/a:1", "reg.example/b:1"] {
        let manifest = oci.image(ARCHITECTURE, name);
        oci.name(&manifest, CONTAINERD_NAME, name);
    }
    let whole = oci.tar();
    assert_eq!(Scratch::new("cut-whole").import(&whole).unwrap().len(), 2);
    for cut in (512..=whole.len() - 1024).step_by(512) {
        let scratch = Scratch::new("cut");
        let error = scratch.import(&whole[..cut]).expect_err(&format!("{cut} bytes"));
        assert_eq!(error.kind, FailureKind::Invalid, "{cut} bytes: {error:?}");
        assert_eq!(scratch.rests(), Vec::<PathBuf>::new(), "{cut} bytes");
    }
}

#[test]
fn the_last_of_several_entries_with_one_name_counts_as_root() {
    let scratch = Scratch::new("twice");
    let mut oci = Oci::default();
    let manifest = oci.image(ARCHITECTURE, "twice");
    oci.name(&manifest, CONTAINERD_NAME, "reg.example/a:1");
    let mut files = oci.files();
    files.insert(0, ("index.json".to_owned(), b"old".to_vec()));
    files.extend(oci.blobs.clone());
    assert_eq!(scratch.import(&tar_of(&files)).unwrap()[0].tags, ["reg.example/a:1"]);
}

#[test]
fn a_name_with_a_digest_is_recorded_without_its_tag_as_root() {
    let scratch = Scratch::new("pinned");
    let mut oci = Oci::default();
    let manifest = oci.image(ARCHITECTURE, "pinned");
    let digest = digest_of(&oci.blobs.last().unwrap().1);
    for name in ["reg.example:5000/a", "reg.example:5000/a:1"] {
        oci.name(&manifest, CONTAINERD_NAME, &format!("{name}@{digest}"));
    }
    let records = scratch.import(&oci.tar()).unwrap();
    assert_eq!(records[0].tags, Vec::<String>::new());
    assert_eq!(records[0].digests, [format!("reg.example:5000/a@{digest}")]);
}

#[test]
fn manifests_for_other_platforms_are_not_parsed_as_root() {
    let scratch = Scratch::new("foreign");
    let mut oci = Oci::default();
    let manifest = oci.image(ARCHITECTURE, "ours");
    oci.name(&manifest, CONTAINERD_NAME, "reg.example/a:1");
    let config = oci.blob(b"{}".to_vec());
    let kind = "application/vnd.in-toto+json";
    let layer = oci.blob(b"statement".to_vec());
    let foreign = oci.blob(
        format!(r#"{{"config":{{{config}}},"layers":[{{"mediaType":"{kind}",{layer}}}]}}"#).into_bytes(),
    );
    let platform = r#""platform":{"os":"unknown","architecture":"unknown"}"#;
    oci.name(&format!("{foreign},{platform}"), OCI_NAME, "reg.example/b:1");
    let records = scratch.import(&oci.tar()).unwrap();
    assert_eq!((records.len(), records[0].tags.as_slice()), (1, &["reg.example/a:1".to_owned()][..]));
}

#[test]
fn indexes_without_a_platform_are_followed_as_root() {
    let scratch = Scratch::new("unnamed");
    let mut oci = Oci::default();
    let mut descriptor = oci.image(ARCHITECTURE, "deep");
    for _ in 0..2 {
        descriptor = oci.blob(format!(r#"{{"manifests":[{{{descriptor}}}]}}"#).into_bytes());
    }
    oci.name(&descriptor, OCI_NAME, "reg.example/a:1");
    let records = scratch.import(&oci.tar()).unwrap();
    assert_eq!(records[0].tags, ["reg.example/a:1"]);
    assert_eq!(records[0].blobs.len(), 5, "two indexes, manifest, config, layer");
}

#[test]
fn the_size_of_documents_is_limited_as_root() {
    let too_long = vec![b' '; usize::try_from(coracle_manifest::DOCUMENT_BYTES_MAX).unwrap() + 1];
    let mut long_manifest = Oci::default();
    let manifest = long_manifest.blob(too_long.clone());
    long_manifest.name(&manifest, OCI_NAME, "reg.example/a:1");
    let mut long_config = Oci::default();
    let config = long_config.blob(too_long);
    let manifest = long_config.blob(format!(r#"{{"config":{{{config}}},"layers":[]}}"#).into_bytes());
    long_config.name(&manifest, OCI_NAME, "reg.example/a:1");
    for oci in [long_manifest, long_config] {
        let error = Scratch::new("long").import(&oci.tar()).unwrap_err();
        assert!(error.kind == FailureKind::Invalid && error.message.contains("longer than"), "{error:?}");
    }
}

#[test]
fn an_image_without_layers_may_have_null_as_root() {
    let config = format!(r#"{{"os":"linux","architecture":"{ARCHITECTURE}","rootfs":{{"diff_ids":null}}}}"#);
    let files = [
        ("c.json".to_owned(), config.into_bytes()),
        ("manifest.json".to_owned(), br#"[{"Config":"c.json","RepoTags":null,"Layers":null}]"#.to_vec()),
    ];
    let records = Scratch::new("null").import(&tar_of(&files)).unwrap();
    assert_eq!((records.len(), records[0].layers.len()), (1, 0));
    assert!(records[0].size_bytes > 0);
}

#[test]
fn the_compression_is_detected_by_its_magic_and_malformed_data_refused_as_root() {
    let plain = docker(&[(ARCHITECTURE, "app:1")]);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    for whole in [plain.clone(), gzip.finish().unwrap(), zstd::encode_all(&plain[..], 1).unwrap()] {
        let scratch = Scratch::new("outer");
        assert_eq!(scratch.import(&whole).unwrap()[0].tags, ["app:1"]);
        let scratch = Scratch::new("outer-cut");
        let error = scratch.import(&whole[..whole.len() / 2]).unwrap_err();
        assert_eq!(error.kind, FailureKind::Invalid, "{error:?}");
        assert_eq!(scratch.rests(), Vec::<PathBuf>::new());
    }
}

#[test]
fn an_image_has_all_its_names_and_the_oci_format_is_preferred_as_root() {
    let mut oci = Oci::default();
    let manifest = oci.image(ARCHITECTURE, "named");
    oci.name(&manifest, CONTAINERD_NAME, "reg.example/a:1");
    oci.name(&manifest, CONTAINERD_NAME, "reg.example/a:2");
    let mut files = oci.files();
    files.push(("manifest.json".to_owned(), b"not read".to_vec()));
    let records = Scratch::new("names").import(&tar_of(&files)).unwrap();
    assert_eq!((records.len(), records[0].tags.len(), records[0].digests.len()), (1, 2, 1), "{records:?}");
}

#[test]
fn links_to_layers_are_followed_and_missing_layers_are_an_error_as_root() {
    let layer = layer("linked");
    let image = |number: u32, diff_id: &str| {
        format!(
            r#"{{"Config":"{number}.json","RepoTags":["a:{number}","b:{number}"],"Layers":["{diff_id}/layer.tar"]}}"#
        )
    };
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |kind: tar::EntryType, name: &str, content: &[u8], target: &str| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        // A link has no body, whatever its size.
        header.set_size(if target.is_empty() { content.len() as u64 } else { 1024 });
        header.set_mode(0o644);
        match target {
            "" => builder.append_data(&mut header, name, content).unwrap(),
            target => builder.append_link(&mut header, name, target).unwrap(),
        }
    };
    let manifest = format!("[{},{},{}]", image(0, "one"), image(1, "two"), image(2, "three"));
    add(tar::EntryType::Regular, "one/layer.tar", &layer, "");
    add(tar::EntryType::Symlink, "two/layer.tar", b"", "../one/layer.tar");
    add(tar::EntryType::Link, "three/layer.tar", b"", "one/layer.tar");
    for number in 0..3 {
        let config = config(ARCHITECTURE, &layer);
        let config = String::from_utf8(config).unwrap().replace("\"x\"", &format!("\"{number}\""));
        add(tar::EntryType::Regular, &format!("{number}.json"), config.as_bytes(), "");
    }
    add(tar::EntryType::Regular, "manifest.json", manifest.as_bytes(), "");
    let records = Scratch::new("links").import(&builder.into_inner().unwrap()).unwrap();
    assert_eq!(records.len(), 3);
    assert!(records.iter().all(|record| record.layers == records[0].layers && record.tags.len() == 2));

    let mut oci = Oci::default();
    let manifest = oci.image(ARCHITECTURE, "missing");
    oci.name(&manifest, CONTAINERD_NAME, "reg.example/a:1");
    oci.blobs.remove(1);
    let scratch = Scratch::new("missing");
    let error = scratch.import(&oci.tar()).unwrap_err();
    assert!(error.kind == FailureKind::Invalid && error.message.contains("is missing"), "{error:?}");
    assert_eq!(scratch.rests(), Vec::<PathBuf>::new());
}

/// Regression: the version of the layout was not read.
#[test]
fn another_version_of_the_layout_is_refused_as_root() {
    let scratch = Scratch::new("version");
    for (text, expected) in [
        (r#"{"imageLayoutVersion":"1.0.0"}"#, None),
        (r#"{"imageLayoutVersion":"2.0.0"}"#, Some("imageLayoutVersion \"2.0.0\"")),
        ("{}", Some("imageLayoutVersion \"\"")),
        ("[", Some("oci-layout: ")),
    ] {
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        archive.append_data(&mut header, "oci-layout", text.as_bytes()).unwrap();
        let end = archive.get_ref().len();
        let layout = archive.into_inner().unwrap()[..end].to_vec();
        let imported = scratch.import(&[layout, oci(ARCHITECTURE, false)].concat());
        match (imported, expected) {
            (Ok(records), None) => assert_eq!(records.len(), 1),
            (Err(failure), Some(words)) if failure.message.contains(words) => {}
            (got, _) => panic!("{text}: {got:?}"),
        }
    }
}
