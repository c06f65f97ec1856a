//! Watches the node's resolver files for the fetcher, which cannot access them and receives their content.
//! They may be symbolic links (systemd-resolved), missing, or replaced during a long pull.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::protocol::Names;
use coracle_sandbox::describe_io;

/// Names of the two files in `/etc`, in the order of [`Names`]: the files that musl's resolver opens.
pub(super) const FILES: [&str; 2] = ["resolv.conf", "hosts"];

/// Maximum size of a file in bytes. Host files with block lists have some megabytes; both files must fit in a
/// message and in the fetcher's memory limit.
const FILE_BYTES_MAX: u64 = 3 << 20;

/// The last observed state of the files.
#[derive(Default)]
pub(super) struct Watch {
    seen: [Option<Stamp>; 2],
    /// Whether the files have been read at least once.
    is_begun: bool,
}

/// Identifies a file's content: device, inode, size, and both times in seconds and nanoseconds.
type Stamp = [i128; 7];

impl Watch {
    /// The content of files that changed since the last call; `None` if none did.
    pub(super) fn changes(&mut self, directory: &Path) -> Option<Names> {
        let mut names = Names::default();
        for (index, name) in FILES.iter().enumerate() {
            let path = directory.join(name);
            // A file that cannot be accessed counts as missing, as for a resolver.
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

/// Reads a file; a file above the maximum size is cut after a line.
fn read(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    if let Err(error) = read {
        eprintln!("read {}: {}: ignored by name resolution", path.display(), describe_io(&error));
        return String::new();
    }
    if bytes.len() as u64 > FILE_BYTES_MAX {
        eprintln!("{}: larger than {FILE_BYTES_MAX} bytes, the rest is ignored", path.display());
        bytes.truncate(FILE_BYTES_MAX as usize);
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        bytes.truncate(end);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resolver files as on real nodes: missing, exchanged symbolic links, rewritten in place.
    #[test]
    fn changes_are_detected_for_all_kinds_of_files() {
        let folder = std::env::temp_dir().join(format!("coracle-names-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        let names = |first: Option<&str>, second: Option<&str>| {
            Some(Names { files: [first.map(str::to_owned), second.map(str::to_owned)] })
        };
        let mut watch = Watch::default();
        assert_eq!(watch.changes(&folder), names(Some(""), Some("")), "both files are missing");
        assert_eq!(watch.changes(&folder), None);
        std::fs::write(at("stub"), "nameserver 127.0.0.53\n").unwrap();
        std::os::unix::fs::symlink("stub", at("resolv.conf")).unwrap();
        assert_eq!(watch.changes(&folder), names(Some("nameserver 127.0.0.53\n"), None));
        // As systemd-resolved does it: a new file is renamed over the old one.
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
        assert_eq!(watch.changes(&folder), names(None, Some("")), "reading a FIFO does not block");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
