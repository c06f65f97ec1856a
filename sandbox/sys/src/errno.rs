//! The kernel's error numbers as a type, with names for the numbers that callers handle.

use core::fmt;

/// An error number of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident = $number:literal),* $(,)?) => {
        impl Errno {
            $(
                #[doc = concat!("Number ", stringify!($number), ", the same on every architecture that coracle is built for.")]
                pub const $name: Self = Self($number);
            )*

            /// The symbol of an error number; `None` if this file has no name for it.
            fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

errnos! {
    EPERM = 1, ENOENT = 2, ESRCH = 3, EINTR = 4, EIO = 5, ENXIO = 6, EAGAIN = 11, ENOMEM = 12, EACCES = 13,
    EBUSY = 16, EEXIST = 17, ENOTDIR = 20, EISDIR = 21, EINVAL = 22, EMFILE = 24, ENOSPC = 28, EPIPE = 32, ENAMETOOLONG = 36,
    ENOSYS = 38, ELOOP = 40, EPROTO = 71, EMSGSIZE = 90, EOPNOTSUPP = 95, ECONNRESET = 104, ENOBUFS = 105, ESHUTDOWN = 108, ECONNREFUSED = 111,
    ESTALE = 116,
    EDQUOT = 122,
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

/// The description of the number, with a lower-case first letter: `no such file or directory`. A leading abbreviation is not
/// changed: `I/O error`.
#[cfg(feature = "std")]
impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = nix::errno::Errno::from_raw(self.0).desc();
        match text.split_at_checked(1) {
            Some((first, rest)) if rest.starts_with(char::is_lowercase) => {
                write!(f, "{}{rest}", first.to_lowercase())
            }
            _ => f.write_str(text),
        }
    }
}

#[cfg(feature = "std")]
impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        Self::from_raw_os_error(errno.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_is_printed_as_its_symbol_or_its_number() {
        assert_eq!(format!("{:?}", Errno::ENOENT), "ENOENT");
        assert_eq!(format!("{:?}", Errno(4000)), "errno 4000");
    }

    #[cfg(feature = "std")]
    #[test]
    fn an_errno_is_described_in_lower_case_except_abbreviations() {
        let table = [
            (Errno::ENOENT, "no such file or directory"),
            (Errno::EIO, "I/O error"),
            (Errno(4000), "unknown errno"),
        ];
        for (errno, text) in table {
            assert_eq!(errno.to_string(), text);
        }
    }
}
