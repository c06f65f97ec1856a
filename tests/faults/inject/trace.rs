//! Follows a process, or the programs that it starts, by ptrace(2), counts their system calls, and at one of them kills the process
//! or lets the call fail. A call that fails is replaced by one that does nothing, and the process gets the error.

use std::collections::HashMap;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

#[cfg(target_arch = "x86_64")]
use super::errnos;

/// Never reached.
pub(crate) const NO_CALL: usize = usize::MAX;

/// Action at a system call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// The process is killed at the entry of the call, of any call.
    Kill,
    /// The call fails with one of the errors that [`errnos::of`] lists for it, by its index. Only calls with such errors are counted.
    #[cfg(target_arch = "x86_64")]
    Error(usize),
}

/// Whose system calls are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// Calls of the process itself.
    Own,
    /// Calls of the process itself after it has executed the daemon's program.
    #[cfg(target_arch = "x86_64")]
    OwnAfterExec,
    /// Calls of the processes that it starts, and of their children, until they execute a program that is not coracle's.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "errors are put in on x86_64 only"))]
    Children,
}

/// Calls that were counted, and the actions taken.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// How many calls were counted.
    pub(crate) calls: usize,
    /// Each counted call and the number of its possible errors. Of [`Fault::Error`] only; without a call to fail, calls are recorded
    /// with their arguments as far as they can be shown, otherwise by their names.
    #[cfg(target_arch = "x86_64")]
    pub(crate) errors: Vec<(String, usize)>,
    /// The call that failed, with its arguments as far as they can be shown, and its error.
    #[cfg(target_arch = "x86_64")]
    pub(crate) failed: Option<(String, Errno)>,
}

/// A process that is followed until it is dead or [`Tracer::stop`] is called.
pub(crate) struct Tracer {
    seen: Arc<Mutex<Seen>>,
    /// Input of a child process that the thread waits for: closing it wakes up the thread.
    waker: ChildStdin,
    thread: JoinHandle<()>,
}

impl Tracer {
    /// Follows `pid`; `fault` happens at the `at`th counted system call, from 1. When this returns, calls are counted. A child of this
    /// process is left to be reaped by the process that started it.
    ///
    /// # Panics
    /// If the process cannot be followed.
    pub(crate) fn attach(pid: i32, whose: Whose, at: usize, fault: Fault) -> Tracer {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let shared = Arc::clone(&seen);
        let (ready, wait) = std::sync::mpsc::channel();
        // ptrace belongs to one thread.
        let thread = std::thread::spawn(move || {
            let root = Pid::from_raw(pid);
            let children = Options::PTRACE_O_TRACEFORK
                | Options::PTRACE_O_TRACEVFORK
                | Options::PTRACE_O_TRACECLONE
                | Options::PTRACE_O_TRACEEXEC;
            let more = match whose {
                Whose::Own => Options::empty(),
                #[cfg(target_arch = "x86_64")]
                Whose::OwnAfterExec => Options::PTRACE_O_TRACEEXEC,
                Whose::Children => children,
            };
            ptrace::seize(root, Options::PTRACE_O_TRACESYSGOOD | more).expect("the process can be traced");
            ptrace::interrupt(root).expect("it is traced");
            let waker = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat");
            let tracees = HashMap::new();
            let thread = Thread { root, whose, at, fault, seen: shared, waker, tracees, has_executed: false };
            thread.follow(ready);
        });
        let waker = wait.recv().expect("the process is followed");
        Tracer { seen, waker, thread }
    }

    /// Whether the process is dead.
    pub(crate) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends the tracing; processes that are alive run on.
    ///
    /// # Panics
    /// If a process could not be followed.
    pub(crate) fn stop(self) -> Seen {
        drop(self.waker);
        self.thread.join().expect("the process was followed");
        self.seen.lock().expect("the thread has ended").clone()
    }
}

/// A process that is followed.
#[derive(Default)]
struct Tracee {
    is_inside: bool,
    /// The error with which its call ends, and the call's first argument.
    #[cfg(target_arch = "x86_64")]
    error: Option<(Errno, u64)>,
}

struct Thread {
    root: Pid,
    whose: Whose,
    at: usize,
    fault: Fault,
    seen: Arc<Mutex<Seen>>,
    waker: Child,
    tracees: HashMap<i32, Tracee>,
    /// Whether the root process has executed the daemon's program.
    has_executed: bool,
}

