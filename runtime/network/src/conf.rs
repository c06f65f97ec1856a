//! Parses network configuration files into one self-contained list. The module does no I/O; `directory` reads
//! the files. The list is self-contained because it is recorded with each pod and sent to workers: `.conf`
//! files are wrapped into a list, the version is chosen, and plugins of the list's own directory are
//! appended. Rules: CNI spec 1.1.0 section 1; CRI 5.1.

use std::collections::{BTreeMap, BTreeSet};

use coracle_job::CNI_VERSIONS;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

/// Maximum number of plugins in a list; real lists have up to five.
pub(super) const PLUGINS_MAX: usize = 32;
/// Maximum length of a self-contained list in bytes: it is part of each pod's record.
const LIST_BYTES_MAX: usize = 256 << 10;
/// Maximum length of a network's name in bytes: host-local and others use it as the name of a directory.
const NAME_BYTES_MAX: usize = 200;
/// Version of a configuration without `cniVersion` (CNI spec 0.1.0 had no such key).
const VERSION_DEFAULT: &str = "0.1.0";
/// Name of the built-in default network.
pub(super) const BUILT_IN_NAME: &str = "coracle";
pub(super) const BUILT_IN_VERSION: &str = "1.0.0";
/// First CNI version with the command STATUS.
const STATUS_SINCE: &str = "1.1.0";

/// A JSON object with unparsed values.
type Fields = BTreeMap<String, Box<RawValue>>;

/// A valid network configuration list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct List {
    /// File name of the list; empty for the list of [`super::DefaultNetwork`].
    pub file: String,
    /// Name of the network.
    pub name: String,
    /// CNI version of the list, one of [`CNI_VERSIONS`].
    pub version: String,
    /// Capabilities that at least one plugin declares.
    pub capabilities: BTreeSet<String>,
    /// The self-contained list as JSON, in the format of [`coracle_job::CniJob::conflist`].
    pub text: String,
}

impl List {
    /// Parses a list of coracle itself, which needs no checks.
    pub(super) fn built_in(text: String) -> List {
        let capabilities = BTreeSet::from(["portMappings".to_owned()]);
        let (file, version) = (String::new(), BUILT_IN_VERSION.to_owned());
        List { file, name: BUILT_IN_NAME.to_owned(), version, capabilities, text }
    }

    /// Whether the version of the configuration has the command STATUS.
    pub(crate) fn has_status(&self) -> bool {
        age(&self.version) >= age(STATUS_SINCE)
    }
}

/// Whether a file with this name is a CNI configuration.
pub(super) fn is_configuration(name: &str) -> bool {
    [".conflist", ".conf", ".json"].iter().any(|ending| name.ends_with(ending))
}

/// Parses the file `name`. `folder` returns the `.conf` files, sorted, of the directory of the given network,
/// and is called at most once.
pub(super) fn parse(
    name: &str,
    bytes: &[u8],
    folder: impl FnOnce(&str) -> Result<Vec<(String, Vec<u8>)>, String>,
) -> Result<List, String> {
    let fields: Fields = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let version = choose_version(&fields)?;
    let network = network_name(&fields)?;
    let plugins = if name.ends_with(".conflist") {
        list_plugins(&fields, || folder(&network))?
    } else if fields.contains_key("type") {
        vec![raw(bytes)?]
    } else if fields.contains_key("plugins") {
        return Err("a list of plugins must be in a file named .conflist".to_owned());
    } else {
        return Err("no type".to_owned());
    };
    if plugins.is_empty() {
        return Err("no plugins".to_owned());
    }
    if plugins.len() > PLUGINS_MAX {
        return Err(format!("{} plugins, but at most {PLUGINS_MAX} are allowed", plugins.len()));
    }
    let mut capabilities = BTreeSet::new();
    for (index, plugin) in plugins.iter().enumerate() {
        check_plugin(plugin, &mut capabilities).map_err(|why| format!("plugin {index}: {why}"))?;
    }
    let text = flat(&version, &network, &plugins.iter().map(|plugin| plugin.get()).collect::<Vec<_>>());
    if text.len() > LIST_BYTES_MAX {
        return Err(format!("a list of {} bytes, but at most {LIST_BYTES_MAX} are allowed", text.len()));
    }
    Ok(List { file: name.to_owned(), name: network, version, capabilities, text })
}

