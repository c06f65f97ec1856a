//! Descriptors: owned and closed on drop, or borrowed. They can be converted to `OwnedFd` and `BorrowedFd` and back, and are
//! accepted by rustix. The monitor keeps its own types because `Option<OwnedFd>` has 8 bytes without std and `Option<Fd>`
//! has 4, and because its constants (the working directory, the standard streams) need no test for -1.

use core::marker::PhantomData;
use core::num::NonZeroU32;

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

/// An open descriptor of this process, closed on drop.
#[derive(Debug)]
pub struct Fd(
    /// The number plus 1: an `Option<Fd>` in a table of the monitor then has 4 bytes.
    NonZeroU32,
);

impl Fd {
    /// Takes ownership of a descriptor that a system call has just returned.
    pub(crate) fn from_call(result: usize) -> Self {
        Self::numbered(result as i32)
    }

    fn numbered(number: i32) -> Self {
        Self(NonZeroU32::MIN.saturating_add(number.unsigned_abs()))
    }

    /// Takes ownership of the descriptor with this number, which this process inherited at its exec.
    ///
    /// # Safety
    /// `number` is open, and no other value owns the descriptor now or later, because this value closes it (the I/O
    /// safety of `std::io`).
    pub unsafe fn inherited(number: i32) -> Self {
        Self::numbered(number)
    }

    /// Borrows the descriptor.
    pub fn borrow(&self) -> FdRef<'_> {
        FdRef(self.number(), PhantomData)
    }

    /// The descriptor's number, for messages and `/proc/self/fd`.
    pub fn number(&self) -> i32 {
        (self.0.get() - 1) as i32
    }

    /// Keeps the descriptor open for the lifetime of the process, for a descriptor that is inherited through exec.
    pub fn leak(self) -> FdRef<'static> {
        let number = self.number();
        core::mem::forget(self);
        FdRef(number, PhantomData)
    }
}

impl Drop for Fd {
    // Not inlined: it is at the end of nearly every function.
    #[inline(never)]
    fn drop(&mut self) {
        // SAFETY: close reads no memory, and the number is this value's alone. Linux frees it even when the call
        // reports an error, so there is nothing to repeat.
        let _ = unsafe { rustix::io::try_close(self.number()) };
    }
}

/// A borrowed descriptor.
#[derive(Clone, Copy, Debug)]
pub struct FdRef<'a>(pub(crate) i32, PhantomData<&'a Fd>);

impl FdRef<'static> {
    /// The working directory, for calls that take a directory (AT_FDCWD).
    pub const WORKING_DIRECTORY: Self = Self(-100, PhantomData);

    /// Standard input, output and error. Every coracle process is started with them and never closes them.
    pub const STANDARD_STREAMS: [Self; 3] =
        [Self(0, PhantomData), Self(1, PhantomData), Self(2, PhantomData)];

    /// Borrows a descriptor by its number for the lifetime of the process.
    ///
    /// # Safety
    /// `number` is open and is neither closed nor replaced while the result is used.
    pub const unsafe fn standing(number: i32) -> Self {
        Self(number, PhantomData)
    }
}

impl FdRef<'_> {
    /// The descriptor's number.
    pub fn number(self) -> i32 {
        self.0
    }

    /// The descriptor as an argument of a system call.
    pub(crate) fn argument(self) -> usize {
        self.0 as isize as usize
    }
}

impl From<OwnedFd> for Fd {
    fn from(fd: OwnedFd) -> Self {
        Self::numbered(fd.into_raw_fd())
    }
}

impl From<Fd> for OwnedFd {
    fn from(fd: Fd) -> Self {
        // SAFETY: `leak` releases the only owner of an open descriptor, which the new value becomes.
        unsafe { Self::from_raw_fd(fd.leak().number()) }
    }
}

impl AsFd for FdRef<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `BorrowedFd` is documented to be a transparent i32 that is not -1. The number is one that the kernel
        // returned, or the constant for the working directory, and is open for the lifetime of `self`. `borrow_raw` would
        // be the same, but tests for -1 in each system call: 1.4 KB of the monitor.
        unsafe { core::mem::transmute::<i32, BorrowedFd<'_>>(self.0) }
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: as above; `self` keeps the descriptor open.
        unsafe { core::mem::transmute::<i32, BorrowedFd<'_>>(self.number()) }
    }
}

impl<'a> From<BorrowedFd<'a>> for FdRef<'a> {
    fn from(fd: BorrowedFd<'a>) -> Self {
        Self(fd.as_raw_fd(), PhantomData)
    }
}
