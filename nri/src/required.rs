//! The plugins that a pod requires: those in the configuration and those in the pod's annotation (NRI 4.7).

use crate::api;
use crate::plugin::Plugin;
use crate::settings::DefaultValidator;

/// Name of the annotation with a pod's own list of required plugins.
pub const ANNOTATION: &str = "required-plugins.noderesource.dev";

/// The plugins that a pod or a container requires.
#[derive(Debug, Default)]
pub(crate) struct Required {
    names: Vec<String>,
    /// Whether an annotation tolerates missing plugins.
    is_tolerated: bool,
    /// Error text of an invalid annotation; `None` if all annotations are valid.
    pub(crate) mistake: Option<String>,
}

impl Required {
    /// The required plugins of a pod, for its own events.
    pub(crate) fn of(settings: &DefaultValidator, pod: &api::PodSandbox) -> Self {
        Self::look(settings, pod, None)
    }

    /// The required plugins of a container of the pod.
    pub(crate) fn of_container(settings: &DefaultValidator, pod: &api::PodSandbox, container: &str) -> Self {
        Self::look(settings, pod, Some(container))
    }

    fn look(settings: &DefaultValidator, pod: &api::PodSandbox, container: Option<&str>) -> Self {
        let mut required = Self { names: settings.required_plugins.clone(), ..Self::default() };
        if let Some(text) = annotation(pod, ANNOTATION, container) {
            match list(text) {
                Ok(names) => required.names.extend(names),
                Err(why) => required.mistake = Some(format!("annotation {ANNOTATION}: {why}")),
            }
        }
        let key = &settings.tolerate_missing_plugins_annotation;
        if let Some(text) = annotation(pod, key, container).filter(|_| !key.is_empty()) {
            match text {
                "1" | "t" | "T" | "true" | "True" | "TRUE" => required.is_tolerated = true,
                "0" | "f" | "F" | "false" | "False" | "FALSE" => {}
                other => {
                    required.mistake = Some(format!("annotation {key}: {other:?} is neither true nor false"))
                }
            }
        }
        required
    }

    /// Whether this plugin is required.
    pub(crate) fn names(&self, plugin: &Plugin) -> bool {
        !self.is_tolerated && self.names.iter().any(|name| plugin.is_called(name))
    }

    /// The required plugins for which `is_there` is false.
    pub(crate) fn missing(&self, is_there: impl Fn(&str) -> bool) -> Vec<&str> {
        match self.is_tolerated {
            true => Vec::new(),
            false => self.names.iter().map(String::as_str).filter(|name| !is_there(name)).collect(),
        }
    }
}

/// The value of an annotation; the most specific key has precedence. `None` if no key is present.
fn annotation<'a>(pod: &'a api::PodSandbox, key: &str, container: Option<&str>) -> Option<&'a str> {
    let of_container = container.and_then(|name| pod.annotations.get(&format!("{key}/container.{name}")));
    let of_pod = || pod.annotations.get(&format!("{key}/pod"));
    of_container.or_else(of_pod).or_else(|| pod.annotations.get(key)).map(String::as_str)
}

/// Parses a list of strings in JSON or YAML: `["a", "b"]`, `[a, b]`, or lines `- a`.
fn list(text: &str) -> Result<Vec<String>, String> {
    let text = text.trim();
    let bad = || format!("{text:?} is not a list of names");
    let items: Vec<&str> = match text.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
        Some(Some(inner)) if inner.trim().is_empty() => Vec::new(),
        Some(Some(inner)) => inner.trim().trim_end_matches(',').split(',').collect(),
        Some(None) => return Err(bad()),
        None => {
            let lines = text.lines().filter(|line| !line.trim().is_empty());
            lines
                .map(|line| line.trim_start().strip_prefix("- ").ok_or_else(bad))
                .collect::<Result<_, _>>()?
        }
    };
    items.into_iter().map(|item| scalar(item.trim()).ok_or_else(bad)).collect()
}

fn scalar(item: &str) -> Option<String> {
    let unquoted = ['"', '\''].into_iter().find_map(|quote| item.strip_prefix(quote)?.strip_suffix(quote));
    let name = unquoted.unwrap_or(item);
    let is_name =
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.+".contains(&byte));
    is_name.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(annotations: &[(&str, &str)]) -> api::PodSandbox {
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        api::PodSandbox { annotations: annotations.collect(), ..api::PodSandbox::default() }
    }

    #[test]
    fn required_plugins_are_lists_of_json_or_yaml() {
        for text in ["[\"a\", '10-b']", "[a, 10-b]", "- a\n- \"10-b\"\n", "[a,10-b,]"] {
            assert_eq!(list(text).unwrap(), ["a", "10-b"], "{text}");
        }
        assert_eq!(list("[]").unwrap(), Vec::<String>::new());
        for text in ["a", "{a: b}", "[a", "[{a: 1}]", "- a\nb", "[a b]"] {
            assert!(list(text).is_err(), "{text}");
        }
    }

    /// Tests rule NRI-C31 of docs/specs/nri.md.
    #[test]
    fn annotations_have_scopes_by_key() {
        let settings = DefaultValidator {
            required_plugins: vec!["always".into()],
            tolerate_missing_plugins_annotation: "tolerate".into(),
            ..DefaultValidator::default()
        };
        let all = pod(&[
            (ANNOTATION, "[all]"),
            ("required-plugins.noderesource.dev/pod", "[pod]"),
            ("required-plugins.noderesource.dev/container.c", "[c]"),
        ]);
        let missing = |required: &Required| required.missing(|_| false).join(" ");
        assert_eq!(missing(&Required::of(&settings, &all)), "always pod");
        assert_eq!(missing(&Required::of_container(&settings, &all, "c")), "always c");
        assert_eq!(missing(&Required::of_container(&settings, &all, "d")), "always pod");
        assert_eq!(missing(&Required::of(&settings, &pod(&[(ANNOTATION, "[all]")]))), "always all");
        let tolerated = pod(&[("tolerate", "True"), (ANNOTATION, "[x]")]);
        assert_eq!(missing(&Required::of(&settings, &tolerated)), "");
        assert_eq!(missing(&Required::of(&settings, &pod(&[("tolerate", "0")]))), "always");
        for wrong in [pod(&[("tolerate", "maybe")]), pod(&[(ANNOTATION, "x: y")])] {
            assert!(Required::of(&settings, &wrong).mistake.is_some());
        }
    }
}
