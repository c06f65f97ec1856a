//! Handles requests of the daemon: reads a frame, performs the request, replies. A request that cannot be decoded is
//! answered as unknown, so that a newer daemon can fall back.

use coracle_sys::{Errno, Fd, fs, process, socket};
use coracle_wire::{ContainerId, FRAME_BYTES_MAX, Reply, Request, VERSION};

use crate::child::Failure;
use crate::exit_records;
use crate::serve::{Monitor, Phase, SEND_PAUSE_NS, unwatch};
use crate::table::{Attached, ContainerState, STREAMS};

/// The descriptors of a frame, taken in order; the remaining ones are closed on drop.
pub(crate) struct Descriptors([Option<Fd>; socket::DESCRIPTORS_MAX]);

impl Descriptors {
    /// The next descriptor.
    ///
    /// # Errors
    /// EINVAL if there is none.
    pub(crate) fn take(&mut self) -> Result<Fd, Errno> {
        self.0.iter_mut().find_map(Option::take).ok_or(Errno::EINVAL)
    }

    /// The next descriptor; `None` if `is_there`, from the request, is false.
    pub(crate) fn take_if(&mut self, is_there: bool) -> Result<Option<Fd>, Errno> {
        if is_there { self.take().map(Some) } else { Ok(None) }
    }
}

