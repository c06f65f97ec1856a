//! The policy of signatures: what reaches workers, what a mistake means, which images of the store are judged, and what happens if the
//! policy is changed while something is judged.

use std::sync::Arc;

use coracle_job::{ImagePolicy, Judged};

use super::*;
use crate::PolicyOptions;

/// Answers each kind of job from a file of its own: the kind is the first byte after the length. A file `hold-KIND` holds one job of the
/// kind, with the answer of its start, until the file `held-KIND` is removed.
const BY_KIND: &str = "cat > $D/job.$$; kind=$(od -An -tu1 -j4 -N1 $D/job.$$ | tr -d ' '); cp $D/job.$$ $D/job-$kind; \
                       cp $D/answer-$kind $D/answer.$$; echo $kind >> $D/runs; \
                       if mv $D/hold-$kind $D/held-$kind 2>/dev/null; then \
                       while [ -e $D/held-$kind ]; do sleep 0.02; done; fi; cat $D/answer.$$";
/// Kinds of jobs.
const PULL: u8 = 0;
const IMPORT: u8 = 1;
const EXPLAIN: u8 = 5;
const READ: u8 = 6;
const JUDGE: u8 = 7;

impl Node {
    fn by_kind() -> Node {
        let node = Node::new();
        node.worker(BY_KIND);
        node.answer_to(JUDGE, &Answer::Done(Outcome::Judged(Vec::new())));
        node
    }

    fn answer_to(&self, kind: u8, answer: &Answer) {
        let mut bytes = Vec::new();
        write_message(&mut bytes, answer).unwrap();
        // A worker must not see half of it.
        let part = self.dir.path().join("part");
        std::fs::write(&part, bytes).unwrap();
        std::fs::rename(part, self.dir.path().join(format!("answer-{kind}"))).unwrap();
    }

    fn read_as(&self, policy: &[u8]) {
        self.answer_to(READ, &Answer::Done(Outcome::PolicyRead(policy.to_vec(), Vec::new())));
    }

    fn pulled_as(&self, record: &ImageRecord) {
        self.answer_to(PULL, &Answer::Done(Outcome::Pulled(record.clone(), Vec::new())));
    }

    /// The last job of a kind.
    fn job(&self, kind: u8) -> Option<Job> {
        let bytes = std::fs::read(self.dir.path().join(format!("job-{kind}"))).ok()?;
        coracle_job::read_message(&mut bytes.as_slice()).unwrap()
    }

    /// Number of jobs of a kind that were begun.
    fn runs_of(&self, kind: u8) -> usize {
        let all = std::fs::read_to_string(self.dir.path().join("runs")).unwrap_or_default();
        all.lines().filter(|line| *line == kind.to_string()).count()
    }

    fn hold(&self, kind: u8) {
        std::fs::write(self.dir.path().join(format!("hold-{kind}")), "").unwrap();
    }

    async fn held(&self, kind: u8) {
        let path = self.dir.path().join(format!("held-{kind}"));
        until("a job is held", || path.exists()).await;
    }

    fn release(&self, kind: u8) {
        std::fs::remove_file(self.dir.path().join(format!("held-{kind}"))).unwrap();
    }

    fn judged(&self, record: &ImageRecord, judgement: Result<Vec<String>, String>) {
        let judged = Judged { id: record.id.clone(), name: TAG.to_owned(), judgement };
        self.answer_to(JUDGE, &Answer::Done(Outcome::Judged(vec![judged])));
    }
}

fn options() -> PolicyOptions {
    PolicyOptions { file: Some("/etc/policy.json".into()), ..PolicyOptions::default() }
}

/// The reason in the condition about the policy in Status.
fn reason(images: &Images) -> Option<&'static str> {
    images.policy_trouble().map(|(reason, _)| reason)
}

fn invalid(text: &str) -> Answer {
    Answer::Failed(Failure { kind: FailureKind::Invalid, message: text.into() })
}

fn refused() -> Answer {
    Answer::Failed(Failure { kind: FailureKind::Signature, message: "rule default[0]".into() })
}

/// The policy of the last pull.
fn policy_of_pull(node: &Node) -> Option<ImagePolicy> {
    match node.job(PULL) {
        Some(Job::Pull(job)) => job.policy,
        job => panic!("another job: {job:?}"),
    }
}

fn policy(bytes: &[u8]) -> Option<ImagePolicy> {
    Some(ImagePolicy { bytes: Arc::from(bytes), minimum_time: String::new() })
}

