//! Judges an image by the policy of the node before anything of it is unpacked. Its signatures are looked for at one endpoint after the
//! other, first at the one that had the manifest, until the policy accepts the image: a mirror without signatures, or with others, hides
//! none of the registry. Neighbours are never asked.
//!
//! An endpoint that has no signature is not an error here: the policy decides. If the registry itself does not answer, and the image is not
//! accepted by what was found, the pull fails for this reason, so that an image is refused as unsigned only if its registry said so.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};
use coracle_judge::{Accepted, Collected, Documents, Judge, Place, Referrer, collect};
use coracle_manifest::{self as manifest, Descriptor, Resolved, hex};
use coracle_reference::Name;
use coracle_signature::Verdict;

use super::connection::Connection;
use super::sources::{FRUITLESS_MAX, Need, Sources, is_passing};
use super::{Fetched, Pull, read_verified};
use crate::policy;
use crate::report::Report;

/// Time after which nothing more is requested.
const LIMIT: Duration = Duration::from_secs(120);
/// Time that each step of an endpoint has at least, after one that has used up the time.
const STEP: Duration = Duration::from_secs(20);

impl Pull<'_> {
    /// Judges the image before anything of it is unpacked. Without a policy nothing is requested.
    ///
    /// # Errors
    /// The image is refused; the registry did not answer.
    pub(super) fn judge(&self, image: &Resolved) -> Result<Accepted, Failure> {
        let Some(configured) = &self.job.policy else { return Ok(Accepted::default()) };
        let judge = policy::judge(configured)?;
        let none = || Failure::new(FailureKind::Internal, "the image has no manifest");
        let documents = Documents::of(&image.documents).ok_or_else(none)?;
        let by_digest = self.name(&format!("@{}", documents.top.digest))?;
        let asked = match self.job.digest.is_empty() {
            true => self.name(&format!(":{}", self.job.tag))?,
            false => by_digest.clone(),
        };
        let (collected, verdict) = self.judge_by_endpoints(&judge, [&asked, &by_digest], &documents)?;
        let mut accepted = Accepted { signed: verdict.signed.clone(), ..Accepted::default() };
        accepted.add(&documents, &collected, &verdict);
        if self.job.digest.is_empty() {
            // The image gets this name, too, if the policy accepts it.
            match judge.judge(Some(&by_digest), &documents, &collected) {
                Ok(verdict) => accepted.add(&documents, &collected, &verdict),
                Err(failure) => {
                    eprintln!("the image does not get the name {by_digest}: {}", failure.message);
                    accepted.refused.push(by_digest.to_string());
                }
            }
        }
        Ok(accepted)
    }

    fn name(&self, version: &str) -> Result<Name, Failure> {
        let text = format!("{}/{}{version}", self.job.registry, self.job.repository);
        Name::parse(&text).map_err(|invalid| Failure::invalid(format!("{text}: {invalid}")))
    }

    /// Requests signatures until the policy accepts the image by the name that is asked for. The name by digest, which the image would get,
    /// too, is worth all requests to the endpoint that is asked then, and no other endpoint.
    fn judge_by_endpoints(
        &self,
        judge: &Judge,
        [asked, by_digest]: [&Name; 2],
        documents: &Documents<'_>,
    ) -> Result<(Collected, Verdict), Failure> {
        let needs = judge.needs(Some(asked));
        if !needs.is_something() {
            // Nothing that could be found changes this verdict.
            judge.judge(Some(asked), documents, &Collected::default())?;
        }
        let needs = needs.or(judge.needs(Some(by_digest)));
        let endpoints = if needs.is_something() { self.sources.each(Need::Resolve) } else { Vec::new() };
        let (mut collected, mut unanswered) = (Collected::default(), None);
        let mut end = Instant::now() + LIMIT;
        let is_accepted =
            |name: &Name, collected: &Collected| judge.judge(Some(name), documents, collected).is_ok();
        for (sources, is_registry) in endpoints {
            if is_registry {
                // Mirrors that answer slowly leave it the same time.
                end = Instant::now() + LIMIT;
            }
            let place = Endpoint::new(sources, is_registry.then_some(end), self.report);
            let [tags, referrers] = needs.steps();
            for (step, names) in [(tags, &[asked, by_digest][..]), (referrers, &[asked][..])] {
                if is_accepted(asked, &collected) {
                    place.patience.set(None);
                }
                let (found, failure) = collect(&place, step, documents, end.max(Instant::now() + STEP));
                collected.add(found);
                match failure {
                    Some(failure) if is_registry => drop(unanswered.get_or_insert(failure)),
                    failure => failure.into_iter().for_each(|failure| collected.note(failure.message)),
                }
                if names.iter().all(|name| is_accepted(name, &collected)) {
                    let verdict = judge.judge(Some(asked), documents, &collected)?;
                    return Ok((collected, verdict));
                }
            }
        }
        let refusal = match judge.judge(Some(asked), documents, &collected) {
            Ok(verdict) => return Ok((collected, verdict)),
            Err(refusal) => refusal,
        };
        let late = || {
            let text = format!("not all was looked at within {} s", LIMIT.as_secs());
            (Instant::now() >= end).then(|| Failure::new(FailureKind::Unavailable, text))
        };
        match unanswered.or_else(late) {
            None => Err(refusal),
            // Its signatures may be those that are missing.
            Some(failure) => {
                let Failure { kind, message } = failure;
                let text = format!("the registry's signatures: {message}; without them: {}", refusal.message);
                Err(Failure::new(kind, text))
            }
        }
    }
}

