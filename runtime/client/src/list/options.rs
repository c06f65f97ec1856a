//! Parser of the options of lists. The module does no I/O.

use std::time::Duration;

use crate::Typed;
use crate::duration;

/// The format in which a list is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Form {
    #[default]
    Table,
    /// A table with more columns.
    Wide,
    /// IDs, one per line.
    Ids,
    Json,
    Yaml,
}

/// Filters and output format of a list.
#[derive(Debug, Default)]
pub(super) struct Options {
    pub(super) form: Form,
    /// Whether complete IDs are printed.
    pub(super) is_complete: bool,
    /// Whether the list contains containers in any state, and pods that are being created or removed.
    pub(super) is_all: bool,
    /// Filter: prefix of the ID; empty: all.
    pub(super) id: String,
    /// Filter: part of the name; empty: all.
    pub(super) name: String,
    /// Filter: part of the namespace; empty: all.
    pub(super) namespace: String,
    /// Filter: ID or name of a pod; empty: all.
    pub(super) pod: String,
    /// Filter: part of the image's name, or prefix of its ID; empty: all.
    pub(super) image: String,
    /// Filter: the state as it is printed; `None`: all.
    pub(super) state: Option<&'static str>,
    pub(super) labels: Vec<(String, String)>,
    /// Maximum number of lines, which are the newest objects; `None`: no limit.
    pub(super) last: Option<usize>,
    /// Time between two readings of the statistics.
    pub(super) sample: Duration,
}

impl Options {
    /// Parses the options of a command.
    ///
    /// # Errors
    /// A description of the invalid argument.
    pub(super) fn parse(command: &Typed) -> Result<Options, String> {
        let name = command.name;
        let is_set = |flag: &str| command.flags.contains(&flag);
        let text = |option: &str| command.value(option).unwrap_or_default().to_owned();
        let mut image = text("--image");
        match command.arguments.as_slice() {
            [] => {}
            [wanted] if name == "images" => image.clone_from(wanted),
            [.., word] => return Err(format!("{name}: {word}: nothing more is expected here")),
        }
        let form = match command.value("--output") {
            _ if is_set("--quiet") => Form::Ids,
            None | Some("table") => Form::Table,
            Some("wide") => Form::Wide,
            Some("json") => Form::Json,
            Some("yaml") => Form::Yaml,
            Some(other) => return Err(format!("--output {other}: table, wide, json or yaml")),
        };
        let last = match command.value("--last") {
            _ if is_set("--latest") => Some(1),
            None => None,
            Some(count) => Some(count.parse().map_err(|_| format!("--last {count}: a number is expected"))?),
        };
        let sample = match command.value("--seconds") {
            None => Duration::from_secs(1),
            Some(text) => duration(text).ok_or_else(|| format!("--seconds {text}: seconds are expected"))?,
        };
        Ok(Options {
            form,
            is_complete: is_set("--no-trunc"),
            // As in crictl, the newest ones are those of all states.
            is_all: is_set("--all") || last.is_some(),
            id: text("--id"),
            name: text("--name"),
            namespace: text("--namespace"),
            pod: text("--pod"),
            image,
            state: command.value("--state").map(|wanted| state(name, wanted)).transpose()?,
            labels: command.all("--label").map(label).collect::<Result<_, _>>()?,
            // crictl's 0 is no limit.
            last: last.filter(|count| *count > 0),
            sample,
        })
    }

    /// Limits a list, which is sorted with the newest objects first, to the requested number.
    pub(super) fn cut<T>(&self, list: &mut Vec<T>) {
        list.truncate(self.last.unwrap_or(usize::MAX));
    }
}

fn label(text: &str) -> Result<(String, String), String> {
    let (name, value) =
        text.split_once('=').ok_or_else(|| format!("--label {text}: NAME=VALUE is expected"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Converts a state in a filter, in upper or lower case, to the state as it is printed.
fn state(command: &str, wanted: &str) -> Result<&'static str, String> {
    let known: &[&str] = match command {
        "pods" => &["Ready", "NotReady"],
        _ => &["Created", "Running", "Exited", "Unknown"],
    };
    let found = known.iter().find(|state| state.eq_ignore_ascii_case(wanted));
    found.copied().ok_or_else(|| format!("--state {wanted}: {}", known.join(", ").to_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::{Form, Options};
    use crate::Typed;
    use std::time::Duration;

    fn typed(name: &'static str, values: &[(&'static str, &str)], flags: &[&'static str]) -> Typed {
        let values = values.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        Typed { name, values, flags: flags.to_vec(), ..Typed::default() }
    }

    #[test]
    fn arguments_become_options() {
        let values = [("--label", "a=1"), ("--label", "b=x=y"), ("--state", "exited"), ("--output", "wide")];
        let options = Options::parse(&typed("ps", &values, &["--no-trunc"])).unwrap();
        assert_eq!((options.form, options.state, options.is_all), (Form::Wide, Some("Exited"), false));
        assert_eq!(options.labels, [("a".into(), "1".into()), ("b".into(), "x=y".into())]);
        let options =
            Options::parse(&typed("ps", &[("--output", "json")], &["--quiet", "--latest"])).unwrap();
        assert_eq!((options.form, options.last, options.is_all), (Form::Ids, Some(1), true));
        let options = Options::parse(&typed("pods", &[("--last", "0")], &[])).unwrap();
        assert_eq!(options.last, None);
        let options = Options::parse(&typed("stats", &[("--seconds", "2")], &[])).unwrap();
        assert_eq!(options.sample, Duration::from_secs(2));
    }

    #[test]
    fn errors_name_the_wrong_option() {
        for (name, option, value) in [
            ("ps", "--label", "a"),
            ("ps", "--state", "ready"),
            ("pods", "--state", "running"),
            ("pods", "--output", "xml"),
            ("pods", "--last", "-1"),
            ("stats", "--seconds", "soon"),
        ] {
            let error = Options::parse(&typed(name, &[(option, value)], &[])).unwrap_err();
            assert!(error.starts_with(&format!("{option} {value}: ")), "{error}");
        }
        let extra = Typed { name: "ps", arguments: vec!["x".into()], ..Typed::default() };
        assert!(Options::parse(&extra).unwrap_err().starts_with("ps: x: nothing more"));
    }
}
