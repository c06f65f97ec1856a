//! Tests the image service in a real directory. Shell scripts act as workers: the test creates the files of a
//! pull, and the script returns an answer from a file.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::reactor;
use coracle_base::store::UNREAD_LIMIT;
use coracle_base::testdir::TestDir;
use coracle_base::workers::Workers;
use coracle_job::{
    Answer, AuthFields, Failure, FailureKind, ImageConfig, ImageRecord, Job, Layer, Limits, Outcome,
    write_message,
};
use coracle_wire::ContainerId;

use super::{Auth, Images, Options, builtin};

mod policy;
mod replace;

const TAG: &str = "reg.example/app:1";

/// Script that reads the job, records that it ran, and returns the prepared answer.
const ANSWER: &str = "cat > $D/job; echo run >> $D/runs; cat $D/answer";

struct Node {
    dir: TestDir,
}

impl Node {
    fn new() -> Node {
        let node = Node { dir: TestDir::new("images") };
        node.worker(ANSWER);
        node
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn worker(&self, script: &str) {
        self.dir.script("worker", script);
    }

    fn answer(&self, answer: &Answer) {
        let mut bytes = Vec::new();
        write_message(&mut bytes, answer).unwrap();
        std::fs::write(self.dir.path().join("answer"), bytes).unwrap();
    }

    fn open(&self) -> Rc<Images> {
        let workers = Workers::new(self.dir.path().join("worker"));
        let options = Options {
            root: self.root(),
            additional_stores: Vec::new(),
            keep_blobs: true,
            partial_pulls: true,
            registries: coracle_job::Registries::default(),
            limits: Limits::default(),
        };
        let images = Images::open(options, workers).unwrap();
        images.configure(&["reg.example/pinned/*".to_owned()], None).unwrap();
        images
    }

    /// Creates all files of the image `digit` and returns its record.
    fn whole(&self, digit: char, tags: &[&str]) -> ImageRecord {
        let record = record(digit, tags);
        for layer in &record.layers {
            std::fs::create_dir_all(self.root().join("layers").join(&layer.name)).unwrap();
        }
        for blob in &record.blobs {
            let path = self.root().join("images/blobs").join(blob.replace(':', "/"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, r#"{"os":"linux"}"#).unwrap();
        }
        record
    }

    async fn pull(&self, images: &Rc<Images>, record: &ImageRecord, name: &str) -> Result<String, Error> {
        self.answer(&Answer::Done(Outcome::Pulled(record.clone(), Vec::new())));
        images.pull(name, Auth::default()).await.map(|id| id.to_string())
    }

    fn runs(&self) -> usize {
        std::fs::read_to_string(self.dir.path().join("runs")).unwrap_or_default().lines().count()
    }

    fn layers(&self) -> Vec<String> {
        super::disk::list(&self.root().join("layers"))
    }

    fn layer(&self, digit: char) -> PathBuf {
        self.root().join("layers").join(digit.to_string().repeat(32))
    }
}

fn hex(digit: char) -> String {
    digit.to_string().repeat(64)
}

fn record(digit: char, tags: &[&str]) -> ImageRecord {
    let id = format!("sha256:{}", hex(digit));
    ImageRecord {
        id: id.clone(),
        tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        digests: vec![format!("reg.example/app@sha256:{}", hex(digit))],
        size_bytes: 1000,
        layers: vec![Layer { diff_id: id.clone(), chain_id: id.clone(), name: digit.to_string().repeat(32) }],
        blobs: vec![id],
        config: ImageConfig { user: "1002".into(), ..ImageConfig::default() },
    }
}

fn imported(images: Vec<ImageRecord>) -> Outcome {
    Outcome::Imported { images, refused: Vec::new(), damaged: Vec::new() }
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        reactor::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn a_pulled_image_is_listed_at_once_and_after_a_restart() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        assert_eq!(images.find(TAG).unwrap(), None);
        assert_eq!(node.pull(&images, &record, TAG).await.unwrap(), record.id);
        let view = images.resolve(TAG).unwrap();
        assert_eq!((view.tags.as_slice(), view.user.as_str()), (record.tags.as_slice(), "1002"));
        assert_eq!(images.record(&view.id).unwrap(), record);
        assert_eq!(images.config(&view.id).unwrap(), (r#"{"os":"linux"}"#.into(), record.id.clone()));
        assert_eq!(images.users_files(&view.id).await.unwrap(), super::UsersFiles::default());
        let again = node.open();
        assert_eq!(again.list(), images.list());
        let mode = std::fs::metadata(node.root().join("layers")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "users can access set-user-ID programs of images");
        assert_eq!(again.list().len(), 2, "with the built-in one");
        assert!(again.usage().await.used_bytes >= 1000);
    });
}

#[test]
fn the_job_of_a_worker_follows_from_the_reference() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.answer(&Answer::Done(Outcome::Pulled(record, Vec::new())));
        let fields = AuthFields { username: "u".into(), password: "p".into(), ..AuthFields::default() };
        let auth = Auth { fields, ..Auth::default() };
        images.pull("app:2", auth).await.unwrap();
        let job = std::fs::read(node.dir.path().join("job")).unwrap();
        let Some(Job::Pull(job)) = coracle_job::read_message(&mut job.as_slice()).unwrap() else {
            panic!("another job")
        };
        assert_eq!((job.registry.as_str(), job.repository.as_str()), ("docker.io", "library/app"));
        assert_eq!((job.tag.as_str(), job.digest.as_str(), job.keep_blobs), ("2", "", true));
        assert_eq!(format!("{:?}", job.credentials), "basic");
        assert_eq!(job.root, node.root());
    });
}

