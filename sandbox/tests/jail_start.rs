//! Tests the child of `jail::start` between clone and exec. The child has a copy of the memory of a process with
//! threads, but only one thread, so a lock of the allocator that another thread held stays locked forever in it.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::File;
use std::os::fd::AsFd;

use coracle_sandbox::jail::{Ended, Start, start};

/// The exit code of a child that allocates or frees.
const ALLOCATES: u8 = 99;

/// The system's allocator, except that it ends the first process of a PID namespace.
struct NotInChildren;

fn check() {
    if std::process::id() == 1 {
        coracle_sys::process::exit(ALLOCATES);
    }
}

// SAFETY: both calls are the system's allocator's, with the same arguments.
unsafe impl GlobalAlloc for NotInChildren {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check();
        // SAFETY: the caller keeps this function's contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        check();
        // SAFETY: as above; `pointer` is from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: NotInChildren = NotInChildren;

/// Regression: the child created the text of an error that had not occurred. It hung, and with it its pull or import,
/// if a thread of the worker was allocating at that moment.
#[test]
fn the_child_neither_allocates_nor_frees_as_root() {
    let (program, directory) = (File::open("/bin/true").unwrap(), File::open("/").unwrap());
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    let arguments = [c"true".to_owned()];
    let start = start(&Start {
        program: program.as_fd(),
        arguments: &arguments,
        directory: directory.as_fd(),
        streams: [null.as_fd(), null.as_fd()],
        output: Some(null.as_fd()),
    });
    assert_eq!(start.expect("root, and PID namespaces").wait(), Ok(Ended::Code(0)));
}
