//! Finds the events of a name: a pod or a container by its name or a prefix of its ID, an image by its name.
//! The module does no I/O.

use std::collections::BTreeSet;

use coracle_base::collect::ordered;

use super::live::Live;
use super::story::Event;

/// Number of digits of an ID in log messages.
const ID_DIGITS: usize = 13;

/// Minimum number of digits of a prefix of an ID; a shorter text is a name.
const PREFIX_DIGITS_MIN: usize = 3;

/// The kind of object that a report describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Pod,
    Container,
    Image,
}

/// The events of one pod, container or image.
#[derive(Debug)]
pub(crate) struct Selection<'a> {
    pub(crate) kind: Kind,
    /// Name of the object: `namespace/name`, `namespace/pod/container`, or an image reference.
    pub(crate) title: String,
    /// IDs of the pod's sandboxes; a pod that was created again has several.
    pub(crate) pod_ids: BTreeSet<String>,
    /// Name of the container; empty if the report is not about a container.
    pub(crate) container: String,
    /// The events, oldest first.
    pub(crate) events: Vec<&'a Event>,
}

/// Selects the events of the object `wanted`.
///
/// # Errors
/// There are no events of this name, or the name is ambiguous.
pub(crate) fn select<'a>(events: &'a [Event], live: &Live, wanted: &str) -> Result<Selection<'a>, String> {
    if let Some(found) = pod(events, live, wanted)? {
        return Ok(found);
    }
    if let Some(found) = container(events, live, wanted)? {
        return Ok(found);
    }
    if let Some(found) = image(events, wanted) {
        return Ok(found);
    }
    let known = match live.silence.as_str() {
        "" => "the daemon has been asked for nothing of this name: if it is a pod, `kubectl describe` says what the kubelet waits \
               for, and `coracle check` whether this node can run it"
            .to_owned(),
        silence => format!("the daemon does not answer: {silence}"),
    };
    Err(format!("{wanted}: neither a pod nor a container nor an image of the last hour; {known}"))
}

/// Whether `id`, complete or shortened as in log messages, begins with `wanted`.
fn begins(id: &str, wanted: &str) -> bool {
    let is_hex = wanted.len() >= PREFIX_DIGITS_MIN && wanted.bytes().all(|byte| byte.is_ascii_hexdigit());
    let length = wanted.len().min(id.len());
    is_hex && length >= PREFIX_DIGITS_MIN && id.get(..length) == wanted.get(..length)
}

/// Whether `name`, which contains slashes, equals `wanted` or ends with it after a slash.
fn is_called(name: &str, wanted: &str) -> bool {
    name == wanted || name.strip_suffix(wanted).is_some_and(|before| before.ends_with('/'))
}

/// The only element of `names`; `None` if it is empty. Fails if there are several.
fn only(names: BTreeSet<String>, what: &str, wanted: &str) -> Result<Option<String>, String> {
    if names.len() > 1 {
        let names: Vec<_> = names.into_iter().collect();
        return Err(format!("{wanted}: several {what} are called so: {}", names.join(", ")));
    }
    Ok(names.into_iter().next())
}

fn short(id: &str) -> &str {
    id.get(..ID_DIGITS).unwrap_or(id)
}

/// The names of the pod sandbox with this ID.
fn names_of(events: &[Event], live: &Live, id: &str) -> BTreeSet<String> {
    let live =
        live.pods.iter().filter(|pod| pod.id == id).map(|pod| format!("{}/{}", pod.namespace, pod.name));
    let told = events.iter().filter(|event| event.pod_id == id).map(|event| event.field("name").to_owned());
    ordered(live.chain(told).filter(|name| !name.is_empty()))
}

fn pod<'a>(events: &'a [Event], live: &Live, wanted: &str) -> Result<Option<Selection<'a>>, String> {
    let live_ids = live.pods.iter().map(|pod| pod.id.clone());
    let all: BTreeSet<String> =
        ordered(events.iter().map(|event| event.pod_id.clone()).filter(|id| !id.is_empty()).chain(live_ids));
    let by_id: BTreeSet<String> = ordered(all.iter().filter(|id| begins(id, wanted)).cloned());
    let title = match only(by_id, "pod sandboxes", wanted)? {
        Some(id) => {
            let title =
                names_of(events, live, &id).into_iter().next().unwrap_or_else(|| short(&id).to_owned());
            return Ok(Some(about_pods(events, title, ordered([id]), false)));
        }
        None => {
            let told = events
                .iter()
                .filter(|event| !event.pod_id.is_empty() || is_about_pod(event))
                .map(|event| event.field("name").to_owned());
            let live = live.pods.iter().map(|pod| format!("{}/{}", pod.namespace, pod.name));
            let names =
                ordered(told.chain(live).filter(|name| name.contains('/') && is_called(name, wanted)));
            only(names, "pods", wanted)?
        }
    };
    Ok(title.map(|title| {
        let ids = ordered(all.into_iter().filter(|id| names_of(events, live, id).contains(&title)));
        about_pods(events, title, ids, true)
    }))
}

