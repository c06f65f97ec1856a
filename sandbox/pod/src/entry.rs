//! The monitor's entry point. The monitor has no libc, so this file contains the first instruction, the memory
//! functions that the compiler calls, and the panic handler. All other code is in the library.
#![no_std]
#![no_main]
#![expect(unsafe_code, reason = "the entry and the memory functions are below Rust")]

use core::arch::{asm, global_asm};

use coracle_pod::{Inherited, Table};
use coracle_sys::stack::FirstStack;
use coracle_sys::{Fd, FdRef, fs};

// rsp is 16-byte aligned here, as the ABI requires before a call; rbp 0 ends a backtrace.
#[cfg(target_arch = "x86_64")]
global_asm!(".globl coracle_pod_start", "coracle_pod_start:", "xor ebp, ebp", "call {main}", "ud2", main = sym main);
#[cfg(target_arch = "aarch64")]
global_asm!(".globl coracle_pod_start", "coracle_pod_start:", "mov x29, xzr", "bl {main}", "brk 1", main = sym main);
// sp is 8-byte aligned here, as the ABI requires; fp and lr 0 end a backtrace.
#[cfg(target_arch = "arm")]
global_asm!(".globl coracle_pod_start", "coracle_pod_start:", "mov fp, #0", "mov lr, #0", "bl {main}", "udf #0", main = sym main);
// sp is 16-byte aligned here. The linker may replace addresses by offsets from gp, which is set without such a replacement.
#[cfg(target_arch = "riscv64")]
global_asm!(".globl coracle_pod_start", "coracle_pod_start:", ".option push", ".option norelax", "la gp, __global_pointer$",
    ".option pop", "mv s0, zero", "mv ra, zero", "call {main}", "unimp", main = sym main);

extern "C" fn main() -> ! {
    static mut TABLE: Table = Table::new();
    let table = &raw mut TABLE;
    // SAFETY: this is the only place that names `TABLE`, `main` is entered once and never returns, and there are no
    // other threads: the reference is the only one.
    let table = unsafe { &mut *table };
    // SAFETY: the daemon starts this program with these open (`sandbox::monitor`), and nothing else here takes them.
    let [listener, state, setup] = [3, 4, 5].map(|number| unsafe { Fd::inherited(number) });
    // SAFETY: only asks whether the number is open; nothing has been opened since the start that could be there.
    let has_user = fs::stat(unsafe { FdRef::standing(USER_NAMESPACE) }).is_ok();
    // SAFETY: as for the others; it is open, as was just seen.
    let user = has_user.then(|| unsafe { Fd::inherited(USER_NAMESPACE) });
    // SAFETY: the kernel entered `main` on the first stack, and there are no other threads.
    let stack = unsafe { FirstStack::claim() };
    coracle_pod::run(table, &stack, Inherited { listener, state, setup, user })
}

/// Number of the descriptor of the pod's user namespace, if the pod has one. Descriptors 7 and 8 are closed by the
/// exec.
const USER_NAMESPACE: i32 = 6;

/// Ends the monitor after a panic, which is a bug; the parent is notified only by the exit code.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    coracle_sys::process::exit(101)
}

/// memcpy(3): the compiler calls it for large copies.
///
/// # Safety
/// Both ranges are valid for `count` bytes and do not overlap.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's ranges; `rep movsb` goes up from both starts, and the ABI keeps the direction flag clear.
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller's ranges, a byte at a time from the start; not a Rust loop, which would become this call.
    unsafe {
        asm!("cbz {n}, 2f", "1: ldrb {b:w}, [{f}], #1", "strb {b:w}, [{t}], #1", "subs {n}, {n}, #1", "b.ne 1b", "2:",
            n = inout(reg) count => _, f = inout(reg) from => _, t = inout(reg) to => _, b = out(reg) _,
            options(nostack));
    }
    #[cfg(target_arch = "arm")]
    // SAFETY: the caller's ranges, a byte at a time from the start; not a Rust loop, which would become this call.
    unsafe {
        asm!("cmp {n}, #0", "beq 2f", "1: ldrb {b}, [{f}], #1", "strb {b}, [{t}], #1", "subs {n}, {n}, #1", "bne 1b", "2:",
            n = inout(reg) count => _, f = inout(reg) from => _, t = inout(reg) to => _, b = out(reg) _,
            options(nostack));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: the caller's ranges, a byte at a time from the start; not a Rust loop, which would become this call.
    unsafe {
        asm!("beqz {n}, 3f", "2: lb {b}, 0({f})", "sb {b}, 0({t})", "addi {f}, {f}, 1", "addi {t}, {t}, 1",
            "addi {n}, {n}, -1", "bnez {n}, 2b", "3:", n = inout(reg) count => _, f = inout(reg) from => _,
            t = inout(reg) to => _, b = out(reg) _, options(nostack));
    }
    to
}

