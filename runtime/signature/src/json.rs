//! Objects of JSON whose members are each read once. A member that is there twice is refused, because another reader may use the other
//! one; so is a member that was not read, if [`Members::finish`] is called: a misspelled `keyPath` must not be a policy without a
//! key.

use std::fmt;

use data_encoding::BASE64;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The reason why a document cannot be read, with its place in the document.
pub(crate) type Problem = String;

/// Maximum number of members of one object.
const MEMBERS_MAX: usize = 4096;

/// The members of an object that were not read yet, in the order of the document.
#[derive(Debug, Default)]
pub(crate) struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Members<'a> {
    /// Parses an object.
    pub(crate) fn parse(text: &'a str) -> Result<Self, Problem> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    /// Parses an object in UTF-8.
    pub(crate) fn parse_bytes(bytes: &'a [u8]) -> Result<Self, Problem> {
        Self::parse(std::str::from_utf8(bytes).map_err(|_| "not UTF-8".to_owned())?)
    }

    /// Removes a member and returns its text.
    pub(crate) fn take(&mut self, name: &str) -> Option<&'a str> {
        let at = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.remove(at).1.get())
    }

    /// Removes a member that has to be there.
    pub(crate) fn need(&mut self, name: &str) -> Result<&'a str, Problem> {
        self.take(name).ok_or_else(|| format!("{name}: missing"))
    }

    fn typed<T: de::DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, Problem> {
        let value = self.take(name).map(serde_json::from_str).transpose();
        value.map_err(|error| format!("{name}: {error}"))
    }

    /// A string; `None` if there is none.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, Problem> {
        self.typed(name)
    }

    /// A string that has to be there.
    pub(crate) fn need_text(&mut self, name: &str) -> Result<String, Problem> {
        self.text(name)?.ok_or_else(|| format!("{name}: missing"))
    }

    /// A list of strings; `None` if there is none.
    pub(crate) fn texts(&mut self, name: &str) -> Result<Option<Vec<String>>, Problem> {
        self.typed(name)
    }

    /// An object that has to be there.
    pub(crate) fn object(&mut self, name: &str) -> Result<Members<'a>, Problem> {
        Members::parse(self.need(name)?).map_err(|problem| within(name, &problem))
    }

    /// The texts of a list's elements; `None` if there is no list.
    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<&'a str>>, Problem> {
        self.take(name).map(list).transpose().map_err(|problem| within(name, &problem))
    }

    /// Bytes in base64 that have to be there.
    pub(crate) fn bytes(&mut self, name: &str) -> Result<Vec<u8>, Problem> {
        base64(&self.need_text(name)?).map_err(|problem| within(name, &problem))
    }

    /// A number that is not negative, which protobuf writes as a string if it has 64 bits.
    pub(crate) fn number(&mut self, name: &str) -> Result<u64, Problem> {
        let text = self.need(name)?;
        let digits = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
        digits.parse().map_err(|_| format!("{name}: {text} is not a number"))
    }

    /// A number like [`Self::number`]; 0 if there is none, because protobuf omits zeros.
    pub(crate) fn number_or_zero(&mut self, name: &str) -> Result<u64, Problem> {
        match self.0.iter().any(|(known, _)| known == name) {
            true => self.number(name),
            false => Ok(0),
        }
    }

    /// The remaining members.
    pub(crate) fn rest(self) -> impl Iterator<Item = (String, &'a str)> {
        self.0.into_iter().map(|(name, value)| (name, value.get()))
    }

    /// Checks that all members were read.
    pub(crate) fn finish(self) -> Result<(), Problem> {
        match self.0.first() {
            Some((name, _)) => Err(format!("unknown member {name:?}")),
            None => Ok(()),
        }
    }
}

/// The texts of a list's elements.
pub(crate) fn list(text: &str) -> Result<Vec<&str>, Problem> {
    let list: Vec<&RawValue> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(list.into_iter().map(RawValue::get).collect())
}

/// Decodes base64 with padding, the form of bytes in JSON documents.
pub(crate) fn base64(text: &str) -> Result<Vec<u8>, Problem> {
    BASE64.decode(text.as_bytes()).map_err(|error| format!("not base64: {error}"))
}

/// Adds the place of a problem in front of it.
pub(crate) fn within(place: &str, problem: &str) -> Problem {
    let joint = if problem.starts_with('[') { "" } else { "." };
    // A problem of a member begins with its name, and one of the object itself does not.
    match problem.split_once(": ") {
        Some((name, _)) if !name.contains(' ') => format!("{place}{joint}{problem}"),
        _ => format!("{place}: {problem}"),
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members: Self::Value = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, &'de RawValue>()? {
                    if members.iter().any(|(known, _)| *known == name) {
                        return Err(de::Error::custom(format!("member {name:?} is there twice")));
                    }
                    if members.len() >= MEMBERS_MAX {
                        return Err(de::Error::custom(format!("more than {MEMBERS_MAX} members")));
                    }
                    members.push((name, value));
                }
                Ok(members)
            }
        }
        from.deserialize_map(Reader).map(Members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_read_once_and_unknown_ones_are_refused() {
        let mut members =
            Members::parse(r#"{"a": "x", "n": "12", "m": 3, "b": "AQI=", "o": {"p": 1}}"#).unwrap();
        assert_eq!((members.text("a"), members.text("a")), (Ok(Some("x".into())), Ok(None)));
        assert_eq!((members.number("n"), members.number("m")), (Ok(12), Ok(3)));
        assert_eq!(members.bytes("b"), Ok(vec![1, 2]));
        assert_eq!(members.object("o").unwrap().text("p").unwrap_err().split(' ').next(), Some("p:"));
        assert_eq!(members.need("z"), Err("z: missing".into()));
        members.finish().unwrap();
        assert!(Members::parse(r#"{"a": 1}"#).unwrap().finish().unwrap_err().contains("\"a\""));
        for wrong in [r#"{"a": 1, "a": 1}"#, "[]", "", "null", r#"{"a"}"#, r#"{"a": 1} x"#] {
            assert!(Members::parse(wrong).is_err(), "{wrong}");
        }
    }
}
