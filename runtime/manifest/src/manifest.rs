//! Manifests and indexes of OCI and Docker: accepted media types and parsing. OCI image specification 1.1;
//! Docker image manifest version 2, schema 2. Schema 1 is refused. Pure.

use coracle_chunked::toc::Stated;
use coracle_job::{Failure, FailureKind};
use coracle_sandbox::collect;

use coracle_json::{Object, Problem};

use super::platform::{ARCHITECTURE, Platform};

/// Media type of an image's manifest.
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Media types of images, and of indexes.
const IMAGES: [&str; 2] = [MANIFEST, "application/vnd.docker.distribution.manifest.v2+json"];
const INDEXES: [&str; 2] = [INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json"];

/// Media type of an index, and of a list of referrers.
pub const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";

/// Value of the `Accept` header in requests of manifests and indexes.
pub fn accept() -> String {
    [INDEXES, IMAGES].concat().join(", ")
}

/// Media type of an image's config.
pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// A descriptor of a blob or manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Media type; empty if it is unknown.
    pub media_type: String,
    /// Digest of the content as the document states it; not validated.
    pub digest: String,
    /// Length in bytes; 0 if it is unknown.
    pub size: u64,
    /// URLs on any host from which the content can be downloaded, too.
    pub urls: Vec<String>,
    /// The blob's table of contents, if it has one.
    pub contents: Option<Box<Stated>>,
    platform: Option<Platform>,
}

impl Descriptor {
    /// A descriptor of which only the digest is known.
    pub fn of(digest: &str) -> Self {
        Self { digest: digest.to_owned(), ..Self::default() }
    }

    /// Reads a descriptor.
    ///
    /// # Errors
    /// A member has another type.
    pub fn read(json: &Object<'_>) -> Result<Self, Problem> {
        let size = json.number("size")?.unwrap_or_default();
        // Annotations may have any value: the image does not need them.
        let annotations = json.map("annotations").unwrap_or_default();
        Ok(Self {
            media_type: json.text("mediaType")?,
            digest: json.text("digest")?,
            size,
            urls: json.texts("urls")?,
            contents: Stated::of(|name| annotations.get(name).map(String::as_str), size).map(Box::new),
            platform: json.object("platform")?.map(|json| Platform::read(&json)).transpose()?,
        })
    }

    /// Checks that a document is what its descriptor, or its registry, states.
    ///
    /// # Errors
    /// It is an index that is stated to be an image, or the reverse.
    pub(crate) fn check(&self, document: &Document) -> Result<(), Failure> {
        let is = matches!(document, Document::Index(_));
        match is_index(&self.media_type) {
            Some(stated) if stated != is => {
                let words = if is { "is an index" } else { "is an image" };
                Err(Failure::invalid(format!(
                    "{}: stated to be {}, but it {words}",
                    self.digest, self.media_type
                )))
            }
            _ => Ok(()),
        }
    }

    /// The name of the descriptor's platform, in docker's notation.
    pub(crate) fn platform_name(&self) -> String {
        self.platform.as_ref().map_or_else(|| "unknown/unknown".to_owned(), Platform::to_string)
    }

    /// Whether the descriptor has a platform.
    pub(crate) fn has_platform(&self) -> bool {
        self.platform.is_some()
    }

    /// Whether the descriptor has no platform, or this node's.
    pub(crate) fn may_be_ours(&self) -> bool {
        self.platform.as_ref().is_none_or(|platform| platform.rank().is_some())
    }
}

/// A document below a registry's `manifests/`.
#[derive(Debug, PartialEq, Eq)]
pub enum Document {
    /// An index of several platforms.
    Index(Vec<Descriptor>),
    /// A manifest of one image.
    Manifest {
        /// Descriptor of the image config.
        config: Descriptor,
        /// Layers of the image, lowest first.
        layers: Vec<Descriptor>,
    },
}

/// Parses a manifest or an index; the type is detected by its members, because the Content-Type of registries
/// varies.
///
/// # Errors
/// It is neither, or both; a layer has an unsupported media type.
pub fn parse(bytes: &[u8]) -> Result<Document, Failure> {
    read(&String::from_utf8_lossy(bytes)).map_err(|problem| Failure::invalid(format!("manifest: {problem}")))
}

fn read(text: &str) -> Result<Document, Problem> {
    let json = Object::parse(text)?;
    json.number("schemaVersion")?;
    if json.list("fsLayers")?.is_some() {
        return Err("Docker schema 1 is not supported".to_owned());
    }
    let descriptors = |name| {
        let read = |text: &str| Descriptor::read(&Object::parse(text)?);
        let list = json.list(name)?;
        list.map(|list| list.into_iter().map(read).collect::<Result<Vec<_>, _>>()).transpose()
    };
    let (media_type, layers) = (json.text("mediaType")?, descriptors("layers")?);
    // Two readers must not see an image and an index under one digest (CVE-2021-41190): the members and the type that the document
    // states have to agree, as for containerd (core/images, `validateMediaType`).
    let stated = is_index(&media_type);
    match (descriptors("manifests")?, json.object("config")?) {
        (Some(_), None) if stated == Some(false) || layers.is_some() => {
            Err(format!("{media_type:?} with a list of manifests is neither an image nor an index"))
        }
        (Some(manifests), None) => Ok(Document::Index(manifests)),
        (None, Some(_)) if stated == Some(true) => {
            Err(format!("{media_type:?} with a config is neither an image nor an index"))
        }
        (None, Some(config)) => {
            let layers = layers.unwrap_or_default();
            match layers.iter().find(|layer| !is_layer(&layer.media_type)) {
                Some(layer) => Err(format!("a layer has media type {:?}", layer.media_type)),
                None => Ok(Document::Manifest { config: Descriptor::read(&config)?, layers }),
            }
        }
        _ => Err(format!("{media_type:?} is neither an image nor an index")),
    }
}

