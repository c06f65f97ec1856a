//! Files of policies and signatures that are not what they should be.

use std::os::unix::fs::MetadataExt;

use coracle_signature::Found;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;

struct Scratch(PathBuf, Store, String);

impl Scratch {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("coracle-policy-{name}-{}", std::process::id()));
        let store = Store::open(&root).unwrap();
        Self(root, store, format!("sha256:{}", "0a".repeat(32)))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn signature() -> Kept {
    let found = Found {
        digest: "sha256:00".to_owned(),
        place: "tag".to_owned(),
        is_of_notation: false,
        media_type: "text/plain".to_owned(),
        annotations: Default::default(),
        content: b"x".to_vec(),
    };
    Kept { top: "sha256:00".to_owned(), member: "sha256:01".to_owned(), found: vec![found] }
}

#[test]
fn stored_signatures_are_read_from_a_regular_file_only() {
    let Scratch(_, store, id) = &Scratch::new("kept");
    assert_eq!(kept(store, id), []);
    keep(store, id, None).unwrap();
    let path = store.signatures(id).unwrap();
    assert!(!path.exists());
    keep(store, id, Some(signature())).unwrap();
    assert_eq!(kept(store, id), [signature()]);
    let written = path.metadata().unwrap().ino();
    keep(store, id, Some(signature())).unwrap();
    assert_eq!(path.metadata().unwrap().ino(), written, "nothing is new");
    let long = fs::OpenOptions::new().append(true).open(&path).unwrap();
    long.set_len(1 << 40).unwrap();
    assert_eq!(kept(store, id), []);
    fs::remove_file(&path).unwrap();
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    assert_eq!(kept(store, id), []);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(kept(store, id), []);
}

/// Two pulls of one image by two names, each with the signature of another key.
#[test]
fn signatures_that_are_stored_at_the_same_time_are_all_kept() {
    let Scratch(_, store, id) = &Scratch::new("lock");
    let of = |number: usize| {
        let mut kept = signature();
        kept.found[0].content = number.to_string().into_bytes();
        kept
    };
    std::thread::scope(|scope| {
        for number in 0..16 {
            scope.spawn(move || keep(store, id, Some(of(number))).unwrap());
        }
    });
    assert_eq!(kept(store, id)[0].found.len(), 16);
}

#[test]
fn a_policy_or_a_key_that_is_no_short_file_is_a_mistake_at_once() {
    let scratch = Scratch::new("file");
    let [policy, key] = ["policy.json", "key.pub"].map(|name| scratch.0.join(name));
    let text = format!(r#"{{"default": [{{"type": "cosign", "keyPath": {key:?}}}]}}"#);
    let mistake = || read(&policy).unwrap_err().message;
    for (path, place) in [(&policy, "policy.json: "), (&key, "default[0].key")] {
        assert!(mistake().contains("no such file"), "{}", mistake());
        mkfifo(path, Mode::S_IRWXU).unwrap();
        assert!(mistake().contains(place) && mistake().contains("is a FIFO"), "{}", mistake());
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
        assert!(mistake().contains(place) && mistake().contains("a directory"), "{}", mistake());
        fs::remove_dir(path).unwrap();
        // 4 GiB, of which nothing is on the disk.
        fs::File::create(path).unwrap().set_len(4 << 30).unwrap();
        assert!(mistake().contains(place), "{}", mistake());
        fs::write(path, b"\xff").unwrap();
        assert!(mistake().contains(place), "{}", mistake());
        fs::write(path, &text).unwrap();
    }
    assert!(mistake().contains("no public key in PEM"), "{}", mistake());
}
