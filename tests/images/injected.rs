//! System calls injected into the confined process that reads an archive, as an exploit of its parser would make them (ptrace(2), with
//! the registers of x86_64): each is refused, and what it writes to its worker is not believed.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};

use coracle_tests::cri::proto::VersionRequest;
use coracle_tests::host::{self, wait_for, wait_until};
use coracle_tests::image::Image;
use coracle_tests::node::{Node, binaries};
use nix::libc;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::find;
use crate::jail::confined;

/// A process that is stopped in its system call.
struct Inmate {
    pid: Pid,
    memory: File,
    usual: libc::user_regs_struct,
}

impl Inmate {
    fn stop(pid: i32) -> Inmate {
        let pid = Pid::from_raw(pid);
        ptrace::attach(pid).expect("the test may trace it");
        waitpid(pid, None).expect("it stops");
        let usual = ptrace::getregs(pid).expect("its registers");
        let memory =
            File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).expect("its memory");
        let mut instruction = [0; 2];
        memory.read_exact_at(&mut instruction, usual.rip - 2).expect("its program");
        assert_eq!(instruction, [0x0f, 0x05], "it is in a system call");
        Inmate { pid, memory, usual }
    }

    /// Result of a system call; `None` if the process was killed. The text is put into its memory, and its address takes the place of each argument [`TEXT`].
    fn call(&self, number: i64, arguments: [u64; 5], text: &[u8]) -> Option<i64> {
        // Below the red zone of the stack.
        let place = self.usual.rsp - 1024;
        self.memory.write_all_at(text, place).expect("its stack");
        let [rdi, rsi, rdx, r10, r8] = arguments.map(|value| if value == TEXT { place } else { value });
        let registers = libc::user_regs_struct {
            rip: self.usual.rip - 2,
            orig_rax: u64::MAX,
            rax: number as u64,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9: 0,
            ..self.usual
        };
        ptrace::setregs(self.pid, registers).expect("it is stopped");
        ptrace::step(self.pid, None).expect("it is stopped");
        match waitpid(self.pid, None).expect("it is a tracee") {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => {
                ptrace::getregs(self.pid).ok().map(|registers| registers.rax as i64)
            }
            WaitStatus::Signaled(_, Signal::SIGKILL, _) => None,
            other => panic!("call {number}: {other:?}"),
        }
    }

    /// Resumes the call in which the process was stopped, unless it was killed.
    fn release(self) {
        let _ = ptrace::setregs(self.pid, self.usual);
        if ptrace::detach(self.pid, None).is_err() {
            // Its parent gets to know of its end only when the tracer has (ptrace(2)).
            let _ = waitpid(self.pid, None);
        }
    }
}

/// An argument that is the address of the text.
const TEXT: u64 = u64::MAX;
const HERE: u64 = libc::AT_FDCWD as u64;
/// All processes, and no process: -1 of an `int`, which is not [`TEXT`].
const ALL: u64 = u32::MAX as u64;

/// Calls with their arguments and their text.
const ATTACKS: [(&str, i64, [u64; 5], &[u8]); 34] = [
    ("openat of the node", libc::SYS_openat, [HERE, TEXT, 0, 0, 0], b"/etc/passwd\0"),
    ("openat upwards", libc::SYS_openat, [HERE, TEXT, 0, 0, 0], b"../../../../../../etc/passwd\0"),
    ("openat of procfs", libc::SYS_openat, [HERE, TEXT, 2, 0, 0], b"/proc/self/mem\0"),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, [HERE, TEXT, 0, 0, 0], &[0; 128]),
    ("socket of IPv4", libc::SYS_socket, [2, 1, 0, 0, 0], b""),
    ("socket of Unix", libc::SYS_socket, [1, 1, 0, 0, 0], b""),
    ("socket of netlink", libc::SYS_socket, [16, 3, 0, 0, 0], b""),
    ("socketpair", libc::SYS_socketpair, [1, 1, 0, TEXT, 0], &[0; 8]),
    ("kill of all", libc::SYS_kill, [ALL, 9, 0, 0, 0], b""),
    ("kill", libc::SYS_kill, [2, 9, 0, 0, 0], b""),
    ("pidfd_open", libc::SYS_pidfd_open, [1, 0, 0, 0, 0], b""),
    ("ptrace", libc::SYS_ptrace, [16, 2, 0, 0, 0], b""),
    ("process_vm_writev", libc::SYS_process_vm_writev, [2, TEXT, 1, TEXT, 1], &[0; 64]),
    ("clone", libc::SYS_clone, [17, 0, 0, 0, 0], b""),
    ("fork", libc::SYS_fork, [0; 5], b""),
    ("vfork", libc::SYS_vfork, [0; 5], b""),
    ("execve", libc::SYS_execve, [TEXT, 0, 0, 0, 0], b"/bin/sh\0"),
    ("mount", libc::SYS_mount, [TEXT, TEXT, TEXT, 0, 0], b"tmpfs\0"),
    ("umount2", libc::SYS_umount2, [TEXT, 2, 0, 0, 0], b"/\0"),
    ("open_tree", libc::SYS_open_tree, [HERE, TEXT, 1, 0, 0], b"/\0"),
    ("pivot_root", libc::SYS_pivot_root, [TEXT, TEXT, 0, 0, 0], b".\0"),
    ("chroot", libc::SYS_chroot, [TEXT, 0, 0, 0, 0], b"..\0"),
    ("unshare", libc::SYS_unshare, [0x1000_0000, 0, 0, 0, 0], b""),
    ("setns", libc::SYS_setns, [0, 0, 0, 0, 0], b""),
    ("bpf", libc::SYS_bpf, [0, TEXT, 64, 0, 0], &[0; 64]),
    ("perf_event_open", libc::SYS_perf_event_open, [TEXT, 0, ALL, ALL, 0], &[0; 128]),
    ("io_uring_setup", libc::SYS_io_uring_setup, [1, TEXT, 0, 0, 0], &[0; 128]),
    ("userfaultfd", libc::SYS_userfaultfd, [1, 0, 0, 0, 0], b""),
    ("keyctl", libc::SYS_keyctl, [0, ALL, 0, 0, 0], b""),
    ("add_key", libc::SYS_add_key, [TEXT, TEXT, TEXT, 4, ALL], b"user\0"),
    ("init_module", libc::SYS_init_module, [TEXT, 4, TEXT, 0, 0], b"\x7fELF\0"),
    ("syslog", libc::SYS_syslog, [10, 0, 0, 0, 0], b""),
    ("setuid", libc::SYS_setuid, [0, 0, 0, 0, 0], b""),
    ("prctl", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0, 0], b""),
];

