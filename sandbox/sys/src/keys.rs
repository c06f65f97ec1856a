//! Session keyrings (keyrings(7), keyctl(2)). All functions return ENOSYS on a kernel without CONFIG_KEYS.

use core::ffi::CStr;

use crate::arch::call;
use crate::{Errno, number};

/// A key's serial number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(i32);

/// All permissions for the possessor of a key (KEY_POS_ALL).
pub const POSSESSOR_ALL: u32 = 0x3f00_0000;
/// Permission for the owner to find the keyring by name and thus to join it (KEY_USR_SEARCH).
pub const USER_SEARCH: u32 = 0x0008_0000;

/// Joins the session keyring with this name, and creates it if there is none that the caller may search
/// (KEYCTL_JOIN_SESSION_KEYRING).
pub fn join_session(name: &CStr) -> Result<Key, Errno> {
    // SAFETY: `name` is a NUL-terminated string borrowed for the call.
    unsafe { call(number::KEYCTL, [1, name.as_ptr() as usize, 0, 0, 0]) }.map(|serial| Key(serial as i32))
}

/// Sets the permissions of `key` (KEYCTL_SETPERM).
pub fn set_permissions(key: Key, permissions: u32) -> Result<(), Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::KEYCTL, [5, key.0 as usize, permissions as usize, 0, 0]) }.map(drop)
}
