//! Parses mountinfo files (proc_pid_mountinfo(5)), to find the cgroup mounts, the propagation of a volume's mount, and
//! the type of a mount.
//!
//! ```text
//!   36 35 98:0 /root /mnt/point rw,noatime shared:1 master:2 - ext4 /dev/root rw,errors=continue
//!   id up dev  part  mount      options    optional fields   - kind source    super block options
//! ```

use std::path::PathBuf;

/// One mount, a line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    pub(crate) mount: PathBuf,
    /// Whether the mount is shared: mounts below it propagate in both directions.
    pub(crate) is_shared: bool,
    /// Whether the mount is a slave: mounts below its master propagate to it.
    pub(crate) is_slave: bool,
    pub(crate) kind: &'a str,
    pub(crate) super_options: &'a str,
}

/// The mounts in order; invalid lines are skipped.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    text.lines().filter_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut fields = mount.split(' ');
        let path = unescape(fields.nth(4)?);
        let optional: Vec<&str> = fields.skip(1).collect();
        let mut filesystem = filesystem.split(' ');
        let kind = filesystem.next()?;
        Some(Line {
            mount: PathBuf::from(path),
            is_shared: optional.iter().any(|field| field.starts_with("shared:")),
            is_slave: optional.iter().any(|field| field.starts_with("master:")),
            kind,
            super_options: filesystem.nth(1)?,
        })
    })
}

/// The file system type of the mount with this id.
pub(crate) fn kind_of(text: &str, mount: u64) -> Option<&str> {
    let line = text
        .lines()
        .find(|line| line.split_once(' ').is_some_and(|(number, _)| number.parse() == Ok(mount)))?;
    line.split_once(" - ")?.1.split(' ').next()
}

/// Decodes spaces, tabs, newlines and backslashes, which are encoded as `\` and three octal digits.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_string();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if byte.is_ascii() => {
                plain.push(char::from(byte));
                plain.push_str(&part[3..]);
            }
            _ => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_fields_are_parsed_and_malformed_lines_skipped() {
        let text = "36 35 98:0 /r /mnt\\040x rw shared:1 master:2 - ext4 /dev/root rw,a=b\n\
            1 2 3 4 5\n - \n\n37 35 98:0 / /y rw - tmpfs none rw\n38 35 0:1 / /z rw - tmpfs none";
        let found: Vec<_> = lines(text).collect();
        let first = Line {
            mount: "/mnt x".into(),
            is_shared: true,
            is_slave: true,
            kind: "ext4",
            super_options: "rw,a=b",
        };
        let second = Line {
            mount: "/y".into(),
            is_shared: false,
            is_slave: false,
            kind: "tmpfs",
            super_options: "rw",
        };
        assert_eq!(found, [first, second]);
        assert_eq!((kind_of(text, 36), kind_of(text, 37)), (Some("ext4"), Some("tmpfs")));
        assert_eq!((kind_of(text, 3), kind_of(text, 1)), (None, None));
    }

    #[test]
    fn escapes_are_octal_and_others_stay() {
        assert_eq!(unescape("a\\040b\\134c\\9\\12\\400"), "a b\\c\\9\\12\\400");
    }

    /// Truncating a real file or changing a byte never causes a panic.
    #[test]
    fn truncated_and_changed_files_cause_no_panic() {
        let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(lines(&text).any(|line| line.mount.as_os_str() == "/proc" && line.kind == "proc"));
        for cut in 0..text.len() {
            if let Some(part) = text.get(..cut) {
                let _ = lines(part).count();
            }
            let mut damaged = text.clone().into_bytes();
            damaged[cut] ^= 0x55;
            let _ = lines(&String::from_utf8_lossy(&damaged)).count();
        }
    }
}
