//! coracled: the CRI daemon.
//!
//! ```text
//! main ──> serve ──> config ──> daemon ──> rpc (the socket) ──> cri/… (one file per RPC)
//! ```
//!
//! This file only reads the command line: flags of the configuration, `--help` and `--version`. All commands are in the program
//! `coracle`.
#![forbid(unsafe_code)]

mod containerd;
mod control;
mod cri;
mod daemon;
mod lock;
mod metrics;
mod mirror;
mod notify;
mod nri_bridge;
mod reclaim;
mod reload;
mod rpc;
mod serve;
mod stats;

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use coracle_base::error::EXIT_USAGE;
use coracle_base::text::{Escaped, print};
use coracle_config::{Sources, flags};
use coracle_preflight::{DAEMON, version};

fn main() -> ExitCode {
    let words: Result<Vec<String>, OsString> =
        std::env::args_os().skip(1).map(OsString::into_string).collect();
    match words.map_err(|word| format!("not UTF-8: {}", word.display())).and_then(|words| parse(&words)) {
        Ok(Asked::Help) => {
            print(&format!("{}`{DAEMON} --version` prints the version.\n", flags::help(DAEMON)))
        }
        Ok(Asked::Version) => print(&version(DAEMON)),
        Ok(Asked::Serve(sources)) => serve::run(&sources),
        Err(usage) => {
            // Without a stderr there is no place for a message.
            let _ = writeln!(std::io::stderr(), "{DAEMON}: {}", Escaped(&usage));
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// A request of the command line.
enum Asked {
    Serve(Sources),
    Help,
    Version,
}

fn parse(words: &[String]) -> Result<Asked, String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (mut rest, mut sources) = (words.as_slice(), Sources::default());
    while let Some(word) = rest.first() {
        rest = match *word {
            "--help" | "-h" => return Ok(Asked::Help),
            "--version" | "-V" => return Ok(Asked::Version),
            word if !word.starts_with('-') => {
                return Err(format!("`{word}` is no flag; commands are in the program coracle"));
            }
            _ => flags::take(rest, &mut sources)?,
        };
    }
    Ok(Asked::Serve(sources))
}
