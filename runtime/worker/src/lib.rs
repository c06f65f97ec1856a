//! coracle-worker: executes one slow or risky job and ends, which frees its memory. The daemon writes the job
//! to its standard input and reads answers from its standard output; standard error is its log. The worker
//! keeps no state outside of the store. Its program is that of the command line, started by another name: half of
//! the code is the same, and flash is scarce.
//!
//! ```text
//! stdin ─► Job ─► pull │ import │ remove trees │ cni ─► Answer… ─► stdout
//!                     └──┬──┘
//!                     unpack, users ─► store
//! ```
//! A pull contacts registries through a child process, the only one with network access ([`coracle_fetch`]). Neighbours of the site are
//! served by another process (`mirror`).
#![forbid(unsafe_code)]

mod attributes;
mod check;
mod containerd;
mod export;
mod failure;
mod fifo;
mod host;
mod import;
mod jail;
mod mirror;
mod net_devices;
mod policy;
mod pull;
mod report;
mod store;
mod tls;
mod unpack;
mod users;

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use coracle_job::{Answer, Failure, FailureKind, Job, Outcome, read_message, write_message};
use coracle_programs::Verifiers;
use coracle_trees::{measure, relabel, remove};
use nix::sys::signal::Signal;

use report::Report;

/// Executes the job that is on standard input, or the subcommand in the arguments of this process, as its only task.
pub fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let subcommand = arguments.next();
    match subcommand.as_ref().and_then(|first| first.to_str()) {
        Some(coracle_programs::SUBCOMMAND) => return coracle_programs::become_program(arguments),
        Some(coracle_programs::CHECK_SUBCOMMAND) => return coracle_programs::check(arguments),
        Some(coracle_programs::VERIFY_SUBCOMMAND) => return verify_image(arguments),
        Some(coracle_registries::SUBCOMMAND) => return coracle_registries::check(arguments),
        Some(tls::CHECK_SUBCOMMAND) => return tls::check(arguments),
        Some(mirror::CHECK_SUBCOMMAND) => return mirror::check(arguments),
        Some(policy::CHECK_SUBCOMMAND) => return policy::check(arguments),
        _ => {}
    }
    let parent = nix::unistd::getppid();
    // The worker ends with the daemon: its result would be lost, and the next daemon would start while it
    // runs. If the daemon has already ended, the signal would never be sent.
    if nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).is_err() || nix::unistd::getppid() != parent {
        return ExitCode::FAILURE;
    }
    if let Some(subcommand) = subcommand {
        let set = attributes::set_for(None).inspect_err(|failure| eprintln!("{}", failure.message));
        return match subcommand.to_str().filter(|_| set.is_ok()) {
            Some(jail::confined::SUBCOMMAND) => jail::confined::live(arguments),
            Some(coracle_fetch::SUBCOMMAND) => coracle_fetch::live(),
            Some(tls::SUBCOMMAND) => tls::run(arguments),
            Some(mirror::SUBCOMMAND) => mirror::run(),
            Some(mirror::CHILD_SUBCOMMAND) => mirror::live(),
            Some(containerd::SUBCOMMAND) => list_containerd(arguments),
            _ => ExitCode::FAILURE,
        };
    }
    let answer = match read_message::<Job>(&mut std::io::stdin()) {
        Ok(Some(job)) => run(job).map_or_else(Answer::Failed, Answer::Done),
        Ok(None) => return ExitCode::FAILURE,
        Err(error) => Answer::Failed(Failure {
            kind: FailureKind::Internal,
            message: format!("read the job: {}", coracle_sandbox::describe_io(&error.into())),
        }),
    };
    match write_message(&mut std::io::stdout(), &answer) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Prints the images of a containerd's store, or one line about the failure.
fn list_containerd(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let (text, code) = match containerd::job_of(arguments).map(run) {
        Some(Ok(Outcome::ContainerdImages(images))) => (containerd::as_json(&images), ExitCode::SUCCESS),
        Some(Err(failure)) => (failure.message, ExitCode::FAILURE),
        _ => ("needs a store and a namespace".to_owned(), ExitCode::FAILURE),
    };
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Runs image verifiers. The process ends when its pull does. A scanner may need much memory, and its end only refuses an image.
fn verify_image(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    attributes::end_before_pods();
    match attributes::set_for_programs() {
        Ok(()) => coracle_programs::verify(arguments),
        Err(failure) => {
            eprintln!("{}", failure.message);
            ExitCode::FAILURE
        }
    }
}

fn run(job: Job) -> Result<Outcome, Failure> {
    let verifiers = match &job {
        Job::Pull(pull) => pull.verifiers.as_ref().map(Verifiers::start).transpose()?,
        _ => None,
    };
    if verifiers.is_some() {
        attributes::raise_open_files()?;
    }
    attributes::set_for(Some(&job))?;
    let fetcher = jail::confine(&job)?;
    let report = Arc::new(Report::default());
    let mut progress = |bytes_done, bytes_total| {
        report.update(|progress| (progress.bytes_done, progress.bytes_total) = (bytes_done, bytes_total));
    };
    match job {
        Job::Pull(job) => {
            let pulled = pull::run(&job, fetcher, verifiers, &report);
            report.finish();
            pulled
                .map(|(image, signed)| Outcome::Pulled(image, signed))
                .map_err(|failure| store::explain(&job.root, failure))
        }
        Job::Explain(job) => {
            policy::explain(&job).map(|rules| Outcome::Explained(coracle_registries::explain(&job), rules))
        }
        Job::ReadPolicy { path } => {
            policy::read(&path).map(|policy| Outcome::PolicyRead(policy.to_bytes(), policy.unsupported()))
        }
        Job::Judge(job) => policy::judge_images(&job).map(Outcome::Judged),
        Job::Import(job) => {
            import::run(&job, &mut progress).map_err(|failure| store::explain(&job.root, failure))
        }
        Job::ListContainerd(job) => containerd::list(&job).map(Outcome::ContainerdImages),
        Job::Check(job) => check::run(&job, &mut |bytes| progress(bytes, 0))
            .map(|(findings, not_compared)| Outcome::Checked { findings, not_compared }),
        Job::CheckLayer(job) => check::next_layer(&job, &report).map(Outcome::LayerChecked),
        Job::Export(job) => export::run(&job, &mut progress).map(|()| Outcome::Exported),
        Job::CheckRegistries { root, registries } => {
            Ok(Outcome::RegistriesChecked(coracle_registries::broken(&registries, &root)))
        }
        Job::RemoveTrees { paths } => remove::run(&paths).map(|()| Outcome::Removed),
        Job::Cni(job) => coracle_cni::run(job).map(Outcome::Cni),
        Job::Cdi { names, directories } => coracle_cdi::run(&names, &directories).map(Outcome::Cdi),
        Job::Scope(job) => coracle_scope::run(&job).map(|()| Outcome::Scoped),
        Job::Hook(job) => coracle_programs::run_hook(&job).map(|()| Outcome::Hooked),
        Job::TakeNetDevices { netns, devices } => net_devices::run(&netns, &devices).map(|()| Outcome::Moved),
        Job::RemoveLink { name } => net_devices::remove(&name).map(|()| Outcome::Removed),
        Job::LookAtHost(question) => host::look(&question).map(Outcome::Looked),
        Job::Relabel { paths, label } => relabel::run(&paths, &label).map(|()| Outcome::Relabelled),
        Job::MeasureTrees { paths } => Ok(Outcome::Measured(measure::run(&paths))),
    }
}
