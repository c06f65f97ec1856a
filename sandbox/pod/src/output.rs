//! Output of containers: reads streams into one shared scratch buffer and passes the lines on to the log. Each event
//! is one read, so that no stream starves another. Memory that output took is given back.

use coracle_sys::{Errno, Fd, FdRef, fs};

use crate::log::{self, LINE_BYTES_MAX, Stream, Tag};
use crate::serve::{Monitor, unwatch};
use crate::table::{AllAttached, Attached, Container, STREAMS, Slot};

/// A pipe cannot hold more (fs.pipe-max-size, 1 MiB unless root raises it): what is read beyond it at a container's
/// end was written after it, by a process that outlives it.
const DRAIN_READS_MAX: usize = (1 << 20) / LINE_BYTES_MAX;

/// From this many held bytes on a line buffer's pages are given back as soon as it is empty.
const LARGE_BYTES: usize = 4096;

/// What a read brought.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadOutcome {
    Some,
    Nothing,
    End,
}

impl Monitor<'_> {
    /// One read of a stream.
    pub(crate) fn read_output(&mut self, slot: Slot, stream: usize) {
        let mut containers = self.table.containers.iter_mut();
        if let Some(container) = containers.find(|container| container.slot == slot) {
            self.is_memory_used = true;
            let mut sinks = Sinks { memory: &mut self.memory, attached: &mut self.table.attached };
            read_stream(self.epoll, &mut sinks, container, stream);
        }
    }

    /// At a container's end: everything that is still in its pipes, and an unfinished line, go to the log.
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

    /// After a quiet while: scratch and empty line buffers are given back.
    pub(crate) fn give_back_memory(&mut self) {
        self.is_memory_used = false;
        self.memory.give_back(0, LINE_BYTES_MAX);
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

/// Where a stream's line buffer is.
fn range(slot: Slot, stream: usize) -> (usize, usize) {
    let index = 1 + usize::from(slot) * STREAMS + stream;
    (index * LINE_BYTES_MAX, (index + 1) * LINE_BYTES_MAX)
}

fn name(stream: usize) -> Stream {
    if stream == 0 { Stream::Stdout } else { Stream::Stderr }
}

/// Where output goes: line buffers on the way to the log, and whoever is attached.
struct Sinks<'m> {
    memory: &'m mut fs::Mapping,
    attached: &'m mut AllAttached,
}

/// Passes a copy on. Who has no room for all of it is let go of: a gap would not be noticed, and waiting would hold up
/// the container.
fn copy(attached: &mut AllAttached, slot: Slot, stream: usize, bytes: &[u8]) {
    attached.retain(|one| {
        let Some(pipe) = one.pipes[stream].as_ref().filter(|_| one.slot == slot) else { return true };
        fs::write(pipe.borrow(), bytes) == Ok(bytes.len())
    });
}

/// The stream is over for those attached, too.
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
    let (scratch, buffers) = memory.split_at_mut(LINE_BYTES_MAX);
    let length = match fs::read(output.file.borrow(), scratch) {
        Err(Errno::EAGAIN | Errno::EINTR) => return ReadOutcome::Nothing,
        // A terminal's end is EIO; whatever else a read says, it will not get better.
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
    let buffer = &mut buffers[from - LINE_BYTES_MAX..to - LINE_BYTES_MAX];
    let writer = &mut container.writer;
    let time_ns = writer.stamp();
    log::split(buffer, &mut output.held, &scratch[..length], |tag, old, new| {
        writer.write(log, time_ns, (name(stream), tag, old, new));
    });
    output.held_max = output.held_max.max(output.held);
    if output.held == 0 && output.held_max >= LARGE_BYTES {
        output.held_max = 0;
        memory.give_back(from, to);
    }
    ReadOutcome::Some
}

/// Writes an unfinished line as a partial one.
fn flush(memory: &mut fs::Mapping, container: &mut Container, stream: usize) {
    let Some(output) = container.outputs[stream].as_mut().filter(|output| output.held > 0) else { return };
    let log: Option<FdRef<'_>> = container.log.as_ref().map(Fd::borrow);
    let (from, _) = range(container.slot, stream);
    if let Some(log) = log {
        let time_ns = container.writer.stamp();
        let line = &memory[from..from + output.held];
        container.writer.write(log, time_ns, (name(stream), Tag::Partial, line, b""));
    }
    output.held = 0;
}