/// Whether the field `name` of an event is that of a pod and not of an image.
fn is_about_pod(event: &Event) -> bool {
    !event.field("call").is_empty() || !event.field("container").is_empty()
}

fn about_pods<'a>(
    events: &'a [Event],
    title: String,
    pod_ids: BTreeSet<String>,
    by_name: bool,
) -> Selection<'a> {
    let is_about = |event: &&Event| {
        let names_it = pod_ids.iter().any(|id| event.fields.values().any(|value| value.contains(short(id))));
        let is_named = by_name && is_about_pod(event) && event.field("name") == title;
        pod_ids.contains(&event.pod_id) || names_it || is_named
    };
    let events = events.iter().filter(is_about).collect();
    Selection { kind: Kind::Pod, title, pod_ids, container: String::new(), events }
}

/// The path `namespace/pod/container` of an event, without the parts that the event does not have.
fn path_of(event: &Event) -> String {
    match (event.field("name"), event.field("container")) {
        (_, "") => String::new(),
        (name, container) => format!("{name}/{container}"),
    }
}

fn container<'a>(events: &'a [Event], live: &Live, wanted: &str) -> Result<Option<Selection<'a>>, String> {
    let live = live.containers.iter().map(|one| {
        (one.id.clone(), one.pod_id.clone(), format!("{}/{}/{}", one.namespace, one.pod_name, one.name))
    });
    let told = events.iter().filter(|event| !event.field("container").is_empty());
    let told = told.map(|event| (event.field("ctr").to_owned(), event.pod_id.clone(), path_of(event)));
    let known: Vec<(String, String, String)> = told.chain(live).collect();
    let by_id: BTreeSet<String> =
        ordered(known.iter().filter(|(id, ..)| begins(id, wanted)).map(|(id, ..)| short(id).to_owned()));
    let by_id = only(by_id, "containers", wanted)?;
    let is_wanted = |(id, _, path): &&(String, String, String)| match &by_id {
        Some(found) => short(id) == found,
        None => is_called(path, wanted),
    };
    let names: BTreeSet<String> = ordered(known.iter().filter(is_wanted).map(|(.., path)| path.clone()));
    let Some(title) = only(names, "containers", wanted)? else { return Ok(None) };
    let name = title.rsplit('/').next().unwrap_or_default().to_owned();
    let is_own = |(id, pod, path): &&(String, String, String)| {
        !pod.is_empty() && *path == title && by_id.as_ref().is_none_or(|found| short(id) == found)
    };
    let pod_ids: BTreeSet<String> = ordered(known.iter().filter(is_own).map(|(_, pod, _)| pod.clone()));
    let ids: BTreeSet<String> =
        ordered(known.iter().filter(|(.., path)| *path == title).map(|(id, ..)| short(id).to_owned()));
    let is_about = |event: &&Event| match (event.field("container"), event.field("ctr")) {
        // What happens to the pod happens to its containers.
        ("", "") => pod_ids.contains(&event.pod_id),
        ("", id) => ids.contains(short(id)),
        (_, id) => {
            path_of(event) == title
                && by_id.as_deref().is_none_or(|found| id.is_empty() || short(id) == found)
        }
    };
    let events = events.iter().filter(is_about).collect();
    Ok(Some(Selection { kind: Kind::Container, title, pod_ids, container: name, events }))
}

/// Whether a reference in an event is the wanted one: `nginx` matches `docker.io/library/nginx:1.27`.
fn is_image(reference: &str, wanted: &str) -> bool {
    if reference.is_empty() || wanted.is_empty() {
        return false;
    }
    let without_version = |name: &str| {
        let name = name.split('@').next().unwrap_or_default();
        let path_begins = name.rfind('/').map_or(0, |slash| slash + 1);
        match name[path_begins..].find(':') {
            Some(colon) => name[..path_begins + colon].to_owned(),
            None => name.to_owned(),
        }
    };
    let bare = without_version(reference);
    is_called(reference, wanted)
        || is_called(&bare, wanted)
        || (without_version(wanted) == wanted && is_called(&bare, wanted))
        || wanted.strip_suffix(":latest").is_some_and(|wanted| is_called(reference, wanted))
        || (wanted.len() > PREFIX_DIGITS_MIN
            && reference
                .strip_prefix("sha256:")
                .is_some_and(|id| begins(id, wanted.trim_start_matches("sha256:"))))
}

