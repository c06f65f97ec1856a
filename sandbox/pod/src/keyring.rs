//! A session keyring for each container (keyrings(7)), shared by its main process and its execs. Without one, all would have
//! the keyring of whoever started the daemon, and read each other's keys.
//!
//! A keyring can only be joined by its name, by whoever has its owner's id and may search it. So the name is a secret: 128
//! random bits that the monitor draws for each container, keeps in memory which no child of its gets, and tells only the
//! process that joins.

use core::ffi::CStr;

use coracle_sys::{Errno, FdRef, keys, socket};

/// Random bytes of a name.
pub(crate) const KEYRING_NAME_BYTES: usize = 16;

/// `coracle-`, two digits a byte, NUL.
const TEXT_BYTES: usize = 8 + 2 * KEYRING_NAME_BYTES + 1;

/// Takes the name that the monitor sent before it cloned this process.
pub(crate) fn take_name(line: FdRef<'_>) -> Result<[u8; KEYRING_NAME_BYTES], Errno> {
    let mut name = [0; KEYRING_NAME_BYTES];
    match socket::receive(line, &mut name)?.length {
        KEYRING_NAME_BYTES => Ok(name),
        _ => Err(Errno::EPROTO),
    }
}

/// Joins the keyring, which the first one makes. Its owner is the effective user; what counts afterwards is possession, and
/// that user may only join it by its name. ENOSYS: there are no keys; EPERM: what started the daemon forbids the call. Both
/// leave the process without a keyring of its own.
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
