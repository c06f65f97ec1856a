//! The index of images, their names and the users of their layers. The module does no I/O, so that all rules
//! of CRI 2.27 and CRI 2.31 can be tested without files; [`super::disk`] stores the records.
//!
//! The index contains only the data that lists and look-ups need, about 300 bytes per image; the other data
//! is in the record.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use coracle_job::ImageRecord;
use coracle_sandbox::collect::ordered;
use coracle_wire::ContainerId;

use coracle_reference::{Invalid, Reference, is_hex};

/// Maximum number of images of a store. A node has dozens; the kubelet reports at most 50 in the node's
/// status.
pub(crate) const IMAGES_MAX: usize = 4096;

/// Maximum number of names (tags, or digests) of one image: more than any real image has.
pub(crate) const NAMES_MAX: usize = 256;

/// Minimum number of hexadecimal digits of an ID prefix. Shorter words (`cafe`, `facade`) are plausible names
/// of images; with seven digits two random IDs have the same prefix once in 2^28 pairs.
const PREFIX_DIGITS_MIN: usize = 7;

/// An image ID: the digest of the config blob, in the format `sha256:HEX` in all RPCs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageId([u8; 32]);

/// Name of a directory below `layers/`: the 64 hexadecimal digits of a chain ID, or its first 32 in images of
/// builds before 0.1.0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum LayerName {
    /// The complete chain ID.
    Whole([u8; 32]),
    /// The first half of the chain ID.
    Half([u8; 16]),
}

impl LayerName {
    /// Number of digits of a link's name: short enough for the options of a mount with many layers, and long
    /// enough that only deliberately created layers can collide.
    const LINK_DIGITS: usize = 24;

    /// The layer's short name for mount options, which is the name of a link; `None` if the layer's own name
    /// is short enough.
    pub(super) fn link(&self) -> Option<String> {
        match self {
            LayerName::Whole(bytes) => Some(hex(&bytes[..Self::LINK_DIGITS / 2])),
            LayerName::Half(_) => None,
        }
    }
}

/// The text does not have the required number of hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotHex;

impl ImageId {
    /// Creates the ID from a SHA-256 digest.
    pub const fn from_bytes(bytes: [u8; 32]) -> ImageId {
        ImageId(bytes)
    }

    /// The 64 hexadecimal digits, which are the file name of the image's record.
    pub fn hex(&self) -> String {
        hex(&self.0)
    }
}

impl FromStr for ImageId {
    type Err = NotHex;
    /// Parses an ID with or without `sha256:`.
    fn from_str(text: &str) -> Result<ImageId, NotHex> {
        parse_hex(text.strip_prefix("sha256:").unwrap_or(text)).map(ImageId)
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for ImageId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

impl FromStr for LayerName {
    type Err = NotHex;
    fn from_str(text: &str) -> Result<LayerName, NotHex> {
        parse_hex(text).map(LayerName::Whole).or_else(|_| parse_hex(text).map(LayerName::Half))
    }
}

impl fmt::Display for LayerName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerName::Whole(bytes) => out.write_str(&hex(bytes)),
            LayerName::Half(bytes) => out.write_str(&hex(bytes)),
        }
    }
}

impl fmt::Debug for LayerName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

/// The part of an image's record that is kept in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub id: ImageId,
    /// Tags as normalised `registry/path:tag`, in the order in which they were added.
    pub tags: Vec<String>,
    /// Repo digests as `registry/path@sha256:…`, in the order in which they were added.
    pub digests: Vec<String>,
    /// Compressed size in bytes; never 0.
    pub size_bytes: u64,
    /// The field `User` of the image config, not parsed.
    pub user: String,
    /// Layers of the image, lowest first.
    pub layers: Vec<LayerName>,
    /// Sequence of the record's last commit. If two records contain the same name, the name belongs to the
    /// image with the greater sequence.
    pub(crate) sequence: u64,
}

