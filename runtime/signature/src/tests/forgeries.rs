//! Forgeries, each refused with its reason, and each a small change of a signature that is accepted.

use coracle_reference::Name;
use serde_json::json;

use super::make::{
    AUTHORITY, Chain, Log, MANIFEST, Pair, SIGNER, Says, Subject, bundle_found, envelope, header,
    notation_found, now, payload, policy, seconds, simple, simple_found, statement, target,
};
use crate::policy::parse;
use crate::time::Clock;

const NAME: &str = "reg.io/team/app:1";
const REPOSITORY: &str = "reg.io/team/app";

fn cosign(pair: &Pair) -> serde_json::Value {
    json!([{ "type": "cosign", "keyPath": pair.public() }])
}

#[test]
fn a_signature_of_another_digest_is_refused() {
    let (subject, pair) = (Subject::new(NAME), Pair::p256());
    let policy = policy(&cosign(&pair));
    let other = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
    let content = payload(REPOSITORY, other);
    let moved = simple_found(subject.top().digest, content.clone(), &pair.sign(&content));
    subject.is_refused(&policy, &[moved], &format!("it is the signature of {other}, not of"));
    // The payload was changed after it was signed.
    let content = payload(REPOSITORY, subject.top().digest);
    let changed = simple_found(subject.top().digest, content, &pair.sign(&payload(REPOSITORY, other)));
    subject.is_refused(&policy, &[changed], "it was not made by");
    let (envelope, ..) = envelope(&pair, &statement(other));
    let moved = bundle_found(subject.top().digest, &json!({ "dsseEnvelope": envelope }), &[]);
    subject.is_refused(&policy, &[moved], &format!("it is the signature of {other}, not of"));
    subject.is_refused(&policy, &[simple(&pair, REPOSITORY, other)], "has no signature");
    subject.is_refused(&policy, &[], "has no signature");
}

#[test]
fn a_signature_for_another_repository_is_refused() {
    let (subject, pair) = (Subject::new(NAME), Pair::p256());
    let sign = |name: &str| simple(&pair, name, subject.top().digest);
    for other in ["reg.io/team/app2", "other.io/team/app", "reg.io/team", "", "reg.io/team/app/x"] {
        subject.is_refused(&policy(&cosign(&pair)), &[sign(other)], "which signedIdentity does not accept");
    }
    let exact = policy(
        &json!([{ "type": "cosign", "keyPath": pair.public(), "signedIdentity": { "type": "matchExact" } }]),
    );
    subject.is_refused(&exact, &[sign("reg.io/team/app:2")], "which signedIdentity does not accept");
    assert!(subject.judge(&exact, &[sign(NAME)]).is_ok());
}

/// One key signs an image for development and another one for production: a bundle does not say which one it is for, so that it counts only
/// where no name is required.
#[test]
fn a_bundle_is_refused_where_a_repository_is_required() {
    let (subject, pair) = (Subject::new(NAME), Pair::p256());
    let (envelope, ..) = envelope(&pair, &statement(subject.top().digest));
    let bundle = bundle_found(subject.top().digest, &json!({ "dsseEnvelope": envelope }), &[]);
    assert!(subject.judge(&policy(&cosign(&pair)), std::slice::from_ref(&bundle)).is_ok());
    for identity in [
        json!({ "type": "exactRepository", "dockerRepository": REPOSITORY }),
        json!({ "type": "matchRepository" }),
        json!({ "type": "matchExact" }),
    ] {
        let stated =
            policy(&json!([{ "type": "cosign", "keyPath": pair.public(), "signedIdentity": identity }]));
        subject.is_refused(
            &stated,
            std::slice::from_ref(&bundle),
            "names no repository, which signedIdentity needs",
        );
        subject.is_refused(&stated, &[], "has no signature; no bundle is looked for");
        let rule = stated.rule(None);
        assert!(!rule.needs().bundles && rule.needs().tag_of_top);
        assert!(rule.explain()[0].ends_with(", no bundles"), "{:?}", rule.explain());
        let found = [bundle.clone(), simple(&pair, NAME, subject.top().digest)];
        assert_eq!(subject.judge(&stated, &found).unwrap().by, [1]);
    }
}

