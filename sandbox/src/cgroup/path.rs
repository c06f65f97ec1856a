//! The path of a cgroup, relative to the mount of each hierarchy.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::Error;

/// Maximum length of a path in bytes: together with a mount point and a file name it fits into PATH_MAX (4096).
const PATH_BYTES_MAX: usize = 3072;

/// Maximum length of a single name in bytes (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;

/// Path of a cgroup: absolute, not the root, without empty, `.` and `..` components.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CgroupPath(String);

impl CgroupPath {
    /// Parses a path such as `/kubepods/burstable/podUID`.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the reason.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let invalid = |why: &str| Err(Error::invalid("cgroup path", format!("{text:?} {why}")));
        let Some(relative) = text.strip_prefix('/') else {
            return invalid("is not absolute");
        };
        if text.len() > PATH_BYTES_MAX {
            return invalid("is too long");
        }
        if !relative.split('/').all(is_name) {
            return invalid("has an invalid component");
        }
        Ok(Self(text.to_string()))
    }

    /// Whether `path`, as in `/proc/PID/cgroup`, is this cgroup or one below it.
    pub fn contains(&self, path: &str) -> bool {
        path.strip_prefix(&self.0).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// The cgroup `name` below this one.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a single valid name.
    pub fn join(&self, name: &str) -> Result<Self, Error> {
        Self::parse(&format!("{self}/{name}")).and_then(|path| match name.contains('/') {
            true => Err(Error::invalid("cgroup path", format!("{name:?} is not one name"))),
            false => Ok(path),
        })
    }

    /// The cgroup of exec number `exec` of the container at this path.
    pub fn exec(&self, exec: u32) -> Self {
        Self(format!("{}/exec-{exec}", self.0))
    }

    /// The systemd units of the cgroup: the slice and the scope.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the path is not a scope in a slice.
    pub fn slice_and_scope(&self) -> Result<(&str, &str), Error> {
        let mut names = self.0.rsplit('/');
        match (names.next(), names.next()) {
            (Some(scope), Some(slice)) if scope.ends_with(".scope") && slice.ends_with(".slice") => {
                Ok((slice, scope))
            }
            _ => Err(Error::invalid("cgroup path", format!("{self} is no scope in a slice of systemd's"))),
        }
    }

    /// The path as text, with the leading slash.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The cgroup's directory below the mount point of a hierarchy.
    pub(super) fn below(&self, mount: &Path) -> PathBuf {
        mount.join(&self.0[1..])
    }

    /// The names of the path's components, starting at the top.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0[1..].split('/')
    }
}

fn is_name(part: &str) -> bool {
    let is_plain = !part.bytes().any(|byte| byte.is_ascii_control());
    !matches!(part, "" | "." | "..") && part.len() <= NAME_BYTES_MAX && is_plain
}

impl fmt::Display for CgroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_absolute_paths_are_cgroup_paths() {
        for good in ["/a", "/kubepods/besteffort/pod1-2", "/system.slice/coracle-0.scope", "/ä b"] {
            assert_eq!(CgroupPath::parse(good).unwrap().to_string(), good);
        }
        let long = format!("/{}", "a".repeat(256));
        let deep = "/a".repeat(2000);
        for bad in
            ["", "/", "a", "/a/", "//a", "/a//b", "/..", "/a/../b", "/a/.", "/a\n", "/a\0", &long, &deep]
        {
            assert!(CgroupPath::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_scope_is_in_a_slice() {
        let path = CgroupPath::parse("/a.slice/a-b.slice/coracle-1.scope").unwrap();
        assert_eq!(path.slice_and_scope().unwrap(), ("a-b.slice", "coracle-1.scope"));
        for other in ["/a.slice", "/a/b.scope", "/a.slice/b", "/b.scope"] {
            assert!(CgroupPath::parse(other).unwrap().slice_and_scope().is_err(), "{other}");
        }
    }

    #[test]
    fn a_cgroup_contains_itself_and_what_is_below() {
        let path = CgroupPath::parse("/a/b").unwrap();
        assert!(["/a/b", "/a/b/c", "/a/b/c/d"].iter().all(|inside| path.contains(inside)));
        assert!(!["/a/bc", "/a", "/", "", "/x/a/b"].iter().any(|outside| path.contains(outside)));
    }

    #[test]
    fn joining_adds_one_name() {
        let path = CgroupPath::parse("/a").unwrap();
        assert_eq!(path.join("b").unwrap().as_str(), "/a/b");
        assert_eq!(path.exec(7).as_str(), "/a/exec-7");
        assert_eq!(path.below(Path::new("/sys/fs/cgroup")), Path::new("/sys/fs/cgroup/a"));
        for bad in ["", "..", "b/c", "/b"] {
            assert!(path.join(bad).is_err(), "{bad:?}");
        }
    }
}
