//! The mark of a part that has bytes of neighbours, for a pull that resumes it: the number of bytes before them, in an extended
//! attribute. If it is lost, or the file system has none, that costs bytes at most: the digest of the blob is verified.

use std::fs::File;

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};

/// Name of the attribute, whose value are decimal digits.
const NAME: &str = "trusted.coracle.unverified";
/// Maximum number of digits.
const DIGITS: usize = 20;

/// Marks that the bytes from `length` on are those of neighbours.
pub fn mark(part: &File, length: u64) {
    let _ = fsetxattr(part, NAME, length.to_string().as_bytes(), XattrFlags::empty());
}

/// Removes the mark, if there is one.
pub fn forget(part: &File) {
    let _ = fremovexattr(part, NAME);
}

/// The number of bytes before those of neighbours; `None`: there is no mark. One at or after `end`, the end of the file, is that of
/// bytes that were not written, and is removed.
pub fn marked(part: &File, end: u64) -> Option<u64> {
    let mut text = [0; DIGITS];
    let count = fgetxattr(part, NAME, &mut text).ok()?;
    let length = std::str::from_utf8(&text[..count]).ok().and_then(|text| text.parse().ok());
    let length = length.filter(|length| *length < end);
    if length.is_none() {
        forget(part);
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_of_unwritten_bytes_is_removed_as_root() {
        let path = std::env::temp_dir().join(format!("coracle-unverified-{}", std::process::id()));
        let part = File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(marked(&part, 9), None);
        mark(&part, 5);
        assert_eq!(marked(&part, 6), Some(5));
        mark(&part, 0);
        assert_eq!(marked(&part, 6), Some(0));
        mark(&part, 6);
        assert_eq!(marked(&part, 6), None);
        assert_eq!(marked(&part, 7), None, "it was removed");
        mark(&part, 3);
        forget(&part);
        assert_eq!(marked(&part, 7), None);
    }
}
