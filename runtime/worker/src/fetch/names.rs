//! The node's files that a resolver reads, watched from outside of the jail: the fetcher gets their contents, so that they may
//! be symbolic links (systemd-resolved's), absent, or another file in the middle of a long pull.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::protocol::Names;

/// Their names in `/etc`, in the order of [`Names`]: what musl's resolver opens.
pub(crate) const FILES: [&str; 2] = ["resolv.conf", "hosts"];

/// Longest file that is handed over: lists of blocked hosts have some megabytes. Both fit in a message and in the jail.
const FILE_BYTES_MAX: u64 = 3 << 20;

/// What was seen of the files last.
#[derive(Default)]
pub(super) struct Watch {
    seen: [Option<Stamp>; 2],
    /// They were looked at before.
    is_begun: bool,
}

/// What differs where a file was written, or replaced by another: device, inode, size, and both times in seconds and
/// nanoseconds.
type Stamp = [i128; 7];

impl Watch {
    /// The contents of those that changed since the last call; `None` where none did.
    pub(super) fn changes(&mut self, directory: &Path) -> Option<Names> {
        let mut names = Names::default();
        for (index, name) in FILES.iter().enumerate() {
            let path = directory.join(name);
            // What cannot be looked at is, for a resolver, not there.
            let about = std::fs::metadata(&path).ok().filter(Metadata::is_file);
            let stamp = about.as_ref().map(stamp);
            if self.is_begun && stamp == self.seen[index] {
                continue;
            }
            self.seen[index] = stamp;
            names.files[index] = Some(if stamp.is_some() { read(&path) } else { String::new() });
        }
        self.is_begun = true;
        names.files.iter().any(Option::is_some).then_some(names)
    }
}

fn stamp(about: &Metadata) -> Stamp {
    [
        about.dev().into(),
        about.ino().into(),
        about.size().into(),
        about.mtime().into(),
        about.mtime_nsec().into(),
        about.ctime().into(),
        about.ctime_nsec().into(),
    ]
}

/// What is longer than the bound is cut after a line.
fn read(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    if let Err(error) = read {
        eprintln!("read {}: {error}: names are looked up without it", path.display());
        return String::new();
    }
    if bytes.len() as u64 > FILE_BYTES_MAX {
        eprintln!("{}: what is behind {FILE_BYTES_MAX} bytes is left out", path.display());
        bytes.truncate(FILE_BYTES_MAX as usize);
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        bytes.truncate(end);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A resolver's files as nodes have them: absent, symbolic links that are exchanged, rewritten in place.
    #[test]
    fn changes_are_seen_whatever_kind_of_file_it_is() {
        let folder = std::env::temp_dir().join(format!("coracle-names-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        let names = |first: Option<&str>, second: Option<&str>| {
            Some(Names { files: [first.map(str::to_owned), second.map(str::to_owned)] })
        };
        let mut watch = Watch::default();
        assert_eq!(watch.changes(&folder), names(Some(""), Some("")), "neither is there");
        assert_eq!(watch.changes(&folder), None);
        std::fs::write(at("stub"), "nameserver 127.0.0.53\n").unwrap();
        std::os::unix::fs::symlink("stub", at("resolv.conf")).unwrap();
        assert_eq!(watch.changes(&folder), names(Some("nameserver 127.0.0.53\n"), None));
        // As systemd-resolved does: a new file takes the name of the old one.
        std::fs::write(at("new"), "nameserver 127.0.0.54\n").unwrap();
        std::fs::rename(at("new"), at("stub")).unwrap();
        assert_eq!(watch.changes(&folder), names(Some("nameserver 127.0.0.54\n"), None));
        std::fs::write(at("hosts"), vec![b'x'; FILE_BYTES_MAX as usize]).unwrap();
        assert_eq!(watch.changes(&folder).unwrap().files[1].as_ref().unwrap().len(), FILE_BYTES_MAX as usize);
        let long = "127.0.0.1 a\n".repeat(FILE_BYTES_MAX as usize / 12 + 1);
        std::fs::write(at("hosts"), &long).unwrap();
        let cut = watch.changes(&folder).unwrap().files[1].clone().unwrap();
        assert!(cut.len() as u64 <= FILE_BYTES_MAX && cut.ends_with('\n') && long.starts_with(&cut));
        std::fs::remove_file(at("hosts")).unwrap();
        nix::unistd::mkfifo(&at("hosts"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(watch.changes(&folder), names(None, Some("")), "a FIFO is not waited for");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
