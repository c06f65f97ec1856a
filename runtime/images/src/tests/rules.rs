//! The rules for images: what reaches workers, what a mistake means, and which images of the store are judged.

use coracle_job::{ImagePolicy, Judged};

use super::*;
use crate::Rules;

/// Answers each kind of job from a file of its own: the kind is the first byte after the length.
const BY_KIND: &str = "cat > $D/job; kind=$(od -An -tu1 -j4 -N1 $D/job | tr -d ' '); cp $D/job $D/job-$kind; \
                       echo $kind >> $D/runs; cat $D/answer-$kind";
/// Kinds of jobs.
const PULL: u8 = 0;
const READ: u8 = 6;
const JUDGE: u8 = 7;

impl Node {
    fn answer_to(&self, kind: u8, answer: &Answer) {
        let mut bytes = Vec::new();
        write_message(&mut bytes, answer).unwrap();
        std::fs::write(self.dir.path().join(format!("answer-{kind}")), bytes).unwrap();
    }

    /// The last job of a kind.
    fn job(&self, kind: u8) -> Option<Job> {
        let bytes = std::fs::read(self.dir.path().join(format!("job-{kind}"))).ok()?;
        coracle_job::read_message(&mut bytes.as_slice()).unwrap()
    }

    fn judged(&self, record: &ImageRecord, judgement: Result<Vec<String>, String>) {
        let judged = Judged { id: record.id.clone(), name: TAG.to_owned(), judgement };
        self.answer_to(JUDGE, &Answer::Done(Outcome::Judged(vec![judged])));
    }
}

fn rules() -> Rules {
    Rules { file: Some("/etc/policy.json".into()), ..Rules::default() }
}

fn invalid(text: &str) -> Answer {
    Answer::Failed(Failure { kind: FailureKind::Invalid, message: text.into() })
}

#[test]
fn without_rules_no_job_has_any_and_nothing_is_judged() {
    let node = Node::new();
    node.worker(BY_KIND);
    reactor::run(async {
        let images = node.open();
        images.set_rules(Rules::default());
        let record = node.whole('a', &[TAG]);
        node.answer_to(PULL, &Answer::Done(Outcome::Pulled(record.clone(), Vec::new())));
        images.pull(TAG, Auth::default()).await.unwrap();
        images.pull(&record.digests[0], Auth::default()).await.unwrap();
        assert_eq!(std::fs::read_to_string(node.dir.path().join("runs")).unwrap(), "0\n");
        let Some(Job::Pull(job)) = node.job(PULL) else { panic!("another job") };
        assert_eq!(job.policy, None);
        assert!(!images.has_rules() && images.policy_trouble().is_none());
        assert_eq!(images.judged().await.unwrap(), None);
    });
}

#[test]
fn a_mistake_refuses_all_pulls_until_it_is_corrected_and_later_ones_do_not() {
    let node = Node::new();
    node.worker(BY_KIND);
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.answer_to(READ, &invalid("image.policy.file: /etc/policy.json: default: missing"));
        node.answer_to(PULL, &Answer::Done(Outcome::Pulled(record.clone(), vec!["cosign: key a".into()])));
        node.judged(&record, Ok(Vec::new()));
        images.set_rules(rules());
        // Also while the policy is being read.
        for _ in 0..2 {
            let error = images.pull(TAG, Auth::default()).await.unwrap_err();
            let text = "SignatureValidationFailed: image.policy.file: /etc/policy.json: default: missing";
            assert_eq!((error.kind(), error.message()), (Kind::Unknown, text));
        }
        assert!(node.job(PULL).is_none(), "no worker was started");
        assert_eq!(images.policy_trouble().unwrap().0, "BrokenPolicy");
        node.answer_to(READ, &Answer::Done(Outcome::PolicyRead(vec![7], Vec::new())));
        images.set_rules(rules());
        until("the policy is read", || images.policy_trouble().is_none()).await;
        images.pull(TAG, Auth::default()).await.unwrap();
        let Some(Job::Pull(job)) = node.job(PULL) else { panic!("another job") };
        assert_eq!(job.policy, Some(ImagePolicy { signatures: Some(vec![7]), ..ImagePolicy::default() }));
        node.answer_to(READ, &invalid("x"));
        images.set_rules(rules());
        until("the mistake is known", || images.policy_trouble().is_some()).await;
        assert!(images.policy_trouble().unwrap().1.contains("the one before stays in force"));
        images.pull(TAG, Auth::default()).await.unwrap();
        // The policy of another file is not that of the one before.
        images.set_rules(Rules { file: Some("/etc/other.json".into()), ..Rules::default() });
        let error = images.pull(TAG, Auth::default()).await.unwrap_err();
        assert!(error.message().starts_with("SignatureValidationFailed"), "{error}");
    });
}

#[test]
fn images_of_the_store_are_judged_and_a_present_digest_is_pulled_only_if_it_is_refused() {
    let node = Node::new();
    node.worker(BY_KIND);
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.answer_to(PULL, &Answer::Done(Outcome::Pulled(record.clone(), Vec::new())));
        node.answer_to(READ, &Answer::Done(Outcome::PolicyRead(vec![7], vec!["default: signedBy".into()])));
        images.pull(TAG, Auth::default()).await.unwrap();
        node.judged(&record, Err("it has no signature".into()));
        images.set_rules(rules());
        until("the image is judged", || images.policy_trouble().is_some()).await;
        let (reason, text) = images.policy_trouble().unwrap();
        assert!(reason == "RefusedImages" && text.contains(TAG), "{text}");
        let Some(Job::Judge(job)) = node.job(JUDGE) else { panic!("another job") };
        assert_eq!(job.images, [(record.id.clone(), vec![TAG.to_owned()])], "without the built-in image");
        let refused = Failure { kind: FailureKind::Signature, message: "rule default[0]".into() };
        node.answer_to(PULL, &Answer::Failed(refused));
        let digest = &record.digests[0];
        let error = images.pull(digest, Auth::default()).await.unwrap_err();
        let text = format!("SignatureValidationFailed: pull image {digest}: rule default[0]");
        assert_eq!((error.kind(), error.message()), (Kind::Unknown, text.as_str()));
        node.judged(&record, Ok(vec!["cosign: key a".into()]));
        images.pull(digest, Auth::default()).await.unwrap();
        // Once a pull of its name succeeds, the store is judged again.
        node.answer_to(PULL, &Answer::Done(Outcome::Pulled(record.clone(), Vec::new())));
        images.pull(TAG, Auth::default()).await.unwrap();
        until("nothing is refused", || images.policy_trouble().is_none()).await;
        images.set_rules(Rules::default());
        assert!(!images.has_rules());
    });
}