/// Formats a list with these plugins as JSON.
pub(super) fn flat(version: &str, name: &str, plugins: &[&str]) -> String {
    let text = serde_json::json!({ "cniVersion": version, "name": name }).to_string();
    format!("{},\"plugins\":[{}]}}", text.trim_end_matches('}'), plugins.join(","))
}

/// The types of a list's plugins, in order.
pub(super) fn kinds(list: &str) -> Vec<String> {
    let list: serde_json::Value = serde_json::from_str(list).unwrap_or_default();
    let plugins = list["plugins"].as_array();
    let kind = |plugin: &serde_json::Value| plugin["type"].as_str().map(str::to_owned);
    plugins.into_iter().flatten().filter_map(kind).collect()
}

/// The plugins of a `.conflist`: the inlined ones, then those of its directory unless
/// `loadOnlyInlinedPlugins` is true.
fn list_plugins(
    fields: &Fields,
    folder: impl FnOnce() -> Result<Vec<(String, Vec<u8>)>, String>,
) -> Result<Vec<Box<RawValue>>, String> {
    let inlined: Option<Vec<Box<RawValue>>> = field(fields, "plugins")?;
    let only_inlined = field(fields, "loadOnlyInlinedPlugins")?.unwrap_or(false);
    if only_inlined && inlined.is_none() {
        return Err("loadOnlyInlinedPlugins without plugins".to_owned());
    }
    let mut plugins = inlined.unwrap_or_default();
    if !only_inlined {
        for (name, bytes) in folder()? {
            plugins.push(raw(&bytes).map_err(|why| format!("{name}: {why}"))?);
        }
    }
    Ok(plugins)
}

/// Checks one plugin's object and collects its declared capabilities.
fn check_plugin(plugin: &RawValue, capabilities: &mut BTreeSet<String>) -> Result<(), String> {
    let fields: Fields = serde_json::from_str(plugin.get()).map_err(|error| error.to_string())?;
    let kind: String = field(&fields, "type")?.ok_or("no type")?;
    if kind.is_empty() || kind == "." || kind == ".." || kind.contains(['/', '\0']) {
        return Err(format!("type {kind:?} is not a file name"));
    }
    // `null` is an empty list, and false, as in Go; that of other fields is an error in libcni, too.
    let declared: Option<BTreeMap<String, Option<bool>>> = field(&fields, "capabilities")?.flatten();
    let declared = declared.unwrap_or_default().into_iter();
    capabilities.extend(declared.filter_map(|(name, wanted)| (wanted == Some(true)).then_some(name)));
    Ok(())
}

/// The newest version of `cniVersion` and `cniVersions` that coracle supports.
fn choose_version(fields: &Fields) -> Result<String, String> {
    let mut offered: Vec<String> = field(fields, "cniVersions")?.unwrap_or_default();
    match field::<String>(fields, "cniVersion")? {
        Some(version) if !version.is_empty() => offered.push(version),
        _ if offered.is_empty() => offered.push(VERSION_DEFAULT.to_owned()),
        _ => {}
    }
    let newest = offered.iter().filter_map(|version| age(version)).max();
    let newest = newest.ok_or_else(|| format!("cniVersion {}: not supported", offered.join(", ")))?;
    Ok(CNI_VERSIONS[newest].to_owned())
}

/// Parses the mandatory name (CNI spec 1.1.0: `[a-zA-Z0-9][a-zA-Z0-9_.-]*`).
fn network_name(fields: &Fields) -> Result<String, String> {
    let name: String = field(fields, "name")?.ok_or("no name")?;
    let letter = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '.' | '-');
    let is_name = name.starts_with(|first: char| first.is_ascii_alphanumeric()) && name.chars().all(letter);
    if !is_name || name.len() > NAME_BYTES_MAX {
        return Err(format!(
            "name {name:?} must be a letter or digit followed by letters, digits, '_', '.' and '-'"
        ));
    }
    Ok(name)
}