#[test]
fn a_tag_is_pulled_again_and_a_present_digest_is_not() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let old = node.whole('a', &[TAG]);
        let new = node.whole('b', &[TAG]);
        node.pull(&images, &old, TAG).await.unwrap();
        node.pull(&images, &new, TAG).await.unwrap();
        assert_eq!(node.runs(), 2);
        assert_eq!(images.resolve(TAG).unwrap().id.to_string(), new.id);
        let digest = &old.digests[0];
        assert_eq!(images.pull(digest, Auth::default()).await.unwrap().to_string(), old.id);
        assert_eq!(node.runs(), 2, "a digest in the store needs no worker");
        for images in [&images, &node.open()] {
            let old = images.resolve(digest).unwrap();
            assert!(old.tags.is_empty() && old.digests.len() == 1);
        }
    });
}

#[test]
fn an_image_has_several_names_which_are_removed_together() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        for tag in [TAG, "reg.example/app:2", "other.example/app:1"] {
            let record = node.whole('a', &[tag]);
            node.pull(&images, &record, tag).await.unwrap();
        }
        let view = images.resolve("other.example/app:1").unwrap();
        assert_eq!(view.tags, [TAG, "reg.example/app:2", "other.example/app:1"]);
        images.remove("reg.example/app:2").unwrap();
        images.remove("reg.example/app:2").unwrap();
        assert_eq!(images.list().len(), 1, "only the built-in image remains");
        until("its disk is freed", || !node.layer('a').exists()).await;
        assert!(!node.root().join("images/blobs/sha256").join(hex('a')).exists());
        assert_eq!(node.open().list().len(), 1);
    });
}

#[test]
fn layers_are_kept_while_a_container_uses_them() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.pull(&images, &record, TAG).await.unwrap();
        let container = ContainerId::from_bytes([1; 32]);
        images.retain(container, record.layers.iter().map(|layer| layer.name.as_str())).unwrap();
        assert!(images.retain(container, ["../../etc"]).is_err());
        images.remove(&record.id).unwrap();
        images.sweep();
        assert!(images.find(TAG).unwrap().is_none() && node.layer('a').is_dir());
        images.release(&container);
        assert!(!node.layer('a').exists());
    });
}

