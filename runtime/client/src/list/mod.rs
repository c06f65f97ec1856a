//! `coracle pods`, `ps`, `images` and `stats`: lists of the running daemon's objects, for a node without
//! crictl. Columns, states, times, sizes and the objects of `-o json` are those of crictl 1.36, so that users
//! and scripts need not adapt; `-o wide` has more columns.
//!
//! ```text
//!   words ──> Options ──> Request ──> answers ──> select ──> Listing ──> table, IDs, JSON or YAML
//! ```

mod object;
mod options;
mod select;
mod table;
mod units;
mod yaml;

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use coracle_base::collect;
use coracle_control::{Answer, Container, Pod, Request, Stats, socket};
use serde_json::{Value, json};

use crate::ask::ask_within;
use crate::{EXIT_USAGE, Typed, complain, print_raw};
use options::{Form, Options};
use table::Table;
pub(crate) use units::one_line;

/// Time limit for the daemon's answer, which it computes from memory.
const DAEMON_PATIENCE: Duration = Duration::from_secs(10);

/// Number of printed digits of an ID, as in crictl.
const ID_DIGITS: usize = 13;

/// The content of a list, in every output format.
#[derive(Default)]
struct Listing {
    /// Name of the array in the JSON output.
    member: &'static str,
    objects: Vec<Value>,
    ids: Vec<String>,
    table: Table,
}