impl Monitor<'_> {
    /// Reads and handles one frame; epoll reports further frames.
    pub(crate) fn answer(&mut self) {
        let Some(connection) = &self.connection else { return };
        let mut buffer = [0; FRAME_BYTES_MAX];
        let received = match socket::receive(connection.socket.borrow(), &mut buffer) {
            Err(Errno::EAGAIN | Errno::EINTR) => return,
            // epoll reports the frame again.
            Err(Errno::ENOMEM | Errno::ENOBUFS) => return process::pause(SEND_PAUSE_NS),
            // No descriptor was free for those of the request: the kernel dropped them.
            Err(Errno::EMSGSIZE) => {
                return match postcard::take_from_bytes::<u32>(&buffer) {
                    Ok((number, _)) => self.refuse(number, Errno::EMFILE),
                    Err(_) => self.disconnect(),
                };
            }
            Err(_) => return self.disconnect(),
            Ok(received) if received.length == 0 => return self.disconnect(),
            Ok(received) => received,
        };
        // The number comes first in a frame, so it can be read even if the request cannot be decoded.
        let Ok((number, rest)) = postcard::take_from_bytes::<u32>(&buffer[..received.length]) else {
            return self.disconnect();
        };
        match postcard::take_from_bytes::<Request>(rest) {
            Ok((request, _)) => self.perform(number, request, Descriptors(received.descriptors)),
            Err(_) => self.reply(number, Reply::Failed(coracle_wire::Failure::Unknown), &[]),
        }
    }

    fn perform(&mut self, number: u32, request: Request, mut descriptors: Descriptors) {
        let is_greeted = self.connection.as_ref().is_some_and(|connection| connection.is_greeted);
        let done = match request {
            Request::Hello { .. } => return self.greet(number),
            _ if !is_greeted => Err(Errno::EPROTO),
            // These requests are answered later, after the process has called exec.
            Request::Start { container, streams, pid, has_cgroup, has_oom_counter } => {
                let asked = crate::start::Asked { container, streams, pid, has_cgroup, has_oom_counter };
                match self.start(number, &asked, &mut descriptors) {
                    Ok(()) => return,
                    refused => refused,
                }
            }
            Request::Resume { container } => match self.resume(number, &container) {
                Ok(()) => return,
                refused => refused,
            },
            Request::Exec { exec, container, has_cgroup } => {
                match self.exec(number, (exec, &container), has_cgroup, &mut descriptors) {
                    Ok(()) => return,
                    refused => refused,
                }
            }
            Request::Signal { container, signal } => match self.table.container(&container) {
                Some(container) if container.is_alive() => {
                    process::pidfd_signal(container.pidfd.borrow(), signal)
                }
                _ => Err(Errno::ESRCH),
            },
            Request::ReopenLog { container } => {
                descriptors.take().and_then(|file| match self.table.container(&container) {
                    Some(container) => {
                        container.log = Some(file);
                        Ok(())
                    }
                    None => Err(Errno::ESRCH),
                })
            }
            Request::Forget { container } => self.forget(&container),
            Request::Shutdown => {
                self.reply(number, Reply::Done, &[]);
                return self.end();
            }
            Request::Stdin { container } => return self.stdin(number, &container),
            Request::Attach { container, stdout, stderr } => {
                self.attach(&container, [stdout, stderr], &mut descriptors)
            }
            Request::CloseStdin { container } => {
                if let Some(container) = self.table.container(&container) {
                    container.stdin = None;
                }
                Ok(())
            }
            Request::ReplaceState => descriptors
                .take()
                .and_then(|listener| Ok((listener, descriptors.take()?)))
                .and_then(|(listener, state)| self.replace_state(listener, state)),
            Request::Process { container } => return self.reply_process(number, &container),
            Request::TcpSocket { is_ipv6 } => match socket::tcp(is_ipv6) {
                Ok(socket) => return self.reply(number, Reply::Done, &[socket.borrow()]),
                Err(errno) => Err(errno),
            },
        };
        match done {
            Ok(()) => self.reply(number, Reply::Done, &[]),
            Err(errno) => self.refuse(number, errno),
        }
    }

    /// Replies that the request is invalid or impossible, with an error number.
    pub(crate) fn refuse(&mut self, number: u32, errno: Errno) {
        self.reply(number, Reply::Failed(coracle_wire::Failure::Refused { errno: errno.0 }), &[]);
    }

    /// Replies that an operation of the launch record failed.
    pub(crate) fn reply_failure(&mut self, number: u32, failure: Failure) {
        let Failure { index, errno } = failure;
        let failure = coracle_wire::Failure::Operation { index, errno: errno.0 };
        self.reply(number, Reply::Failed(failure), &[]);
    }

    fn greet(&mut self, number: u32) {
        if let Phase::Failed { failure, .. } = self.phase {
            self.reply_failure(number, failure);
            return self.end();
        }
        if let Some(connection) = &mut self.connection {
            connection.is_greeted = true;
        }
        for container in &mut self.table.containers {
            if let ContainerState::Exited { is_told, .. } = &mut container.state {
                *is_told = false;
            }
        }
        self.reply(number, Reply::Hello { version: VERSION }, &[]);
        self.tell();
    }

    fn forget(&mut self, id: &ContainerId) -> Result<(), Errno> {
        if let Some(index) = self.table.containers.iter().position(|container| container.id == *id) {
            if self.table.containers[index].is_alive() {
                return Err(Errno::EBUSY);
            }
            self.remove_container(index);
        }
        exit_records::remove(self.state.borrow(), id)
    }

    /// Removes the table entry of a container and closes its descriptors.
    pub(crate) fn remove_container(&mut self, index: usize) {
        let container = self.table.containers.swap_remove(index);
        self.table.attached.retain(|attached| attached.slot != container.slot);
        for output in container.outputs.iter().flatten() {
            unwatch(self.epoll, &output.file);
        }
        if let ContainerState::Starting(starting) = &container.state {
            unwatch(self.epoll, &starting.report);
        }
    }

    /// Replies with the pidfd of a running container's main process.
    fn reply_process(&mut self, number: u32, id: &ContainerId) {
        let container = self.table.containers.iter().find(|container| container.id == *id);
        let refused = match container.map(|container| (&container.state, container)) {
            Some((ContainerState::Running, container)) => {
                return match self.try_reply(number, Reply::Done, &[container.pidfd.borrow()]) {
                    Ok(()) => {}
                    Err(_) => self.disconnect(),
                };
            }
            Some((ContainerState::Starting(_), _)) => Errno::EAGAIN,
            Some((ContainerState::Exited { .. }, _)) | None => Errno::ESRCH,
        };
        self.refuse(number, refused);
    }

    fn attach(
        &mut self,
        container: &ContainerId,
        streams: [bool; STREAMS],
        descriptors: &mut Descriptors,
    ) -> Result<(), Errno> {
        let slot = self.table.running(container).ok_or(Errno::ESRCH)?.slot;
        let pipes = [descriptors.take_if(streams[0])?, descriptors.take_if(streams[1])?];
        for pipe in pipes.iter().flatten() {
            fs::set_nonblocking(pipe.borrow())?;
        }
        self.table.attached.push(Attached { slot, pipes }).map_err(|_| Errno::EAGAIN)
    }

    fn stdin(&mut self, number: u32, id: &ContainerId) {
        // The descriptor is taken out during the call, because the reply may disconnect, which borrows the whole
        // monitor.
        let Some(stdin) = self.table.container(id).and_then(|container| container.stdin.take()) else {
            return self.refuse(number, Errno::ENXIO);
        };
        self.reply(number, Reply::Done, &[stdin.borrow()]);
        if let Some(container) = self.table.container(id) {
            container.stdin = Some(stdin);
        }
    }
}
