//! Finds the manifest of this node's platform, which may be behind indexes, and its config. Registries, archives and
//! containerd's content store differ only in how a document is read.
//!
//! As with containerd, an index is filtered by platform: by its descriptors, and by the config for a descriptor
//! without a platform. An image that is named directly is taken whatever its config says, because the node may run
//! other architectures by binfmt_misc.

use coracle_job::{Failure, FailureKind};

use super::manifest::{self, Descriptor, Document};
use super::{config, platform};

/// Maximum number of manifests and indexes that are read for one image; most need two.
const DOCUMENTS_MAX: u32 = 16;

/// The documents of an image, and its layers.
#[derive(Debug)]
pub struct Resolved {
    /// Digest of the config.
    pub id: String,
    /// Content of the config.
    pub config: Vec<u8>,
    /// Digest and content of the manifests and indexes that lead to the image, the top one first.
    pub documents: Vec<(String, Vec<u8>)>,
    /// Layers, lowest first.
    pub layers: Vec<Descriptor>,
    /// The platform of the image, if this node does not support it.
    pub foreign: Option<String>,
}

/// The result of a search for this platform's image.
#[derive(Debug)]
pub enum Resolution {
    /// The image for this node's platform was found.
    Found(Resolved),
    /// The manifest or index with this digest is missing.
    NoManifest(String),
    /// The config with this digest is missing.
    NoConfig(String),
    /// There are images for these other platforms only.
    Foreign(Vec<String>),
}

/// The kind of a document, which determines where a registry has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A manifest or index.
    Manifest,
    /// The config of an image.
    Config,
}

/// Reads a document, whose digest it verifies; `None` if it is missing.
pub type ReadDocument<'a> = &'a dyn Fn(&Descriptor, Kind) -> Result<Option<Vec<u8>>, Failure>;

/// Follows a descriptor to the image of this platform.
///
/// # Errors
/// A document is invalid or cannot be read, or too many have to be read.
pub fn resolve(top: &Descriptor, read: ReadDocument<'_>) -> Result<Resolution, Failure> {
    if !top.may_be_ours() {
        // Unread: what the manifests of others point to need not be layers.
        return Ok(Resolution::Foreign(vec![top.platform_name()]));
    }
    Search { read, documents: Vec::new(), count: 0 }.look(top)
}

struct Search<'a> {
    read: ReadDocument<'a>,
    /// The documents from the top to the current one.
    documents: Vec<(String, Vec<u8>)>,
    /// Number of documents that were read.
    count: u32,
}

impl Search<'_> {
    fn look(&mut self, descriptor: &Descriptor) -> Result<Resolution, Failure> {
        self.count += 1;
        if self.count > DOCUMENTS_MAX {
            return Err(Failure::invalid(format!(
                "more than {DOCUMENTS_MAX} manifests and indexes lead to the image"
            )));
        }
        let digest = descriptor.digest.clone();
        let Some(bytes) = (self.read)(descriptor, Kind::Manifest)? else {
            return Ok(Resolution::NoManifest(digest));
        };
        let document = manifest::parse(&bytes)?;
        descriptor.check(&document)?;
        self.documents.push((digest, bytes));
        let found = match document {
            Document::Index(manifests) => self.choose(&manifests),
            Document::Manifest { config, layers } => self.image(descriptor, &config, layers),
        };
        if !matches!(found, Ok(Resolution::Found(_))) {
            self.documents.pop();
        }
        found
    }

    /// Looks for the image in an index: behind the best descriptor, and then behind each one without a platform.
    fn choose(&mut self, manifests: &[Descriptor]) -> Result<Resolution, Failure> {
        let others = manifests.iter().filter(|descriptor| !descriptor.may_be_ours());
        let mut names: Vec<String> = others.map(Descriptor::platform_name).collect();
        let (mut missing, mut broken) = (None, None);
        for candidate in manifest::candidates(manifests) {
            match self.look(candidate) {
                Ok(Resolution::Foreign(platforms)) => names.extend(platforms),
                Ok(absent @ (Resolution::NoManifest(_) | Resolution::NoConfig(_))) => {
                    missing.get_or_insert(absent);
                }
                // It may be something other than an image.
                Err(failure) if failure.kind == FailureKind::Invalid && !candidate.has_platform() => {
                    broken.get_or_insert(failure);
                }
                found => return found,
            }
        }
        match (missing, broken) {
            (Some(missing), _) => Ok(missing),
            (None, Some(failure)) if names.is_empty() => Err(failure),
            (None, _) => Ok(Resolution::Foreign(names)),
        }
    }

    fn image(
        &mut self,
        descriptor: &Descriptor,
        config: &Descriptor,
        layers: Vec<Descriptor>,
    ) -> Result<Resolution, Failure> {
        let id = config.digest.clone();
        let Some(config) = (self.read)(config, Kind::Config)? else { return Ok(Resolution::NoConfig(id)) };
        let foreign = foreign(&config)?;
        let is_filtered = self.documents.len() > 1 && !descriptor.has_platform();
        Ok(match foreign {
            Some(platform) if is_filtered => Resolution::Foreign(vec![platform]),
            foreign => {
                let documents = std::mem::take(&mut self.documents);
                Resolution::Found(Resolved { id, config, documents, layers, foreign })
            }
        })
    }
}

