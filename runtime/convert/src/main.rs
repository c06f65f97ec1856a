//! For the machine that builds images: `convert` makes layers with a table of contents (zstd:chunked), of which nodes download what
//! changed only; `diff` says what an update will download, before it is shipped. It needs neither root nor a daemon.
//!
//! ```text
//! archive or OCI layout ─► source ─► layer ─► archive       (convert)
//! two of them           ─► source ─► diff ─► text            (diff)
//! ```
#![forbid(unsafe_code)]

mod archive;
mod convert;
mod diff;
mod failure;
mod layer;
mod source;
mod table;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use diff::Platform;
use failure::{Context, Failure};

/// The compression level of containers/storage.
const LEVEL: i32 = 10;
const USAGE: &str = "\
coracle-convert convert IN OUT [--level N]
  Writes the images of IN, an archive of docker save or in OCI format or a directory with an OCI layout, to the OCI archive OUT.
  Their layers get a table of contents (zstd:chunked); IDs of images and diff IDs do not change. Level: 1 to 22, by default 10.
coracle-convert diff OLD NEW [--platform OS/ARCHITECTURE[/VARIANT]]
  Says what a node with the image OLD downloads for the image NEW, by layer and by file.
";

fn main() -> ExitCode {
    let words: Result<Vec<String>, _> =
        std::env::args_os().skip(1).map(std::ffi::OsString::into_string).collect();
    let Ok(words) = words else { return usage("an argument is not UTF-8") };
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["convert", from, to] => convert(from, to, LEVEL),
        ["convert", from, to, "--level", level] => match level.parse() {
            Ok(level @ 1..=22) => convert(from, to, level),
            _ => return usage(&format!("--level {level}: not a number from 1 to 22")),
        },
        ["diff", old, new] => diff(old, new, &Platform::default()),
        ["diff", old, new, "--platform", platform] => match platform_of(platform) {
            Some(platform) => diff(old, new, &platform),
            None => {
                return usage(&format!(
                    "--platform {platform}: not OS/ARCHITECTURE or OS/ARCHITECTURE/VARIANT"
                ));
            }
        },
        ["help" | "--help" | "-h"] => {
            return ended(print(USAGE));
        }
        ["--version"] => {
            return ended(print(concat!("coracle-convert ", env!("CARGO_PKG_VERSION"), "\n")));
        }
        _ => return usage("convert IN OUT, or diff OLD NEW"),
    };
    ended(done)
}

fn ended(done: Result<(), Failure>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nothing is left to report an error to.
            let _ = writeln!(io::stderr(), "coracle-convert: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> Result<(), Failure> {
    io::stdout().write_all(text.as_bytes()).context(|| "standard output")
}

fn usage(why: &str) -> ExitCode {
    const EXIT_USAGE: u8 = 2;
    let _ = write!(io::stderr(), "coracle-convert: {why}\n{USAGE}");
    ExitCode::from(EXIT_USAGE)
}

fn convert(from: &str, to: &str, level: i32) -> Result<(), Failure> {
    convert::run(Path::new(from), Path::new(to), level, &mut |line| print(&format!("{line}\n")))
}

fn diff(old: &str, new: &str, platform: &Platform) -> Result<(), Failure> {
    print(&diff::run(Path::new(old), Path::new(new), platform)?)
}

fn platform_of(text: &str) -> Option<Platform> {
    let mut parts = text.split('/').map(str::to_owned);
    let (os, architecture) = (parts.next()?, parts.next()?);
    let variant = parts.next().unwrap_or_default();
    let is_whole = !os.is_empty() && !architecture.is_empty() && parts.next().is_none();
    is_whole.then_some(Platform { os, architecture, variant })
}
