//! A session keyring for each container (keyrings(7)), shared by its main process and its execs. Otherwise all
//! containers would inherit the daemon's session keyring and could read each other's keys.
//!
//! A keyring can only be joined by its name, by a process that has the owner's id and may search it. Therefore the name
//! is a secret: 128 random bits that the monitor generates for each container, keeps in memory that its children do not
//! inherit, and sends only to the process that joins.

use core::ffi::CStr;

use coracle_sys::{Errno, FdRef, keys, socket};

/// Number of random bytes in a keyring's name.
pub(crate) const KEYRING_NAME_BYTES: usize = 16;

/// Length of a keyring's name in bytes: `coracle-`, two digits per random byte, and NUL.
const TEXT_BYTES: usize = 8 + 2 * KEYRING_NAME_BYTES + 1;

/// Receives the keyring's name, which the monitor has sent before it cloned this process.
pub(crate) fn take_name(line: FdRef<'_>) -> Result<[u8; KEYRING_NAME_BYTES], Errno> {
    let mut name = [0; KEYRING_NAME_BYTES];
    match socket::receive(line, &mut name)?.length {
        KEYRING_NAME_BYTES => Ok(name),
        _ => Err(Errno::EPROTO),
    }
}

/// Joins the keyring; the first call creates it. Its owner is the effective user, who may only join it by name; its
/// possessors have all permissions. After ENOSYS (a kernel without keyrings) and EPERM (the daemon's parent forbids the
/// call) the process has no keyring of its own.
pub(crate) fn join(name: &[u8; KEYRING_NAME_BYTES]) -> Result<(), Errno> {
    let mut text = [0; TEXT_BYTES];
    text[..8].copy_from_slice(b"coracle-");
    for (digits, byte) in text[8..].as_chunks_mut::<2>().0.iter_mut().zip(name) {
        *digits =
            [byte >> 4, byte & 0xf].map(|digit| if digit < 10 { b'0' + digit } else { b'a' + digit - 10 });
    }
    let name = CStr::from_bytes_until_nul(&text).map_err(|_| Errno::EINVAL)?;
    match keys::join_session(name) {
        Err(Errno::ENOSYS | Errno::EPERM) => Ok(()),
        joined => keys::set_permissions(joined?, keys::POSSESSOR_ALL | keys::USER_SEARCH),
    }
}
