//! A user of the node without rights, who knows every name: what of the runtime's files can be read or run.

use std::fs;
use std::io::{BufRead, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use super::trace::CAREFUL;
use crate::see::Outcome;

/// The set-user-id and set-group-id bits.
const SETID: u32 = 0o6000;

/// Longest file that is searched.
const BYTES_MAX: u64 = 64 << 20;

/// Reads paths from standard input, one a line, and tries each: `GOT secret PATH` where the text is found,
/// `GOT setuid PATH` for a program that would run with another's rights, `saw readable PATH` otherwise.
pub(crate) fn known(secret: &str) -> Outcome {
    let mut tried = 0;
    for path in std::io::stdin().lock().lines() {
        let path = path.map_err(|error| format!("read stdin: {error}"))?;
        tried += 1;
        if let Ok(about) = fs::metadata(&path)
            && about.is_file()
            && about.mode() & SETID != 0
            && rustix::fs::access(path.as_str(), rustix::fs::Access::EXEC_OK).is_ok()
        {
            println!("GOT setuid {path}");
        }
        if let Ok(entries) = fs::read_dir(&path) {
            println!("saw listed {path} {}", entries.flatten().count());
            continue;
        }
        let Ok(file) = fs::OpenOptions::new().read(true).custom_flags(CAREFUL).open(&path) else { continue };
        if !file.metadata().is_ok_and(|about| about.is_file()) {
            continue;
        }
        let mut bytes = Vec::new();
        // What was read before an error counts.
        let _ = file.take(BYTES_MAX).read_to_end(&mut bytes);
        let found = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
        println!("{} {path}", if found { "GOT secret" } else { "saw readable" });
    }
    println!("saw tried {tried}");
    Ok(0)
}