/// memmove(3): the compiler calls it for copies between ranges that may overlap.
///
/// # Safety
/// Both ranges are valid for `count` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= count {
        // SAFETY: the caller's ranges; `to` does not start inside `from`'s, so going up never reads what was written.
        return unsafe { memcpy(to, from, count) };
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's ranges, from the last byte down (`count` is not 0 here); the flag is cleared again.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") count => _,
            inout("rdi") to.wrapping_add(count).wrapping_sub(1) => _,
            inout("rsi") from.wrapping_add(count).wrapping_sub(1) => _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller's ranges, from the last byte down (`count` is not 0 here).
    unsafe {
        asm!("1: ldrb {b:w}, [{f}, #-1]!", "strb {b:w}, [{t}, #-1]!", "subs {n}, {n}, #1", "b.ne 1b",
            n = inout(reg) count => _, f = inout(reg) from.wrapping_add(count) => _,
            t = inout(reg) to.wrapping_add(count) => _, b = out(reg) _, options(nostack));
    }
    #[cfg(target_arch = "arm")]
    // SAFETY: the caller's ranges, from the last byte down (`count` is not 0 here).
    unsafe {
        asm!("1: ldrb {b}, [{f}, #-1]!", "strb {b}, [{t}, #-1]!", "subs {n}, {n}, #1", "bne 1b",
            n = inout(reg) count => _, f = inout(reg) from.wrapping_add(count) => _,
            t = inout(reg) to.wrapping_add(count) => _, b = out(reg) _, options(nostack));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: the caller's ranges, from the last byte down (`count` is not 0 here).
    unsafe {
        asm!("2: addi {f}, {f}, -1", "addi {t}, {t}, -1", "lb {b}, 0({f})", "sb {b}, 0({t})", "addi {n}, {n}, -1",
            "bnez {n}, 2b", n = inout(reg) count => _, f = inout(reg) from.wrapping_add(count) => _,
            t = inout(reg) to.wrapping_add(count) => _, b = out(reg) _, options(nostack));
    }
    to
}

/// memset(3): the compiler calls it to fill memory.
///
/// # Safety
/// The range is valid for `count` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, count: usize) -> *mut u8 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's range, upwards.
    unsafe {
        asm!("rep stosb", inout("rcx") count => _, inout("rdi") to => _, in("al") value as u8, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller's range, upwards.
    unsafe {
        asm!("cbz {n}, 2f", "1: strb {b:w}, [{t}], #1", "subs {n}, {n}, #1", "b.ne 1b", "2:",
            n = inout(reg) count => _, t = inout(reg) to => _, b = in(reg) value, options(nostack));
    }
    #[cfg(target_arch = "arm")]
    // SAFETY: the caller's range, upwards.
    unsafe {
        asm!("cmp {n}, #0", "beq 2f", "1: strb {b}, [{t}], #1", "subs {n}, {n}, #1", "bne 1b", "2:",
            n = inout(reg) count => _, t = inout(reg) to => _, b = in(reg) value, options(nostack));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: the caller's range, upwards.
    unsafe {
        asm!("beqz {n}, 3f", "2: sb {b}, 0({t})", "addi {t}, {t}, 1", "addi {n}, {n}, -1", "bnez {n}, 2b", "3:",
            n = inout(reg) count => _, t = inout(reg) to => _, b = in(reg) value, options(nostack));
    }
    to
}

/// memcmp(3): the compiler calls it for comparisons.
///
/// # Safety
/// Both ranges are valid for `count` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    for index in 0..count {
        // SAFETY: `index` is inside the caller's range. Volatile, so that the loop does not become this very call.
        let left = unsafe { left.wrapping_add(index).read_volatile() };
        // SAFETY: as above.
        let right = unsafe { right.wrapping_add(index).read_volatile() };
        if left != right {
            return i32::from(left) - i32::from(right);
        }
    }
    0
}

/// bcmp(3): the compiler calls it for comparisons for equality.
///
/// # Safety
/// Both ranges are valid for `count` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    // SAFETY: the caller's promise is the same.
    unsafe { memcmp(left, right, count) }
}
