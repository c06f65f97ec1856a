//! JSON as Go's encoding/json reads it, which is how containerd, Docker and the tools that make images read
//! manifests and configs: null is the same as an absent member, strings may have invalid UTF-8, and the name of a
//! member is compared without case if no member has exactly this name.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

/// Maximum number of entries of a list or map of strings, which the daemon keeps: an entry takes three bytes of the document and
/// more than 24 of memory. Images have some dozens.
const ENTRIES_MAX: usize = 16 << 10;

/// A JSON object, whose members are parsed when they are read. Of several members with one name the last counts.
#[derive(Debug, Default)]
pub struct Object<'a>(BTreeMap<String, &'a RawValue>);

/// The reason why a document or a member cannot be read, as text for users.
pub type Problem = String;

impl<'a> Object<'a> {
    /// Parses an object; null is an empty one.
    ///
    /// # Errors
    /// The text is not JSON, or not an object.
    pub fn parse(text: &'a str) -> Result<Self, Problem> {
        let members: Option<BTreeMap<String, &'a RawValue>> =
            serde_json::from_str(text).map_err(|error| error.to_string())?;
        Ok(Self(members.unwrap_or_default()))
    }

    fn member(&self, name: &str) -> Option<&'a RawValue> {
        let is_set = |value: &&&RawValue| value.get() != "null";
        let folded = || self.0.iter().filter(|(known, _)| known.eq_ignore_ascii_case(name));
        let found = self.0.get(name).filter(is_set);
        found.or_else(|| folded().map(|(_, value)| value).find(is_set)).copied()
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Problem> {
        let value = self.member(name).map(|value| serde_json::from_str(value.get()));
        value.transpose().map_err(|error| at(name, &error.to_string()))
    }

    /// A string; empty if there is none.
    ///
    /// # Errors
    /// The member has another type. The methods for other types fail likewise.
    pub fn text(&self, name: &str) -> Result<String, Problem> {
        Ok(self.read(name)?.unwrap_or_default())
    }

    /// A number that is not negative; `None` if there is none.
    pub fn number(&self, name: &str) -> Result<Option<u64>, Problem> {
        self.read(name)
    }

    /// A list of strings; empty if there is none.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, Problem> {
        let texts: Vec<Option<String>> = self.read(name)?.unwrap_or_default();
        limit(name, texts.len())?;
        Ok(texts.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// An object with strings; empty if there is none.
    pub fn map(&self, name: &str) -> Result<BTreeMap<String, String>, Problem> {
        let map: BTreeMap<String, Option<String>> = self.read(name)?.unwrap_or_default();
        limit(name, map.len())?;
        let mut texts = BTreeMap::new();
        texts.extend(map.into_iter().map(|(key, value)| (key, value.unwrap_or_default())));
        Ok(texts)
    }

    /// The names of an object's members, in order; empty if there is none.
    pub fn names(&self, name: &str) -> Result<Vec<String>, Problem> {
        let members = self.object(name)?.unwrap_or_default().0;
        limit(name, members.len())?;
        Ok(members.into_keys().collect())
    }

    /// An object; `None` if there is none.
    pub fn object(&self, name: &str) -> Result<Option<Object<'a>>, Problem> {
        let object = self.member(name).map(|value| Object::parse(value.get()));
        object.transpose().map_err(|problem| at(name, &problem))
    }

    /// A list, whose elements are read by [`Object::parse`]; `None` if there is none.
    pub fn list(&self, name: &str) -> Result<Option<Vec<&'a str>>, Problem> {
        let list = self.member(name).map(|value| list(value.get()));
        list.transpose().map_err(|problem| at(name, &problem))
    }
}

/// Parses a list of objects, whose elements are read by [`Object::parse`]; null is an empty one.
///
/// # Errors
/// The text is not JSON, or not a list.
pub fn list(text: &str) -> Result<Vec<&str>, Problem> {
    let list: Option<Vec<&RawValue>> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(list.unwrap_or_default().into_iter().map(RawValue::get).collect())
}

fn limit(name: &str, count: usize) -> Result<(), Problem> {
    match count > ENTRIES_MAX {
        true => Err(at(name, &format!("more than {ENTRIES_MAX} entries"))),
        false => Ok(()),
    }
}

fn at(name: &str, problem: &str) -> Problem {
    format!("{name}: {problem}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_absent_and_names_are_compared_without_case() {
        let text = r#" {"Env": ["a", null], "labels": {"x": null, "y": "z"}, "CMD": null, "cmd": ["c"],
            "user": "no", "User": "yes", "size": 5, "volumes": {"/b": {}, "/a": null}, "list": [null, {"a": "b"}]} "#;
        let object = Object::parse(text).unwrap();
        assert_eq!(object.texts("Env").unwrap(), ["a", ""]);
        let labels: Vec<_> = object.map("Labels").unwrap().into_iter().collect();
        assert_eq!(labels, [("x".to_owned(), String::new()), ("y".to_owned(), "z".to_owned())]);
        assert_eq!(
            (object.text("User").unwrap(), object.text("USER").unwrap()),
            ("yes".into(), "yes".into())
        );
        assert_eq!((object.texts("Cmd").unwrap(), object.texts("none").unwrap()), (vec!["c".into()], vec![]));
        assert_eq!((object.number("Size").unwrap(), object.number("none").unwrap()), (Some(5), None));
        assert_eq!(object.names("Volumes").unwrap(), ["/a", "/b"]);
        let list = object.list("list").unwrap().unwrap();
        assert_eq!(Object::parse(list[0]).unwrap().text("a").unwrap(), "");
        assert_eq!(Object::parse(list[1]).unwrap().text("a").unwrap(), "b");
        assert!(Object::parse("null").unwrap().object("x").unwrap().is_none());
    }

    #[test]
    fn errors_of_json_name_the_member() {
        let object = Object::parse(r#"{"config": {"Env": "x"}, "size": -1, "list": {}}"#).unwrap();
        let config = object.object("config").unwrap().unwrap();
        assert!(config.texts("Env").unwrap_err().starts_with("Env: invalid type: string"));
        assert!(object.number("size").unwrap_err().starts_with("size: "));
        assert!(object.list("list").unwrap_err().starts_with("list: "));
        for text in ["", "[]", "5", "{", "{}x"] {
            assert!(Object::parse(text).is_err(), "{text:?}");
        }
    }
}