/// Whether a media type is that of an index, or of an image; `None` if it is of neither.
fn is_index(media_type: &str) -> Option<bool> {
    let is_one_of = |known: [&str; 2]| known.iter().any(|known| known.eq_ignore_ascii_case(media_type));
    is_one_of(INDEXES).then_some(true).or_else(|| is_one_of(IMAGES).then_some(false))
}

/// Whether a layer of this media type is supported. Layers that must not be distributed (OCI's nondistributable,
/// Docker's foreign ones) are unpacked like all others.
fn is_layer(media_type: &str) -> bool {
    let kind = media_type
        .strip_prefix("application/vnd.oci.image.layer.v1.tar")
        .or_else(|| media_type.strip_prefix("application/vnd.oci.image.layer.nondistributable.v1.tar"))
        .or_else(|| media_type.strip_prefix("application/vnd.docker.image.rootfs.diff.tar"))
        .or_else(|| media_type.strip_prefix("application/vnd.docker.image.rootfs.foreign.diff.tar"));
    media_type.is_empty() || matches!(kind, Some("" | "+gzip" | ".gzip" | "+zstd" | ".zstd"))
}

/// The descriptors of an index that may lead to this node's image, the best one first: Linux, and the best variant
/// for this CPU. Those without a platform are last, because their config decides.
pub(crate) fn candidates(manifests: &[Descriptor]) -> Vec<&Descriptor> {
    let rank = |descriptor: &&Descriptor| descriptor.platform.as_ref().and_then(Platform::rank);
    let mut candidates: Vec<&Descriptor> =
        manifests.iter().filter(|descriptor| descriptor.may_be_ours()).collect();
    collect::sort_by_key(&mut candidates, |descriptor| (!descriptor.has_platform(), rank(descriptor)));
    candidates
}

/// The log line about an image that is used although its config names another platform.
pub fn foreign_image(platform: &str) -> String {
    format!(
        "the image is for {platform}, and this node is linux/{ARCHITECTURE}: its programs run only by an emulator \
         (binfmt_misc)"
    )
}

/// Maximum number of platform names in one error: an index may list hundreds.
const PLATFORMS_MAX: usize = 20;

/// The failure for an image that is available only for `platforms`, none of which this node supports.
pub fn no_match(platforms: impl Iterator<Item = String>) -> Failure {
    let mut names: Vec<String> = platforms.filter(|name| !name.starts_with("unknown/")).collect();
    collect::sort(&mut names);
    names.dedup();
    let more = if names.len() > PLATFORMS_MAX { ", …" } else { "" };
    names.truncate(PLATFORMS_MAX);
    let there = match names.is_empty() {
        true => String::new(),
        false => format!("; there is: {}{more}", names.join(", ")),
    };
    let text = format!("no match for platform in manifest: linux/{ARCHITECTURE}: not found{there}");
    Failure::new(FailureKind::NotFound, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_of_a_document_is_detected_by_its_members() {
        let config = r#""config":{"digest":"sha256:c","size":2}"#;
        let layer =
            |kind: &str| format!(r#"{{{config},"layers":[{{"mediaType":"{kind}","digest":"d","size":1}}]}}"#);
        for (text, expected) in [
            (r#"{"manifests":[]}"#.to_owned(), Ok("index")),
            (format!("{{{config}}}"), Ok("manifest")),
            (layer("application/vnd.oci.image.layer.v1.tar+zstd"), Ok("manifest")),
            (layer("application/vnd.docker.image.rootfs.diff.tar.gzip"), Ok("manifest")),
            (layer("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"), Ok("manifest")),
            (layer("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"), Ok("manifest")),
            (layer("application/vnd.oci.image.layer.nondistributable.v1.tar"), Ok("manifest")),
            (layer("application/vnd.oci.image.layer.v1.tar+gzip+encrypted"), Err("media type")),
            (
                r#"{"manifests":[{"digest":"d","platform":{"os":"linux","variant":null}}]}"#.to_owned(),
                Ok("index"),
            ),
            (
                r#"{"manifests":[{"digest":"d","annotations":{"x":null}}],"config":null}"#.to_owned(),
                Ok("index"),
            ),
            (r#"{"schemaVersion":1,"fsLayers":[{"blobSum":"d"}]}"#.to_owned(), Err("schema 1")),
            (format!(r#"{{"fsLayers":[{{}}],{config}}}"#), Err("schema 1")),
            (format!(r#"{{"schemaVersion":1,{config}}}"#), Ok("manifest")),
            (format!(r#"{{"schemaVersion":"2",{config}}}"#), Err("schemaVersion")),
            (format!(r#"{{"mediaType":"{MANIFEST}",{config}}}"#), Ok("manifest")),
            (format!(r#"{{"mediaType":"{}",{config}}}"#, INDEXES[0]), Err("neither")),
            (format!(r#"{{"mediaType":"{}","manifests":[]}}"#, INDEXES[1]), Ok("index")),
            (format!(r#"{{"mediaType":"{MANIFEST}","manifests":[]}}"#), Err("neither")),
            (r#"{"manifests":[],"layers":[]}"#.to_owned(), Err("neither")),
            (format!(r#"{{"manifests":[],{config}}}"#), Err("neither")),
            ("{}".to_owned(), Err("neither")),
            ("[".to_owned(), Err("manifest:")),
        ] {
            match (parse(text.as_bytes()), expected) {
                (Ok(Document::Index(_)), Ok("index")) | (Ok(Document::Manifest { .. }), Ok("manifest")) => {}
                (Err(error), Err(words)) if error.message.contains(words) => {}
                (got, _) => panic!("{text}: {got:?}"),
            }
        }
    }
}