#[test]
fn a_signature_by_another_key_is_refused() {
    let (subject, pair, other) = (Subject::new(NAME), Pair::p256(), Pair::of(&["-algorithm", "ed25519"]));
    let found = simple(&other, REPOSITORY, subject.top().digest);
    subject.is_refused(&policy(&cosign(&pair)), &[found], &format!("it was not made by {}", pair.public()));
    let (ours, others) = (Chain::p256(), Chain::p256());
    let notation = policy(&json!([{ "type": "notation", "rootPath": ours.root_path() }]));
    // Both roots have the same name.
    let refusal =
        subject.judge(&notation, &[others.signature("ES256", &subject.top())]).unwrap_err().to_string();
    assert!(refusal.contains("chain of certificates"), "{refusal}");
    // A key without its certificate: the chain of another signer.
    let mut mixed = ours.signature("ES256", &subject.top());
    let mut document: serde_json::Value = serde_json::from_slice(&mixed.content).unwrap();
    let theirs: serde_json::Value =
        serde_json::from_slice(&others.signature("ES256", &subject.top()).content).unwrap();
    document["signature"] = theirs["signature"].clone();
    mixed.content = document.to_string().into_bytes();
    subject.is_refused(&notation, &[mixed], "it was not made with the key of its certificate");
}

#[test]
fn a_certificate_that_is_not_valid_now_is_refused() {
    let (subject, chain) = (Subject::new(NAME), Chain::p256());
    let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
    let found = [chain.signature("ES256", &subject.top())];
    let at = |time: u64, minimum| {
        subject.judge_at(&notation, &found, Clock::new(time, minimum)).map_err(|refusal| refusal.to_string())
    };
    let (day, seconds) = (86_400, seconds());
    assert!(at(seconds, None).is_ok() && at(seconds + 9 * day, None).is_ok());
    assert!(at(seconds + 11 * day, None).unwrap_err().contains("a certificate expired on 20"));
    assert!(at(seconds - day, None).unwrap_err().contains("a certificate is not valid before 20"));
    // A board without a clock.
    assert!(at(5, None).unwrap_err().contains("the clock of this node is not set"));
    assert!(at(5, Some(seconds)).is_ok());
    assert!(at(5, Some(seconds + 11 * day)).unwrap_err().contains("expired"));
    assert!(
        at(seconds + 11 * day, Some(seconds)).unwrap_err().contains("expired"),
        "the minimum is no maximum"
    );
    // Public keys need no time.
    let pair = Pair::p256();
    let found = [simple(&pair, REPOSITORY, subject.top().digest)];
    assert!(subject.judge_at(&policy(&cosign(&pair)), &found, Clock::new(5, None)).is_ok());
}

#[test]
fn an_envelope_that_expired_or_has_unknown_critical_headers_is_refused() {
    let (subject, chain) = (Subject::new(NAME), Chain::p256());
    let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
    let sign = |header: &serde_json::Value| {
        [notation_found(subject.top().digest, chain.envelope("ES256", header, &target(&subject.top())))]
    };
    let mut expired = header("ES256");
    expired["io.cncf.notary.expiry"] = json!("2026-01-02T00:00:00Z");
    subject.is_refused(&notation, &sign(&expired), "its expiry is not declared critical");
    expired["crit"] = json!(["io.cncf.notary.signingScheme", "io.cncf.notary.expiry"]);
    subject.is_refused(&notation, &sign(&expired), "the signature expired on 2026-01-02");
    expired["io.cncf.notary.expiry"] = json!("2999-01-02T00:00:00Z");
    assert!(subject.judge(&notation, &sign(&expired)).is_ok());
    for (member, value, words) in [
        (
            "crit",
            json!(["io.cncf.notary.signingScheme", "io.cncf.notary.verificationPlugin"]),
            "verificationPlugin",
        ),
        ("io.cncf.notary.signingScheme", json!("notary.x509.signingAuthority"), "signing scheme"),
        ("crit", json!([]), "not declared critical"),
        ("cty", json!("text/plain"), "its payload is of type \"text/plain\""),
        ("alg", json!("none"), "the algorithm \"none\" is not supported"),
        ("alg", json!("PS256"), "the algorithm \"PS256\" is not supported"),
    ] {
        let mut changed = header("ES256");
        changed[member] = value;
        subject.is_refused(&notation, &sign(&changed), words);
    }
    let mut cose = sign(&header("ES256"));
    cose[0].media_type = "application/cose".to_owned();
    subject.is_refused(&notation, &cose, "COSE");
}

