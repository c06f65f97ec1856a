//! Types for identifiers: 32 random bytes, printed as 64 lower-case hex digits (CRI 2.0; cAdvisor and other tools
//! search cgroup paths for exactly this form). They are created from bytes or by parsing.

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

/// Error: the text is not an ID, which has 64 lower-case hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidId;

impl fmt::Display for InvalidId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an id is 64 lower-case hex digits")
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name([u8; 32]);

        impl $name {
            /// Creates an id from 32 bytes, which must be random: ids are unique over the lifetime of the node.
            pub const fn from_bytes(bytes: [u8; 32]) -> Self {
                Self(bytes)
            }

            /// The bytes behind the hex digits.
            pub const fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }

            /// The 64 hex digits; does not allocate.
            pub fn hex(&self) -> [u8; 64] {
                const DIGITS: &[u8; 16] = b"0123456789abcdef";
                let mut text = [0; 64];
                for (pair, byte) in text.chunks_exact_mut(2).zip(self.0) {
                    pair[0] = DIGITS[usize::from(byte >> 4)];
                    pair[1] = DIGITS[usize::from(byte & 15)];
                }
                text
            }
        }

        impl fmt::Display for $name {
            /// Formats the ID: `{}` prints all 64 digits, `{:.13}` the first 13, as crictl and coracle's log do.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let hex = self.hex();
                let text = core::str::from_utf8(&hex).unwrap_or_default();
                f.pad(text)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:.13}", self)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                parse_hex(text).map(Self)
            }
        }
    };
}

id! {
    /// ID of a pod sandbox.
    PodId
}
id! {
    /// ID of a container.
    ContainerId
}

/// The id of an exec, unique within the lifetime of its monitor.
pub type ExecId = u32;

fn parse_hex(text: &str) -> Result<[u8; 32], InvalidId> {
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return Err(InvalidId);
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Ok(bytes)
}

fn digit(character: u8) -> Result<u8, InvalidId> {
    match character {
        b'0'..=b'9' => Ok(character - b'0'),
        b'a'..=b'f' => Ok(character - b'a' + 10),
        _ => Err(InvalidId),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_printed_as_it_is_parsed() {
        let text = "00ff".repeat(16);
        let id: PodId = text.parse().unwrap();
        assert_eq!(id.to_string(), text);
        assert_eq!(format!("{id:.13}"), "00ff00ff00ff0");
        assert_eq!(id.as_bytes()[..2], [0, 255]);
    }

    #[test]
    fn an_id_has_64_lower_case_hex_digits() {
        for text in
            ["", "00", &"0".repeat(63), &"0".repeat(65), &"0F".repeat(32), &"0g".repeat(32), &"é".repeat(32)]
        {
            assert_eq!(text.parse::<ContainerId>(), Err(InvalidId), "{text:?}");
        }
    }
}
