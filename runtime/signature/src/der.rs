//! DER (X.690) as far as keys and certificates need it: values with their tags. Certificates are verified by webpki; this module serves
//! what webpki does not say: the key of a certificate in a policy, its times and its purposes.

/// DER tag BOOLEAN; the others follow.
pub(crate) const BOOLEAN: u8 = 0x01;
pub(crate) const INTEGER: u8 = 0x02;
pub(crate) const BIT_STRING: u8 = 0x03;
pub(crate) const OCTET_STRING: u8 = 0x04;
pub(crate) const OBJECT_ID: u8 = 0x06;
pub(crate) const UTC_TIME: u8 = 0x17;
pub(crate) const GENERALIZED_TIME: u8 = 0x18;
pub(crate) const SEQUENCE: u8 = 0x30;
/// The field `version` of a certificate, `[0] EXPLICIT`.
pub(crate) const VERSION: u8 = 0xa0;
/// The field `extensions` of a certificate, `[3] EXPLICIT`.
pub(crate) const EXTENSIONS: u8 = 0xa3;

/// A value of DER: tag and content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Value<'a> {
    pub(crate) tag: u8,
    pub(crate) content: &'a [u8],
    /// The content with tag and length.
    pub(crate) whole: &'a [u8],
}

impl<'a> Value<'a> {
    /// Takes one value off the front of `bytes`; returns the rest, too. `None` if it is malformed or longer than 64 KiB.
    pub(crate) fn take(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (&tag, rest) = bytes.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = match (first, rest) {
            (0..=0x7f, rest) => (usize::from(first), rest),
            (0x81, [one, rest @ ..]) => (usize::from(*one), rest),
            (0x82, [one, two, rest @ ..]) => (usize::from(u16::from_be_bytes([*one, *two])), rest),
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        Some((Self { tag, content, whole: &bytes[..bytes.len() - rest.len()] }, rest))
    }

    /// The only value of `bytes`, with this tag.
    pub(crate) fn only(bytes: &'a [u8], tag: u8) -> Option<Self> {
        Self::take(bytes).filter(|(value, rest)| value.tag == tag && rest.is_empty()).map(|(value, _)| value)
    }

    /// The values that make up the content; `None` if one is malformed.
    pub(crate) fn parts(&self) -> Option<Vec<Value<'a>>> {
        let (mut parts, mut rest) = (Vec::new(), self.content);
        while !rest.is_empty() {
            let (value, after) = Self::take(rest)?;
            parts.push(value);
            rest = after;
        }
        Some(parts)
    }

    /// The bytes of a bit string without unused bits.
    pub(crate) fn bits(&self) -> Option<&'a [u8]> {
        self.content.strip_prefix(&[0]).filter(|_| self.tag == BIT_STRING)
    }
}