#[test]
fn a_certificate_for_other_purposes_is_refused() {
    let subject = Subject::new(NAME);
    let p256 = &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
    for (extensions, words) in [
        ("keyUsage=critical,keyEncipherment\n", "key usage lacks digitalSignature"),
        ("extendedKeyUsage=codeSigning\n", "key usage lacks digitalSignature"),
        (
            "keyUsage=critical,digitalSignature\nextendedKeyUsage=1.3.6.1.5.5.7.3.99\n",
            "chain of certificates is refused",
        ),
        (
            "keyUsage=critical,digitalSignature\nextendedKeyUsage=codeSigning,serverAuth\n",
            "its extended key usage has other purposes",
        ),
        (
            "keyUsage=critical,digitalSignature\nextendedKeyUsage=codeSigning,anyExtendedKeyUsage\n",
            "its extended key usage has other purposes",
        ),
        (
            "keyUsage=critical,digitalSignature\nextendedKeyUsage=codeSigning,clientAuth\n",
            "its extended key usage has other purposes",
        ),
        ("keyUsage=critical,digitalSignature,keyCertSign\n", "its key usage is not digitalSignature alone"),
        ("keyUsage=critical,digitalSignature,decipherOnly\n", "its key usage is not digitalSignature alone"),
        ("keyUsage=digitalSignature\n", "or is not critical"),
        ("basicConstraints=critical,CA:TRUE\nkeyUsage=critical,digitalSignature\n", "that of an authority"),
    ] {
        let chain = Chain::of(p256, extensions);
        let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
        subject.is_refused(&notation, &[chain.signature("ES256", &subject.top())], words);
    }
    // The certificate of a signer is no root of others, and may be trusted itself only if it is one.
    let chain = Chain::of(p256, SIGNER);
    let leaf = chain.leaf.folder.path("cert.pem");
    let notation = policy(&json!([{ "type": "notation", "rootPath": leaf }]));
    subject.is_refused(&notation, &[chain.signature("ES256", &subject.top())], "leads to no root");
}

#[test]
fn a_chain_beyond_the_constraints_of_its_authorities_is_refused() {
    const ROOT_OF_SIGNERS: &str =
        "basicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign\n";
    const NO_KEY_USAGE: &str = "basicConstraints=critical,CA:TRUE\n";
    const NOT_CRITICAL: &str = "basicConstraints=critical,CA:TRUE\nkeyUsage=keyCertSign\n";
    const OTHER_USAGE: &str = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,cRLSign\n";
    const NO_AUTHORITY: &str = "keyUsage=critical,keyCertSign\n";
    const ALSO_NONE: &str = "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,keyCertSign\n";
    let subject = Subject::new(NAME);
    let p256 = &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
    for (root, between, words) in [
        (ROOT_OF_SIGNERS, None, None),
        (AUTHORITY, Some(AUTHORITY), None),
        (AUTHORITY, Some(ROOT_OF_SIGNERS), None),
        (ROOT_OF_SIGNERS, Some(AUTHORITY), Some("does not permit 1 intermediate")),
        (NOT_CRITICAL, None, Some("or is not critical")),
        (NO_KEY_USAGE, None, Some("lacks keyCertSign")),
        (OTHER_USAGE, None, Some("lacks keyCertSign")),
        (AUTHORITY, Some(NO_KEY_USAGE), Some("lacks keyCertSign")),
        (AUTHORITY, Some(SIGNER), Some("lacks keyCertSign")),
        (NO_AUTHORITY, None, Some("lack CA:TRUE")),
        (ALSO_NONE, None, Some("lack CA:TRUE")),
    ] {
        let chain = Chain::made(p256, SIGNER, root, between);
        let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
        let found = [chain.signature("ES256", &subject.top())];
        match words {
            None => drop(
                subject.judge(&notation, &found).unwrap_or_else(|why| panic!("{root} {between:?}: {why}")),
            ),
            Some(words) => subject.is_refused(&notation, &found, words),
        }
    }
}

/// The key of the certificate determines the algorithm: a weaker hash than that of its length is refused, and so is a stronger one.
#[test]
fn an_algorithm_that_does_not_fit_the_key_is_refused() {
    let subject = Subject::new(NAME);
    let chain = Chain::of(&["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"], SIGNER);
    let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
    for algorithm in ["PS384", "PS512"] {
        let words = format!("the algorithm \"{algorithm}\" is not supported");
        subject.is_refused(&notation, &[chain.signature(algorithm, &subject.top())], &words);
    }
}

/// A signature of the bytes of a manifest is no statement that this image is meant.
#[test]
fn a_bundle_with_a_signature_of_plain_bytes_is_refused() {
    let (subject, pair) = (Subject::new(NAME), Pair::p256());
    for bytes in [subject.top().bytes, b""] {
        let signature = data_encoding::BASE64.encode(&pair.sign(bytes));
        let content = json!({ "messageSignature": { "signature": signature } });
        let found = bundle_found(subject.top().digest, &content, &[]);
        subject.is_refused(&policy(&cosign(&pair)), &[found], "dsseEnvelope: missing");
    }
}

