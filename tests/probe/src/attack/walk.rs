//! An unprivileged user of the node who knows all names: which files of the runtime can be read or executed.

use std::fs;
use std::io::{BufRead, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use super::trace::CAREFUL;
use crate::see::Outcome;

/// The set-user-ID and set-group-ID bits.
const SETID: u32 = 0o6000;

/// Maximum size of a searched file in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// Reads paths from standard input, one per line, and tries each: prints `GOT secret PATH` if the text is
/// found, `GOT setuid PATH` for a program that would run with another user's privileges, otherwise `saw
/// readable PATH`.
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
        // Data that was read before an error is searched.
        let _ = file.take(BYTES_MAX).read_to_end(&mut bytes);
        let found = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
        println!("{} {path}", if found { "GOT secret" } else { "saw readable" });
    }
    println!("saw tried {tried}");
    Ok(0)
}
