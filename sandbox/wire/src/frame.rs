//! Frames on the monitor's `SOCK_SEQPACKET` socket: one postcard message each, descriptors beside it by SCM_RIGHTS.
//!
//! A request carries a number that its reply repeats; events come unasked. A request the monitor does not know is
//! answered [`Failure::Unknown`], never fatal: a newer daemon may drive an older monitor and fall back.
//! At most one daemon is connected; a new connection replaces the old one.

use serde::{Deserialize, Serialize};

use crate::{ContainerId, ExecId, ExitRecord};

/// Version of the frames, exchanged in [`Request::Hello`]. Raised when a variant or field is appended, here or to the
/// operations of a launch record.
pub const VERSION: u16 = 5;

/// Longest frame: everything long travels in a memfd, so a frame is a few ids and numbers.
pub const FRAME_BYTES_MAX: usize = 256;

/// Most descriptors with one frame: record, three streams, log, cgroup, OOM counter, and one to spare.
pub const DESCRIPTORS_MAX: usize = 8;

/// A request with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToMonitor {
    /// Repeated by the reply. 0 is not used.
    pub number: u32,
    /// What is asked.
    pub request: Request,
}

/// What the daemon asks of a monitor. The descriptors each one needs are listed in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// First on every connection. Reply: [`Reply::Hello`], or [`Reply::Failed`] with the operation of the setup
    /// record that failed (the monitor then exits).
    Hello {
        /// The daemon's [`VERSION`].
        version: u16,
    },
    /// Clone a process and walk the launch record in it. Reply, once the process has exec'ed: [`Reply::Started`] with
    /// its pidfd; [`Reply::Failed`] otherwise, and nothing is left.
    /// Descriptors: launch record; then, where `streams` says so, log file; then, where set, cgroup, OOM counter; then,
    /// where the record needs it, the mount namespace of the host (since version 5: before, monitors have it).
    Start {
        /// The container; a second one with the same id is refused with EEXIST.
        container: ContainerId,
        /// What stdin, stdout and stderr are.
        streams: Streams,
        /// Which pid namespace its process lives in.
        pid: PidNamespace,
        /// A descriptor of the container's cgroup2 directory comes along: CLONE_INTO_CGROUP.
        has_cgroup: bool,
        /// A descriptor of the OOM counter comes along: `memory.events` (v2) or `memory.oom_control` (v1), both with a
        /// line `oom_kill N`. Read now and when the main process ends.
        has_oom_counter: bool,
    },
    /// Clone a process into the namespaces of a running container (mount, cgroup and pid by setns) and walk the
    /// launch record in it. Replies as [`Request::Start`]; its end is [`Event::ExecExited`]. It joins before the first
    /// operation that is no `WriteFile`: those at the front (`cgroup.procs`) are still paths of the host. With
    /// `Op::Terminal` the three streams are replaced, and the master side comes with the reply.
    /// Descriptors: launch record, stdin, stdout, stderr; then, where set, cgroup.
    Exec {
        /// Chosen by the daemon.
        exec: ExecId,
        /// The container, which must run: otherwise ESRCH.
        container: ContainerId,
        /// A descriptor of the exec's cgroup2 directory comes along.
        has_cgroup: bool,
    },
    /// Send a signal to the main process of a container. Reply: Done, or Failed with ESRCH when it does not run.
    Signal {
        /// The container.
        container: ContainerId,
        /// Kernel's number.
        signal: i32,
    },
    /// From the reply on, every log line goes to the new file. Descriptors: the new log file. Reply: Done.
    ReopenLog {
        /// The container, running or not yet forgotten.
        container: ContainerId,
    },
    /// The container is being removed: close its log and streams, remove its exit record, free its place.
    /// Reply: Done (also when it is not known); Failed with EBUSY while its main process runs.
    Forget {
        /// The container.
        container: ContainerId,
    },
    /// End the monitor: SIGKILL and reap what it started, then exit. Reply: Done, before the exit.
    Shutdown,
    /// A descriptor for what a container with `stdin` reads (the write end of its pipe), or of its terminal's master
    /// side. Reply: Done with the descriptor; Failed with ENXIO where there is none. For attach.
    Stdin {
        /// The container.
        container: ContainerId,
    },
    /// From the reply on, a copy of what a container writes goes into pipes of the daemon's, until its end. One whose
    /// pipe is full is let go of, both pipes at once: neither the container nor its log waits for it.
    /// Descriptors: where set, write ends for stdout (or the terminal) and stderr. Reply: Done; Failed with ESRCH where
    /// the container does not run, EAGAIN where too many are attached. Since version 2.
    Attach {
        /// The container.
        container: ContainerId,
        /// A pipe for stdout comes along.
        stdout: bool,
        /// A pipe for stderr comes along.
        stderr: bool,
    },
    /// Close the monitor's end of a container's stdin, so that its reader sees the end once every other copy is closed.
    /// Reply: Done, also where there is none or it is closed already. Since version 2.
    CloseStdin {
        /// The container.
        container: ContainerId,
    },
    /// A new TCP socket in the pod's network namespace, not connected. Reply: Done with the descriptor; Failed with the
    /// kernel's reason. Since version 2.
    TcpSocket {
        /// IPv6 instead of IPv4.
        is_ipv6: bool,
    },
    /// Let a container's process go on that waits in its launch record (`Op::Wait`). Replies as [`Request::Start`]; ESRCH
    /// where none waits. A process whose daemon goes away while it waits is killed. Since version 3.
    Resume {
        /// The container.
        container: ContainerId,
    },
}