#[test]
fn the_start_removes_unused_data_only() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.pull(&images, &record, TAG).await.unwrap();
        drop(images);
        node.whole('b', &[]);
        for name in ["tmp-1", "tmp-trash-0"] {
            std::fs::create_dir(node.root().join("layers").join(name)).unwrap();
        }
        std::fs::write(node.root().join("images/parts/x"), "half").unwrap();
        std::fs::create_dir(node.root().join("images/users").join(hex('b'))).unwrap();
        let images = node.open();
        node.worker("cat > $D/job; rm -rf $D/root/layers/tmp-trash-*; cat $D/answer");
        node.answer(&Answer::Done(Outcome::Removed));
        images.sweep();
        for gone in ["layers/tmp-1", "layers/tmp-trash-0", "images/users/"] {
            let path = node.root().join(gone);
            let path = if gone.ends_with('/') { path.join(hex('b')) } else { path };
            until(gone, || !path.exists()).await;
        }
        assert!(!node.layer('b').exists() && node.layer('a').is_dir());
        assert!(node.root().join("images/blobs/sha256").join(hex('a')).exists());
        assert!(!node.root().join("images/blobs/sha256").join(hex('b')).exists());
        assert!(
            node.root().join("images/parts/x").exists(),
            "a partly downloaded blob is kept for the next attempt"
        );
    });
}

#[test]
fn damaged_records_are_quarantined_and_affect_one_image_each() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        for digit in ['a', 'b', 'c', 'd', 'e'] {
            let record = node.whole(digit, &[&format!("reg.example/{digit}:1")]);
            node.pull(&images, &record, "reg.example/x:1").await.unwrap();
        }
        let records = node.root().join("images/records");
        std::fs::write(records.join(hex('a')), "").unwrap();
        std::fs::write(records.join(hex('b')), vec![0; 500]).unwrap();
        let whole = std::fs::read(records.join(hex('c'))).unwrap();
        std::fs::write(records.join(hex('c')), &whole[..whole.len() / 2]).unwrap();
        std::fs::remove_dir(node.layer('d')).unwrap();
        std::fs::copy(records.join(hex('e')), records.join(hex('f'))).unwrap();
        let images = node.open();
        let ids: Vec<_> =
            images.list().iter().filter(|view| !view.pinned).map(|view| view.id.hex()).collect();
        assert_eq!(ids, [hex('e')]);
        images.sweep();
        assert!(node.layer('a').is_dir(), "the layers of a lost record are unknown, so nothing is removed");
        for (digit, reason) in [
            ('a', "0 bytes"),
            ('b', "CORR"),
            ('c', "instead of"),
            ('d', "missing"),
            ('f', "is the record of"),
        ] {
            let aside = node.root().join("quarantine").join(format!("{}.0", hex(digit)));
            assert!(aside.exists(), "{digit}");
            let text = std::fs::read_to_string(format!("{}.reason", aside.display())).unwrap();
            assert!(text.contains(reason), "{digit}: {text}");
        }
    });
}

/// Regression: the image was quarantined because of "layer … is missing", and its layer was removed.
#[test]
fn a_layer_that_cannot_be_accessed_is_not_missing() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.pull(&images, &record, TAG).await.unwrap();
        // A symbolic link to itself: ELOOP, similar to EIO of a disk.
        let aside = node.dir.path().join("aside");
        std::fs::rename(node.layer('a'), &aside).unwrap();
        std::os::unix::fs::symlink(node.layer('a'), node.layer('a')).unwrap();
        let images = node.open();
        images.sweep();
        assert_eq!(images.resolve(TAG).unwrap().id.to_string(), record.id);
        assert!(!node.root().join("quarantine").exists());
        assert!(node.layer('a').is_symlink(), "it is not removed");
        let error = node.pull(&images, &record, TAG).await.unwrap_err();
        assert!(error.message().contains("stat"), "{error}");
        std::fs::remove_file(node.layer('a')).unwrap();
        std::fs::rename(&aside, node.layer('a')).unwrap();
        assert_eq!(node.pull(&images, &record, TAG).await.unwrap(), record.id);
    });
}

