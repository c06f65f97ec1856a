//! Encodes a launch record and checks the limits of the format.

use std::ffi::CString;

use coracle_wire::{Block, Op, RECORD_VERSION, RecordHeader};

use crate::Error;

/// Maximum length of a record in bytes. The kernel accepts at most 2 MiB of arguments and environment; the rest is
/// paths.
const RECORD_BYTES_MAX: usize = 4 << 20;

/// Number of slots in the child's table of detached trees (`coracle_wire::Op::OpenTree`).
const SLOTS_MAX: u16 = 256;

/// The launch record of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchRecord {
    /// The encoded operations.
    pub bytes: Vec<u8>,
    /// Whether an operation needs the host's mount namespace: for volumes with mount propagation, namespaces by path, and
    /// hooks.
    pub needs_host: bool,
}

/// A record under construction.
pub(super) struct Record {
    /// The frame version of the monitor that will execute it.
    version: u16,
    bytes: Vec<u8>,
    operations: u16,
    slots: u16,
    has_all_mounts: bool,
    needs_host: bool,
}

impl Record {
    pub(super) fn new(version: u16) -> Self {
        let header = RecordHeader { version: RECORD_VERSION };
        // Encoding the header, one integer, into a growing vector cannot fail.
        let bytes = postcard::to_allocvec(&header).unwrap_or_default();
        Self { version, bytes, operations: 0, slots: 0, has_all_mounts: false, needs_host: false }
    }

    /// Whether the monitor supports the operation.
    pub(super) fn supports(&self, op: &Op<'_>) -> bool {
        op.since() <= self.version
    }

    /// Appends the operation, unless the monitor does not support it.
    pub(super) fn push(&mut self, op: &Op<'_>) -> Result<(), Error> {
        if self.has_all_mounts && mounts(op) {
            return Err(Error::invalid("launch record", format!("{op:?} would come after the covers")));
        }
        if !self.supports(op) {
            return Ok(());
        }
        self.needs_host |= matches!(op, Op::OpenTree { from_host: true, .. } | Op::JoinNamespace { .. });
        // As records are encoded, so that the code for it is in the program once.
        let bytes =
            postcard::to_allocvec(op).map_err(|error| Error::invalid("launch record", error.to_string()))?;
        self.bytes.extend_from_slice(&bytes);
        if self.bytes.len() > RECORD_BYTES_MAX {
            return Err(Error::invalid("launch record", format!("is longer than {RECORD_BYTES_MAX} bytes")));
        }
        let operations = self.operations.checked_add(1);
        self.operations =
            operations.ok_or_else(|| Error::invalid("launch record", "has too many operations"))?;
        Ok(())
    }

    /// Refuses further mount operations from now on, because they could hide or uncover masked paths.
    pub(super) fn seal_mounts(&mut self) {
        self.has_all_mounts = true;
    }

    /// Allocates an unused slot.
    pub(super) fn slot(&mut self) -> Result<u16, Error> {
        if self.slots == SLOTS_MAX {
            return Err(Error::invalid(
                "mounts",
                format!("with the masked paths and the default mounts they are more than {SLOTS_MAX}"),
            ));
        }
        self.slots += 1;
        Ok(self.slots - 1)
    }

    pub(super) fn finish(self) -> LaunchRecord {
        LaunchRecord { bytes: self.bytes, needs_host: self.needs_host }
    }
}

/// Whether the operation attaches a mount in the container's root, or creates a detached tree.
fn mounts(op: &Op<'_>) -> bool {
    matches!(
        op,
        Op::Attach { .. }
            | Op::BindSelf { .. }
            | Op::Filesystem { .. }
            | Op::Mask { .. }
            | Op::Node { .. }
            | Op::Overlay { .. }
            | Op::ReadOnly { .. }
            | Op::Symlink { .. }
            | Op::Terminal
            | Op::Tmpfs { .. }
    )
}

/// A sequence of strings for a [`Block`].
#[derive(Default)]
pub(super) struct Strings {
    count: u32,
    bytes: Vec<u8>,
}

impl Strings {
    pub(super) fn of<T: AsRef<[u8]>>(field: &str, all: impl IntoIterator<Item = T>) -> Result<Self, Error> {
        let mut strings = Self::default();
        for one in all {
            let text = c_string(field, one.as_ref())?;
            strings.bytes.extend_from_slice(text.as_bytes_with_nul());
            strings.count += 1;
            // This also prevents an overflow of `count`.
            if strings.bytes.len() > RECORD_BYTES_MAX {
                return Err(Error::invalid(field, format!("is longer than {RECORD_BYTES_MAX} bytes")));
            }
        }
        Ok(strings)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn block(&self) -> Block<'_> {
        Block { count: self.count, bytes: &self.bytes }
    }
}

pub(super) fn c_string(field: &str, bytes: &[u8]) -> Result<CString, Error> {
    CString::new(bytes).map_err(|_| Error::invalid(field, "contains a NUL byte"))
}