/// The platform of an image that this node does not support; old images without a platform are accepted.
///
/// # Errors
/// The config is invalid.
pub fn foreign(config: &[u8]) -> Result<Option<String>, Failure> {
    let document = config::parse(config)?;
    Ok(platform::foreign(&document.os, &document.architecture))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::{ARCHITECTURE, digest_of};

    /// Documents by digest.
    #[derive(Default)]
    struct Documents(HashMap<String, Vec<u8>>);

    impl Documents {
        fn add(&mut self, text: String) -> String {
            let digest = digest_of(text.as_bytes());
            self.0.insert(digest.clone(), text.into_bytes());
            digest
        }

        fn image(&mut self, architecture: &str) -> String {
            let config = self.add(format!(r#"{{"architecture":"{architecture}","rootfs":{{}}}}"#));
            self.add(format!(r#"{{"config":{{"digest":"{config}"}}}}"#))
        }

        fn index(&mut self, entries: &[(&str, &str)]) -> String {
            let entry = |(digest, platform): &(&str, &str)| match *platform {
                "" => format!(r#"{{"digest":"{digest}"}}"#),
                name => {
                    format!(r#"{{"digest":"{digest}","platform":{{"os":"linux","architecture":"{name}"}}}}"#)
                }
            };
            let entries: Vec<String> = entries.iter().map(entry).collect();
            self.add(format!(r#"{{"manifests":[{}]}}"#, entries.join(",")))
        }

        /// The digest of the image's manifest, the platforms of others, or what is missing.
        fn resolve(&self, top: &str) -> Result<String, String> {
            let read = |descriptor: &Descriptor, _| Ok(self.0.get(&descriptor.digest).cloned());
            match resolve(&Descriptor::of(top), &read).map_err(|failure| failure.message)? {
                Resolution::Found(found) => Ok(found.documents.last().unwrap().0.clone()),
                Resolution::Foreign(platforms) => Err(platforms.join(" ")),
                Resolution::NoManifest(_) | Resolution::NoConfig(_) => Err("missing".to_owned()),
            }
        }
    }

    #[test]
    fn an_index_is_searched_and_a_named_image_is_taken() {
        let mut all = Documents::default();
        let (ours, other) = (all.image(ARCHITECTURE), all.image("s390x"));
        assert_eq!(all.resolve(&other), Ok(other.clone()), "named directly");
        let by_config = all.index(&[(&other, ""), (&ours, "")]);
        assert_eq!(all.resolve(&by_config), Ok(ours.clone()));
        let artifact =
            all.add(r#"{"config":{"digest":"x"},"layers":[{"mediaType":"text/plain"}]}"#.to_owned());
        let beside = all.index(&[(&artifact, ""), (&ours, "")]);
        assert_eq!(all.resolve(&beside), Ok(ours.clone()));
        let only = all.index(&[(&artifact, "")]);
        assert!(all.resolve(&only).unwrap_err().contains("media type"));
        let none = all.index(&[(&other, ""), (&ours, "mips")]);
        assert_eq!(all.resolve(&none), Err("linux/mips linux/s390x".to_owned()));
        // A descriptor's platform counts more than the config's.
        let said = all.index(&[(&other, ARCHITECTURE)]);
        assert_eq!(all.resolve(&said), Ok(other.clone()));
        let absent = all.index(&[("sha256:0", ARCHITECTURE), (&other, "")]);
        assert_eq!(all.resolve(&absent), Err("missing".to_owned()));
    }

    /// Two readers must not see an image and an index under one digest.
    #[test]
    fn a_document_is_what_its_descriptor_states() {
        const INDEX: &str = "application/vnd.oci.image.index.v1+json";
        let mut all = Documents::default();
        let image = all.image(ARCHITECTURE);
        let index = all.index(&[(&image, "")]);
        for (digest, media_type, expected) in [
            (&image, manifest::MANIFEST, Ok(())),
            (&image, "text/plain", Ok(())),
            (&image, INDEX, Err("but it is an image")),
            (&index, &INDEX.to_uppercase(), Ok(())),
            (&index, manifest::MANIFEST, Err("but it is an index")),
        ] {
            let mut stated = Descriptor::of(digest);
            stated.media_type = media_type.to_owned();
            let read = |descriptor: &Descriptor, _| Ok(all.0.get(&descriptor.digest).cloned());
            match (resolve(&stated, &read), expected) {
                (Ok(_), Ok(())) => {}
                (Err(failure), Err(words)) if failure.message.contains(words) => {}
                (got, _) => panic!("{media_type}: {got:?}"),
            }
        }
    }

    #[test]
    fn nested_indexes_are_followed_to_a_limit() {
        let mut all = Documents::default();
        let image = all.image(ARCHITECTURE);
        let mut top = image.clone();
        for _ in 1..DOCUMENTS_MAX {
            top = all.index(&[(&top, "")]);
        }
        assert_eq!(all.resolve(&top), Ok(image));
        top = all.index(&[(&top, "")]);
        assert!(all.resolve(&top).unwrap_err().contains("more than 16"));
    }
}
