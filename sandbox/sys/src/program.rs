//! The running program's own file in memory. An idle daemon uses almost none of its code and constants, whose pages
//! the kernel can read from the file again.

use core::ffi::c_void;

use rustix::mm::{Advice, madvise};

use crate::memory::PAGE_BYTES;

const PT_LOAD: u32 = 1;
const PF_W: u32 = 2;

/// The header of a 64-bit ELF file (elf(5), `Elf64_Ehdr`).
#[repr(C)]
struct Header {
    identification: [u8; 16],
    kind: u16,
    machine: u16,
    version: u32,
    entry: u64,
    segments_offset: u64,
    sections_offset: u64,
    flags: u32,
    header_bytes: u16,
    segment_bytes: u16,
    segments: u16,
    section_bytes: u16,
    sections: u16,
    names_section: u16,
}

/// One program header of a 64-bit ELF file (elf(5), `Elf64_Phdr`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Segment {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    physical_address: u64,
    file_bytes: u64,
    memory_bytes: u64,
    alignment: u64,
}

/// Drops the mapped pages of the program's code and constants (madvise, MADV_DONTNEED); pages that are used again are
/// read back from the file. Segments that can be written are kept. Has no effect in a program whose ELF header is not
/// mapped, and in 32-bit programs.
pub fn forget_constant_pages() {
    for (start, bytes) in constant_ranges() {
        // SAFETY: the range belongs to a segment of the program's file that is mapped without a right to write, and
        // was not changed before, because it has no relocations: the kernel reads the same bytes again.
        let _ = unsafe { madvise(start as *mut c_void, bytes, Advice::LinuxDontNeed) };
    }
}

/// The segments of this program that cannot be written: first address and length in bytes, in whole pages.
fn constant_ranges() -> impl Iterator<Item = (usize, usize)> {
    unsafe extern "C" {
        static __executable_start: Header;
    }
    let header = &raw const __executable_start;
    // SAFETY: the linker puts this symbol at the start of the first segment (ld(1), "PROVIDE"), whose page is mapped.
    let (identification, offset, segment_bytes, count) = unsafe {
        let Header { identification, segments_offset, segment_bytes, segments, .. } = &*header;
        (*identification, *segments_offset as usize, usize::from(*segment_bytes), usize::from(*segments))
    };
    let is_readable = header.addr().is_multiple_of(PAGE_BYTES)
        && identification[..5] == [0x7f, b'E', b'L', b'F', 2]
        && segment_bytes == size_of::<Segment>()
        && offset + count * segment_bytes <= PAGE_BYTES;
    let count = if is_readable { count } else { 0 };
    let segments = header.cast::<u8>().wrapping_add(offset).cast::<Segment>();
    let loaded = (0..count).map(move |index| {
        // SAFETY: the table of `count` segments lies in the mapped page of the header, eight-byte aligned as in the
        // file.
        unsafe { segments.wrapping_add(index).read_unaligned() }
    });
    let loaded = loaded.filter(|segment| segment.kind == PT_LOAD);
    let mut first = None;
    loaded.filter_map(move |segment| {
        let address = segment.address as usize / PAGE_BYTES * PAGE_BYTES;
        let start = header.addr() + (address - *first.get_or_insert(address));
        let end = (segment.address as usize + segment.memory_bytes as usize) / PAGE_BYTES * PAGE_BYTES;
        (segment.flags & PF_W == 0 && end > address).then_some((start, end - address))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    static CONSTANT: [u8; 3 * PAGE_BYTES] = [7; 3 * PAGE_BYTES];

    /// Whether one of the ranges contains the page of an address.
    fn contains(address: usize) -> bool {
        constant_ranges()
            .any(|(start, bytes)| (start..start + bytes).contains(&(address / PAGE_BYTES * PAGE_BYTES)))
    }

    #[test]
    fn code_and_constants_are_dropped_and_read_back() {
        static mut VARIABLE: [u8; 2 * PAGE_BYTES] = [8; 2 * PAGE_BYTES];
        assert!(contains(forget_constant_pages as *const () as usize));
        assert!(contains(CONSTANT[PAGE_BYTES..].as_ptr().addr()));
        assert!(!contains((&raw const VARIABLE).addr() + PAGE_BYTES));
        forget_constant_pages();
        assert!(CONSTANT.iter().all(|byte| *byte == 7));
    }
}