/// One endpoint as a place of signatures.
struct Endpoint<'a> {
    /// The one endpoint that is asked for signatures.
    sources: Sources,
    /// Time until which the endpoint is asked again after a temporary failure; past: it is asked once.
    patience: Cell<Option<Instant>>,
    /// Whether nothing more is requested: a mirror has not answered, and the others may have what is needed.
    is_given_up: Cell<bool>,
    is_registry: bool,
    report: &'a Report,
    problems: RefCell<Vec<String>>,
}

impl<'a> Endpoint<'a> {
    /// `end`: nothing is requested later; only the registry itself is asked again.
    fn new(sources: Sources, end: Option<Instant>, report: &'a Report) -> Self {
        let patience = Cell::new(end.and_then(|end| end.checked_sub(FRUITLESS_MAX)));
        let is_registry = end.is_some();
        Self {
            sources,
            patience,
            is_given_up: Cell::new(false),
            is_registry,
            report,
            problems: RefCell::default(),
        }
    }

    /// Requests a document; `None` if the endpoint says that it does not have it.
    fn get(
        &self,
        what: &str,
        accept: &str,
        size: Option<u64>,
        digest: &str,
    ) -> Result<Option<Fetched>, Failure> {
        self.report.pulse();
        if self.is_given_up.get() {
            let text = format!("{what}: not requested from a mirror that has not answered");
            return Err(Failure::new(FailureKind::Unavailable, text));
        }
        let read = |connection: &Connection| read_verified(connection, what, accept, size, digest);
        let got = match self.patience.get().is_some_and(|end| Instant::now() < end) {
            true => self.sources.ask(Need::Resolve, &mut (), |()| 0, |connection, ()| read(connection)),
            false => self.sources.once(Need::Resolve, read),
        };
        // What did not answer for so long is asked for the rest once, which may be there.
        if got.as_ref().is_err_and(|failure| self.is_of_place(failure)) {
            self.patience.set(None);
            self.is_given_up.set(!self.is_registry);
        }
        match got {
            Ok(found) => Ok(Some(found)),
            Err(failure) if failure.kind == FailureKind::NotFound => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// The list of referrers: by the API, or by the tag that stands for it (distribution specification, "Referrers Tag Schema").
    fn list(&self, digest: &str) -> Result<Option<Fetched>, Failure> {
        match self.get(&format!("referrers/{digest}"), manifest::INDEX_TYPE, None, "") {
            // A registry that does not know the API answers 400, 404 or 405 (all statuses without a meaning of their own).
            Ok(None) => {}
            Err(failure) if failure.kind == FailureKind::Internal => {}
            answer => return answer,
        }
        self.get(&format!("manifests/{}", digest.replacen(':', "-", 1)), manifest::INDEX_TYPE, None, "")
    }
}

impl Place for Endpoint<'_> {
    fn tagged(&self, tag: &str) -> Result<Vec<Vec<u8>>, Failure> {
        let manifest = self.get(&format!("manifests/{tag}"), &manifest::accept(), None, "")?;
        Ok(manifest.map(|manifest| manifest.bytes).into_iter().collect())
    }

    fn referrers(&self, digest: &str) -> Result<Vec<Referrer>, Failure> {
        let Some(list) = self.list(digest)? else { return Ok(Vec::new()) };
        let name = || format!("referrers of {digest}");
        if list.has_more {
            let problem = format!("{}: only the first part of the list is looked at", name());
            self.problems.borrow_mut().push(problem);
        }
        let (referrers, problems) = Referrer::read_all(&list.bytes).map_err(Failure::invalid)?;
        let named = problems.into_iter().map(|problem| format!("{}: {problem}", name()));
        self.problems.borrow_mut().extend(named);
        Ok(referrers)
    }

    fn manifest(&self, digest: &str) -> Result<Option<Vec<u8>>, Failure> {
        hex(digest)?;
        let manifest = self.get(&format!("manifests/{digest}"), &manifest::accept(), None, digest)?;
        Ok(manifest.map(|manifest| manifest.bytes))
    }

    fn content(&self, layer: &Descriptor) -> Result<Option<Vec<u8>>, Failure> {
        hex(&layer.digest)?;
        let content = self.get(&format!("blobs/{}", layer.digest), "*/*", Some(layer.size), &layer.digest)?;
        Ok(content.map(|content| content.bytes))
    }

    fn is_of_place(&self, failure: &Failure) -> bool {
        is_passing(failure) || matches!(failure.kind, FailureKind::Certificate | FailureKind::NoSpace)
    }

    fn problems(&self) -> Vec<String> {
        self.problems.take()
    }
}
