//! Output of containers: reads streams into one shared scratch buffer and passes the lines on to the log. Each event
//! is one read, so that no stream starves another. Memory that output took is given back.

use coracle_sys::{Errno, Fd, FdRef, fs};

use crate::log::{self, LINE_BYTES_MAX, Stream, Tag};
use crate::serve::{Monitor, unwatch};
use crate::table::{AllAttached, Attached, Container, Place, STREAMS};

/// A pipe cannot hold more (fs.pipe-max-size, 1 MiB unless root raises it): what is read beyond it at a container's
/// end was written after it, by a process that outlives it.
const DRAIN_READS_MAX: usize = (1 << 20) / LINE_BYTES_MAX;

/// From this many held bytes on a line buffer's pages are given back as soon as it is empty.
const LARGE_BYTES: usize = 4096;

/// What a read brought.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Poured {
    Some,
    Nothing,
    End,
}

impl Monitor<'_> {
    /// One read of a stream.
    pub(crate) fn read_output(&mut self, place: Place, stream: usize) {
        let mut containers = self.table.containers.iter_mut();
        if let Some(container) = containers.find(|container| container.place == place) {
            self.is_memory_used = true;
            let mut sinks = Sinks { memory: &mut self.memory, attached: &mut self.table.attached };
            pour(self.epoll, &mut sinks, container, stream);
        }
    }

    /// At a container's end: everything that is still in its pipes, and an unfinished line, go to the log.
    pub(crate) fn drain(&mut self, index: usize) {
        self.is_memory_used = true;
        let Some(container) = self.table.containers.get_mut(index) else { return };
        let mut sinks = Sinks { memory: &mut self.memory, attached: &mut self.table.attached };
        for stream in 0..STREAMS {
            for _ in 0..DRAIN_READS_MAX {
                if pour(self.epoll, &mut sinks, container, stream) != Poured::Some {
                    break;
                }
            }
            flush(sinks.memory, container, stream);
        }
        let place = container.place;
        self.table.attached.retain(|attached| attached.place != place);
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
                    let (from, to) = range(container.place, stream);
                    self.memory.give_back(from, to);
                }
            }
        }
    }
}

/// Where a stream's line buffer is.
fn range(place: Place, stream: usize) -> (usize, usize) {
    let index = 1 + usize::from(place) * STREAMS + stream;
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
fn copy(attached: &mut AllAttached, place: Place, stream: usize, bytes: &[u8]) {
    attached.retain(|one| {
        let Some(pipe) = one.pipes[stream].as_ref().filter(|_| one.place == place) else { return true };
        fs::write(pipe.borrow(), bytes) == Ok(bytes.len())
    });
}

/// The stream is over for those attached, too.
fn end_copies(attached: &mut [Attached], place: Place, stream: usize) {
    for one in attached.iter_mut().filter(|one| one.place == place) {
        one.pipes[stream] = None;
    }
}

fn pour(epoll: FdRef<'_>, sinks: &mut Sinks<'_>, container: &mut Container, stream: usize) -> Poured {
    let Some(output) = &mut container.outputs[stream] else { return Poured::End };
    let memory = &mut *sinks.memory;
    let (scratch, buffers) = memory.split_at_mut(LINE_BYTES_MAX);
    let length = match fs::read(output.file.borrow(), scratch) {
        Err(Errno::EAGAIN | Errno::EINTR) => return Poured::Nothing,
        // A terminal's end is EIO; whatever else a read says, it will not get better.
        Ok(0) | Err(_) => {
            flush(memory, container, stream);
            if let Some(output) = container.outputs[stream].take() {
                unwatch(epoll, &output.file);
                let (from, to) = range(container.place, stream);
                memory.give_back(from, to);
            }
            end_copies(sinks.attached, container.place, stream);
            return Poured::End;
        }
        Ok(length) => length,
    };
    copy(sinks.attached, container.place, stream, &scratch[..length]);
    let Some(log) = container.log.as_ref().map(Fd::borrow) else { return Poured::Some };
    let (from, to) = range(container.place, stream);
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
    Poured::Some
}

/// Writes an unfinished line as a partial one.
fn flush(memory: &mut fs::Mapping, container: &mut Container, stream: usize) {
    let Some(output) = container.outputs[stream].as_mut().filter(|output| output.held > 0) else { return };
    let log: Option<FdRef<'_>> = container.log.as_ref().map(Fd::borrow);
    let (from, _) = range(container.place, stream);
    if let Some(log) = log {
        let time_ns = container.writer.stamp();
        let line = &memory[from..from + output.held];
        container.writer.write(log, time_ns, (name(stream), Tag::Partial, line, b""));
    }
    output.held = 0;
}
