//! Both forms of archives, built here and imported into a scratch store. As root: layers hold owners.

use std::io::Write;
use std::path::PathBuf;

use coracle_job::Limits;

use super::*;

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
        let job =
            ImportJob { root: self.0.join("root"), archive, limits: Limits::default(), keep_blobs: true };
        run(&job, &mut |_, _| ())
    }

    /// Directories that a failed import must not leave.
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

/// An OCI layout with a nested index; `lie` breaks the layer's bytes after the digests were made.
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
fn docker_archives_give_their_images_of_this_platform() {
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
    let users = root.join("images/users").join(&records[0].id[7..]).join("passwd");
    assert_eq!(std::fs::read(users).unwrap(), b"app:1");
    assert_eq!(std::fs::read_dir(root.join("images/parts")).unwrap().count(), 0);
}

#[test]
fn oci_layouts_are_followed_through_nested_indexes() {
    let scratch = Scratch::new("oci");
    let zstd = zstd::encode_all(&oci(ARCHITECTURE, false)[..], 1).unwrap();
    let records = scratch.import(&zstd).unwrap();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].tags, ["reg.example/app:1"]);
    assert!(records[0].digests[0].starts_with("reg.example/app@sha256:"), "{:?}", records[0].digests);
    for blob in &records[0].blobs {
        assert!(scratch.0.join("root/images/blobs/sha256").join(&blob[7..]).is_file(), "{blob}");
    }
}

#[test]
fn what_is_not_for_this_platform_is_said_so() {
    for bytes in [docker(&[("s390x", "a:1")]), oci("s390x", false)] {
        let error = Scratch::new("platform").import(&bytes).unwrap_err();
        assert_eq!(error.kind, FailureKind::NotFound, "{error:?}");
        assert!(error.message.contains("no match for platform"), "{error:?}");
    }
}

#[test]
fn lies_and_truncation_leave_nothing() {
    let whole = docker(&[(ARCHITECTURE, "app:1")]);
    let mut cases = vec![oci(ARCHITECTURE, true), b"garbage".to_vec(), tar_of(&[("x".into(), vec![1])])];
    // Cuts before the end marker; cut inside it, an archive is still whole.
    cases.extend((1..whole.len() - 2048).step_by(700).map(|cut| whole[..cut].to_vec()));
    for bytes in cases {
        let scratch = Scratch::new("lies");
        let error = scratch.import(&bytes).expect_err(&format!("{} bytes", bytes.len()));
        assert_eq!(error.kind, FailureKind::Invalid, "{error:?}");
        assert_eq!(scratch.rests(), Vec::<PathBuf>::new(), "{} bytes", bytes.len());
    }
}
