//! What stands in the place of containerd's files; tests/images/take_over.rs has the files that it writes itself.

use std::fs;
use std::path::PathBuf;

use coracle_job::FailureKind;
use nix::sys::stat::Mode;

use super::*;

struct Scratch(PathBuf);

impl Scratch {
    fn new(about: &str) -> Self {
        let root = std::env::temp_dir().join(format!("coracle-containerd-{about}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("io.containerd.metadata.v1.bolt")).unwrap();
        fs::create_dir_all(root.join("io.containerd.content.v1.content/blobs/sha256")).unwrap();
        Self(root)
    }

    fn list(&self) -> Result<Vec<ContainerdImage>, Failure> {
        list(&ListContainerdJob { store: self.0.clone(), namespace: "k8s.io".to_owned() })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn other_kinds_of_files_are_refused_without_waiting() {
    let scratch = Scratch::new("kinds");
    let path = metadata::path(&scratch.0);
    let error = scratch.list().unwrap_err();
    assert!(
        error.kind == FailureKind::NotFound && error.message.contains("not the root directory"),
        "{error:?}"
    );
    nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
    assert!(scratch.list().unwrap_err().message.contains("not a regular file"));
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert!(scratch.list().is_err());
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(scratch.list().unwrap_err().message.contains("not a regular file"));
    fs::remove_dir(&path).unwrap();
    for text in [&b""[..], b"rubbish", &[0; 65536]] {
        fs::write(&path, text).unwrap();
        let error = scratch.list().unwrap_err();
        assert!(
            error.kind == FailureKind::Invalid && error.message.contains("meta.db: damaged: "),
            "{error:?}"
        );
    }
}

#[test]
fn blobs_are_verified_and_must_be_regular_files() {
    let scratch = Scratch::new("blobs");
    let content = ContentStore::of(&scratch.0);
    let digest = digest_of(b"text");
    assert_eq!(content.document(&digest).unwrap(), None);
    let path = content.path(&digest).unwrap();
    fs::write(&path, "text").unwrap();
    assert_eq!(content.document(&digest).unwrap().as_deref(), Some(&b"text"[..]));
    assert_eq!(content.bytes(&digest).unwrap(), Some(4));
    fs::write(&path, "tex!").unwrap();
    assert!(content.document(&digest).unwrap_err().message.contains("its content has digest"));
    fs::File::create(&path).unwrap().set_len(5 << 20).unwrap();
    assert!(content.document(&digest).unwrap_err().message.contains("longer than"));
    fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
    assert!(content.document(&digest).unwrap_err().message.contains("not a regular file"));
    assert!(content.bytes(&digest).is_err());
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
    assert!(content.document(&digest).is_err());
    assert!(content.path("sha256:../../x").is_err() && content.path("sha512:00").is_err());
}
