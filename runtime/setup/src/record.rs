//! The record of what `enable` does to a node, which `disable` needs to restore it: the files and directories that it creates, and
//! the lines that it replaces in files of others. The record is written before the first change, and removed last.

use serde_json::{Value, json};

/// Directory of the records.
const DIRECTORY: &str = "/etc/coracle/setup";

/// A line of a file that is replaced, or added at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edit {
    /// Path of the file.
    pub(crate) path: String,
    /// The line before, without its end; `None` if the line is added.
    pub(crate) before: Option<String>,
    /// The line after the edit, without its line break.
    pub(crate) after: String,
}

/// The record of one program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    /// Paths of the files that coracle writes.
    pub(crate) files: Vec<String>,
    /// Paths of the directories that did not exist before.
    pub(crate) directories: Vec<String>,
    /// The edits in the order in which they were made.
    pub(crate) edits: Vec<Edit>,
}

/// The path of a program's record.
pub(crate) fn path(program: &str) -> String {
    format!("{DIRECTORY}/{program}.json")
}

impl Record {
    /// Parses a record.
    ///
    /// # Errors
    /// The text has another form.
    pub(crate) fn parse(text: &str) -> Result<Record, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let list = |name: &str| value[name].as_array().cloned().ok_or(format!("{name} is not a list"));
        let strings = |name: &str| -> Result<Vec<String>, String> {
            let path = |value: &Value| value.as_str().filter(|path| is_plain(path)).map(str::to_owned);
            list(name)?
                .iter()
                .map(|value| path(value).ok_or(format!("{name}: not an absolute path")))
                .collect()
        };
        let line = |value: &Value| value.as_str().filter(|line| !line.contains('\n')).map(str::to_owned);
        let mut edits = Vec::new();
        for value in list("edits")? {
            let path = value["path"].as_str().filter(|path| is_plain(path)).map(str::to_owned);
            let before = match &value["before"] {
                Value::Null => Some(None),
                before => line(before).map(Some),
            };
            match (path, before, line(&value["after"])) {
                (Some(path), Some(before), Some(after)) => edits.push(Edit { path, before, after }),
                _ => return Err("edits: not a path and two lines".to_owned()),
            }
        }
        Ok(Record { files: strings("files")?, directories: strings("directories")?, edits })
    }

    /// Formats the record for [`Record::parse`].
    pub(crate) fn text(&self) -> String {
        let edit = |edit: &Edit| json!({ "path": edit.path, "before": edit.before, "after": edit.after });
        let edits: Vec<Value> = self.edits.iter().map(edit).collect();
        let value = json!({ "files": self.files, "directories": self.directories, "edits": edits });
        format!("{value:#}\n")
    }
}

/// Whether a path is absolute, and has neither parts with two dots nor a line feed.
fn is_plain(path: &str) -> bool {
    path.starts_with('/') && !path.contains('\n') && path.split('/').all(|part| part != "..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let edit = Edit { path: "/a".into(), before: Some("x \"y\"".into()), after: "z".into() };
        let added = Edit { path: "/b".into(), before: None, after: "é".into() };
        let record =
            Record { files: vec!["/c/d".into()], directories: vec!["/c".into()], edits: vec![edit, added] };
        assert_eq!(Record::parse(&record.text()), Ok(record));
        assert_eq!(Record::parse(&Record::default().text()), Ok(Record::default()));
    }

    #[test]
    fn malformed_records_are_refused() {
        for text in [
            "",
            "[]",
            "{}",
            r#"{"files": ["a"], "directories": [], "edits": []}"#,
            r#"{"files": ["/a/../../b"], "directories": [], "edits": []}"#,
            r#"{"files": [], "directories": [1], "edits": []}"#,
            r#"{"files": [], "directories": [], "edits": [{"path": "/a", "before": 1, "after": "b"}]}"#,
            r#"{"files": [], "directories": [], "edits": [{"path": "/a", "before": null, "after": "b\nc"}]}"#,
        ] {
            assert!(Record::parse(text).is_err(), "{text}");
        }
    }
}
