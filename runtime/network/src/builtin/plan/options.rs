//! The options of one plugin; parsed options are removed. The module does no I/O.

use std::net::IpAddr;

use serde_json::{Map, Value};

/// The options of one plugin that have not been parsed yet.
pub(super) struct Options(pub(super) Map<String, Value>);

impl Options {
    pub(super) fn of(value: Value) -> Result<Options, String> {
        match value {
            Value::Object(fields) => Ok(Options(fields)),
            _ => Err("not an object".to_owned()),
        }
    }

    /// Removes an option and returns its value; null counts as missing.
    pub(super) fn value(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key).filter(|value| !value.is_null())
    }

    pub(super) fn read<T>(
        &mut self,
        key: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| format!("{key}: {value} is not built in"))
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<bool, String> {
        Ok(self.read(key, Value::as_bool)?.unwrap_or(false))
    }

    pub(super) fn number(&mut self, key: &str, most: u64) -> Result<Option<u64>, String> {
        self.read(key, |value| value.as_u64().filter(|number| *number <= most))
    }

    pub(super) fn text(&mut self, key: &str) -> Result<Option<String>, String> {
        self.read(key, |value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned))
    }

    pub(super) fn address(&mut self, key: &str) -> Result<Option<IpAddr>, String> {
        self.read(key, |value| value.as_str()?.parse().ok())
    }

    pub(super) fn list(&mut self, key: &str) -> Result<Vec<Value>, String> {
        Ok(self.read(key, |value| value.as_array().cloned())?.unwrap_or_default())
    }

    /// Removes options that have no effect while they are empty, zero or false; fails if one has another
    /// value.
    pub(super) fn off(&mut self, keys: &[&str]) -> Result<(), String> {
        for key in keys {
            let is_off = |value: &Value| match value {
                Value::Null | Value::Bool(false) => true,
                Value::Number(number) => number.as_u64() == Some(0),
                Value::String(text) => text.is_empty(),
                Value::Array(items) => items.is_empty(),
                Value::Object(fields) => fields.is_empty(),
                Value::Bool(true) => false,
            };
            self.read(key, |value| is_off(value).then_some(()))?;
        }
        Ok(())
    }

    /// Fails if an option remains, which is then unknown.
    pub(super) fn end(self) -> Result<(), String> {
        self.0.keys().next().map_or(Ok(()), |key| Err(format!("{key} is not built in")))
    }
}
