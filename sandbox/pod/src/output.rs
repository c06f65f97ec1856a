//! Handles output of containers: reads streams into one shared buffer and passes the lines to the log. Each event
//! causes one read, so that no stream starves another. Memory that output has used is returned to the kernel.

use coracle_sys::memory::Mapping;
use coracle_sys::{Errno, Fd, FdRef, fs};
use coracle_wire::CONTAINERS_MAX;

use crate::log::{self, LINE_BYTES_MAX, Stream, Tag};
use crate::serve::{Monitor, unwatch};
use crate::table::{AllAttached, Attached, Container, STREAMS, Slot};

/// Size in bytes of the buffer for lines that are written together.
const BATCH_BYTES: usize = 8 << 10;
/// Size in bytes of the buffers that all streams share: one for a read and one for its lines.
const SHARED_BYTES: usize = LINE_BYTES_MAX + BATCH_BYTES;
/// Size in bytes of all buffers: the shared ones, then a line buffer for each stream of each container.
pub(crate) const MEMORY_BYTES: usize = SHARED_BYTES + LINE_BYTES_MAX * CONTAINERS_MAX * STREAMS;

/// Maximum number of reads when a container ends. A pipe contains at most 1 MiB (fs.pipe-max-size, unless root raises
/// it); further output is from a process that outlives the container.
const DRAIN_READS_MAX: usize = (1 << 20) / LINE_BYTES_MAX;

/// Number of buffered bytes above which the pages of a line buffer are returned to the kernel as soon as it is empty.
const LARGE_BYTES: usize = 4096;

/// Result of a read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadOutcome {
    Some,
    Nothing,
    End,
}

impl Monitor<'_> {
    /// Reads once from a stream.
    pub(crate) fn read_output(&mut self, slot: Slot, stream: usize) {
        let mut containers = self.table.containers.iter_mut();
        if let Some(container) = containers.find(|container| container.slot == slot) {
            self.is_memory_used = true;
            let mut sinks = Sinks { memory: &mut self.memory, attached: &mut self.table.attached };
            read_stream(self.epoll, &mut sinks, container, stream);
        }
    }

    /// Writes the remaining output of an ended container to the log: the content of its pipes, and an incomplete line.
    pub(crate) fn drain(&mut self, index: usize) {
        self.is_memory_used = true;
        let Some(container) = self.table.containers.get_mut(index) else { return };
        let mut sinks = Sinks { memory: &mut self.memory, attached: &mut self.table.attached };
        for stream in 0..STREAMS {
            for _ in 0..DRAIN_READS_MAX {
                if read_stream(self.epoll, &mut sinks, container, stream) != ReadOutcome::Some {
                    break;
                }
            }
            flush(sinks.memory, container, stream);
        }
        let slot = container.slot;
        self.table.attached.retain(|attached| attached.slot != slot);
    }

    /// Returns the shared buffer, empty line buffers and the page for PIDs to the kernel; called after a time without
    /// events.
    pub(crate) fn give_back_memory(&mut self) {
        self.is_memory_used = false;
        if let Some(spare) = self.table.spare.get_mut() {
            spare.give_back();
        }
        self.memory.give_back(0, SHARED_BYTES);
        for container in &mut self.table.containers {
            for (stream, output) in container.outputs.iter_mut().enumerate() {
                if let Some(output) = output.as_mut().filter(|output| output.held == 0 && output.held_max > 0)
                {
                    output.held_max = 0;
                    let (from, to) = range(container.slot, stream);
                    self.memory.give_back(from, to);
                }
            }
        }
    }
}

/// The range of a stream's line buffer in the monitor's memory.
fn range(slot: Slot, stream: usize) -> (usize, usize) {
    let index = usize::from(slot) * STREAMS + stream;
    let from = SHARED_BYTES + index * LINE_BYTES_MAX;
    (from, from + LINE_BYTES_MAX)
}

fn name(stream: usize) -> Stream {
    if stream == 0 { Stream::Stdout } else { Stream::Stderr }
}

/// Destinations of output: line buffers for the log, and attached clients.
struct Sinks<'m> {
    memory: &'m mut Mapping,
    attached: &'m mut AllAttached,
}

/// Copies output to attached clients. A client whose pipe has no space for the whole output is disconnected: the client
/// would not notice a gap, and waiting would block the container.
fn copy(attached: &mut AllAttached, slot: Slot, stream: usize, bytes: &[u8]) {
    attached.retain(|one| {
        let Some(pipe) = one.pipes[stream].as_ref().filter(|_| one.slot == slot) else { return true };
        fs::write(pipe.borrow(), bytes) == Ok(bytes.len())
    });
}

/// Closes the pipes of attached clients at the end of a stream.
fn end_copies(attached: &mut [Attached], slot: Slot, stream: usize) {
    for one in attached.iter_mut().filter(|one| one.slot == slot) {
        one.pipes[stream] = None;
    }
}

fn read_stream(
    epoll: FdRef<'_>,
    sinks: &mut Sinks<'_>,
    container: &mut Container,
    stream: usize,
) -> ReadOutcome {
    let Some(output) = &mut container.outputs[stream] else { return ReadOutcome::End };
    let memory = &mut *sinks.memory;
    let (shared, buffers) = memory.split_at_mut(SHARED_BYTES);
    let (scratch, batch) = shared.split_at_mut(LINE_BYTES_MAX);
    let length = match fs::read(output.file.borrow(), scratch) {
        Err(Errno::EAGAIN | Errno::EINTR) => return ReadOutcome::Nothing,
        // A closed terminal gives EIO; other errors are permanent too.
        Ok(0) | Err(_) => {
            flush(memory, container, stream);
            if let Some(output) = container.outputs[stream].take() {
                unwatch(epoll, &output.file);
                let (from, to) = range(container.slot, stream);
                memory.give_back(from, to);
            }
            end_copies(sinks.attached, container.slot, stream);
            return ReadOutcome::End;
        }
        Ok(length) => length,
    };
    copy(sinks.attached, container.slot, stream, &scratch[..length]);
    let Some(log) = container.log.as_ref().map(Fd::borrow) else { return ReadOutcome::Some };
    let (from, to) = range(container.slot, stream);
    let buffer = &mut buffers[from - SHARED_BYTES..to - SHARED_BYTES];
    let mut lines = container.writer.batch(log, name(stream), batch);
    log::split(buffer, &mut output.held, &scratch[..length], |tag, old, new| lines.add(tag, old, new));
    lines.write();
    output.held_max = output.held_max.max(output.held);
    if output.held == 0 && output.held_max >= LARGE_BYTES {
        output.held_max = 0;
        memory.give_back(from, to);
    }
    ReadOutcome::Some
}

/// Writes an incomplete line with the tag `P`.
fn flush(memory: &mut Mapping, container: &mut Container, stream: usize) {
    let Some(output) = container.outputs[stream].as_mut().filter(|output| output.held > 0) else { return };
    let log: Option<FdRef<'_>> = container.log.as_ref().map(Fd::borrow);
    let (from, _) = range(container.slot, stream);
    if let Some(log) = log {
        let (shared, buffers) = memory.split_at_mut(SHARED_BYTES);
        let line = &buffers[from - SHARED_BYTES..][..output.held];
        let mut lines = container.writer.batch(log, name(stream), &mut shared[LINE_BYTES_MAX..]);
        lines.add(Tag::Partial, line, b"");
        lines.write();
    }
    output.held = 0;
}