impl Entry {
    /// Creates the entry of a record. All IDs, layer names and image names are checked, because a record of a
    /// worker or from the disk is not trusted.
    pub(crate) fn of(record: &ImageRecord, sequence: u64) -> Result<Entry, String> {
        let id = record.id.strip_prefix("sha256:").and_then(|hex| hex.parse().ok());
        let id = id.ok_or_else(|| format!("id {:?} is not sha256:HEX", record.id))?;
        let layers = record.layers.iter().map(|layer| {
            layer
                .name
                .parse()
                .map_err(|NotHex| format!("layer name {:?} is not 64 or 32 hex digits", layer.name))
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let tags = record.tags.iter().map(|name| (name, false));
        for (name, is_digest) in tags.chain(record.digests.iter().map(|name| (name, true))) {
            let reference = Reference::parse(name).map_err(|invalid| format!("name {name:?}: {invalid}"))?;
            if reference.to_string() != *name || reference.has_digest() != is_digest {
                return Err(format!("name {name:?} is not in normal form"));
            }
        }
        if let Some(blob) = record.blobs.iter().find(|blob| !coracle_reference::is_digest(blob)) {
            return Err(format!("blob {blob:?} is not a digest"));
        }
        if record.tags.len() > NAMES_MAX || record.digests.len() > NAMES_MAX {
            return Err(format!("more than {NAMES_MAX} names"));
        }
        Ok(Entry {
            id,
            tags: record.tags.clone(),
            digests: record.digests.clone(),
            // Clients treat 0 as an error (CRI 2.27).
            size_bytes: record.size_bytes.max(1),
            user: record.config.user.clone(),
            layers,
            sequence,
        })
    }

    /// A name of the image for users: a tag, else a digest, else the ID.
    pub(crate) fn name(&self) -> String {
        self.tags.first().or(self.digests.first()).cloned().unwrap_or_else(|| self.id.to_string())
    }

    fn has_name(&self, name: &str) -> bool {
        self.tags.iter().chain(&self.digests).any(|own| own == name)
    }
}

/// The result of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Exactly one image; with its ID.
    One(ImageId),
    /// There is no such image.
    None,
    /// The text is a prefix of several IDs, which is an error in all RPCs.
    Ambiguous,
}

/// All images, and the users of their layers.
#[derive(Default)]
pub(crate) struct Index {
    images: BTreeMap<ImageId, Entry>,
    users: BTreeMap<ContainerId, BTreeSet<LayerName>>,
    sequence: u64,
    /// Layers with known damage, and what it is.
    pub(crate) damage: BTreeMap<LayerName, String>,
    /// Directories of damaged layers that were replaced, and the containers that may still use them; `None`: this is not known.
    pub(crate) replaced: BTreeMap<String, Option<BTreeSet<ContainerId>>>,
}

impl Index {
    /// Inserts or replaces an image. Each name belongs to one image: the names of the new image are removed
    /// from images with a smaller sequence, and those images are returned, because their records must be
    /// updated. An image with a greater sequence keeps its names.
    pub(crate) fn insert(&mut self, mut entry: Entry) -> Vec<ImageId> {
        let mut poorer = Vec::new();
        let own = entry.id;
        for other in self.images.values_mut().filter(|other| other.id != own) {
            let (older, newer) = if other.sequence < entry.sequence {
                (&mut *other, &mut entry)
            } else {
                (&mut entry, &mut *other)
            };
            let names = older.tags.len() + older.digests.len();
            older.tags.retain(|name| !newer.has_name(name));
            older.digests.retain(|name| !newer.has_name(name));
            if older.tags.len() + older.digests.len() < names {
                poorer.push(older.id);
            }
        }
        // That of the built-in image is the greatest there is and no commit's.
        if entry.sequence < u64::MAX {
            self.sequence = self.sequence.max(entry.sequence);
        }
        self.images.insert(entry.id, entry);
        poorer
    }

    /// The sequence of the last commit, which may have been for an image that was removed since.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Removes an image with all its names; returns its entry.
    pub(crate) fn remove(&mut self, id: &ImageId) -> Option<Entry> {
        self.images.remove(id)
    }

    pub(crate) fn get(&self, id: &ImageId) -> Option<&Entry> {
        self.images.get(id)
    }

