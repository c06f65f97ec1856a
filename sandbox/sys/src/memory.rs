//! Memory: memfds with seals, and mappings of this process.

use core::ffi::CStr;
use core::ops::{Deref, DerefMut};

use crate::arch::{MADV_DONTNEED, call};
use crate::{Errno, Fd, FdRef, number};

/// All seals of a memfd: no further seals, shrinking, growing or writing.
pub const SEALS_ALL: u32 = 0xf;
/// Seals that make a mapping safe to read: the file can neither shrink nor change.
const SEALS_FOR_MAPPING: u32 = 0x2 | 0x8;

/// Creates a memfd that can be sealed (memfd_create, Linux 3.17).
pub fn memory_file(name: &CStr) -> Result<Fd, Errno> {
    const CLOEXEC_AND_SEALS: usize = 3;
    // SAFETY: `name` is a NUL-terminated string borrowed for the call.
    unsafe { call(number::MEMFD_CREATE, [name.as_ptr() as usize, CLOEXEC_AND_SEALS]) }.map(Fd::from_call)
}

/// Creates a memfd that can be sealed, and executed regardless of `vm.memfd_noexec` (MFD_EXEC, **Linux 6.3**; EINVAL
/// before, where every memfd is executable).
pub fn executable_memory_file(name: &CStr) -> Result<Fd, Errno> {
    const CLOEXEC_AND_SEALS_AND_EXEC: usize = 3 | 0x10;
    // SAFETY: `name` is a NUL-terminated string borrowed for the call.
    unsafe { call(number::MEMFD_CREATE, [name.as_ptr() as usize, CLOEXEC_AND_SEALS_AND_EXEC]) }
        .map(Fd::from_call)
}

/// Adds seals to a memfd (fcntl F_ADD_SEALS).
pub fn add_seals(file: FdRef<'_>, seals: u32) -> Result<(), Errno> {
    // SAFETY: F_ADD_SEALS takes a number.
    unsafe { call(number::FCNTL, [file.argument(), 1033, seals as usize]) }.map(drop)
}

/// Returns the seals of a memfd (fcntl F_GET_SEALS).
pub fn seals(file: FdRef<'_>) -> Result<u32, Errno> {
    // SAFETY: F_GET_SEALS takes nothing.
    unsafe { call(number::FCNTL, [file.argument(), 1034]) }.map(|seals| seals as u32)
}

/// Private memory of this process, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    start: *mut u8,
    length: usize,
}

pub(crate) const PAGE_BYTES: usize = 4096;
const PROT_READ: usize = 1;
const PROT_WRITE: usize = 2;
const MAP_PRIVATE: usize = 2;
const MAP_ANONYMOUS: usize = 0x20;

impl Mapping {
    /// Maps `length` zero bytes, rounded up to pages; a page uses memory once it is written.
    pub fn anonymous(length: usize) -> Result<Self, Errno> {
        let length = length.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or(Errno::ENOMEM)?;
        let arguments = [0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, usize::MAX, 0];
        // SAFETY: address 0 without MAP_FIXED lets the kernel choose a free range, so no memory in use is replaced.
        let start = unsafe { call(number::MMAP, arguments) }?;
        Ok(Self { start: start as *mut u8, length })
    }

    /// Maps a whole sealed memfd. EPERM if the seals still allow it to shrink or change, because a slice of it would
    /// then be unsound.
    pub fn sealed(file: FdRef<'_>) -> Result<Self, Errno> {
        if seals(file)? & SEALS_FOR_MAPPING != SEALS_FOR_MAPPING {
            return Err(Errno::EPERM);
        }
        let length = size(file)?;
        if length == 0 {
            return Err(Errno::EINVAL);
        }
        // A private, writable mapping: writes through `DerefMut` stay in this process.
        let arguments = [0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.argument(), 0];
        // SAFETY: as in `anonymous`; the seals checked above keep the file's bytes and size as they are.
        let start = unsafe { call(number::MMAP, arguments) }?;
        Ok(Self { start: start as *mut u8, length })
    }

    /// Makes children of this process see zeros instead of a copy (madvise, MADV_WIPEONFORK, Linux 4.14). For anonymous
    /// memory.
    pub fn wipe_in_children(&self) -> Result<(), Errno> {
        const MADV_WIPEONFORK: usize = 18;
        // SAFETY: the range is this value's own mapping; the call changes only what later children are given.
        unsafe { call(number::MADVISE, [self.start as usize, self.length, MADV_WIPEONFORK]) }.map(drop)
    }

    /// Returns the whole pages in `from..to` to the kernel: they then read as zero (anonymous memory) and use no memory
    /// until they are written (madvise, MADV_DONTNEED).
    pub fn give_back(&mut self, from: usize, to: usize) {
        let from = from.next_multiple_of(PAGE_BYTES);
        let to = to.min(self.length) / PAGE_BYTES * PAGE_BYTES;
        if from < to {
            // SAFETY: the range lies inside this mapping, which `&mut self` borrows alone; that the bytes become zero
            // is as if they had been written.
            let _ = unsafe { call(number::MADVISE, [self.start as usize + from, to - from, MADV_DONTNEED]) };
        }
    }
}

fn size(file: FdRef<'_>) -> Result<usize, Errno> {
    const SEEK_END: usize = 2;
    // SAFETY: the call reads no memory; the offset of these files is not used.
    unsafe { call(number::LSEEK, [file.argument(), 0, SEEK_END]) }
}

impl Deref for Mapping {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start..start + length` is mapped readable until drop, initialised by the kernel, and changed only
        // through `&mut self`: it is private, and of a file only when sealed.
        unsafe { core::slice::from_raw_parts(self.start, self.length) }
    }
}

impl DerefMut for Mapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, mapped writable, and borrowed alone by `&mut self`.
        unsafe { core::slice::from_raw_parts_mut(self.start, self.length) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, and no slice of it outlives the value.
        let _ = unsafe { call(number::MUNMAP, [self.start as usize, self.length]) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs;

    #[test]
    fn a_memfd_is_mapped_only_once_it_is_sealed() {
        let file = memory_file(c"test").unwrap();
        fs::write(file.borrow(), b"hello").unwrap();
        assert_eq!(Mapping::sealed(file.borrow()).unwrap_err(), Errno::EPERM);
        add_seals(file.borrow(), SEALS_ALL).unwrap();
        assert_eq!(&Mapping::sealed(file.borrow()).unwrap()[..], b"hello");
        assert_eq!(fs::write(file.borrow(), b"x"), Err(Errno::EPERM));
    }

    #[test]
    fn memory_given_back_reads_as_zero() {
        let mut memory = Mapping::anonymous(3 * PAGE_BYTES).unwrap();
        memory.fill(1);
        memory.give_back(1, 2 * PAGE_BYTES);
        assert_eq!((memory[0], memory[PAGE_BYTES], memory[2 * PAGE_BYTES]), (1, 0, 1));
    }
}