/// Regression: the image was missing until the next start, and layers that it shares with another image were
/// removed together with the other one.
#[test]
fn a_record_that_cannot_be_read_is_retried() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        let mut other = node.whole('b', &["reg.example/other:1"]);
        other.layers = record.layers.clone();
        for record in [&record, &other] {
            node.pull(&images, record, &record.tags[0]).await.unwrap();
        }
        let path = node.root().join("images/records").join(hex('a'));
        let aside = node.dir.path().join("aside");
        std::fs::rename(&path, &aside).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
        let images = node.open();
        images.sweep();
        assert_eq!((images.find(TAG).unwrap(), images.unread_count()), (None, 1));
        let first = images.unread_first().unwrap();
        assert_eq!(first, format!("{}: too many symbolic links encountered", path.display()));
        images.remove(&other.id).unwrap();
        assert!(node.layer('a').is_dir());
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        until("it is read", || images.unread_count() == 0).await;
        assert_eq!(images.resolve(TAG).unwrap().id.to_string(), record.id);
        assert!(!node.root().join("quarantine").exists());
    });
}

/// Regression: the record was tried again for ever, and until then no layer of any image was removed.
#[test]
fn an_image_record_that_can_never_be_read_is_set_aside_and_layers_are_removed_again() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let (kept, other) = (node.whole('a', &[TAG]), node.whole('b', &["reg.example/other:1"]));
        for record in [&kept, &other] {
            node.pull(&images, record, &record.tags[0]).await.unwrap();
        }
        let path = node.root().join("images/records").join(hex('a'));
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
        let (images, start) = (node.open(), Instant::now());
        images.sweep();
        // Long enough, but the daemon itself may have been stopped: and often enough, but not for long enough.
        images.try_unread(start + UNREAD_LIMIT * 2);
        (0..20).for_each(|_| images.try_unread(start + UNREAD_LIMIT - Duration::from_secs(1)));
        assert_eq!(images.unread_count(), 1);
        images.remove(&other.id).unwrap();
        assert!(node.layer('b').is_dir(), "the unread image may use it");
        images.try_unread(start + UNREAD_LIMIT + Duration::from_secs(1));
        assert_eq!((images.unread_count(), images.unread_first()), (0, None));
        let reason = node.root().join("quarantine").join(format!("{}.0.reason", hex('a')));
        let reason = std::fs::read_to_string(reason).unwrap();
        assert!(reason.contains("cannot be read, for ten minutes: too many symbolic links"), "{reason}");
        // What is removed from now on leaves nothing, and the image can be pulled again.
        node.pull(&images, &other, &other.tags[0]).await.unwrap();
        images.remove(&other.id).unwrap();
        assert!(!node.layer('b').exists());
        node.pull(&images, &kept, TAG).await.unwrap();
        assert!(node.open().find(TAG).unwrap().is_some());
    });
}

/// Regression: the image was only reported as not loaded, and every pull of it failed, because a record
/// cannot be renamed over a directory. Opening a FIFO would block.
#[test]
fn a_record_that_is_not_a_file_is_quarantined_and_its_image_pulled_again() {
    let node = Node::new();
    reactor::run(async {
        for what in ["directory", "fifo"] {
            let images = node.open();
            let record = node.whole('a', &[TAG]);
            node.pull(&images, &record, TAG).await.unwrap();
            let path = node.root().join("images/records").join(hex('a'));
            std::fs::remove_file(&path).unwrap();
            match what {
                "directory" => std::fs::create_dir(&path).unwrap(),
                _ => nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
            }
            let images = node.open();
            assert!(images.find(TAG).unwrap().is_none() && !path.exists(), "{what}");
            assert_eq!(images.unread_count(), 0);
            assert!(coracle_base::store::damaged_count() > 0, "Status shows it");
            assert_eq!(node.pull(&images, &record, TAG).await.unwrap(), record.id, "{what}");
            assert!(node.open().find(TAG).unwrap().is_some(), "{what}");
        }
    });
}

