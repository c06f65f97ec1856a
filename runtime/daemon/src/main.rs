//! coracle: the daemon a kubelet calls to run pods, and the command line that goes with it.
//!
//! ```text
//!   cli ──> serve ──> config ──> daemon ──> rpc (the socket) ──> cri/… (one file per RPC)
//! ```
//!
//! This file only chooses the subcommand.
#![forbid(unsafe_code)]

mod check;
mod cli;
mod config;
mod containerd;
mod control;
mod cri;
mod daemon;
mod metrics;
mod notify;
mod plugins;
mod rpc;
mod serve;
mod settle;
mod stats;

use std::io::Write as _;
use std::process::ExitCode;

use cli::Command;

fn main() -> ExitCode {
    match cli::parse(std::env::args_os().skip(1)) {
        Ok(Command::Serve(sources)) => serve::run(&sources),
        Ok(Command::ConfigCheck(sources)) => match config::load(&sources) {
            Ok(_) => print("no mistakes\n"),
            Err(problems) => complain(problems),
        },
        Ok(Command::ConfigDefault) => print(&config::document()),
        Ok(Command::Version) => print(&cli::version()),
        Ok(Command::Help(text)) => print(&text),
        Ok(Command::Check { sources, as_json }) => match config::load(&sources) {
            Ok(config) => check::run(&config, as_json),
            Err(problems) => complain(problems),
        },
        Ok(Command::Image(words, sources)) => match config::load(&sources) {
            Ok(config) => control::client::run(&config.state, &words),
            Err(problems) => complain(problems),
        },
        Err(usage) => {
            complain([usage]);
            ExitCode::from(cli::EXIT_USAGE)
        }
    }
}

/// To stdout; a reader that left early is no failure worth a message.
fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// To stderr, one line each.
fn complain<T: std::fmt::Display>(lines: impl IntoIterator<Item = T>) -> ExitCode {
    for line in lines {
        // Without a stderr there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "coracle: {line}");
    }
    ExitCode::FAILURE
}
