//! Which images there are, under which names, and who needs their layers. A value: no file is touched here, so that
//! every rule of CRI 2.27 and CRI 2.31 can be tested without one. `super::records` keeps the disk in step.
//!
//! What a list shows and a look-up compares is in memory, about 300 bytes an image; everything else of an image is in
//! its record.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use coracle_job::ImageRecord;
use coracle_wire::ContainerId;

use super::reference::{Invalid, Reference, is_hex};

/// Images of one store. A node of this size holds dozens; the kubelet's own node status lists 50.
pub(crate) const IMAGES_MAX: usize = 4096;

/// Names (tags, or digests) of one image: more than any real image has, few enough to list.
pub(crate) const NAMES_MAX: usize = 256;

/// Hex digits an id may be cut to. Shorter words (`cafe`, `facade`) are names people give to images; at seven digits
/// two random ids agree once in 2^28 pairs.
const PREFIX_DIGITS_MIN: usize = 7;

/// An image: the digest of its config blob. Printed as `sha256:HEX`, the same in every RPC.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageId([u8; 32]);

/// A directory below `layers/`: the 64 hex digits of a chain ID, or its first 32 in images of builds before 0.1.0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum LayerName {
    /// All of it.
    Whole([u8; 32]),
    /// Its first half.
    Half([u8; 16]),
}

impl LayerName {
    /// Hex digits of a link: as many layers as before fit into a mount's options, and no two layers of a store that were not
    /// made for it agree in them.
    const LINK_DIGITS: usize = 24;

    /// A shorter name for a mount's options, which the directory of links has; none where the name is short itself.
    pub(super) fn link(&self) -> Option<String> {
        match self {
            LayerName::Whole(bytes) => Some(hex(&bytes[..Self::LINK_DIGITS / 2])),
            LayerName::Half(_) => None,
        }
    }
}

/// The text is not what it should name: hex digits of the right number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotHex;

impl ImageId {
    /// The id that is this SHA-256 digest.
    pub const fn from_bytes(bytes: [u8; 32]) -> ImageId {
        ImageId(bytes)
    }

    /// The 64 digits, which name the record.
    pub fn hex(&self) -> String {
        hex(&self.0)
    }
}

impl FromStr for ImageId {
    type Err = NotHex;
    /// With or without `sha256:`.
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

/// What is in memory of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub id: ImageId,
    /// Normalised `registry/path:tag`, in the order they came.
    pub tags: Vec<String>,
    /// `registry/path@sha256:…`, in the order they came.
    pub digests: Vec<String>,
    /// Compressed bytes; never 0.
    pub size_bytes: u64,
    /// The config's `User`, as it stands.
    pub user: String,
    /// Lowest first.
    pub layers: Vec<LayerName>,
    /// Of its record's last commit; where two records claim one name, the greater number has it.
    pub(crate) sequence: u64,
}

impl Entry {
    /// The entry of a record, which is checked: ids, layer names and names are what they should be, so that nothing a
    /// worker or a disk says becomes a path or a list entry unseen.
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
        if let Some(blob) = record.blobs.iter().find(|blob| !super::reference::is_digest(blob)) {
            return Err(format!("blob {blob:?} is not a digest"));
        }
        if record.tags.len() > NAMES_MAX || record.digests.len() > NAMES_MAX {
            return Err(format!("more than {NAMES_MAX} names"));
        }
        Ok(Entry {
            id,
            tags: record.tags.clone(),
            digests: record.digests.clone(),
            // A client takes 0 for an error (CRI 2.27).
            size_bytes: record.size_bytes.max(1),
            user: record.config.user.clone(),
            layers,
            sequence,
        })
    }

    fn has_name(&self, name: &str) -> bool {
        self.tags.iter().chain(&self.digests).any(|own| own == name)
    }
}

/// What a look-up found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// This image.
    One(ImageId),
    /// No image.
    None,
    /// The text is a prefix of more than one id: an error everywhere, never a guess.
    Ambiguous,
}

/// All images and all users of layers.
#[derive(Default)]
pub(crate) struct Index {
    images: BTreeMap<ImageId, Entry>,
    users: BTreeMap<ContainerId, BTreeSet<LayerName>>,
}

impl Index {
    /// Puts an image in, in place of what was known of it. Names are unique: those it brings are taken from whoever had
    /// them with a smaller sequence, and those images, whose records now say too much, are returned. A name that
    /// another image holds with a greater sequence stays there.
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
        self.images.insert(entry.id, entry);
        poorer
    }

    /// Takes an image out with all its names.
    pub(crate) fn remove(&mut self, id: &ImageId) -> Option<Entry> {
        self.images.remove(id)
    }

    pub(crate) fn get(&self, id: &ImageId) -> Option<&Entry> {
        self.images.get(id)
    }

    /// All images, by id: an order that stays.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.images.values()
    }

    pub(crate) fn len(&self) -> usize {
        self.images.len()
    }

    /// Finds what a client calls `text` (CRI 2.27): an id with or without `sha256:`, a name in any spelling that normalises
    /// to one an image has, or else the beginning of one id.
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

    /// `user` needs `layers`, beside those it needed before.
    pub(crate) fn retain(&mut self, user: ContainerId, layers: impl IntoIterator<Item = LayerName>) {
        self.users.entry(user).or_default().extend(layers);
    }

    /// `user` needs nothing any more. Gives what it needed.
    pub(crate) fn release(&mut self, user: &ContainerId) -> Vec<LayerName> {
        self.users.remove(user).into_iter().flatten().collect()
    }

    /// Layers that containers need.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = LayerName> {
        self.users.values().flatten().copied()
    }

    /// Whether an image or a container needs the layer.
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
    fn layers_have_whole_names_and_those_of_earlier_builds() {
        let whole: LayerName = "0123456789abcdef".repeat(4).parse().unwrap();
        assert_eq!(whole.to_string(), "0123456789abcdef".repeat(4));
        assert_eq!(whole.link().as_deref(), Some("0123456789abcdef01234567"));
        let half: LayerName = "0123456789abcdef".repeat(2).parse().unwrap();
        assert_eq!((half.to_string(), half.link()), ("0123456789abcdef".repeat(2), None));
        assert_ne!(whole, half, "what agrees in half of a name is another layer");
        for wrong in ["", "l", "../x", &"0".repeat(63), &"0".repeat(31), &"g".repeat(64)] {
            assert!(wrong.parse::<LayerName>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_image_is_found_by_everything_that_names_it() {
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
    fn a_prefix_of_two_ids_is_never_a_guess_and_a_name_goes_before_a_prefix() {
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
    fn a_tag_moves_to_the_newer_image_whatever_the_order_of_loading() {
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
            assert_eq!(index.get(&id(1)).unwrap().digests.len(), 1, "the old image stays by its digest");
        }
    }

    #[test]
    fn a_layer_is_needed_until_its_last_image_and_container_are_gone() {
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
    fn ids_print_what_they_parse() {
        let text = format!("sha256:{}", "0f".repeat(32));
        assert_eq!(text.parse::<ImageId>().unwrap().to_string(), text);
        for text in ["", "sha256:", "0F", &"0F".repeat(32), &"0".repeat(63), &"é".repeat(32)] {
            assert!(text.parse::<ImageId>().is_err(), "{text}");
        }
    }

    /// Driven at random, a name never belongs to two images.
    #[test]
    fn no_name_is_held_twice() {
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