impl Thread {
    /// Follows the system calls until the root process is dead, or the waker is and no call is about to fail. What is traced then runs
    /// on untraced, because this thread ends.
    fn follow(mut self, ready: Sender<ChildStdin>) {
        let mut ready = Some(ready);
        let waker = Pid::from_raw(self.waker.id() as i32);
        // Not the children of other threads, which are theirs to reap.
        let mine = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        let stopped = WaitPidFlag::WEXITED | WaitPidFlag::WSTOPPED | WaitPidFlag::WNOWAIT;
        let mut is_over = false;
        while !is_over || self.is_failing() {
            let pid = match waitid(Id::All, stopped | mine) {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, _, _)) if pid == self.root => break,
                Ok(status) => status.pid().expect("a status of a process"),
                Err(Errno::EINTR) => continue,
                Err(error) => panic!("wait: {error}"),
            };
            if pid == waker {
                let _ = self.waker.wait(); // so that the next wait does not find it again
                is_over = true;
                continue;
            }
            let Ok(status) = waitpid(pid, Some(WaitPidFlag::WNOHANG | mine)) else { continue };
            let is_followed = self.handle(pid, status);
            if let Some(ready) = ready.take() {
                let waker = self.waker.stdin.take().expect("it is piped");
                ready.send(waker).expect("the test waits");
            }
            if is_followed {
                self.resume(pid, status);
            }
        }
        let _ = self.waker.kill(); // it may have ended
        let _ = self.waker.wait();
    }

    /// Whether a call has been prevented, and has not ended yet.
    fn is_failing(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.tracees.values().any(|tracee| tracee.error.is_some());
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    fn is_counted(&self, pid: Pid) -> bool {
        match self.whose {
            Whose::Own => pid == self.root,
            #[cfg(target_arch = "x86_64")]
            Whose::OwnAfterExec => pid == self.root && self.has_executed,
            Whose::Children => pid != self.root,
        }
    }

    fn resume(&self, pid: Pid, status: WaitStatus) {
        let signal = if let WaitStatus::Stopped(_, signal) = status { Some(signal) } else { None };
        // ESRCH: it has been killed, which the next wait shows.
        let _ = if self.is_counted(pid) { ptrace::syscall(pid, signal) } else { ptrace::cont(pid, signal) };
    }

    /// Whether the process is to be resumed.
    fn handle(&mut self, pid: Pid, status: WaitStatus) -> bool {
        match status {
            WaitStatus::PtraceSyscall(_) => {
                self.call(pid);
                true
            }
            WaitStatus::PtraceEvent(_, _, event) if event == ptrace::Event::PTRACE_EVENT_EXEC as i32 => {
                if pid == self.root {
                    // Not the shell, which may be about to begin.
                    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
                    self.has_executed = program.ends_with("coracled");
                    self.tracees.entry(pid.as_raw()).or_default().is_inside = true;
                    return true;
                }
                let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let is_ours = String::from_utf8_lossy(&command).contains("coracle");
                if !is_ours {
                    let _ = ptrace::detach(pid, None); // it has been killed
                }
                is_ours
            }
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => {
                self.tracees.remove(&pid.as_raw());
                false
            }
            WaitStatus::StillAlive => false,
            _ => true,
        }
    }

    /// The entry or the exit of a call.
    fn call(&mut self, pid: Pid) {
        let tracee = self.tracees.entry(pid.as_raw()).or_default();
        tracee.is_inside = !tracee.is_inside;
        if !tracee.is_inside {
            #[cfg(target_arch = "x86_64")]
            if let Some((error, argument)) = tracee.error.take() {
                errnos::answer(pid, error, argument);
            }
            return;
        }
        let mut seen = self.seen.lock().expect("no thread panics with it");
        match self.fault {
            Fault::Kill => {
                seen.calls += 1;
                if seen.calls == self.at {
                    let _ = kill(pid, Signal::SIGKILL); // it may be dead by another hand
                }
            }
            #[cfg(target_arch = "x86_64")]
            Fault::Error(index) => {
                let Some((name, errors)) = errnos::of(pid) else { return };
                seen.calls += 1;
                let arguments = if self.at == NO_CALL { errnos::arguments(pid) } else { String::new() };
                seen.errors.push((format!("{name}{arguments}"), errors.len()));
                if seen.calls == self.at
                    && let Some(error) = errors.get(index)
                {
                    seen.failed = Some((format!("{name}{}", errnos::arguments(pid)), *error));
                    tracee.error = Some((*error, errnos::skip(pid)));
                }
            }
        }
    }
}
