//! `coracle k3s` and `coracle kubeadm`: configure these programs to use coracle, and back.
//!
//! ```text
//!   k3s, kubeadm (what the program needs, what prevents it) ──> plan (a list of changes; pure) ──> apply
//!      └── kubelet, unit ──> host (files below a root directory)      └── own, record             report
//! ```
//! Nothing is restarted: the operator receives the commands. The only program that is started lists the images of the old
//! containerd ([`List`]) for `--dry-run`. The commands are processes of their own, so
//! they may block. `--host-root` names the root directory of another node's files.
#![forbid(unsafe_code)]

mod apply;
mod host;
mod k3s;
mod kubeadm;
mod kubelet;
mod old_images;
mod own;
mod plan;
mod record;
mod report;
mod unit;

use std::path::Path;
use std::process::ExitCode;

use coracle_client::{EXIT_USAGE, Typed, complain, print};
use serde_json::{Value, json};

use host::Host;
pub use old_images::{List, OldImage};

/// Returns what is wrong with the configuration of coracle once a drop-in has this text: the path of the drop-in on the node, and
/// the text.
pub type Check<'a> = &'a dyn Fn(&str, &str) -> Vec<String>;
use plan::{Plan, State, Wanted};
use report::Mode;

/// The program that is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// k3s, a server or an agent.
    K3s,
    /// A kubelet that kubeadm configures.
    Kubeadm,
}

impl Program {
    /// The name of the program and of the command.
    pub fn name(self) -> &'static str {
        match self {
            Program::K3s => "k3s",
            Program::Kubeadm => "kubeadm",
        }
    }

    fn wanted(self, host: &Host, endpoint: &str, check: Check<'_>, takes_images: bool) -> Wanted {
        let mut wanted = Wanted { takes_images, ..Wanted::default() };
        let collected = match self {
            Program::K3s => k3s::collect(host, endpoint, &mut wanted),
            Program::Kubeadm => kubeadm::collect(host, endpoint, &mut wanted),
        };
        if let Err(problem) = collected {
            wanted.refusals.push(problem.0);
        }
        for file in wanted.files.iter().filter(|file| file.path.starts_with(OWN_DROP_INS)) {
            let mistakes = check(&file.path, &file.text).into_iter();
            wanted.refusals.extend(
                mistakes.map(|mistake| format!("{}: coracle would not start with it: {mistake}", file.path)),
            );
        }
        wanted
    }
}

/// Directory of coracle's drop-ins.
const OWN_DROP_INS: &str = "/etc/coracle/conf.d/";

/// Runs `enable`, `disable` or `status`; `socket` is the daemon's CRI socket, `check` checks coracle's configuration, `list` lists the images of a containerd. Exit code 1: the command was refused or failed, something
/// was left, or, of `status`, the program is not completely configured; 2: the words are wrong.
pub fn run(program: Program, command: &Typed, socket: &Path, check: Check<'_>, list: List<'_>) -> ExitCode {
    let usage = |text: String| {
        complain([text]);
        ExitCode::from(EXIT_USAGE)
    };
    if let Some(extra) = command.arguments.first() {
        return usage(format!("{extra}: nothing more is expected here"));
    }
    let as_json = match command.value("--output") {
        None | Some("text") => false,
        Some("json") => true,
        Some(other) => return usage(format!("--output {other}: text or json")),
    };
    let Some(socket) = socket.to_str() else {
        return complain([format!("{}: the socket's path is not UTF-8", socket.display())]);
    };
    let host = match Host::open(Path::new(command.value("--host-root").unwrap_or("/"))) {
        Ok(host) => host,
        Err(problem) => return complain([problem]),
    };
    let endpoint = format!("unix://{socket}");
    let form = Form { is_dry: command.flags.contains(&"--dry-run"), as_json };
    match command.name {
        "enable" => {
            let wanted = program.wanted(&host, &endpoint, check, !command.flags.contains(&"--no-images"));
            enable(program, &host, wanted, form, list)
        }
        "disable" => disable(program, &host, form),
        _ => {
            let wanted = program.wanted(&host, &endpoint, check, false);
            status(program, &host, &endpoint, &wanted, as_json)
        }
    }
}

fn planned(program: Program, host: &Host, wanted: &Wanted) -> Plan {
    plan::enable(program.name(), wanted, &|path| host.read(path), &|path| host.exists(path))
}