/// What a container's standard streams are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Streams {
    /// stdin is a pipe that is kept open; otherwise /dev/null.
    pub stdin: bool,
    /// One pseudo terminal of the container's own devpts for all three, which the child makes and hands over.
    pub tty: bool,
    /// A log file comes along; otherwise output is read and dropped.
    pub log: bool,
}

/// Which pid namespace a new container's main process lives in (CRI 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PidNamespace {
    /// The monitor's own: the host's, or the pod's shared one.
    Monitor,
    /// A new one in which it is pid 1.
    New,
    /// That of another running container of this pod.
    Of(ContainerId),
}

/// What the monitor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromMonitor {
    /// The answer to request `number`.
    Reply {
        /// As in the request.
        number: u32,
        /// The answer.
        reply: Reply,
    },
    /// Unasked.
    Event(Event),
}

/// Answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The namespaces are set up and the monitor serves.
    Hello {
        /// The monitor's [`VERSION`].
        version: u16,
    },
    /// Done; [`Request::Stdin`] adds its descriptor.
    Done,
    /// The process has exec'ed. Descriptors: its pidfd; then, for an exec with a terminal, the master side.
    Started,
    /// It did not work, and nothing is left of it.
    Failed(Failure),
    /// The process waits in its launch record, for [`Request::Resume`] or its end. Descriptors: its pidfd. Only where the
    /// record has an `Op::Wait`. Since version 3.
    Waiting,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// This monitor does not know the request.
    Unknown,
    /// The request itself: `errno` as described at it.
    Refused {
        /// Kernel's number.
        errno: i32,
    },
    /// Operation `index` of the record (from 0, in order) failed in the child.
    Operation {
        /// Which one.
        index: u16,
        /// Kernel's number; 0 where the record itself cannot be read.
        errno: i32,
    },
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A container's main process ended, its output is in the log and its exit record is written.
    Exited(ExitRecord),
    /// An exec ended.
    ExecExited {
        /// Which.
        exec: ExecId,
        /// How.
        exit: crate::Exit,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Exit;

    /// What monitors of 0.1.0 read and write: a daemon of any later version must still drive them. Append, never change.
    #[test]
    fn frames_of_0_1_0_are_these_bytes() {
        let id = ContainerId::from_bytes([7; 32]);
        let streams = Streams { stdin: true, tty: false, log: true };
        let start = Request::Start {
            container: id,
            streams,
            pid: PidNamespace::New,
            has_cgroup: true,
            has_oom_counter: false,
        };
        let exec = Request::Exec { exec: 300, container: id, has_cgroup: true };
        let seven = "07".repeat(32);
        for (request, expected) in [
            (Request::Hello { version: 1 }, "0500 01".to_owned()),
            (start, format!("0501 {seven} 010001 01 01 00")),
            (exec, format!("0502 ac02 {seven} 01")),
            (Request::Signal { container: id, signal: 15 }, format!("0503 {seven} 1e")),
            (Request::ReopenLog { container: id }, format!("0504 {seven}")),
            (Request::Forget { container: id }, format!("0505 {seven}")),
            (Request::Shutdown, "0506".to_owned()),
            (Request::Stdin { container: id }, format!("0507 {seven}")),
            // Of 0.2.0:
            (Request::Attach { container: id, stdout: true, stderr: false }, format!("0508 {seven} 01 00")),
            (Request::CloseStdin { container: id }, format!("0509 {seven}")),
            (Request::TcpSocket { is_ipv6: true }, "050a 01".to_owned()),
        ] {
            let bytes = postcard::to_allocvec(&ToMonitor { number: 5, request }).unwrap();
            assert_eq!(hex(&bytes), expected.replace(' ', ""), "{request:?}");
        }
        for (said, expected) in [
            (FromMonitor::Reply { number: 5, reply: Reply::Hello { version: 1 } }, "00 05 00 01"),
            (FromMonitor::Reply { number: 5, reply: Reply::Done }, "00 05 01"),
            (FromMonitor::Reply { number: 5, reply: Reply::Started }, "00 05 02"),
            (
                FromMonitor::Reply {
                    number: 5,
                    reply: Reply::Failed(Failure::Operation { index: 3, errno: 2 }),
                },
                "00 05 03 02 03 04",
            ),
            (FromMonitor::Event(Event::ExecExited { exec: 300, exit: Exit::Signal(9) }), "01 01 ac02 01 09"),
        ] {
            assert_eq!(hex(&postcard::to_allocvec(&said).unwrap()), expected.replace(' ', ""), "{said:?}");
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn the_largest_frames_fit() {
        let id = ContainerId::from_bytes([255; 32]);
        let streams = Streams { stdin: true, tty: true, log: true };
        let pid = PidNamespace::Of(id);
        let start = Request::Start { container: id, streams, pid, has_cgroup: true, has_oom_counter: true };
        let bytes = postcard::to_allocvec(&ToMonitor { number: u32::MAX, request: start }).unwrap();
        assert!(bytes.len() <= FRAME_BYTES_MAX, "{}", bytes.len());
        let exited = Event::Exited(ExitRecord {
            container: id,
            exit: Exit::Signal(255),
            oom_killed: true,
            finished_at_ns: i64::MIN,
            lost_log_lines: u64::MAX,
        });
        let bytes = postcard::to_allocvec(&FromMonitor::Event(exited)).unwrap();
        assert!(bytes.len() <= FRAME_BYTES_MAX, "{}", bytes.len());
    }
}