#[test]
fn a_signature_without_its_own_log_entry_is_refused() {
    let (subject, pair, log, other_log) = (Subject::new(NAME), Pair::p256(), Log::new(), Log::new());
    let digest = subject.top().digest;
    let logged = policy(
        &json!([{ "type": "cosign", "keyPath": pair.public(), "rekorPublicKeyPath": log.0.public() }]),
    );
    subject.is_refused(&logged, &[simple(&pair, REPOSITORY, digest)], "so it is in no transparency log");
    let (envelope, payload, signature) = envelope(&pair, &statement(digest));
    let content = json!({ "dsseEnvelope": envelope });
    let with = |entries: &[serde_json::Value]| [bundle_found(digest, &content, entries)];
    subject.is_refused(&logged, &with(&[]), "no entry of a transparency log");
    let body = Log::body(true, &pair, &payload, &signature);
    for says in [Says::Promise, Says::Proof] {
        subject.is_refused(
            &logged,
            &with(&[other_log.entry(&body, says)]),
            "was not signed by a configured log",
        );
        for (body, words) in [
            (Log::body(true, &pair, b"other", &signature), "about another payload"),
            (Log::body(true, &pair, &payload, b"other"), "about another signature"),
            (Log::body(true, &other_log.0, &payload, &signature), "about another key"),
            (Log::body(false, &pair, &payload, &signature), "is not supported for this signature"),
        ] {
            subject.is_refused(&logged, &with(&[log.entry(&body, says)]), words);
        }
    }
    // What the log signed was about another body.
    let mut moved = log.entry(&Log::body(true, &pair, b"other", &signature), Says::Promise);
    moved["canonicalizedBody"] = log.entry(&body, Says::Promise)["canonicalizedBody"].clone();
    subject.is_refused(&logged, &with(&[moved]), "its timestamp was not signed");
    let mut moved = log.entry(&Log::body(true, &pair, b"other", &signature), Says::Proof);
    moved["canonicalizedBody"] = log.entry(&body, Says::Promise)["canonicalizedBody"].clone();
    subject.is_refused(&logged, &with(&[moved]), "does not lead from the entry to the checkpoint");
    let mut neither = log.entry(&body, Says::Promise);
    neither.as_object_mut().unwrap().remove("inclusionPromise");
    subject.is_refused(&logged, &with(&[neither]), "neither a signed timestamp nor a proof");
    // A right promise does not excuse a wrong proof.
    let mut both = log.entry(&body, Says::Promise);
    both["inclusionProof"] = other_log.entry(&body, Says::Proof)["inclusionProof"].clone();
    subject.is_refused(&logged, &with(&[both]), "its checkpoint was not signed");
}

#[test]
fn a_signature_of_an_index_is_not_one_of_its_manifest() {
    let (subject, pair, chain) = (Subject::new(NAME), Pair::p256(), Chain::p256());
    let sigstore_signed = policy(
        &json!([{ "type": "sigstoreSigned", "keyPath": pair.public(), "signedIdentity": { "type": "matchRepository" } }]),
    );
    let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
    let (index, member) = (subject.top().digest, subject.member().digest);
    subject.is_refused(
        &sigstore_signed,
        &[simple(&pair, REPOSITORY, index)],
        "not only the index: cosign sign --recursive",
    );
    subject.is_refused(&policy(&cosign(&pair)), &[simple(&pair, REPOSITORY, member)], "has no signature");
    let mut moved = simple(&pair, REPOSITORY, index);
    moved.digest = member.to_owned();
    subject.is_refused(
        &sigstore_signed,
        &[moved],
        &format!("it is the signature of {index}, not of {member}"),
    );
    let mut moved = simple(&pair, REPOSITORY, member);
    moved.digest = index.to_owned();
    subject.is_refused(
        &policy(&cosign(&pair)),
        &[moved],
        &format!("it is the signature of {member}, not of {index}"),
    );
    let mut moved = chain.signature("ES256", &subject.member());
    moved.digest = index.to_owned();
    subject.is_refused(&notation, &[moved], &format!("it is the signature of {member}, not of {index}"));
}