/// Executes one of the commands. Exit code 1: the daemon does not answer; 2: invalid arguments.
pub fn run(state: &Path, command: &Typed) -> ExitCode {
    let options = match Options::parse(command) {
        Ok(options) => options,
        Err(text) => {
            complain([text]);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let listing = match command.name {
        "pods" => pods(state, &options),
        "ps" => containers(state, &options),
        "images" => images(state, &options),
        _ => stats(state, &options),
    };
    match listing {
        Ok(listing) => print_raw(&shown(listing, options.form)),
        Err(error) => complain([crate::ask::unanswered(&socket(state), &error)]),
    }
}

/// Formats the list; characters that a terminal would execute are escaped.
fn shown(listing: Listing, form: Form) -> String {
    let Listing { member, objects, ids, table } = listing;
    match form {
        Form::Ids => ids.iter().fold(String::new(), |text, id| text + id + "\n"),
        Form::Table | Form::Wide => table.to_string(),
        Form::Json => json_text(&json!({ member: objects }), true) + "\n",
        Form::Yaml => yaml::text(&json!({ member: objects })),
    }
}

/// Formats JSON; characters that a terminal would execute, which can only be in strings, are escaped.
pub(crate) fn json_text(value: &Value, is_pretty: bool) -> String {
    let text = if is_pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
    // Values have strings as keys and no other failure.
    units::escaped_json(&text.unwrap_or_default())
}

/// The first digits of an ID, or all if the options request this.
fn id(id: &str, options: &Options) -> String {
    let hex = id.strip_prefix("sha256:").unwrap_or(id);
    let end = if options.is_complete { hex.len() } else { ID_DIGITS };
    hex.get(..end).unwrap_or(hex).to_owned()
}

fn pods(state: &Path, options: &Options) -> io::Result<Listing> {
    let mut pods = all_pods(state)?;
    pods.retain(|pod| select::pod(pod, options));
    options.cut(&mut pods);
    let mut table = Table::new(&["POD ID", "CREATED", "STATE", "NAME", "NAMESPACE", "ATTEMPT", "RUNTIME"]);
    table.more(options.form == Form::Wide, &["IP", "UID"]);
    for pod in &pods {
        let runtime = if pod.runtime_handler.is_empty() { "(default)" } else { &pod.runtime_handler };
        table.row([
            id(&pod.id, options),
            units::ago(pod.created_at_ns),
            select::pod_state(pod).to_owned(),
            pod.name.clone(),
            pod.namespace.clone(),
            pod.attempt.to_string(),
            runtime.to_owned(),
            pod.addresses.join(","),
            pod.uid.clone(),
        ]);
    }
    Ok(Listing {
        member: "items",
        ids: pods.iter().map(|pod| pod.id.clone()).collect(),
        objects: pods.iter().map(object::pod).collect(),
        table,
    })
}

fn containers(state: &Path, options: &Options) -> io::Result<Listing> {
    let pods = if options.pod.is_empty() { Vec::new() } else { all_pods(state)? };
    let mut containers = all_containers(state)?;
    containers.retain(|container| select::container(container, &pods, options));
    options.cut(&mut containers);
    let mut table = Table::new(&[
        "CONTAINER",
        "IMAGE",
        "CREATED",
        "STATE",
        "NAME",
        "ATTEMPT",
        "POD ID",
        "POD",
        "NAMESPACE",
    ]);
    table.more(options.form == Form::Wide, &["PID", "EXIT", "REASON", "IMAGE ID"]);
    for container in &containers {
        let exit =
            if container.finished_at_ns == 0 { String::new() } else { container.exit_code.to_string() };
        let pid = if container.pid == 0 { String::new() } else { container.pid.to_string() };
        table.row([
            id(&container.id, options),
            image_of(container, options),
            units::ago(container.created_at_ns),
            select::container_state(container).to_owned(),
            container.name.clone(),
            container.attempt.to_string(),
            id(&container.pod_id, options),
            container.pod_name.clone(),
            container.namespace.clone(),
            pid,
            exit,
            container.reason.clone(),
            id(&container.image_id, options),
        ]);
    }
    Ok(Listing {
        member: "containers",
        ids: containers.iter().map(|container| container.id.clone()).collect(),
        objects: containers.iter().map(object::container).collect(),
        table,
    })
}

/// The image of a container as crictl prints it: the name in the request, shortened if it is an ID.
fn image_of(container: &Container, options: &Options) -> String {
    match container.image.strip_prefix("sha256:") {
        Some(_) => id(&container.image, options),
        None => container.image.clone(),
    }
}

fn images(state: &Path, options: &Options) -> io::Result<Listing> {
    let answers = answers(state, &Request::List {})?;
    let mut rows = Vec::new();
    let mut listing = Listing { member: "images", ..Listing::default() };
    for answer in &answers {
        let Answer::Image { id: image_id, tags, digests, size_bytes, pinned, user: _ } = answer else {
            continue;
        };
        if !select::image(image_id, tags, digests, options) {
            continue;
        }
        listing.ids.push(image_id.clone());
        listing.objects.push(object::image(answer));
        let digest = digests.first().and_then(|digest| digest.split_once('@'));
        let repository = digest.map_or("<none>", |(repository, _)| repository);
        let names: Vec<(&str, &str)> = match tags.as_slice() {
            [] => vec![(repository, "<none>")],
            tags => tags.iter().map(|tag| tag.rsplit_once(':').unwrap_or((tag, "<none>"))).collect(),
        };
        for (name, tag) in names {
            rows.push([
                name.to_owned(),
                tag.to_owned(),
                if options.is_complete { image_id.clone() } else { id(image_id, options) },
                units::size(*size_bytes as f64, 3),
                digest.map_or("<none>", |(_, digest)| digest).to_owned(),
                pinned.to_string(),
            ]);
        }
    }
    collect::sort(&mut rows);
    let mut table = Table::new(&["IMAGE", "TAG", "IMAGE ID", "SIZE"]);
    table.more(options.form == Form::Wide, &["DIGEST", "PINNED"]);
    rows.into_iter().for_each(|row| table.row(row));
    listing.table = table;
    Ok(listing)
}

#[expect(clippy::disallowed_methods, reason = "the client is a process of its own, which may wait")]
fn stats(state: &Path, options: &Options) -> io::Result<Listing> {
    let pods = if options.pod.is_empty() { Vec::new() } else { all_pods(state)? };
    let before = all_stats(state)?;
    std::thread::sleep(options.sample);
    let mut stats = all_stats(state)?;
    stats.retain(|stats| select::stats(stats, &pods, options));
    let mut table = Table::new(&["CONTAINER", "NAME", "CPU %", "MEM", "DISK", "INODES", "SWAP"]);
    table.more(options.form == Form::Wide, &["POD ID", "POD", "NAMESPACE", "MEM LIMIT"]);
    for stats in &stats {
        let earlier = before.iter().find(|earlier| earlier.id == stats.id);
        let memory = stats.memory.clone().unwrap_or_default();
        let layer = stats.layer.clone().unwrap_or_default();
        let limit = memory.available_bytes.map(|free| free.saturating_add(memory.working_set_bytes));
        let swap = stats.swap.as_ref().map_or(0, |swap| swap.usage_bytes);
        table.row([
            id(&stats.id, options),
            stats.name.clone(),
            format!("{:.2}", cpu_percent(earlier, stats)),
            units::size(memory.working_set_bytes as f64, 4),
            units::size(layer.used_bytes as f64, 4),
            layer.inodes.to_string(),
            units::size(swap as f64, 4),
            id(&stats.pod_id, options),
            stats.pod_name.clone(),
            stats.namespace.clone(),
            limit.map_or_else(String::new, |limit| units::size(limit as f64, 4)),
        ]);
    }
    Ok(Listing {
        member: "stats",
        ids: stats.iter().map(|stats| stats.id.clone()).collect(),
        objects: stats.iter().map(object::stats).collect(),
        table,
    })
}

/// CPU time per wall-clock time between two readings, in percent; 0 without an earlier one.
fn cpu_percent(earlier: Option<&Stats>, now: &Stats) -> f64 {
    let (Some(earlier), Some(used)) = (earlier, now.cpu_ns) else { return 0.0 };
    let passed = now.at_ns.saturating_sub(earlier.at_ns);
    if passed <= 0 {
        return 0.0;
    }
    let burnt = used.saturating_sub(earlier.cpu_ns.unwrap_or(used));
    burnt as f64 / passed as f64 * 100.0
}

fn answers(state: &Path, request: &Request) -> io::Result<Vec<Answer>> {
    answers_within(state, request, DAEMON_PATIENCE)
}

/// All answers to a request; a failure that the daemon reports is an error.
fn answers_within(state: &Path, request: &Request, limit: Duration) -> io::Result<Vec<Answer>> {
    let answers = ask_within(state, request, limit)?;
    for answer in &answers {
        if let Answer::Failed { message } = answer {
            return Err(io::Error::other(message.clone()));
        }
    }
    Ok(answers)
}

/// All pod sandboxes, newest first.
///
/// # Errors
/// The daemon does not answer.
pub(crate) fn all_pods(state: &Path) -> io::Result<Vec<Pod>> {
    let answers = answers(state, &Request::Pods {})?.into_iter().rev();
    Ok(answers.filter_map(|answer| if let Answer::Pod(pod) = answer { Some(pod) } else { None }).collect())
}

/// All containers, newest first.
///
/// # Errors
/// The daemon does not answer.
pub(crate) fn all_containers(state: &Path) -> io::Result<Vec<Container>> {
    containers_within(state, DAEMON_PATIENCE)
}

/// All containers like [`all_containers`], within a time limit.
///
/// # Errors
/// The daemon does not answer in time.
pub(crate) fn containers_within(state: &Path, limit: Duration) -> io::Result<Vec<Container>> {
    let answers = answers_within(state, &Request::Containers {}, limit)?.into_iter().rev();
    let container = |answer| if let Answer::Container(found) = answer { Some(found) } else { None };
    Ok(answers.filter_map(container).collect())
}

fn all_stats(state: &Path) -> io::Result<Vec<Stats>> {
    let answers = answers(state, &Request::Stats {})?.into_iter();
    Ok(answers
        .filter_map(|answer| if let Answer::Stats(stats) = answer { Some(stats) } else { None })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::{Stats, cpu_percent};

    #[test]
    fn cpu_time_is_relative_to_the_time_between_readings() {
        let at = |at_ns, cpu_ns| Stats { at_ns, cpu_ns, ..Stats::default() };
        let second = 1_000_000_000;
        for (earlier, now, expected) in [
            (Some(at(0, Some(0))), at(second, Some(second as u64 / 2)), 50.0),
            (Some(at(0, Some(0))), at(second, Some(2 * second as u64)), 200.0),
            (None, at(second, Some(7)), 0.0),
            (Some(at(second, Some(0))), at(second, Some(7)), 0.0),
            (Some(at(2 * second, Some(0))), at(second, Some(7)), 0.0),
            (Some(at(0, None)), at(second, Some(7)), 0.0),
            (Some(at(0, Some(9))), at(second, None), 0.0),
            // Another cgroup under the same ID, whose counter began anew.
            (Some(at(0, Some(9))), at(second, Some(1)), 0.0),
        ] {
            assert_eq!(cpu_percent(earlier.as_ref(), &now), expected, "{now:?}");
        }
    }
}