#[test]
fn records_of_workers_are_checked() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let mut escaping = node.whole('a', &[TAG]);
        escaping.layers[0].name = "../../../etc".into();
        let mut nameless = node.whole('a', &["App"]);
        nameless.id = "sha256:../../x".into();
        let mut shouting = node.whole('a', &["App"]);
        shouting.blobs.clear();
        for record in [escaping, nameless, shouting] {
            let error = node.pull(&images, &record, TAG).await.unwrap_err();
            assert!(error.message().contains("record is refused"), "{error}");
            assert_eq!(error.kind(), Kind::Internal);
        }
        assert_eq!(images.list().len(), 1);
    });
}

#[test]
fn a_pull_that_lost_a_part_is_retried_a_limited_number_of_times() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        std::fs::remove_dir(node.layer('a')).unwrap();
        let error = node.pull(&images, &record, TAG).await.unwrap_err();
        assert!(error.message().contains("is missing"), "{error}");
        assert_eq!(node.runs(), 3);
        node.worker("cat > $D/job; test -e $D/second && mkdir -p $D/root/layers/$(echo aaaaaaaa | sed 's/.*/&&&&/'); touch $D/second; cat $D/answer");
        assert_eq!(node.pull(&images, &record, TAG).await.unwrap(), record.id);
    });
}

#[test]
fn failures_have_the_text_that_the_kubelet_expects() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let cases = [
            (
                FailureKind::Unavailable,
                Kind::Unknown,
                "RegistryUnavailable: pull image docker.io/library/app:1: why",
            ),
            (FailureKind::Denied, Kind::PermissionDenied, "pull image docker.io/library/app:1: why"),
            (FailureKind::NotFound, Kind::NotFound, "pull image docker.io/library/app:1: why"),
            (FailureKind::NoSpace, Kind::ResourceExhausted, "pull image docker.io/library/app:1: why"),
        ];
        for (failure, kind, text) in cases {
            node.answer(&Answer::Failed(Failure { kind: failure, message: "why".into() }));
            let error = images.pull("app:1", Auth::default()).await.unwrap_err();
            assert_eq!((error.kind(), error.message()), (kind, text));
        }
        let error = images.pull("App", Auth::default()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument);
        assert!(error.message().contains("invalid reference format"), "{error}");
    });
}

#[test]
fn callers_of_one_reference_share_a_pull_and_may_disconnect() {
    let node = Node::new();
    node.worker(
        "cat > $D/job; echo run >> $D/runs; while ! test -e $D/go; do sleep 0.01; done; cat $D/answer",
    );
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.answer(&Answer::Done(Outcome::Pulled(record.clone(), Vec::new())));
        let call = |name: &'static str, auth: Auth| {
            let images = images.clone();
            reactor::spawn(async move { images.pull(name, auth).await })
        };
        let mut calls: Vec<_> = (0..4).map(|_| call(TAG, Auth::default())).collect();
        let fields = AuthFields { registry_token: "t".into(), ..AuthFields::default() };
        let other = call(TAG, Auth { fields, ..Auth::default() });
        until("both workers run", || node.runs() == 2).await;
        drop(calls.remove(0));
        drop(other);
        std::fs::write(node.dir.path().join("go"), "").unwrap();
        for call in calls {
            assert_eq!(call.await.unwrap().to_string(), record.id);
        }
        assert_eq!(node.runs(), 2, "one for each set of credentials");
        until("no pull is running", || images.pulls.len() == 0).await;
    });
}

