//! Signatures of images: which ones a policy requires of an image, and whether the image has them. The crate is pure: it reads no
//! file, makes no request and knows no clock, so that each rule has a test without a registry. What it is given by a registry it does
//! not trust: lengths and numbers are limited, and what cannot be read is refused.
//!
//! ```text
//! file of the policy ─► policy::parse (with the keys' files) ─► Policy ─► needs(name): what to request
//!                                                                     └─► judge(image, found, time) ─► Verdict │ Refusal
//! ```
//! A policy is a containers-policy.json(5): `insecureAcceptAnything`, `reject` and `sigstoreSigned` mean what they mean for CRI-O.
//! Two further types are of coracle: `cosign` and `notation`, which other readers of such files do not know. What is not
//! supported (`signedBy`, certificates of Fulcio, COSE) refuses the images that it governs, with a text that names it.
//!
//! | module | reads |
//! |---|---|
//! | `policy`, `scope`, `reference` | the policy, and which of its rules applies to a name |
//! | `simple` | cosign's payload in the format "simple signing" |
//! | `bundle`, `log` | sigstore's bundles, and entries of a transparency log |
//! | `notation`, `chain` | notation's envelopes, and chains of certificates |
//! | `key`, `der`, `json`, `time` | what these have in common |
#![forbid(unsafe_code)]

mod bundle;
mod chain;
mod der;
mod json;
mod judge;
mod key;
mod log;
mod notation;
mod policy;
mod reference;
mod scope;
mod simple;
#[cfg(test)]
mod tests;
mod time;

pub use bundle::BUNDLE_TYPE;
pub use judge::{Document, Found, Image, NOTATION_PLACE, Refusal, Verdict};
pub use notation::NOTATION_TYPE;
pub use policy::{POLICY_BYTES_MAX, Policy, parse};
pub use reference::Name;
pub use scope::{Needs, Rule};
pub use simple::{SIMPLE_SIGNING, signature_tag};
pub use time::{Clock, parse_time};
