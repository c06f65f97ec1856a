//! Signatures of images: which ones a policy requires of an image, and whether the image has them. The crate is pure: it reads no
//! file, makes no request and knows no clock, so that each rule has a test without a registry. What it is given by a registry it does
//! not trust: lengths and numbers are limited, and what cannot be read is refused.
//!
//! ```text
//! file of the policy ─► policy::parse (with the keys' files) ─► Policy ─► needs(name): what to request
//!                                                                     └─► judge(image, found, time) ─► Verdict │ Refusal
//! ```
//! A policy is a containers-policy.json(5) with two further types, `cosign` and `notation`, which other readers of such files do not
//! know. What is not supported (`signedBy`, certificates of Fulcio) refuses the images that it governs, with a text that names it.
//!
//! A signature says that a key signed a digest. It does not say that the image is the newest of its tag: a registry may have an older one
//! with its signature. Policies that name digests prevent that.
//!
//! | module | reads |
//! |---|---|
//! | `policy`, `scope`, `identity` | the policy, which of its rules applies to a name, and which signed name is accepted for it |
//! | `simple` | cosign's payload in the format "simple signing" |
//! | `bundle`, `log` | sigstore's bundles, and entries of a transparency log |
//! | `notation`, `chain` | notation's envelopes, and chains of certificates |
//! | `key`, `der`, `json`, `image`, `time` | what these have in common |
#![forbid(unsafe_code)]

mod bundle;
mod chain;
mod identity;
mod image;
mod json;
mod judge;
mod key;
mod log;
mod notation;
mod policy;
mod scope;
mod simple;
#[cfg(test)]
mod tests;
mod time;

pub use bundle::{BUNDLE_TYPE, PREDICATE, SIGNED};
pub use image::{Document, Found, Image};
pub use judge::{Refusal, Verdict, shortened};
pub use notation::NOTATION_TYPE;
pub use policy::{POLICY_BYTES_MAX, Policy, parse};
pub use scope::{Needs, Rule};
pub use simple::{ANNOTATIONS, SIMPLE_SIGNING, signature_tag};
pub use time::{Clock, parse_time};