/// Parses one field of an object; the error contains the field's name.
fn field<T: DeserializeOwned>(fields: &Fields, key: &str) -> Result<Option<T>, String> {
    let Some(text) = fields.get(key) else { return Ok(None) };
    serde_json::from_str(text.get()).map_err(|error| format!("{key}: {error}"))
}

fn raw(bytes: &[u8]) -> Result<Box<RawValue>, String> {
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

/// Index of a version in the list of supported versions, oldest first; `None` if it is not supported.
fn age(version: &str) -> Option<usize> {
    CNI_VERSIONS.iter().position(|known| *known == version)
}

#[cfg(test)]
mod tests {
    use super::{is_configuration, parse};

    const FOLDER: [(&str, &str); 2] =
        [("1.conf", r#"{"type":"first"}"#), ("2.conf", r#"{ "type" : "second" }"#)];

    fn text(name: &str, bytes: &str, files: &[(&str, &str)]) -> Result<String, String> {
        let files = files.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect();
        parse(name, bytes.as_bytes(), |_| Ok(files)).map(|list| list.text)
    }

    #[test]
    fn valid_files_become_self_contained_lists() {
        let cases = [
            (
                "a.conflist",
                r#"{"cniVersion":"0.3.1","name":"n","disableCheck":true,"plugins":[{"type":"a", "big": 18446744073709551616}]}"#,
                r#"{"cniVersion":"0.3.1","name":"n","plugins":[{"type":"a", "big": 18446744073709551616}]}"#,
            ),
            (
                "a.conf",
                r#"{"cniVersion":"0.2.0","name":"n","type":"a"}"#,
                r#"{"cniVersion":"0.2.0","name":"n","plugins":[{"cniVersion":"0.2.0","name":"n","type":"a"}]}"#,
            ),
            (
                "a.json",
                r#"{"name":"n","type":"a"}"#,
                r#"{"cniVersion":"0.1.0","name":"n","plugins":[{"name":"n","type":"a"}]}"#,
            ),
            (
                "a.conflist",
                r#"{"cniVersion":"0.4.0","cniVersions":["1.0.0","9.9.9","0.3.0"],"name":"n","plugins":[{"type":"a"}]}"#,
                r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"a"}]}"#,
            ),
        ];
        for (name, bytes, expected) in cases {
            assert_eq!(text(name, bytes, &[]).as_deref(), Ok(expected), "{name} {bytes}");
        }
    }

    #[test]
    fn plugins_of_the_directory_follow_the_inlined_ones() {
        let cases = [
            (r#""plugins":[{"type":"in"}]"#, Ok(r#"[{"type":"in"},{"type":"first"},{ "type" : "second" }]"#)),
            (r#""cniVersions":[]"#, Ok(r#"[{"type":"first"},{ "type" : "second" }]"#)),
            (r#""loadOnlyInlinedPlugins":true,"plugins":[{"type":"in"}]"#, Ok(r#"[{"type":"in"}]"#)),
            (r#""loadOnlyInlinedPlugins":true"#, Err("loadOnlyInlinedPlugins without plugins")),
            (r#""loadOnlyInlinedPlugins":true,"plugins":[]"#, Err("no plugins")),
        ];
        for (part, expected) in cases {
            let bytes = format!(r#"{{"cniVersion":"1.1.0","name":"n",{part}}}"#);
            let expected = expected
                .map(|plugins| format!(r#"{{"cniVersion":"1.1.0","name":"n","plugins":{plugins}}}"#))
                .map_err(str::to_owned);
            assert_eq!(text("a.conflist", &bytes, &FOLDER), expected, "{part}");
        }
        let broken =
            text("a.conflist", r#"{"cniVersion":"1.1.0","name":"n"}"#, &[("x.conf", "{")]).unwrap_err();
        assert!(broken.starts_with("x.conf: EOF"), "{broken}");
    }

    #[test]
    fn invalid_files_are_refused_with_the_reason() {
        let cases = [
            ("a.conflist", "", "EOF while parsing a value at line 1 column 0"),
            ("a.conflist", "[]", "invalid type: sequence, expected a map at line 1 column 0"),
            ("a.conflist", r#"{"cniVersion":"1.0.0","plugins":[{"type":"a"}]}"#, "no name"),
            ("a.conflist", r#"{"cniVersion":"1.0.0","name":"n"}"#, "no plugins"),
            (
                "a.conflist",
                r#"{"cniVersion":"2.0.0","name":"n","plugins":[]}"#,
                "cniVersion 2.0.0: not supported",
            ),
            ("a.conflist", r#"{"name":"n","plugins":[{}]}"#, "plugin 0: no type"),
            (
                "a.conflist",
                r#"{"name":"n","plugins":[{"type":"a"},{"type":"../b"}]}"#,
                "plugin 1: type \"../b\" is not a file name",
            ),
            ("a.conf", r#"{"name":"n"}"#, "no type"),
            (
                "a.conf",
                r#"{"name":"n","plugins":[{"type":"a"}]}"#,
                "a list of plugins must be in a file named .conflist",
            ),
            (
                "a.conf",
                r#"{"name":"n","type":7}"#,
                "plugin 0: type: invalid type: integer `7`, expected a string at line 1 column 1",
            ),
        ];
        for (name, bytes, expected) in cases {
            assert_eq!(text(name, bytes, &[]), Err(expected.to_owned()), "{name} {bytes}");
        }
        for name in ["", "-a", "a/b", "..", "a b", "é", &"a".repeat(201)] {
            let bytes = format!(r#"{{"name":"{name}","type":"a"}}"#);
            assert!(text("a.conf", &bytes, &[]).unwrap_err().starts_with("name "), "{name}");
        }
        let many = vec![r#"{"type":"a"}"#; 33].join(",");
        let many = text("a.conflist", &format!(r#"{{"name":"n","plugins":[{many}]}}"#), &[]);
        assert_eq!(many, Err("33 plugins, but at most 32 are allowed".to_owned()));
    }

    #[test]
    fn capabilities_are_those_declared_true() {
        let bytes = br#"{"name":"n","plugins":[{"type":"a","capabilities":{"dns":true,"mac":false,"x":null}},
            {"type":"b","capabilities":{"portMappings":true}},{"type":"c","capabilities":null}]}"#;
        let list = parse("a.conflist", bytes, |_| Ok(Vec::new())).unwrap();
        assert_eq!(list.capabilities.iter().map(String::as_str).collect::<Vec<_>>(), ["dns", "portMappings"]);
        assert!(!list.has_status());
    }

    /// Any input is either refused or becomes a list; parsing that list again does not change it.
    #[test]
    fn damaged_files_are_refused_or_parsed() {
        let whole = br#"{"cniVersion":"0.4.0","cniVersions":["1.0.0"],"name":"n-1","plugins":[{"type":"a","capabilities":{"dns":true},"x":[1,{"y":null}]},{"type":"b"}]}"#;
        let mut random: u64 = 7;
        for round in 0..5000 {
            let mut bytes = whole.to_vec();
            for _ in 0..=round % 3 {
                // xorshift64
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let at = random as usize % bytes.len();
                match random >> 60 {
                    0..=7 => bytes[at] = (random >> 32) as u8,
                    8..=11 => drop(bytes.remove(at)),
                    12..=13 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, b"{}[]\",:"[(random >> 40) as usize % 7]),
                }
            }
            let shown = String::from_utf8_lossy(&bytes).into_owned();
            if let Ok(list) = parse("a.conflist", &bytes, |_| Ok(Vec::new())) {
                let again = parse("a.conflist", list.text.as_bytes(), |_| Ok(Vec::new()));
                assert_eq!(again.as_ref(), Ok(&list), "{shown}");
            }
        }
    }

    #[test]
    fn configuration_files_are_recognised_by_their_suffix() {
        for (name, expected) in
            [("a.conflist", true), ("a.conf", true), ("a.json", true), ("a.conf~", false), ("README", false)]
        {
            assert_eq!(is_configuration(name), expected, "{name}");
        }
    }
}