#[test]
fn without_a_policy_no_job_has_one_and_nothing_is_judged() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        images.set_policy(PolicyOptions::default());
        let record = node.whole('a', &[TAG]);
        node.pulled_as(&record);
        images.pull(TAG, Auth::default()).await.unwrap();
        images.pull(&record.digests[0], Auth::default()).await.unwrap();
        images.tag(TAG, "reg.example/app:2").await.unwrap();
        assert_eq!(std::fs::read_to_string(node.dir.path().join("runs")).unwrap(), "0\n");
        assert_eq!(policy_of_pull(&node), None);
        assert!(!images.has_policy() && images.policy_trouble().is_none());
        assert_eq!(images.judged().await.unwrap(), None);
    });
}

#[test]
fn a_mistake_at_the_first_read_refuses_all_pulls_and_a_later_one_does_not() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.answer_to(READ, &invalid("image.policy.file: /etc/policy.json: default: missing"));
        node.pulled_as(&record);
        node.answer_to(EXPLAIN, &Answer::Done(Outcome::Explained(Vec::new(), Vec::new())));
        images.set_policy(options());
        // Also while the policy is being read.
        for _ in 0..2 {
            let error = images.pull(TAG, Auth::default()).await.unwrap_err();
            let text = "SignatureValidationFailed: image.policy.file: /etc/policy.json: default: missing";
            assert_eq!((error.kind(), error.message()), (Kind::Unknown, text));
        }
        assert!(node.job(PULL).is_none(), "no worker was started");
        assert_eq!(images.policy_trouble().unwrap().0, "BrokenPolicy");
        // The endpoints are shown, and the mistake.
        let (_, _, rules_of_image) = images.explain(TAG).await.unwrap();
        assert!(rules_of_image[0].contains("default: missing"), "{rules_of_image:?}");
        node.read_as(&[7]);
        images.set_policy(options());
        until("the policy is read", || images.policy_trouble().is_none()).await;
        images.pull(TAG, Auth::default()).await.unwrap();
        assert_eq!(policy_of_pull(&node), policy(&[7]));
        node.answer_to(READ, &invalid("x"));
        images.set_policy(options());
        until("the mistake is known", || images.policy_trouble().is_some()).await;
        assert!(images.policy_trouble().unwrap().1.contains("the one before stays in force"));
        images.pull(TAG, Auth::default()).await.unwrap();
        // The policy of another file is not that of the one before.
        images.set_policy(PolicyOptions { file: Some("/etc/other.json".into()), ..PolicyOptions::default() });
        assert_eq!(images.policy_trouble().unwrap().0, "NotJudged", "a mistake of another file");
        let error = images.pull(TAG, Auth::default()).await.unwrap_err();
        assert!(error.message().starts_with("SignatureValidationFailed"), "{error}");
    });
}

/// The medium of the file may be mounted after the start.
#[test]
fn a_policy_that_cannot_be_read_at_first_is_read_again() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.answer_to(READ, &invalid("no such file"));
        node.pulled_as(&record);
        images.set_policy(options());
        images.pull(TAG, Auth::default()).await.unwrap_err();
        node.read_as(&[7]);
        until("the policy is read", || images.policy_trouble().is_none()).await;
        images.pull(TAG, Auth::default()).await.unwrap();
        assert_eq!(policy_of_pull(&node), policy(&[7]));
    });
}

#[test]
fn the_later_of_two_reads_applies() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.pulled_as(&record);
        node.hold(READ);
        node.read_as(&[1]);
        images.set_policy(options());
        node.held(READ).await;
        // A pull that waits for the first read gets the second.
        let pull = reactor::spawn({
            let images = images.clone();
            async move { images.pull(TAG, Auth::default()).await }
        });
        node.read_as(&[2]);
        images.set_policy(options());
        pull.await.unwrap();
        assert_eq!(policy_of_pull(&node), policy(&[2]));
        node.release(READ);
        reactor::sleep(Duration::from_millis(300)).await;
        images.pull(TAG, Auth::default()).await.unwrap();
        assert_eq!(policy_of_pull(&node), policy(&[2]), "the first read came later");
    });
}