/// How a command is executed and reported.
#[derive(Clone, Copy)]
struct Form {
    /// Whether the changes are printed only.
    is_dry: bool,
    /// Whether the report is one JSON object.
    as_json: bool,
}

/// Parts of a report beside the changes.
#[derive(Default)]
struct Remarks {
    /// Facts that the operator should know.
    notes: Vec<String>,
    /// Commands that the operator has to run afterwards.
    steps: Vec<String>,
    /// Images of the old containerd, if they are listed.
    images: Vec<OldImage>,
}

fn enable(program: Program, host: &Host, mut wanted: Wanted, form: Form, list: List<'_>) -> ExitCode {
    let plan = planned(program, host, &wanted);
    let mut images = Vec::new();
    if form.is_dry && plan.problems.is_empty() && !plan.changes.is_empty() {
        match old_images::list(host, &wanted, list) {
            Ok(listed) => images = listed,
            Err(why) => wanted.notes.push(why),
        }
    }
    carry_out(host, &plan, &Remarks { notes: wanted.notes, steps: wanted.steps, images }, form)
}

fn disable(program: Program, host: &Host, form: Form) -> ExitCode {
    let (paths, steps) = match program {
        Program::K3s => (k3s::paths(), k3s::steps_back(host)),
        Program::Kubeadm => (kubeadm::paths(), kubeadm::steps_back(host)),
    };
    let plan = plan::disable(program.name(), &paths, &|path| host.read(path), &|path| host.exists(path));
    carry_out(host, &plan, &Remarks { steps, ..Remarks::default() }, form)
}

/// Makes or shows the changes and reports everything.
fn carry_out(host: &Host, plan: &Plan, remarks: &Remarks, form: Form) -> ExitCode {
    let Form { is_dry, as_json } = form;
    let (count, failed) = if is_dry { (plan.changes.len(), None) } else { apply::apply(host, &plan.changes) };
    let (done, not_done) = plan.changes.split_at(count);
    let mut problems = plan.problems.clone();
    if let Some(problem) = failed {
        problems.push(problem.0);
        problems.extend(
            (!not_done.is_empty())
                .then(|| format!("{} changes were not made: repeat the command", not_done.len())),
        );
    }
    let steps: &[String] = if done.is_empty() || !problems.is_empty() { &[] } else { &remarks.steps };
    let text = match as_json {
        true => json_line(json!({
            "dry_run": is_dry,
            "changes": report::json_changes(done),
            "images": old_images::json(&remarks.images),
            "notes": remarks.notes,
            "steps": steps,
            "problems": problems,
        })),
        false => {
            let mode = if is_dry { Mode::Shown } else { Mode::Done };
            let nothing =
                if plan.changes.is_empty() && problems.is_empty() { "nothing to change\n" } else { "" };
            let then = if is_dry { "then run" } else { "now run" };
            let changes = report::changes(done, mode);
            let notes = report::list("note", &remarks.notes);
            [nothing, &changes, &old_images::text(&remarks.images), &notes, &report::list(then, steps)]
                .concat()
        }
    };
    let printed = print(&text);
    match problems.is_empty() {
        true => printed,
        false => complain(&problems),
    }
}

fn status(program: Program, host: &Host, endpoint: &str, wanted: &Wanted, as_json: bool) -> ExitCode {
    let plan = planned(program, host, wanted);
    let count = plan.parts.iter().filter(|part| part.state == State::InPlace).count();
    let own = plan.parts.iter().filter(|part| matches!(part.state, State::Outdated | State::Changed)).count();
    let state = match (count + own, plan.problems.is_empty() && plan.changes.is_empty()) {
        (0, _) => "disabled",
        (_, true) => "enabled",
        (_, false) => "partly enabled",
    };
    let text = match as_json {
        true => json_line(json!({
            "program": program.name(),
            "state": state,
            "endpoint": endpoint,
            "parts": report::json_parts(&plan.parts),
            "notes": wanted.notes,
            "problems": plan.problems,
        })),
        false => {
            let lines =
                plan.parts.iter().map(|part| format!("{:<8}  {}\n", report::word(part.state), part.path));
            let lines: String = lines.collect();
            let notes = report::list("note", &wanted.notes);
            let problems = report::list("problem", &plan.problems);
            format!("{}: {state}\n{lines}{notes}{problems}", program.name())
        }
    };
    match (print(&text), state) {
        (ExitCode::SUCCESS, "enabled") => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn json_line(value: Value) -> String {
    format!("{value}\n")
}
