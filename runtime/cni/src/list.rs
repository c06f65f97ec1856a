//! Parses a network configuration list of the daemon, and creates the JSON that each plugin reads on standard
//! input. Pure. Unknown parts of a plugin's object are passed on byte for byte: values stay text, so that
//! numbers keep all digits. Rules: CNI spec 1.1.0, "Deriving execution configuration from plugin
//! configuration".

use std::collections::BTreeMap;

use coracle_job::{Attachment, CNI_VERSIONS, PortMapping};
use coracle_sandbox::collect::ordered;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

/// A JSON object with unparsed values.
type Fields = BTreeMap<String, Box<RawValue>>;

/// A parsed network configuration list.
#[derive(Debug)]
pub(super) struct List {
    /// Name of the network.
    pub(super) name: String,
    /// The list's `cniVersion`, one of [`CNI_VERSIONS`].
    pub(super) version: String,
    /// The plugins in the order of ADD; at least one.
    pub(super) plugins: Vec<Plugin>,
}

/// The configuration object of one plugin.
#[derive(Debug)]
pub(super) struct Plugin {
    /// `type`: the file name of the program, without `/`.
    pub(super) kind: String,
    /// Capabilities that are declared `true`.
    capabilities: Vec<String>,
    /// The configuration object without the member `capabilities`.
    fields: Fields,
}

#[derive(Deserialize)]
struct ListText {
    #[serde(rename = "cniVersion")]
    version: String,
    name: String,
    plugins: Vec<Fields>,
}

impl List {
    /// Parses the list of a job; the error is a description of the invalid part.
    pub(super) fn parse(text: &str) -> Result<List, String> {
        let read: ListText =
            serde_json::from_str(text).map_err(|error| format!("network configuration list: {error}"))?;
        let wrong = |why: String| format!("network {:?}: {why}", read.name);
        if !CNI_VERSIONS.contains(&read.version.as_str()) {
            return Err(wrong(format!("unknown cniVersion {:?}", read.version)));
        }
        if read.plugins.is_empty() {
            return Err(wrong("no plugins".to_owned()));
        }
        let plugins = read.plugins.into_iter().map(Plugin::from_fields).collect::<Result<_, _>>();
        let plugins = plugins.map_err(wrong)?;
        Ok(List { name: read.name, version: read.version, plugins })
    }

    /// Whether the list's version is `version` or later.
    pub(super) fn is_since(&self, version: &str) -> bool {
        age(&self.version) >= age(version)
    }
}

/// Serialises `value` as JSON text.
fn raw(value: &impl Serialize) -> Result<Box<RawValue>, String> {
    to_raw_value(value).map_err(|error| format!("plugin's input: {error}"))
}

/// Index of a version in the list of supported versions, oldest first; `None` if it is not supported.
pub(super) fn age(version: &str) -> Option<usize> {
    CNI_VERSIONS.iter().position(|known| *known == version)
}

impl Plugin {
    fn from_fields(mut fields: Fields) -> Result<Plugin, String> {
        let kind: String = fields
            .get("type")
            .and_then(|text| serde_json::from_str(text.get()).ok())
            .ok_or("a plugin without a type")?;
        if kind.is_empty() || kind == "." || kind == ".." || kind.contains(['/', '\0']) {
            return Err(format!("plugin type {kind:?} is not a file name"));
        }
        // As in Go, `null` is an empty list, and false.
        let declared: Option<BTreeMap<String, Option<bool>>> = match fields.remove("capabilities") {
            None => None,
            Some(text) => serde_json::from_str(text.get())
                .map_err(|error| format!("plugin type {kind:?}: capabilities: {error}"))?,
        };
        let declared = declared.unwrap_or_default().into_iter();
        let capabilities =
            declared.filter_map(|(name, wanted)| (wanted == Some(true)).then_some(name)).collect();
        Ok(Plugin { kind, capabilities, fields })
    }

    /// Creates the plugin's standard input: its object with `name` and `cniVersion` of the list, `prevResult`
    /// if there is one, and `runtimeConfig` with the capability arguments of `attachment` that the plugin
    /// declares.
    pub(super) fn input(
        &self,
        list: &List,
        previous: Option<&str>,
        attachment: Option<&Attachment>,
    ) -> Result<Vec<u8>, String> {
        let mut fields: BTreeMap<&str, Box<RawValue>> =
            ordered(self.fields.iter().map(|(key, value)| (key.as_str(), value.clone())));
        fields.insert("name", raw(&list.name)?);
        fields.insert("cniVersion", raw(&list.version)?);
        if let Some(previous) = previous {
            let previous = RawValue::from_string(previous.to_owned())
                .map_err(|error| format!("result of the preceding plugin: {error}"))?;
            fields.insert("prevResult", previous);
        }
        if let Some(attachment) = attachment {
            let arguments = self.arguments(attachment)?;
            if !arguments.is_empty() {
                fields.insert("runtimeConfig", raw(&arguments)?);
            }
        }
        serde_json::to_vec(&fields).map_err(|error| format!("plugin's input: {error}"))
    }

    /// The capability arguments of the pod that this plugin declares.
    fn arguments(&self, attachment: &Attachment) -> Result<Fields, String> {
        let mut arguments = Fields::new();
        for name in &self.capabilities {
            if name == "portMappings" && !attachment.port_mappings.is_empty() {
                let ports: Vec<_> = attachment.port_mappings.iter().map(PortArgument::from).collect();
                arguments.insert(name.clone(), raw(&ports)?);
            } else if let Some((_, text)) = attachment.capabilities.iter().find(|(known, _)| known == name) {
                let value = RawValue::from_string(text.clone())
                    .map_err(|error| format!("capability {name:?}: {error}"))?;
                arguments.insert(name.clone(), value);
            }
        }
        Ok(arguments)
    }
}

/// An element of `portMappings` (CNI conventions, "Dynamic plugin specific fields").
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PortArgument<'a> {
    host_port: u16,
    container_port: u16,
    protocol: &'a str,
    #[serde(rename = "hostIP", skip_serializing_if = "str::is_empty")]
    host_ip: &'a str,
}

impl<'a> From<&'a PortMapping> for PortArgument<'a> {
    fn from(port: &'a PortMapping) -> PortArgument<'a> {
        PortArgument {
            host_port: port.host_port,
            container_port: port.container_port,
            protocol: &port.protocol,
            host_ip: &port.host_ip,
        }
    }
}

#[cfg(test)]
mod tests;