#[test]
fn a_pull_under_an_older_policy_is_judged_by_the_newer_for_every_caller() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        let pull = |name: &'static str| {
            let images = images.clone();
            reactor::spawn(async move { images.pull(name, Auth::default()).await })
        };
        node.hold(PULL);
        node.pulled_as(&record);
        let first = pull(TAG);
        node.held(PULL).await;
        assert_eq!(policy_of_pull(&node), None);
        node.read_as(&[7]);
        images.set_policy(options());
        until("the policy is read", || images.policy_trouble().is_none()).await;
        let joined = pull(TAG);
        reactor::sleep(Duration::from_millis(50)).await;
        node.answer_to(PULL, &refused());
        node.release(PULL);
        for pull in [first, joined] {
            let error = pull.await.unwrap_err();
            assert!(error.message().starts_with("SignatureValidationFailed: pull image"), "{error}");
        }
        assert_eq!((node.runs_of(PULL), policy_of_pull(&node)), (2, policy(&[7])));
        assert_eq!(images.find(TAG).unwrap(), None);
        // The same content of the policy after a reload is no other policy.
        node.hold(PULL);
        node.pulled_as(&record);
        let third = pull(TAG);
        node.held(PULL).await;
        let reads = node.runs_of(READ);
        images.set_policy(options());
        until("the policy is read again", || node.runs_of(READ) > reads).await;
        reactor::sleep(Duration::from_millis(100)).await;
        node.release(PULL);
        third.await.unwrap();
        assert_eq!(node.runs_of(PULL), 3);
    });
}

#[test]
fn an_import_under_an_older_policy_is_judged_by_the_newer() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.hold(IMPORT);
        node.answer_to(IMPORT, &Answer::Done(imported(vec![record.clone()])));
        let import = reactor::spawn({
            let images = images.clone();
            async move { images.import("/some/archive.tar".as_ref()).await }
        });
        node.held(IMPORT).await;
        node.read_as(&[7]);
        images.set_policy(options());
        until("the policy is read", || images.policy_trouble().is_none()).await;
        node.answer_to(IMPORT, &refused());
        node.release(IMPORT);
        assert_eq!(import.await.unwrap_err().kind(), Kind::FailedPrecondition);
        assert_eq!((node.runs_of(IMPORT), images.find(TAG).unwrap()), (2, None));
        let Some(Job::Import(job)) = node.job(IMPORT) else { panic!("another job") };
        assert_eq!(job.policy, policy(&[7]));
    });
}

#[test]
fn an_image_that_is_removed_while_it_is_judged_is_pulled() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.pulled_as(&record);
        node.read_as(&[7]);
        images.set_policy(options());
        images.pull(TAG, Auth::default()).await.unwrap();
        until("the store is judged", || images.policy_trouble().is_none()).await;
        node.hold(JUDGE);
        let pull = reactor::spawn({
            let (images, name) = (images.clone(), record.digests[0].clone());
            async move { images.pull(&name, Auth::default()).await }
        });
        node.held(JUDGE).await;
        images.remove(TAG).unwrap();
        node.whole('a', &[TAG]);
        node.release(JUDGE);
        pull.await.unwrap();
        assert_eq!(node.runs_of(PULL), 2);
        assert!(images.find(&record.id).unwrap().is_some());
    });
}

#[test]
fn a_further_name_is_judged() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.pulled_as(&record);
        // Before there is a policy: an image that is published later lets the store be judged again.
        images.pull(TAG, Auth::default()).await.unwrap();
        node.read_as(&[7]);
        images.set_policy(options());
        until("the store is judged", || images.policy_trouble().is_none()).await;
        node.judged(&record, Err("rule default[0], reject".into()));
        let error = images.tag(TAG, "other.example/app:1").await.unwrap_err();
        assert!(
            error.message().contains("other.example/app:1") && error.message().contains("reject"),
            "{error}"
        );
        let Some(Job::Judge(job)) = node.job(JUDGE) else { panic!("another job") };
        assert_eq!(job.images, [(record.id.clone(), vec!["other.example/app:1".to_owned()])]);
        assert_eq!(images.find("other.example/app:1").unwrap(), None);
        node.judged(&record, Ok(Vec::new()));
        images.tag(TAG, "other.example/app:1").await.unwrap();
        assert!(images.find("other.example/app:1").unwrap().is_some());
    });
}