    /// All images in the order of their IDs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.images.values()
    }

    pub(crate) fn len(&self) -> usize {
        self.images.len()
    }

    /// Finds an image by `text` (CRI 2.27): an ID with or without `sha256:`, a name in any spelling with the
    /// same normal form, or the prefix of an ID.
    pub(crate) fn find(&self, text: &str) -> Result<Found, Invalid> {
        if let Ok(id) = text.parse::<ImageId>() {
            return Ok(if self.images.contains_key(&id) { Found::One(id) } else { Found::None });
        }
        let parsed = Reference::parse(text);
        if let Ok(reference) = &parsed {
            let name = reference.to_string();
            if let Some(entry) = self.images.values().find(|entry| entry.has_name(&name)) {
                return Ok(Found::One(entry.id));
            }
        }
        let digits = text.strip_prefix("sha256:").unwrap_or(text);
        if digits.len() >= PREFIX_DIGITS_MIN && digits.len() < 64 && is_hex(digits) {
            return Ok(self.find_prefix(digits));
        }
        parsed.map(|_| Found::None)
    }

    fn find_prefix(&self, digits: &str) -> Found {
        let mut matching = self.images.keys().filter(|id| id.hex().starts_with(digits));
        match (matching.next(), matching.next()) {
            (None, _) => Found::None,
            (Some(id), None) => Found::One(*id),
            (Some(_), Some(_)) => Found::Ambiguous,
        }
    }

    /// Marks `layers` as used by `user`, in addition to the layers marked before.
    pub(crate) fn retain(&mut self, user: ContainerId, layers: impl IntoIterator<Item = LayerName>) {
        self.users.entry(user).or_default().extend(layers);
    }

    /// Removes the marks of all layers used by `user`; returns these layers.
    pub(crate) fn release(&mut self, user: &ContainerId) -> Vec<LayerName> {
        self.users.remove(user).into_iter().flatten().collect()
    }

    /// The containers that use the layer.
    pub(crate) fn users_of(&self, layer: &LayerName) -> BTreeSet<ContainerId> {
        let users = self.users.iter().filter(|(_, layers)| layers.contains(layer));
        ordered(users.map(|(user, _)| *user))
    }

    /// Whether a container that was there when a layer was replaced may use the directory of this name.
    pub(crate) fn uses_replaced(&self, directory: &str) -> bool {
        self.replaced.get(directory).is_some_and(|users| match users {
            Some(users) => users.iter().any(|user| self.users.contains_key(user)),
            None => !self.users.is_empty(),
        })
    }

    /// Forgets the damage of layers that nothing uses, and replaced layers that no container uses: they are removed from the disk.
    pub(crate) fn forget_unneeded(&mut self) {
        let layers: Vec<_> = self.damage.keys().filter(|layer| !self.is_needed(layer)).copied().collect();
        layers.iter().for_each(|layer| drop(self.damage.remove(layer)));
        let names: Vec<_> = self.replaced.keys().filter(|name| !self.uses_replaced(name)).cloned().collect();
        names.iter().for_each(|name| drop(self.replaced.remove(name)));
    }

    /// Notes damage of a layer, or that it has none; returns whether this is news.
    pub(crate) fn note_damage(&mut self, layer: LayerName, damage: Option<String>) -> bool {
        match damage {
            Some(damage) => self.damage.insert(layer, damage.clone()) != Some(damage),
            None => self.damage.remove(&layer).is_some(),
        }
    }

    /// The layers that are marked as used by containers.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = LayerName> {
        self.users.values().flatten().copied()
    }

    /// Whether an image or a container uses the layer.
    pub(crate) fn is_needed(&self, layer: &LayerName) -> bool {
        self.images.values().any(|entry| entry.layers.contains(layer))
            || self.users.values().any(|layers| layers.contains(layer))
    }
}

fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn parse_hex<const N: usize>(text: &str) -> Result<[u8; N], NotHex> {
    if text.len() != 2 * N || !is_hex(text) {
        return Err(NotHex);
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digit = |character: u8| (character as char).to_digit(16).map_or(0, |digit| digit as u8);
        *byte = digit(pair[0]) << 4 | digit(pair[1]);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::{ContainerId, Entry, Found, ImageId, Index, LayerName};

    fn id(byte: u8) -> ImageId {
        ImageId::from_bytes([byte; 32])
    }

    fn entry(byte: u8, sequence: u64, tags: &[&str]) -> Entry {
        Entry {
            id: id(byte),
            tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
            digests: vec![format!("docker.io/library/d{byte}@sha256:{}", id(byte).hex())],
            size_bytes: 1,
            user: String::new(),
            layers: vec![LayerName::Half([byte; 16])],
            sequence,
        }
    }

    #[test]
    fn a_record_of_more_than_256_names_is_refused() {
        let of = |count: usize| {
            let record = coracle_job::ImageRecord {
                id: id(1).to_string(),
                tags: (0..count).map(|number| format!("docker.io/library/a:{number}")).collect(),
                digests: Vec::new(),
                size_bytes: 1,
                layers: Vec::new(),
                blobs: Vec::new(),
                config: coracle_job::ImageConfig::default(),
            };
            Entry::of(&record, 1).map(|entry| entry.tags.len())
        };
        assert_eq!(of(256), Ok(256));
        assert_eq!(of(257), Err("more than 256 names".to_owned()));
    }

    #[test]
    fn full_layer_names_and_those_of_earlier_builds_are_parsed() {
        let whole: LayerName = "0123456789abcdef".repeat(4).parse().unwrap();
        assert_eq!(whole.to_string(), "0123456789abcdef".repeat(4));
        assert_eq!(whole.link().as_deref(), Some("0123456789abcdef01234567"));
        let half: LayerName = "0123456789abcdef".repeat(2).parse().unwrap();
        assert_eq!((half.to_string(), half.link()), ("0123456789abcdef".repeat(2), None));
        assert_ne!(whole, half, "equal halves do not make equal layers");
        for wrong in ["", "l", "../x", &"0".repeat(63), &"0".repeat(31), &"g".repeat(64)] {
            assert!(wrong.parse::<LayerName>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_image_is_found_by_id_prefix_and_name() {
        let mut index = Index::default();
        index.insert(entry(0xab, 1, &["docker.io/library/app:latest", "reg:5000/x/app:2"]));
        let hex = id(0xab).hex();
        let found = [
            hex.clone(),
            format!("sha256:{hex}"),
            "abababababab".into(),
            "sha256:abababa".into(),
            "app".into(),
            "app:latest".into(),
            "library/app".into(),
            "docker.io/app".into(),
            "reg:5000/x/app:2".into(),
            format!("d171@sha256:{hex}"),
            format!("docker.io/library/d171:any@sha256:{hex}"),
        ];
        for text in found {
            assert_eq!(index.find(&text), Ok(Found::One(id(0xab))), "{text}");
        }
        let absent = [
            "ffffffffffff".to_owned(),
            "ababab".into(),
            "app:2".into(),
            "reg:5000/x/app".into(),
            "d171".into(),
            id(1).hex(),
            format!("other@sha256:{hex}"),
            "abababababac".into(),
        ];
        for text in absent {
            assert_eq!(index.find(&text), Ok(Found::None), "{text}");
        }
        for text in ["", "App", "a b", "sha256:"] {
            assert!(index.find(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_ambiguous_prefix_is_an_error_and_a_name_precedes_a_prefix() {
        let mut index = Index::default();
        index.insert(Entry { id: ImageId([0xcc; 32]), ..entry(1, 1, &[]) });
        let mut near = [0xcc; 32];
        near[31] = 0;
        index.insert(Entry { id: ImageId(near), ..entry(2, 2, &[]) });
        assert_eq!(index.find("ccccccccc"), Ok(Found::Ambiguous));
        assert_eq!(index.find(&"c".repeat(63)), Ok(Found::One(ImageId([0xcc; 32]))));
        index.insert(entry(3, 3, &["docker.io/library/ccccccccc:latest"]));
        assert_eq!(index.find("ccccccccc"), Ok(Found::One(id(3))));
    }

    #[test]
    fn a_tag_belongs_to_the_newer_image_in_any_order_of_loading() {
        let tag = "docker.io/library/app:latest";
        for order in [[1, 2], [2, 1]] {
            let mut index = Index::default();
            let mut poorer = Vec::new();
            for sequence in order {
                poorer.extend(index.insert(entry(sequence, u64::from(sequence), &[tag])));
            }
            assert_eq!(poorer, [id(1)], "{order:?}");
            assert_eq!(index.find("app"), Ok(Found::One(id(2))), "{order:?}");
            assert!(index.get(&id(1)).unwrap().tags.is_empty());
            assert_eq!(index.get(&id(1)).unwrap().digests.len(), 1, "the old image keeps its digest");
        }
    }

    #[test]
    fn a_layer_is_needed_until_its_last_image_and_container_are_removed() {
        let mut index = Index::default();
        let layer = LayerName::Half([7; 16]);
        let user = ContainerId::from_bytes([1; 32]);
        index.insert(entry(7, 1, &[]));
        index.retain(user, [layer]);
        index.retain(user, [LayerName::Half([8; 16])]);
        index.remove(&id(7)).unwrap();
        assert!(index.is_needed(&layer) && index.is_needed(&LayerName::Half([8; 16])));
        assert_eq!(index.release(&user), [layer, LayerName::Half([8; 16])]);
        assert!(index.release(&user).is_empty());
        assert!(!index.is_needed(&layer) && !index.is_needed(&LayerName::Half([8; 16])));
    }

    #[test]
    fn a_replaced_layer_is_needed_by_the_containers_that_were_there() {
        let mut index = Index::default();
        let layer = LayerName::Half([7; 16]);
        let [old, new] = [1, 2].map(|byte| ContainerId::from_bytes([byte; 32]));
        index.retain(old, [layer]);
        index.replaced.insert("0".into(), Some(index.users_of(&layer)));
        index.replaced.insert("of unknown containers".into(), None);
        index.retain(new, [layer]);
        assert!(index.uses_replaced("0") && index.uses_replaced("of unknown containers"));
        let damage = || Some("/x: has other content".to_owned());
        assert!(index.note_damage(layer, damage()) && !index.note_damage(layer, damage()));
        index.release(&old);
        index.forget_unneeded();
        assert_eq!(index.replaced.keys().collect::<Vec<_>>(), ["of unknown containers"]);
        assert!(index.damage.contains_key(&layer), "a container uses it");
        index.release(&new);
        index.forget_unneeded();
        assert!(index.replaced.is_empty() && index.damage.is_empty());
    }

    #[test]
    fn ids_are_printed_as_they_are_parsed() {
        let text = format!("sha256:{}", "0f".repeat(32));
        assert_eq!(text.parse::<ImageId>().unwrap().to_string(), text);
        for text in ["", "sha256:", "0F", &"0F".repeat(32), &"0".repeat(63), &"é".repeat(32)] {
            assert!(text.parse::<ImageId>().is_err(), "{text}");
        }
    }

    /// After random operations, no name belongs to two images.
    #[test]
    fn names_are_unique() {
        let names: Vec<String> = (0..6).map(|n| format!("docker.io/library/n{n}:latest")).collect();
        let mut index = Index::default();
        let mut seed = 0x9e37_79b9_u64;
        for sequence in 1..3000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let byte = (seed >> 60) as u8;
            let picked: Vec<&str> = names
                .iter()
                .enumerate()
                .filter(|(n, _)| seed >> (20 + n) & 1 == 1)
                .map(|(_, name)| name.as_str())
                .collect();
            if seed >> 50 & 7 == 0 {
                index.remove(&id(byte));
            } else {
                index.insert(entry(byte, sequence, &picked));
            }
            for name in &names {
                let holders = index.iter().filter(|entry| entry.tags.contains(name)).count();
                assert!(holders <= 1, "{name} at step {sequence}");
            }
        }
    }
}
