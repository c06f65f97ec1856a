//! Frames on the monitor's `SOCK_SEQPACKET` socket: each is one postcard message, with descriptors by SCM_RIGHTS.
//!
//! A request has a number that its reply repeats; events are sent without a request. A monitor answers a request that
//! it does not know with [`Failure::Unknown`] and keeps running, so that a newer daemon can control an older monitor
//! and fall back. At most one daemon is connected; a new connection replaces the old one.

use serde::{Deserialize, Serialize};

use crate::{ContainerId, ExecId, ExitRecord};

/// Version of the frames, exchanged in [`Request::Hello`]. The version is incremented when a variant or field is
/// appended to a frame or to the operations of a launch record.
pub const VERSION: u16 = 8;

/// Maximum length of a frame in bytes. Long data is passed in a memfd, so a frame contains only a few ids and numbers.
pub const FRAME_BYTES_MAX: usize = 256;

/// Maximum number of descriptors in one frame: record, three streams, log, cgroup, OOM counter, and one spare.
pub const DESCRIPTORS_MAX: usize = 8;

/// Maximum number of containers in the table of a monitor, including exited ones until [`Request::Forget`]; a start beyond it is
/// refused with EAGAIN. Kubernetes has no limit; pods in practice have fewer than 20.
pub const CONTAINERS_MAX: usize = 64;

/// Maximum number of concurrent execs of a pod: probes and hooks of every container and a few shells; EAGAIN beyond it.
pub const EXECS_MAX: usize = 128;

/// A request with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToMonitor {
    /// Number of the request, which the reply repeats; never 0.
    pub number: u32,
    /// The request itself.
    pub request: Request,
}

/// Requests of the daemon. The documentation of each lists its descriptors in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// The first request on every connection. Reply: [`Reply::Hello`], or [`Reply::Failed`] with the operation of the
    /// setup record that failed (the monitor then exits).
    Hello {
        /// The [`VERSION`] of the daemon.
        version: u16,
    },
    /// Clones a process that executes the launch record. Reply, once the process has called exec: [`Reply::Started`]
    /// with its pidfd; otherwise [`Reply::Failed`], with everything cleaned up. Descriptors: launch record; the log
    /// file if `streams.log` is set; the cgroup if `has_cgroup`; the OOM counter if `has_oom_counter`; the mount
    /// namespace of the host if the record needs it (since version 5; older monitors hold it themselves).
    Start {
        /// ID of the new container; an ID that exists is refused with EEXIST.
        container: ContainerId,
        /// The types of stdin, stdout and stderr.
        streams: Streams,
        /// The PID namespace of the container's process.
        pid: PidNamespace,
        /// Whether the frame has a descriptor of the container's cgroup2 directory, for CLONE_INTO_CGROUP.
        has_cgroup: bool,
        /// Whether the frame has a descriptor of the OOM counter: `memory.events` (v2) or `memory.oom_control` (v1),
        /// both with a line `oom_kill N`. The counter is read at the start and when the main process ends.
        /// With v2 the monitor also opens that of the parent of `has_cgroup`'s directory.
        has_oom_counter: bool,
    },
    /// Clones a process into the namespaces of a running container (mount, cgroup and pid through setns) that executes
    /// the launch record. Replies are those of [`Request::Start`]; its end is reported as [`Event::ExecExited`]. It
    /// joins the namespaces before the first operation other than `WriteFile`: the paths of leading `WriteFile`
    /// operations (`cgroup.procs`) are those of the host. With `Op::Terminal` the three streams are replaced, and the
    /// reply has the master side. Descriptors: launch record, stdin, stdout, stderr; the cgroup if `has_cgroup`.
    Exec {
        /// ID of the exec, chosen by the daemon.
        exec: ExecId,
        /// The container, which must be running: otherwise ESRCH.
        container: ContainerId,
        /// Whether the frame has a descriptor of the exec's cgroup2 directory.
        has_cgroup: bool,
    },
    /// Sends a signal to the main process of a container. Reply: Done, or Failed with ESRCH if it is not running.
    Signal {
        /// The container whose process gets the signal.
        container: ContainerId,
        /// The kernel's signal number.
        signal: i32,
    },
    /// Replaces the log file: after the reply, every log line is written to the new file. Descriptors: the new log
    /// file. Reply: Done.
    ReopenLog {
        /// The container, which is running or was not yet removed by [`Request::Forget`].
        container: ContainerId,
    },
    /// Closes a removed container's log and streams, removes its exit record and frees its table entry. Reply: Done
    /// (also if the container is unknown); Failed with EBUSY while its main process runs.
    Forget {
        /// The container to be forgotten.
        container: ContainerId,
    },
    /// Ends the monitor: it kills and reaps its children, then exits. Reply: Done, before the exit.
    Shutdown,
    /// Returns the write end of the stdin pipe of a container, or the master side of its terminal, for attach. Reply:
    /// Done with the descriptor; Failed with ENXIO if there is none.
    Stdin {
        /// The container whose stdin is requested.
        container: ContainerId,
    },
    /// Copies the container's output into pipes of the daemon until the container ends. If a pipe is full, both pipes
    /// of the client are closed, because neither the container nor its log may wait for a client. Descriptors: write
    /// ends for stdout (or the terminal) and stderr, as selected. Reply: Done; Failed with ESRCH if the container does
    /// not run, EAGAIN if too many clients are attached. Since version 2.
    Attach {
        /// The container whose output is copied.
        container: ContainerId,
        /// Whether the frame has a pipe for stdout.
        stdout: bool,
        /// Whether the frame has a pipe for stderr.
        stderr: bool,
    },
    /// Closes the monitor's end of a container's stdin, so that the reader gets EOF once every other copy is closed.
    /// Reply: Done, also if the container has no stdin or it is already closed. Since version 2.
    CloseStdin {
        /// The container whose stdin is closed.
        container: ContainerId,
    },
    /// Creates an unconnected TCP socket in the pod's network namespace. Reply: Done with the descriptor; Failed with
    /// the kernel's error. Since version 2.
    TcpSocket {
        /// Whether the socket is for IPv6 instead of IPv4.
        is_ipv6: bool,
    },
    /// Resumes a container's process that waits in its launch record (`Op::Wait`). Replies are those of
    /// [`Request::Start`]; ESRCH if no process waits. A waiting process is killed if the daemon disconnects. Since
    /// version 3.
    Resume {
        /// The container whose process is resumed.
        container: ContainerId,
    },
    /// Returns the main process of a container, for a daemon that has been restarted. Reply: Done with its pidfd;
    /// Failed with ESRCH if the process is not running, EAGAIN if it has not called exec yet. Since version 6.
    Process {
        /// The container whose process is requested.
        container: ContainerId,
    },
    /// Replaces the listening socket and the state directory, which another program has removed. Descriptors: a listening
    /// SOCK_SEQPACKET socket; the directory. Reply: Done; Failed with the kernel's error, after which the old ones are still
    /// used. Since version 7.
    ReplaceState,
}

