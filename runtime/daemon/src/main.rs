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

/// Name of this program in its texts.
const NAME: &str = "coracled";

fn main() -> ExitCode {
    let words: Result<Vec<String>, OsString> =
        std::env::args_os().skip(1).map(OsString::into_string).collect();
    let asks = |long: &str, short: &str| {
        words.iter().flatten().any(|word| word.as_str() == long || word.as_str() == short)
    };
    if asks("--help", "-h") {
        return print(&format!("{}`{NAME} --version` prints the version.\n", flags::help(NAME)));
    }
    if asks("--version", "-V") {
        return print(&coracle_preflight::version(NAME));
    }
    match words.map_err(|word| format!("not UTF-8: {}", word.display())).and_then(parse) {
        Ok(sources) => serve::run(&sources),
        Err(usage) => {
            // Without a stderr there is no place for a message.
            let _ = writeln!(std::io::stderr(), "{NAME}: {}", Escaped(&usage));
            ExitCode::from(EXIT_USAGE)
        }
    }
}

fn parse(words: Vec<String>) -> Result<Sources, String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    flags::parse(&words)
}