#[test]
fn a_pull_without_callers_is_joined_by_a_retry_or_ends() {
    let node = Node::new();
    let script = "test -e $D/runs && exit; cat > $D/job; echo $$ > $D/runs; mkdir $D/root/layers/tmp-x; exec sleep 1000";
    node.worker(script);
    reactor::run(async {
        let images = node.open();
        images.pulls.grace.set(Duration::from_millis(300));
        let call = || {
            let images = images.clone();
            reactor::spawn(async move { images.pull(TAG, Auth::default()).await })
        };
        let first = call();
        until("it runs", || node.layers().contains(&"tmp-x".to_owned())).await;
        drop(first);
        reactor::sleep(Duration::from_millis(50)).await;
        let second = call();
        reactor::sleep(Duration::from_millis(500)).await;
        assert_eq!((node.runs(), images.pulls.len()), (1, 1), "the retry joined the first worker");
        drop(second);
        until("it ends", || images.pulls.len() == 0).await;
        let worker = std::fs::read_to_string(node.dir.path().join("runs")).unwrap();
        let process = PathBuf::from("/proc").join(worker.lines().next().unwrap());
        until("its worker is killed and reaped", || !process.exists()).await;
        until("its incomplete data is removed", || !node.layers().contains(&"tmp-x".to_owned())).await;
    });
}

#[test]
fn the_built_in_image_needs_no_network_and_is_not_removed() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let id = images.pull(builtin::TAG, Auth::default()).await.unwrap();
        assert_eq!((id, node.runs()), (builtin::ID, 0));
        for name in [builtin::TAG.to_owned(), id.to_string(), id.hex(), id.hex()[..13].to_owned()] {
            images.remove(&name).unwrap();
            let view = images.resolve(&name).unwrap();
            assert!(view.pinned && view.size_bytes > 0 && view.tags == [builtin::TAG], "{name}");
        }
        assert_eq!(images.record(&id).unwrap_err().kind(), Kind::FailedPrecondition);
        assert_eq!(images.config(&id).unwrap().0, builtin::CONFIG);
        let mut thief = node.whole('a', &[builtin::TAG]);
        node.pull(&images, &thief, TAG).await.unwrap();
        assert_eq!(images.resolve(builtin::TAG).unwrap().id, builtin::ID);
        thief.id = builtin::ID.to_string();
        node.pull(&images, &thief, TAG).await.unwrap();
        assert_eq!(images.resolve(builtin::TAG).unwrap().digests.len(), 0);
    });
}

#[test]
fn pins_follow_the_names() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let name = "reg.example/pinned/app:1";
        for digit in ['a', 'b'] {
            let record = node.whole(digit, &[name]);
            node.pull(&images, &record, name).await.unwrap();
        }
        let pinned = |digit| images.resolve(&hex(digit)).unwrap().pinned;
        assert!(pinned('b') && !pinned('a'), "the pin moves with the tag (PIN-8)");
        images.remove(name).unwrap();
        assert!(images.find(&hex('b')).unwrap().is_none(), "an explicit removal is executed (PIN-7)");
    });
}

#[test]
fn an_import_publishes_all_images_with_normalised_names() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let records = vec![node.whole('a', &["app", "not A name"]), node.whole('b', &[])];
        node.answer(&Answer::Done(imported(records)));
        let (views, rest) = images.import("/some/archive.tar".as_ref()).await.unwrap();
        assert!(rest.is_ok());
        assert_eq!(views.len(), 2);
        assert_eq!(images.resolve("app").unwrap().tags, ["docker.io/library/app:latest"]);
        assert!(images.find(&hex('b')).unwrap().is_some());
        node.answer(&Answer::Failed(Failure { kind: FailureKind::Invalid, message: "no archive".into() }));
        let error = images.import("/some/archive.tar".as_ref()).await.unwrap_err();
        assert_eq!(error.message(), "import /some/archive.tar: no archive");
    });
}
