//! `coracle events`: prints changes of pods and containers when they happen, one line each, until the daemon
//! or the reader ends.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use coracle_base::time::rfc3339;
use coracle_control::{Answer, Event, Request, socket};
use serde_json::{Value, json};

use crate::ask::converse;
use crate::list::{json_text, one_line};
use crate::{EXIT_USAGE, Typed, complain};

/// Executes the command. Exit code 1: the daemon does not answer or has ended; 2: invalid arguments.
pub fn run(state: &Path, command: &Typed) -> ExitCode {
    let is_json = match (command.arguments.as_slice(), command.value("--output")) {
        ([], None | Some("text")) => false,
        ([], Some("json")) => true,
        ([], Some(other)) => return usage(format!("--output {other}: text or json")),
        ([.., word], _) => return usage(format!("events: {word}: nothing more is expected here")),
    };
    let socket = socket(state);
    let listened = converse(&socket, &Request::Events {}, |answer| match answer {
        Answer::Event(event) => {
            let line = if is_json { json_text(&object(&event), false) } else { line(&event) };
            let mut out = io::stdout().lock();
            writeln!(out, "{line}").and_then(|()| out.flush())
        }
        Answer::Failed { message } => Err(io::Error::other(message)),
        _ => Ok(()),
    });
    match listened {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        Err(error) => complain([crate::ask::unanswered(&socket, &error)]),
    }
}

fn usage(text: String) -> ExitCode {
    complain([text]);
    ExitCode::from(EXIT_USAGE)
}

/// Formats an event as a line of text: time, kind of change, object.
fn line(event: &Event) -> String {
    let what = if event.name.is_empty() { "pod" } else { "container" };
    let name = if event.name.is_empty() { String::new() } else { format!("/{}", event.name) };
    let text = format!(
        "{} {what} {} {:.13} {}/{}{name}",
        rfc3339(event.at_ns),
        event.happened,
        event.id,
        event.namespace,
        event.pod_name
    );
    one_line(&text)
}

/// Formats an event as a JSON object, with the names of the CRI's ContainerEventResponse for members that it
/// has.
fn object(event: &Event) -> Value {
    json!({
        "containerId": event.id,
        "containerEventType": format!("CONTAINER_{}_EVENT", event.happened.to_uppercase()),
        "createdAt": event.at_ns.to_string(),
        "name": event.name,
        "podSandboxId": event.pod_id,
        "podName": event.pod_name,
        "namespace": event.namespace,
    })
}
