//! A worker that only runs CNI jobs: stands in for the worker's own main until the branches meet.
#![forbid(unsafe_code)]

mod cni;

use std::process::ExitCode;

use coracle_job::{Answer, Failure, FailureKind, Job, Outcome, read_message, write_message};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == cni::PLUGIN_SUBCOMMAND) {
        return cni::become_plugin(arguments);
    }
    let answer = match read_message::<Job>(&mut std::io::stdin()) {
        Ok(Some(Job::Cni(job))) => match cni::run(job) {
            Ok(outcome) => Answer::Done(Outcome::Cni(outcome)),
            Err(failure) => Answer::Failed(failure),
        },
        _ => Answer::Failed(Failure { kind: FailureKind::Internal, message: "not a CNI job".into() }),
    };
    match write_message(&mut std::io::stdout(), &answer) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
