//! What a place may have: each lie beside a signature that is right, more than the limits, and a place that does not answer.

use std::cell::Cell;
use std::time::Duration;

use coracle_job::FailureKind;
use coracle_manifest::digest_of;
use serde_json::{Value, json};

use super::*;
use crate::Signed;

const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";

/// A place with these answers.
#[derive(Default)]
struct Fake {
    tagged: Vec<Value>,
    referrers: Vec<Referrer>,
    manifests: BTreeMap<String, Value>,
    blobs: BTreeMap<String, Vec<u8>>,
    /// Failure of a request for a document that the place lacks; `None`: the document is absent.
    failure: Option<FailureKind>,
    /// Whether the list of referrers fails, too.
    has_no_list: bool,
    requests: Cell<usize>,
}

impl Fake {
    fn absent<T>(&self) -> Result<Option<T>, Failure> {
        self.failure.map_or(Ok(None), |kind| Err(Failure::new(kind, "lost")))
    }

    /// A layer with this content.
    fn layer(&mut self, content: &[u8]) -> Value {
        self.blobs.insert(digest_of(content), content.to_vec());
        json!({ "mediaType": SIMPLE_SIGNING, "digest": digest_of(content), "size": content.len() })
    }

    /// A referrer with these layers.
    fn refer(&mut self, kind: &str, predicate: &str, manifest: Value) {
        let digest = digest_of(manifest.to_string().as_bytes());
        let (kind, predicate) = (kind.to_owned(), predicate.to_owned());
        self.referrers.push(Referrer { digest: digest.clone(), kind, predicate });
        self.manifests.insert(digest, manifest);
    }

    /// Collects from this place, which answers.
    fn collect(&self, needs: Needs) -> Collected {
        let (collected, unanswered) = self.collect_until(needs, Instant::now() + Duration::from_secs(60));
        assert_eq!(unanswered, None);
        collected
    }

    fn collect_until(&self, needs: Needs, end: Instant) -> (Collected, Option<Failure>) {
        let [top, member] = ["top", "member"].map(|digest| Signed { digest, bytes: b"" });
        collect(self, needs, &Documents { top, member }, end)
    }
}

impl Place for Fake {
    fn tagged(&self, _: &str) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(self.tagged.iter().map(|manifest| manifest.to_string().into_bytes()).collect())
    }

    fn referrers(&self, _: &str) -> Result<Vec<Referrer>, Failure> {
        match self.has_no_list {
            true => self.absent().map(Option::unwrap_or_default),
            false => Ok(self.referrers.clone()),
        }
    }

    fn manifest(&self, digest: &str) -> Result<Option<Vec<u8>>, Failure> {
        self.requests.set(self.requests.get() + 1);
        match self.manifests.get(digest) {
            Some(manifest) => Ok(Some(manifest.to_string().into_bytes())),
            None => self.absent(),
        }
    }

    fn content(&self, layer: &Descriptor) -> Result<Option<Vec<u8>>, Failure> {
        self.requests.set(self.requests.get() + 1);
        self.blobs.get(&layer.digest).map_or_else(|| self.absent(), |content| Ok(Some(content.clone())))
    }

    fn is_of_place(&self, failure: &Failure) -> bool {
        failure.kind == FailureKind::Unavailable
    }

    fn problems(&self) -> Vec<String> {
        vec!["about the place".to_owned()]
    }
}

fn tag_of_top() -> Needs {
    Needs { tag_of_top: true, ..Needs::default() }
}

fn bundles() -> Needs {
    Needs { bundles: true, ..Needs::default() }
}

#[test]
fn each_invalid_layer_is_reported_and_hides_no_other_signature() {
    let absent = digest_of(b"absent");
    for (lie, words) in [
        (json!({ "mediaType": SIMPLE_SIGNING, "digest": absent, "size": 6 }), "not found"),
        (
            json!({ "mediaType": SIMPLE_SIGNING, "digest": absent, "size": 1_u64 << 40 }),
            "longer than 131072 bytes",
        ),
        (json!({ "mediaType": SIMPLE_SIGNING, "digest": 5 }), "layers[0]: "),
        (json!("no layer"), "layers[0]: "),
    ] {
        for failure in [None, Some(FailureKind::Invalid), Some(FailureKind::Denied)] {
            let mut place = Fake { failure, ..Fake::default() };
            let good = place.layer(b"good");
            place.tagged.push(json!({ "layers": "no list" }));
            place.tagged.push(json!({ "layers": [lie, good] }));
            let collected = place.collect(tag_of_top());
            assert_eq!(collected.found.len(), 1, "{lie}");
            assert_eq!(collected.found[0].content, b"good");
            let words = if failure.is_some() && words == "not found" { "lost" } else { words };
            let problems = collected.problems();
            assert!(problems.contains(words) && problems.contains("about the place"), "{lie}: {problems}");
        }
    }
}