#[test]
fn a_signature_for_another_media_type_is_refused() {
    let (subject, pair, chain) = (Subject::new(NAME), Pair::p256(), Chain::p256());
    // The index is stated to be a manifest.
    let mut confused = subject.top();
    confused.media_type = MANIFEST;
    let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
    subject.is_refused(
        &notation,
        &[chain.signature("ES256", &confused)],
        "it is the signature of a document of type",
    );
    let mut longer = target(&subject.top());
    longer["targetArtifact"]["size"] = json!(1);
    let envelope_of =
        |payload| [notation_found(subject.top().digest, chain.envelope("ES256", &header("ES256"), &payload))];
    subject.is_refused(&notation, &envelope_of(longer), "of a document of 1 bytes");
    subject.is_refused(&notation, &envelope_of(json!({ "other": 1 })), "targetArtifact: missing");
    // A signature of cosign under the media types of other things.
    let mut layer = simple(&pair, REPOSITORY, subject.top().digest);
    layer.media_type = "application/vnd.oci.image.layer.v1.tar".to_owned();
    subject.is_refused(
        &policy(&cosign(&pair)),
        &[layer.clone()],
        "has no such signature, but 1 of other types",
    );
    layer.media_type = "application/vnd.dev.sigstore.bundle.v0.3+json".to_owned();
    subject.is_refused(&policy(&cosign(&pair)), &[layer], "bundle");
    // A list of contents or the result of a scan is signed by the same key.
    let mut other = statement(subject.top().digest);
    other["predicateType"] = json!("https://spdx.dev/Document");
    let (envelope, ..) = envelope(&pair, &other);
    let attested = bundle_found(subject.top().digest, &json!({ "dsseEnvelope": envelope }), &[]);
    subject.is_refused(&policy(&cosign(&pair)), &[attested], "does not sign an image");
}

/// A policy that names a digest accepts no older one, whatever signatures it has.
#[test]
fn a_policy_for_one_digest_refuses_older_ones() {
    let pair = Pair::p256();
    let (new, old) = (Subject::new("reg.io/team/app:2"), Subject::new("reg.io/team/app:1"));
    let pinned = format!("{REPOSITORY}@{}", new.top().digest);
    let text = json!({
        "default": [{ "type": "reject" }],
        "transports": { "docker": { pinned.as_str(): cosign(&pair), REPOSITORY: [{ "type": "reject" }] } },
    });
    let policy = parse(&text.to_string(), &super::make::read).unwrap();
    let by_digest = |subject: &Subject| {
        let name = Name::parse(&format!("{REPOSITORY}@{}", subject.top().digest)).unwrap();
        let image = crate::Image { name: Some(&name), top: subject.top(), member: subject.member() };
        let found = [simple(&pair, REPOSITORY, subject.top().digest)];
        policy.rule(Some(&name)).judge(&image, &found, now()).map_err(|refusal| refusal.to_string())
    };
    assert!(by_digest(&new).is_ok());
    assert!(by_digest(&old).unwrap_err().contains("[0], reject: every image is refused"));
    // A tag may be moved back to the older digest.
    old.is_refused(&policy, &[simple(&pair, REPOSITORY, old.top().digest)], "reject");
}

#[test]
fn a_truncated_payload_is_refused() {
    let (subject, pair, chain) = (Subject::new(NAME), Pair::p256(), Chain::p256());
    let digest = subject.top().digest;
    let whole = payload(REPOSITORY, digest);
    for end in [0, 1, whole.len() / 2, whole.len() - 1] {
        // Also if it was signed like this.
        let cut = whole[..end].to_vec();
        let signature = pair.sign(&cut);
        subject.is_refused(&policy(&cosign(&pair)), &[simple_found(digest, cut, &signature)], "payload: ");
        let cut = simple_found(digest, whole[..end].to_vec(), &pair.sign(&whole));
        subject.is_refused(&policy(&cosign(&pair)), &[cut], "it was not made by");
    }
    let notation = policy(&json!([{ "type": "notation", "rootPath": chain.root_path() }]));
    let mut found = chain.signature("ES256", &subject.top());
    let envelope = found.content.clone();
    for end in (0..envelope.len()).step_by(97) {
        found.content = envelope[..end].to_vec();
        subject.is_refused(&notation, &[found.clone()], "envelope: ");
    }
    // Members that are there twice have two meanings.
    let twice = String::from_utf8(whole)
        .unwrap()
        .replace("\"critical\"", "\"critical\":{},\"critical\"")
        .into_bytes();
    let signature = pair.sign(&twice);
    subject.is_refused(&policy(&cosign(&pair)), &[simple_found(digest, twice, &signature)], "is there twice");
}

#[test]
fn many_wrong_signatures_make_one_short_text() {
    let (subject, pair, other) = (Subject::new(NAME), Pair::p256(), Pair::p256());
    let found = vec![simple(&other, REPOSITORY, subject.top().digest); 100];
    let refusal = subject.judge(&policy(&cosign(&pair)), &found).unwrap_err().to_string();
    assert!(refusal.contains("and 95 more") && refusal.len() < 2000, "{refusal}");
}
