//! Reads files of the node's configuration, such as registries.yaml and certificates. One of them may be a FIFO or a device by
//! mistake, and a worker that waited for its content would keep its caller waiting.

use std::io;
use std::path::Path;

use coracle_sandbox::hostpath;

/// Size limit; bundles of root certificates have some 200 KiB.
const BYTES_MAX: u64 = 8 << 20;

/// Reads a regular file.
///
/// # Errors
/// The I/O error; the file is not regular, or longer than 8 MiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    Ok(hostpath::read(path, BYTES_MAX)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn other_types_of_files_are_refused_without_waiting() {
        let folder = std::env::temp_dir().join(format!("coracle-node-file-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let (file, fifo) = (folder.join("file"), folder.join("fifo"));
        fs::write(&file, b"text").unwrap();
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        assert_eq!(read(&file).unwrap(), b"text");
        assert_eq!(read(&fifo).unwrap_err().to_string(), "is a FIFO, not a regular file");
        assert_eq!(read(&folder.join("absent")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(read(&folder).is_err());
        fs::remove_dir_all(folder).unwrap();
    }
}