#[test]
fn referrers_that_are_absent_broken_or_of_others_hide_none_beside_them() {
    let mut place = Fake::default();
    let layer = place.layer(b"good");
    let other = place.layer(b"other");
    let subject = json!({ "digest": "top" });
    place.referrers.push(Referrer {
        digest: "gone".to_owned(),
        kind: BUNDLE.to_owned(),
        ..Referrer::default()
    });
    place.refer(BUNDLE, "", json!({ "subject": { "digest": "another" }, "layers": [other] }));
    place.refer(BUNDLE, "", json!({ "layers": [other] }));
    place.refer(BUNDLE, "", json!("no manifest"));
    // A list of contents, and what nothing needs.
    place.refer(BUNDLE, "https://spdx.dev/Document", json!({ "subject": subject, "layers": [other] }));
    place.refer(NOTATION_TYPE, "", json!({ "subject": subject, "layers": [other] }));
    place.refer("text/plain", "", json!({ "subject": subject, "layers": [other] }));
    place.refer(BUNDLE, SIGNED, json!({ "subject": subject, "layers": [layer] }));
    let collected = place.collect(bundles());
    let contents: Vec<&[u8]> = collected.found.iter().map(|found| &found.content[..]).collect();
    assert_eq!(contents, [b"good"]);
    assert!(!collected.found[0].is_of_notation);
    assert!(collected.problems().contains("it refers to another digest"), "{}", collected.problems());
    let envelopes = place.collect(Needs { envelopes: true, ..Needs::default() });
    assert!(envelopes.found.len() == 1 && envelopes.found[0].is_of_notation);
    assert_eq!(place.collect(Needs::default()).found.len(), 0);
}

#[test]
fn limits_of_signatures_are_reported_and_bound_the_requests() {
    let mut place = Fake::default();
    let layers: Vec<Value> = (0..1000).map(|number| place.layer(number.to_string().as_bytes())).collect();
    place.tagged.push(json!({ "layers": layers }));
    let collected = place.collect(tag_of_top());
    assert_eq!((collected.found.len(), place.requests.get()), (SIGNATURES_MAX, SIGNATURES_MAX));
    assert!(collected.problems().contains("more than 32 signatures are not looked at"));
    // cosign appends: those of the keys of today are the last.
    let newest = (968..1000).rev().map(|number| number.to_string().into_bytes());
    assert!(collected.found.into_iter().map(|found| found.content).eq(newest));
    let mut place = Fake::default();
    for number in 0..1000 {
        let subject = json!({ "digest": "top" });
        place.refer(BUNDLE, "", json!({ "subject": subject, "layers": [], "number": number }));
    }
    let collected = place.collect(bundles());
    assert_eq!((collected.found.len(), place.requests.get()), (0, SIGNATURES_MAX));
    assert!(collected.problems().contains("more than 32 referrers are not looked at"));
    // Layers of other types are not requested, however many there are.
    let other = json!({ "mediaType": "text/plain", "digest": "x", "size": 1 });
    let place = Fake { tagged: vec![json!({ "layers": vec![other; 20_000] })], ..Fake::default() };
    let collected = place.collect(tag_of_top());
    assert_eq!((collected.found.len(), place.requests.get()), (0, 0));
}

#[test]
fn a_place_that_does_not_answer_is_not_one_without_signatures_and_what_it_answers_counts() {
    let down = || Fake { failure: Some(FailureKind::Unavailable), ..Fake::default() };
    let gone = Referrer { digest: "gone".to_owned(), kind: BUNDLE.to_owned(), ..Referrer::default() };
    let collect = |place: &Fake| {
        let end = Instant::now() + Duration::from_secs(60);
        let (collected, unanswered) = place.collect_until(tag_of_top().or(bundles()), end);
        assert_eq!(unanswered.map(|failure| failure.kind), Some(FailureKind::Unavailable));
        collected.found.into_iter().map(|found| found.content).collect::<Vec<_>>()
    };
    let subject = json!({ "digest": "top" });
    let absent = json!({ "mediaType": SIMPLE_SIGNING, "digest": digest_of(b"absent"), "size": 6 });
    // A referrer, and beside it one that is there.
    let mut place = down();
    place.referrers.push(gone.clone());
    assert!(collect(&place).is_empty());
    let layer = place.layer(b"good");
    place.refer(BUNDLE, SIGNED, json!({ "subject": subject, "layers": [layer] }));
    assert_eq!(collect(&place), [b"good"]);
    // A layer below the tag, and beside it one that is there.
    let mut place = down();
    let layer = place.layer(b"good");
    place.tagged.push(json!({ "layers": [layer, absent] }));
    assert_eq!(collect(&Fake { has_no_list: true, ..place }), [b"good"]);
}

