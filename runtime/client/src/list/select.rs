//! Filters of the lists, and the names of states. All filters must match. The module does no I/O.

use std::collections::BTreeMap;

use super::options::Options;
use coracle_control::{Container, Pod, Stats};

/// The state of a pod sandbox as crictl prints it. Sandboxes that are being created or removed have no state
/// in the CRI.
pub(super) fn pod_state(pod: &Pod) -> &'static str {
    match pod.state.as_str() {
        "ready" => "Ready",
        "being created" => "Creating",
        "being removed" => "Removing",
        _ => "NotReady",
    }
}

/// The state of a container as crictl prints it.
pub(super) fn container_state(container: &Container) -> &'static str {
    match container.state.as_str() {
        "running" => "Running",
        "exited" => "Exited",
        "created" => "Created",
        "being created" => "Creating",
        _ => "Unknown",
    }
}

/// Whether the list contains this pod sandbox. Sandboxes that are being created, which the kubelet does not
/// see, are in the list only with `-a`.
pub(super) fn pod(pod: &Pod, options: &Options) -> bool {
    let state = pod_state(pod);
    (options.is_all || state != "Creating")
        && pod.id.starts_with(&options.id)
        && is_part(&pod.name, &options.name)
        && is_part(&pod.namespace, &options.namespace)
        && options.state.is_none_or(|wanted| wanted == state)
        && has_labels(&pod.labels, options)
}

/// Whether the list contains this container; without a filter for the state, only running containers.
pub(super) fn container(container: &Container, pods: &[Pod], options: &Options) -> bool {
    let state = container_state(container);
    let is_in_state = match options.state {
        Some(wanted) => state == wanted,
        None => options.is_all || state == "Running",
    };
    is_in_state
        && container.id.starts_with(&options.id)
        && is_part(&container.name, &options.name)
        && is_part(&container.namespace, &options.namespace)
        && is_of_pod(&container.pod_id, pods, options)
        && is_of_image(container, options)
        && has_labels(&container.labels, options)
}

/// Whether the list contains these statistics.
pub(super) fn stats(stats: &Stats, pods: &[Pod], options: &Options) -> bool {
    stats.id.starts_with(&options.id)
        && is_part(&stats.name, &options.name)
        && is_part(&stats.namespace, &options.namespace)
        && is_of_pod(&stats.pod_id, pods, options)
        && has_labels(&stats.labels, options)
}

/// Whether one of an image's names contains the text of the filter, or its ID begins with it.
pub(super) fn image(id: &str, tags: &[String], digests: &[String], options: &Options) -> bool {
    let wanted = options.image.as_str();
    wanted.is_empty()
        || id
            .strip_prefix("sha256:")
            .unwrap_or(id)
            .starts_with(wanted.strip_prefix("sha256:").unwrap_or(wanted))
        || tags.iter().chain(digests).any(|name| name.contains(wanted))
}

fn is_of_image(container: &Container, options: &Options) -> bool {
    let names = [container.image.clone(), container.image_name.clone()];
    image(&container.image_id, &names, &[], options)
}

/// Whether this is the ID of a pod that the filter selects: by a prefix of its ID, its name, or namespace and
/// name.
fn is_of_pod(pod_id: &str, pods: &[Pod], options: &Options) -> bool {
    let wanted = options.pod.as_str();
    if wanted.is_empty() || pod_id.starts_with(wanted) {
        return true;
    }
    let pod = pods.iter().find(|pod| pod.id == pod_id);
    pod.is_some_and(|pod| match wanted.split_once('/') {
        Some((namespace, name)) => pod.namespace == namespace && pod.name == name,
        None => pod.name == wanted,
    })
}

/// Whether the text contains `part`. `^` means the start of the text and `$` its end, as in the regular
/// expressions of crictl; names in Kubernetes contain neither.
fn is_part(text: &str, part: &str) -> bool {
    let (start, end) = (part.strip_prefix('^'), part.strip_suffix('$'));
    match (start, end) {
        (Some(_), Some(_)) => part.strip_prefix('^').and_then(|part| part.strip_suffix('$')) == Some(text),
        (Some(start), None) => text.starts_with(start),
        (None, Some(end)) => text.ends_with(end),
        (None, None) => text.contains(part),
    }
}

fn has_labels(labels: &BTreeMap<String, String>, options: &Options) -> bool {
    options.labels.iter().all(|(name, value)| labels.get(name) == Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_names_match_as_simple_expressions_do() {
        for (text, part, expected) in [
            ("web-1", "", true),
            ("web-1", "eb", true),
            ("web-1", "^web", true),
            ("web-1", "^eb", false),
            ("web-1", "1$", true),
            ("web-1", "web$", false),
            ("web-1", "^web-1$", true),
            ("web-1", "^web-$", false),
            ("", "^$", true),
            ("web", "^", true),
            ("web", "$", true),
        ] {
            assert_eq!(is_part(text, part), expected, "{text} {part}");
        }
    }

    #[test]
    fn all_filters_must_match() {
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        let running = Container {
            id: "aa11".into(),
            pod_id: "bb22".into(),
            name: "app".into(),
            namespace: "default".into(),
            state: "running".into(),
            image: "localhost/x:1".into(),
            image_id: "sha256:cc33".into(),
            labels,
            ..Container::default()
        };
        let own =
            Pod { id: "bb22".into(), name: "web".into(), namespace: "default".into(), ..Pod::default() };
        let is_listed = |change: &dyn Fn(&mut Options)| {
            let mut options = Options::default();
            change(&mut options);
            container(&running, std::slice::from_ref(&own), &options)
        };
        for wanted in ["bb", "web", "default/web", ""] {
            assert!(is_listed(&|options| options.pod = wanted.into()), "{wanted}");
        }
        for wanted in ["eb", "other/web", "default/", "b2"] {
            assert!(!is_listed(&|options| options.pod = wanted.into()), "{wanted}");
        }
        for wanted in ["cc3", "sha256:cc33", "localhost", "x:1"] {
            assert!(is_listed(&|options| options.image = wanted.into()), "{wanted}");
        }
        assert!(!is_listed(&|options| options.image = "y".into()));
        assert!(!is_listed(&|options| options.state = Some("Exited")));
        assert!(!is_listed(&|options| options.labels = vec![("app".into(), "db".into())]));
        assert!(!is_listed(&|options| {
            options.name = "app".into();
            options.namespace = "kube".into();
        }));
        let exited = Container { state: "exited".into(), ..running };
        assert!(!container(&exited, &[], &Options::default()));
        assert!(container(&exited, &[], &Options { is_all: true, ..Options::default() }));
        let making = Pod { state: "being created".into(), ..own };
        assert!(!pod(&making, &Options::default()));
        assert!(pod(&making, &Options { is_all: true, ..Options::default() }));
    }
}