/// An import of an archive that stops in the middle, and the rest of the archive.
fn half_an_import(node: &Node, name: &str) -> (Child, File, Vec<u8>) {
    let archive = Image::probe(&node.probe(), name).oci_archive(&format!("localhost/{name}:1"));
    let pipe = node.folder().join(name);
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let import = Command::new(binaries().join("coracle"))
        .args(["image", "--state"])
        .arg(node.state())
        .arg("import")
        .arg(&pipe)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program runs");
    let mut writer = File::options().write(true).open(&pipe).expect("the import opens it");
    writer.write_all(&archive[..archive.len() / 2]).expect("half of it");
    (import, writer, archive[archive.len() / 2..].to_vec())
}

/// The process that reads the archive, waiting for more of it.
fn waiting(node: &Node) -> i32 {
    wait_for("the archive is read as far as it goes", || {
        let pid = confined(node, "confined spool")?;
        let call = fs::read_to_string(format!("/proc/{pid}/syscall")).ok()?;
        call.starts_with(&format!("{} 0x0 ", libc::SYS_read)).then_some(pid)
    })
}

#[test]
fn calls_injected_into_an_archive_parser_are_refused() {
    let node = Node::start();
    let (mut import, mut writer, rest) = half_an_import(&node, "injected");
    let inmate = Inmate::stop(waiting(&node));
    assert_eq!(inmate.call(libc::SYS_sched_yield, [0; 5], b""), Some(0), "its own calls work");
    let allowed: Vec<_> = ATTACKS
        .iter()
        .map(|(name, number, arguments, text)| (name, inmate.call(*number, *arguments, text)))
        .filter(|(_, result)| result.is_none_or(|result| result >= 0))
        .collect();
    inmate.release();
    assert!(allowed.is_empty(), "{allowed:?}");
    writer.write_all(&rest).expect("the rest");
    drop(writer);
    assert!(import.wait().expect("it ends").success(), "it continues where it was");
    assert!(find(&node, "localhost/injected:1").is_some());
    node.stop();
}

/// A parser that is not itself any more tells its worker what it wants, or nothing.
#[test]
fn an_archive_parser_that_lies_or_stops_ends_only_its_import() {
    let mut node = Node::start();
    for (name, lie) in
        [("zero", vec![0; 512]), ("ones", vec![0xff; 512]), ("long", b"\0\x7f\xff\xff".repeat(64))]
    {
        let (mut import, writer, _) = half_an_import(&node, name);
        let inmate = Inmate::stop(waiting(&node));
        // Its worker may kill it at once.
        let sent = inmate.call(libc::SYS_write, [1, TEXT, lie.len() as u64, 0, 0], &lie);
        assert!(sent.is_none_or(|sent| sent == lie.len() as i64), "{name}: {sent:?}");
        inmate.release();
        drop(writer);
        assert!(!import.wait().expect("it ends").success(), "{name}");
        assert!(find(&node, &format!("localhost/{name}:1")).is_none());
    }
    // Stopped, like its worker: 15 minutes of silence would end both, or the end of the daemon.
    let (mut import, writer, _) = half_an_import(&node, "stopped");
    let stopped = [waiting(&node), node.workers().first().expect("it runs").pid];
    for pid in stopped {
        nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGSTOP).expect("it is there");
    }
    node.version(VersionRequest::default()).expect("the daemon answers");
    let other = Image::probe(&node.probe(), "other").oci_archive("localhost/other:1");
    node.try_import(&other).expect("another import is not hindered");
    node.restart();
    assert!(!import.wait().expect("it ends").success());
    drop(writer);
    wait_until("they are gone, stopped or not", || stopped.iter().all(|pid| !host::is_alive(*pid)));
    assert!(find(&node, "localhost/stopped:1").is_none());
    node.stop();
}