#[test]
fn images_of_the_store_are_judged_and_a_present_digest_is_pulled_only_if_it_is_refused() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.pulled_as(&record);
        node.answer_to(READ, &Answer::Done(Outcome::PolicyRead(vec![7], vec!["default: signedBy".into()])));
        images.pull(TAG, Auth::default()).await.unwrap();
        node.judged(&record, Err("it has no signature".into()));
        images.set_policy(options());
        until("the image is judged", || reason(&images) == Some("RefusedImages")).await;
        let (_, text) = images.policy_trouble().unwrap();
        assert!(text.contains("does not accept") && text.contains(TAG), "{text}");
        let Some(Job::Judge(job)) = node.job(JUDGE) else { panic!("another job") };
        let names = vec![TAG.to_owned(), record.digests[0].clone()];
        assert_eq!(job.images, [(record.id.clone(), names)], "all names, without the built-in image");
        node.answer_to(PULL, &refused());
        let digest = &record.digests[0];
        let error = images.pull(digest, Auth::default()).await.unwrap_err();
        let text = format!("SignatureValidationFailed: pull image {digest}: rule default[0]");
        assert_eq!((error.kind(), error.message()), (Kind::Unknown, text.as_str()));
        node.judged(&record, Ok(vec!["cosign: key a".into()]));
        images.pull(digest, Auth::default()).await.unwrap();
        // A pull or an import of the name says that it is accepted now, without another judgement.
        let judgements = node.runs_of(JUDGE);
        node.pulled_as(&record);
        images.pull(TAG, Auth::default()).await.unwrap();
        assert_eq!((images.policy_trouble(), node.runs_of(JUDGE)), (None, judgements));
        images.set_policy(PolicyOptions::default());
        assert!(!images.has_policy());
    });
}

/// An image that was there when the archives of the start were awaited was not judged by this policy, nor was one that was imported before.
#[test]
fn a_pull_that_waits_for_archives_gets_no_image_that_the_policy_refuses() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        node.read_as(&[7]);
        images.set_policy(options());
        for (judgement, is_accepted) in [(Err("rule default[0]".to_owned()), false), (Ok(Vec::new()), true)] {
            let record = node.whole('a', &[TAG]);
            node.pulled_as(&record);
            node.judged(&record, judgement);
            let waiting = reactor::spawn({
                let images = images.clone();
                async move { images.arrived_at_start(TAG).await }
            });
            reactor::sleep(Duration::from_millis(50)).await;
            images.pull(TAG, Auth::default()).await.unwrap();
            let expected = is_accepted.then_some(record.id);
            assert_eq!(waiting.await.map(|id| id.to_string()), expected);
            images.remove(TAG).unwrap();
        }
    });
}

#[test]
fn a_store_that_was_not_judged_is_not_reported_as_accepted() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        // More names than one job has.
        let tags: Vec<String> = (0..60).map(|number| format!("reg.example/app:{number}")).collect();
        for digit in ['a', 'b', 'c'] {
            let tags: Vec<String> = tags.iter().map(|tag| format!("{tag}{digit}")).collect();
            let tags: Vec<&str> = tags.iter().map(String::as_str).collect();
            node.pulled_as(&node.whole(digit, &tags));
            images.pull(tags[0], Auth::default()).await.unwrap();
        }
        node.read_as(&[7]);
        node.answer_to(JUDGE, &invalid("it is broken"));
        images.set_policy(options());
        assert_eq!(reason(&images), Some("NotJudged"), "at once");
        let is_said = || images.policy_trouble().is_some_and(|(_, text)| text.contains("it is broken"));
        until("the failure is known", is_said).await;
        assert_eq!(reason(&images), Some("NotJudged"));
        node.answer_to(JUDGE, &Answer::Done(Outcome::Judged(Vec::new())));
        let before = node.runs_of(JUDGE);
        images.set_policy(options());
        until("the store is judged", || images.policy_trouble().is_none()).await;
        assert_eq!(node.runs_of(JUDGE) - before, 2);
        let Some(Job::Judge(job)) = node.job(JUDGE) else { panic!("another job") };
        assert_eq!(job.images.len(), 1, "those that the first job did not have");
    });
}

/// An archive that the policy refused is read in full again only after a change of the policy.
#[test]
fn an_archive_that_was_refused_is_tried_again_after_a_change_of_the_policy() {
    let node = Node::by_kind();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        let folder = node.dir.path().join("import");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("a.tar"), "x").unwrap();
        node.answer_to(IMPORT, &refused());
        node.read_as(&[1]);
        images.set_policy(options());
        images.import_from(vec![folder]);
        images.follow_bundles();
        until("the archive is refused", || node.runs_of(IMPORT) == 1).await;
        node.answer_to(IMPORT, &Answer::Done(imported(vec![record.clone()])));
        // Neither a look at the directories nor a reload without a change tries it again.
        images.import_from(vec![node.dir.path().join("import")]);
        let reads = node.runs_of(READ);
        images.set_policy(options());
        until("the policy is read again", || node.runs_of(READ) > reads).await;
        reactor::sleep(Duration::from_millis(300)).await;
        assert_eq!(node.runs_of(IMPORT), 1);
        node.read_as(&[2]);
        images.set_policy(options());
        until("the archive is imported", || matches!(images.find(TAG), Ok(Some(_)))).await;
        assert_eq!(node.runs_of(IMPORT), 2);
    });
}
