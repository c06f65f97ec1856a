//! Validation of paths, as text, before they are added to a record.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::record::c_string;
use crate::Error;

/// Maximum length of a path in bytes, without its NUL (the kernel's PATH_MAX is 4096).
const PATH_BYTES_MAX: usize = 4095;

/// Validates a host path: absolute and not too long.
pub(super) fn host(field: &str, path: &Path) -> Result<CString, Error> {
    if !path.is_absolute() {
        return Err(Error::invalid(field, format!("{} is not absolute", path.display())));
    }
    bounded(field, path.as_os_str().as_bytes())
}

/// Validates and cleans a container path: the result is absolute, without empty, `.` and `..` components. A relative
/// path starts at `/`, and `..` at the root stays there, as in the kernel.
pub(super) fn container(field: &str, path: &str) -> Result<String, Error> {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let clean = format!("/{}", parts.join("/"));
    bounded(field, clean.as_bytes())?;
    Ok(clean)
}

/// Validates and cleans a container path, as a C string.
pub(super) fn container_c(field: &str, path: &str) -> Result<CString, Error> {
    c_string(field, container(field, path)?.as_bytes())
}

/// Number of components of a cleaned path: 0 for the root.
pub(super) fn depth(clean: &str) -> usize {
    clean.split('/').filter(|part| !part.is_empty()).count()
}

/// Whether a cleaned path is `directory` or below it.
pub(super) fn is_within(clean: &str, directory: &str) -> bool {
    clean.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn bounded(field: &str, bytes: &[u8]) -> Result<CString, Error> {
    if bytes.len() > PATH_BYTES_MAX {
        return Err(Error::invalid(field, format!("is longer than {PATH_BYTES_MAX} bytes")));
    }
    c_string(field, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_paths_are_cleaned() {
        let table = [
            ("/", "/"),
            ("", "/"),
            ("data", "/data"),
            ("/data/", "/data"),
            ("//a/./b//c", "/a/b/c"),
            ("/a/../../b", "/b"),
            ("../../etc", "/etc"),
            ("/a/..", "/"),
            ("/a/...", "/a/..."),
        ];
        for (path, expected) in table {
            assert_eq!(container("target", path).as_deref(), Ok(expected), "{path:?}");
        }
        assert!(container("target", "/a\0b").is_err());
        assert!(container("target", &"/a".repeat(3000)).is_err());
    }

    /// For any input the result is clean, and cleaning it again changes nothing.
    #[test]
    fn a_clean_path_is_not_changed_by_cleaning() {
        let mut seed = 7_u64;
        for _ in 0..5_000 {
            let path: String = (0..12)
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    ["/", ".", "..", "a", "/../", "é"][(seed >> 33) as usize % 6]
                })
                .collect();
            let clean = container("target", &path).unwrap();
            assert_eq!(container("target", &clean).unwrap(), clean, "{path:?}");
            assert!(clean.starts_with('/') && !clean.split('/').any(|part| part == ".."), "{path:?}");
        }
    }

    #[test]
    fn host_paths_are_absolute() {
        assert!(host("source", Path::new("/srv/data")).is_ok());
        assert!(host("source", Path::new("srv/data")).is_err());
        assert!(is_within("/dev/shm", "/dev") && is_within("/dev", "/dev") && !is_within("/device", "/dev"));
    }
}