/// Programs without support for referrers wrote the type of an empty config into the list, so that only the manifest has the type.
#[test]
fn a_referrer_of_an_unknown_type_is_what_its_manifest_says() {
    let mut place = Fake::default();
    let layer = place.layer(b"good");
    let manifest = |kind: &str, number: usize| {
        let (config, subject) = (json!({ "mediaType": EMPTY }), json!({ "digest": "top" }));
        json!({ "artifactType": kind, "config": config, "subject": subject, "layers": [layer], "number": number })
    };
    for (number, listed) in ["", EMPTY].into_iter().enumerate() {
        for kind in [BUNDLE, NOTATION_TYPE, "text/plain", ""] {
            place.refer(listed, "", manifest(kind, number));
        }
    }
    let found = |place: &Fake, needs| -> Vec<bool> {
        place.collect(needs).found.iter().map(|found| found.is_of_notation).collect()
    };
    assert_eq!(found(&place, bundles()), [false, false]);
    assert_eq!(found(&place, Needs { envelopes: true, ..Needs::default() }), [true, true]);
    // A crowd of them takes no place of those that are known.
    (0..1000).for_each(|number| place.refer("", "", manifest("text/plain", number)));
    place.refer(BUNDLE, SIGNED, manifest(BUNDLE, 1000));
    assert_eq!(found(&place, bundles()), [false; 3]);
}

/// Whatever a manifest says beside a signature, the signature is found, and what is not read is not kept.
#[test]
fn annotations_and_media_types_of_megabytes_hide_no_signature_and_are_not_kept() {
    let long = "x".repeat(4 << 20);
    let mut place = Fake::default();
    let mut with = |name: &str, value: &str| {
        let mut layer = place.layer(b"good");
        layer["annotations"] = json!({ ANNOTATIONS[0]: "c2ln", name: value });
        layer
    };
    let (padded, promised) = (with("junk", &long), with(ANNOTATIONS[1], &long));
    let mut typed = place.layer(b"good");
    typed["mediaType"] = json!(format!("{BUNDLE_TYPE}{long}"));
    place.tagged.push(json!({ "layers": [promised, typed, padded] }));
    let collected = place.collect(tag_of_top());
    let annotations: Vec<_> = collected.found.iter().map(|found| found.annotations.clone()).collect();
    assert_eq!(annotations, [[(ANNOTATIONS[0].to_owned(), "c2ln".to_owned())].into()]);
    assert_eq!(collected.problems.iter().filter(|problem| problem.contains("longer than")).count(), 1);
}

#[test]
fn no_request_is_sent_after_the_time_limit() {
    let mut place = Fake::default();
    let layer = place.layer(b"good");
    place.tagged.push(json!({ "layers": [layer] }));
    place.refer(BUNDLE, "", json!({ "subject": { "digest": "top" }, "layers": [layer] }));
    let needs = tag_of_top().or(bundles());
    let (collected, _) = place.collect_until(needs, Instant::now());
    assert_eq!((collected.found.len(), place.requests.get()), (0, 0));
    assert!(collected.problems().contains("within the time limit"));
    assert_eq!(place.collect(needs).found.len(), 2);
}

#[test]
fn signatures_of_several_places_are_added_once() {
    let mut place = Fake::default();
    let layer = place.layer(b"good");
    place.tagged.push(json!({ "layers": [layer] }));
    let mut all = Collected::default();
    (0..3).for_each(|_| all.add(place.collect(tag_of_top())));
    (0..1000).for_each(|number| all.note(format!("reason {number}")));
    assert_eq!(all.found.len(), 1);
    assert!(all.problems().len() < 200 && all.problems().ends_with("more"), "{}", all.problems());
}

/// A list of 4 MiB may have a million entries, and a reason repeats what is wrong.
#[test]
fn a_list_of_referrers_is_read_up_to_a_number_and_its_lies_are_cut() {
    let read = |list: Value| Referrer::read_all(json!({ "manifests": list }).to_string().as_bytes());
    let entry = json!({ "digest": digest_of(b"x"), "artifactType": BUNDLE });
    let lies = json!([{ "digest": "x".repeat(1 << 20) }, 5, { "digest": "../../x" }, { "digest": 5 }, entry]);
    let (referrers, problems) = read(lies).unwrap();
    assert_eq!((referrers.len(), problems.len()), (1, 4));
    let mut collected = Collected::default();
    problems.into_iter().for_each(|problem| collected.note(problem));
    assert!(collected.problems().len() < 1000, "{}", collected.problems());
    let (referrers, problems) = read(json!(vec![json!({ "digest": 5 }); 20_000])).unwrap();
    assert_eq!((referrers.len(), problems.len()), (0, ENTRIES_MAX + 1));
    assert!(problems[0].contains("of 20000 entries 1024"), "{}", problems[0]);
    assert!(read(json!("no list")).is_err());
}