/// The kinds of a container's standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Streams {
    /// Whether stdin is a pipe that is kept open; otherwise it is /dev/null.
    pub stdin: bool,
    /// Whether all three streams are one pseudo terminal in the container's devpts; the child opens it and sends the
    /// master side to the monitor.
    pub tty: bool,
    /// Whether the frame has a log file; otherwise output is discarded.
    pub log: bool,
}

/// The PID namespace of a new container's main process (CRI 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PidNamespace {
    /// The PID namespace of the monitor: the host's; or the pod's shared one if the pod has one.
    Monitor,
    /// A new PID namespace, in which the main process has PID 1.
    New,
    /// The PID namespace of another running container of this pod.
    Of(ContainerId),
}

/// Messages of the monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromMonitor {
    /// The answer to request `number`.
    Reply {
        /// The number of the request.
        number: u32,
        /// The reply to the request.
        reply: Reply,
    },
    /// An event, which is sent without a request.
    Event(Event),
}

/// Replies to requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The pod's namespaces are set up, and the monitor accepts requests.
    Hello {
        /// The [`VERSION`] of the monitor.
        version: u16,
    },
    /// The request succeeded; [`Request::Stdin`] and [`Request::TcpSocket`] add a descriptor.
    Done,
    /// The process has called exec. Descriptors: the process's pidfd; for an exec with a terminal also the master side.
    Started,
    /// The request failed, and everything has been cleaned up.
    Failed(Failure),
    /// The process waits at an `Op::Wait` of its launch record for [`Request::Resume`]. Descriptors: the process's
    /// pidfd. Since version 3.
    Waiting,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The monitor does not know the request.
    Unknown,
    /// The request is invalid or impossible; the documentation of the request lists the error numbers.
    Refused {
        /// The kernel's error number.
        errno: i32,
    },
    /// Operation `index` of the record (from 0, in order) failed in the child.
    Operation {
        /// Index of the operation in the record, from 0.
        index: u16,
        /// The kernel's error number; 0 if the record itself cannot be read.
        errno: i32,
    },
}

/// Events that a monitor sends without a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A container's main process has ended; its output is in the log, and its exit record is written.
    Exited(ExitRecord),
    /// An exec has ended.
    ExecExited {
        /// Id of the exec.
        exec: ExecId,
        /// Exit code or signal of the exec.
        exit: crate::Exit,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Exit;

    /// The encoding of 0.1.0: a later daemon must still be able to control such monitors. New cases may be appended;
    /// existing cases must not be changed.
    #[test]
    fn the_format_of_frames_of_0_1_0_is_unchanged() {
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
            // Requests of 0.2.0:
            (Request::Attach { container: id, stdout: true, stderr: false }, format!("0508 {seven} 01 00")),
            (Request::CloseStdin { container: id }, format!("0509 {seven}")),
            (Request::TcpSocket { is_ipv6: true }, "050a 01".to_owned()),
            // Requests of later versions:
            (Request::Resume { container: id }, format!("050b {seven}")),
            (Request::Process { container: id }, format!("050c {seven}")),
            (Request::ReplaceState, "050d".to_owned()),
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