fn image<'a>(events: &'a [Event], wanted: &str) -> Option<Selection<'a>> {
    let is_about = |event: &&Event| {
        is_image(event.field("image"), wanted)
            || (event.message.starts_with("image") && is_image(event.field("name"), wanted))
            || (event.message.contains("image") && event.error().contains(wanted) && wanted.contains('/'))
    };
    let events: Vec<&Event> = events.iter().filter(is_about).collect();
    let last = events.last()?;
    let title = match (last.field("image"), last.field("name")) {
        (image, _) if is_image(image, wanted) && !image.starts_with("sha256:") => image,
        (_, name) if last.message.starts_with("image") && !name.is_empty() => name,
        _ => wanted,
    };
    let title = title.to_owned();
    let none = BTreeSet::new();
    Some(Selection { kind: Kind::Image, title, pod_ids: none, container: String::new(), events })
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaa456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const B: &str = "bbbb456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn event(pod_id: &str, message: &str, fields: &[(&str, &str)]) -> Event {
        let fields = fields.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Event {
            pod_id: pod_id.into(),
            time: "t".into(),
            level: "info".into(),
            message: message.into(),
            fields,
        }
    }

    fn events() -> Vec<Event> {
        vec![
            event(A, "ready", &[("name", "default/web")]),
            event(
                A,
                "created",
                &[
                    ("name", "default/web"),
                    ("container", "app"),
                    ("ctr", "c111456789abc"),
                    ("image", "reg.example/x/app:1"),
                ],
            ),
            event(
                A,
                "created",
                &[("name", "default/web"), ("container", "db"), ("ctr", "c222456789abc"), ("image", "db:2")],
            ),
            event(A, "kill", &[("ctr", "c111456789abc")]),
            event(B, "ready", &[("name", "other/web")]),
            event(B, "created", &[("name", "other/web"), ("container", "app"), ("ctr", "c333456789abc")]),
            event(
                "",
                "call failed",
                &[("call", "pull_image"), ("name", "default/web"), ("image", "reg.example/x/app:2")],
            ),
            event(
                "",
                "image pulled",
                &[("image", "sha256:abcdef0123"), ("name", "docker.io/library/nginx:1.27")],
            ),
            event(
                "",
                "quarantine",
                &[("path", "/q/aaaa456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")],
            ),
        ]
    }

    fn found(wanted: &str) -> Result<(Kind, String, usize), String> {
        let events = events();
        select(&events, &Live::default(), wanted).map(|found| (found.kind, found.title, found.events.len()))
    }

    #[test]
    fn names_and_ids_find_their_lines() {
        for (wanted, kind, title, lines) in [
            ("default/web", Kind::Pod, "default/web", 6),
            ("aaaa", Kind::Pod, "default/web", 5),
            (A, Kind::Pod, "default/web", 5),
            ("other/web", Kind::Pod, "other/web", 2),
            ("default/web/app", Kind::Container, "default/web/app", 3),
            ("c111", Kind::Container, "default/web/app", 3),
            ("c111456789abcdef0123456789abcdef", Kind::Container, "default/web/app", 3),
            ("db", Kind::Container, "default/web/db", 2),
            ("nginx", Kind::Image, "docker.io/library/nginx:1.27", 1),
            ("nginx:1.27", Kind::Image, "docker.io/library/nginx:1.27", 1),
            ("reg.example/x/app:2", Kind::Image, "reg.example/x/app:2", 1),
            ("reg.example/x/app", Kind::Image, "reg.example/x/app:2", 2),
            ("sha256:abcdef", Kind::Image, "docker.io/library/nginx:1.27", 1),
        ] {
            assert_eq!(found(wanted), Ok((kind, title.to_owned(), lines)), "{wanted}");
        }
    }

    #[test]
    fn ambiguous_and_unknown_names_are_errors() {
        for (wanted, expected) in [
            ("web", "several pods are called so: default/web, other/web"),
            ("app", "several containers are called so: default/web/app, other/web/app"),
            ("aa", "neither a pod"),
            ("nothing", "neither a pod"),
            ("", "neither a pod"),
            ("eb", "neither a pod"),
        ] {
            let error = found(wanted).unwrap_err();
            assert!(error.contains(expected), "{wanted}: {error}");
        }
    }
}
