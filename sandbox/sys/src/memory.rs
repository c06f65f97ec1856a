//! Memory: memfds with seals, and mappings of this process.

use core::ffi::CStr;
use core::ops::{Deref, DerefMut};
use core::ptr::null_mut;

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::{Errno, Fd, FdRef};

/// Seals that make a mapping safe to read: the file can neither shrink nor change.
const SEALS_FOR_MAPPING: SealFlags = SealFlags::SHRINK.union(SealFlags::WRITE);

/// Creates a memfd that can be sealed (memfd_create, Linux 3.17).
pub fn memory_file(name: &CStr) -> Result<Fd, Errno> {
    Ok(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?.into())
}

/// Private memory of this process, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    start: *mut u8,
    length: usize,
}

pub(crate) const PAGE_BYTES: usize = 4096;
const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Mapping {
    /// Maps `length` zero bytes, rounded up to pages; a page uses memory once it is written.
    pub fn anonymous(length: usize) -> Result<Self, Errno> {
        let length = length.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or(Errno::ENOMEM)?;
        // SAFETY: a null address without MAP_FIXED lets the kernel choose a free range, so no memory in use is replaced.
        let start = unsafe { mmap_anonymous(null_mut(), length, READ_WRITE, MapFlags::PRIVATE) }?;
        Ok(Self { start: start.cast(), length })
    }

    /// Maps a whole sealed memfd. EPERM if the seals still allow it to shrink or change, because a slice of it would
    /// then be unsound.
    pub fn sealed(file: FdRef<'_>) -> Result<Self, Errno> {
        if !rustix::fs::fcntl_get_seals(file)?.contains(SEALS_FOR_MAPPING) {
            return Err(Errno::EPERM);
        }
        let length = rustix::fs::seek(file, SeekFrom::End(0))? as usize;
        if length == 0 {
            return Err(Errno::EINVAL);
        }
        // A private, writable mapping: writes through `DerefMut` stay in this process.
        // SAFETY: as in `anonymous`; the seals checked above keep the file's bytes and size as they are.
        let start = unsafe { mmap(null_mut(), length, READ_WRITE, MapFlags::PRIVATE, file, 0) }?;
        Ok(Self { start: start.cast(), length })
    }

    /// Makes children of this process see zeros instead of a copy (madvise, MADV_WIPEONFORK, Linux 4.14). For anonymous
    /// memory.
    pub fn wipe_in_children(&self) -> Result<(), Errno> {
        // SAFETY: the range is this value's own mapping; the call changes only what later children are given.
        Ok(unsafe { madvise(self.start.cast(), self.length, Advice::LinuxWipeOnFork) }?)
    }

    /// Returns the whole pages in `from..to` to the kernel: they then read as zero (anonymous memory) and use no memory
    /// until they are written (madvise, MADV_DONTNEED).
    pub fn give_back(&mut self, from: usize, to: usize) {
        let from = from.next_multiple_of(PAGE_BYTES);
        let to = to.min(self.length) / PAGE_BYTES * PAGE_BYTES;
        if from < to {
            // SAFETY: the range lies inside this mapping, which `&mut self` borrows alone; that the bytes become zero
            // is as if they had been written.
            let _ =
                unsafe { madvise(self.start.wrapping_add(from).cast(), to - from, Advice::LinuxDontNeed) };
        }
    }
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
        let _ = unsafe { munmap(self.start.cast(), self.length) };
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
        rustix::fs::fcntl_add_seals(&file, SEALS_FOR_MAPPING).unwrap();
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
