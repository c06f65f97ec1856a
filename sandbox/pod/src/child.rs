//! Executes a launch record in the cloned child, operation by operation, up to exec. It makes no decisions and
//! allocates nothing. If an operation fails, the child reports the number of the operation and the error number over a
//! pipe, which exec closes, and exits.
//!
//! The monitor executes the pod's setup record with the same code in its own process.

use core::ffi::CStr;
use core::mem::MaybeUninit;

use coracle_sys::mark::Mark;
use coracle_sys::memory::Mapping;
use coracle_sys::process::{self, Control, Pointers};
use coracle_sys::sched::{self, InheritOnFork};
use coracle_sys::{Errno, Fd, FdRef, bpf, fs, mount, socket};
use coracle_wire::{Block, Op, Text, walk};

use crate::capabilities::drop_bounding;
use crate::init::{self, Init};
use crate::keyring;
use crate::launch::{ChildState, Destination, become_second, stay_on_this_cpu};
use crate::mounts;
use crate::root::{Make, Root};
use crate::trees::{self, Tree, Trees};
use crate::verify::{Wanted, verify};

/// The umask of a process whose record does not set one.
const UMASK: u32 = 0o022;
/// Error number that means that the record cannot be read.
pub(crate) const DAMAGED: Errno = Errno(0);
/// Length of an encoded [`Failure`].
pub(crate) const FAILURE_BYTES: usize = 6;

/// The failure of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Index of the operation, from 0. An index after the last one, `Op::Exec`, is that of its candidate.
    pub(crate) index: u16,
    /// The error; 0: the record cannot be read.
    pub(crate) errno: Errno,
}

impl Failure {
    /// Encodes the failure for the pipe.
    pub(crate) fn to_bytes(self) -> [u8; FAILURE_BYTES] {
        let mut bytes = [0; FAILURE_BYTES];
        bytes[..2].copy_from_slice(&self.index.to_ne_bytes());
        bytes[2..].copy_from_slice(&self.errno.0.to_ne_bytes());
        bytes
    }

    /// Decodes a failure from the pipe.
    pub(crate) fn from_bytes(bytes: [u8; FAILURE_BYTES]) -> Self {
        let [a, b, errno @ ..] = bytes;
        Self { index: u16::from_ne_bytes([a, b]), errno: Errno(i32::from_ne_bytes(errno)) }
    }
}

/// Executes the pod's setup record in the monitor itself. Returns the first process of the PID namespace that
/// containers share, if the record creates one.
pub(crate) fn set_up(record: FdRef<'_>) -> Result<Option<Init>, Failure> {
    let record = Mapping::sealed(record).map_err(|errno| Failure { index: 0, errno })?;
    let mut walker = Walker::new(None);
    walker.walk(&record)?;
    Ok(walker.init)
}

/// Executes the operations of a record one after the other.
pub(crate) struct Walker<'a> {
    /// The child's state; `None` if the monitor itself executes the record.
    child: Option<ChildState<'a>>,
    /// The container's root; `None` before it is opened or entered.
    root: Option<Root>,
    trees: Trees,
    umask: u32,
    takes_usual_turns: bool,
    /// The first process of the PID namespace that the setup record creates; `None` in other records.
    init: Option<Init>,
    /// Whether an exec has joined its container's namespaces.
    has_joined: bool,
    has_left: bool,
    has_terminal: bool,
    /// Whether the container's seccomp filter applies, which may refuse the process's own calls.
    has_filter: bool,
    /// The candidate of `Op::Exec` that exists although exec did not find it, counted from 1: its interpreter is missing.
    found: u16,
    /// The secret for the process's own calls that a filter would refuse; `None` if there are no such calls.
    mark: Option<Mark>,
}

impl<'a> Walker<'a> {
    pub(crate) fn new(child: Option<ChildState<'a>>) -> Self {
        Self {
            child,
            root: None,
            trees: Trees::new(),
            umask: UMASK,
            takes_usual_turns: false,
            init: None,
            has_joined: false,
            has_left: false,
            has_terminal: false,
            has_filter: false,
            found: 0,
            mark: None,
        }
    }

    /// Executes all operations and returns their number; `Op::Exec` at the end of a container's record does not return.
    pub(crate) fn walk(&mut self, record: &[u8]) -> Result<u16, Failure> {
        let damaged = |index| Failure { index, errno: DAMAGED };
        let mut index = 0;
        let mut refused = None;
        for op in walk(record).map_err(|_| damaged(0))? {
            let op = op.map_err(|_| damaged(index))?;
            let done = self
                .join_container(&op)
                .and_then(|()| self.continue_in_second(&op))
                .and_then(|()| self.perform(&op));
            let failed = |errno| Failure { index: index.saturating_add(self.found), errno };
            match (done, op) {
                // Tried again as the container's user, who may enter a directory that root may not, such as one of an
                // NFS server with root_squash (runc: finalizeNamespace).
                (Err(errno @ (Errno::EACCES | Errno::EPERM)), Op::WorkingDirectory { path, .. }) => {
                    refused = Some((path, failed(errno)));
                }
                (done, op) => {
                    done.map_err(failed)?;
                    if let (Some((path, failure)), Op::User { .. }) = (refused, op) {
                        enter(path).map_err(|errno| Failure { errno, ..failure })?;
                        refused = None;
                    }
                }
            }
            index = index.checked_add(1).ok_or(damaged(index))?;
        }
        Ok(index)
    }

    /// Joins the container's namespaces, for an exec, before the first operation other than `WriteFile`.
    fn join_container(&mut self, next: &Op<'_>) -> Result<(), Errno> {
        let Some(child @ ChildState { home: Destination::Existing { .. }, .. }) = &self.child else {
            return Ok(());
        };
        let is_for_the_host =
            matches!(next, Op::WriteFile { .. } | Op::Limit { .. } | Op::GiveStreams { .. });
        if self.has_joined || is_for_the_host {
            return Ok(());
        }
        child.join()?;
        self.root = Some(Root::open()?);
        self.has_joined = true;
        Ok(())
    }

    /// Creates the second process in the container's PID namespace if `next` is the exec and the process already has
    /// the container's privileges and filter; the second process continues.
    fn continue_in_second(&mut self, next: &Op<'_>) -> Result<(), Errno> {
        let is_last = matches!(next, Op::Exec { .. });
        let Some(child) = &mut self.child else { return Ok(()) };
        let (report, second) = (child.report, child.second.take_if(|_| is_last));
        let Some(pid) = second else { return Ok(()) };
        self.close_descriptors()?;
        let mark = self.mark.unwrap_or(Mark::NONE);
        if !self.has_filter {
            stay_on_this_cpu();
        }
        become_second(pid, report, mark)?;
        process::new_session_marked(mark)?;
        let [stdin, ..] = FdRef::STANDARD_STREAMS;
        if self.has_terminal { fs::set_controlling_terminal(stdin, mark) } else { Ok(()) }
    }

    /// Closes all descriptors except the standard streams and the report pipe, which are the only ones that are still
    /// needed.
    fn close_descriptors(&mut self) -> Result<(), Errno> {
        let Some(child) = self.child.as_mut().filter(|_| !core::mem::replace(&mut self.has_left, true))
        else {
            return Ok(());
        };
        self.root = None;
        self.trees = Trees::new();
        child.close_descriptors()
    }

    fn perform(&mut self, op: &Op<'_>) -> Result<(), Errno> {
        match *op {
            Op::WriteFile { path, data, optional } => write_file(text(path)?, data, optional),
            Op::Unshare { flags } => {
                self.has_own(u64::from(flags));
                process::unshare(u64::from(flags))?;
                self.trees.has_own_namespace()
            }
            Op::RootPropagation { propagation } => {
                mount::mount(None, c"/", None, mount::MS_REC | mounts::flag(propagation), None)
            }
            Op::OpenTree { slot, path, recursive, from_host } => {
                let host = if from_host { Some(self.host()?) } else { None };
                self.trees.open(slot, text(path)?, recursive, host)
            }
            Op::Overlay { directory, options, target } => {
                fs::change_directory_to(text(directory)?)?;
                let kind = c"overlay";
                mount::mount(Some(kind), text(target)?, Some(kind), 0, Some(text(options)?))?;
                fs::change_directory_to(c"/")
            }
            Op::Tmpfs { options, target, flags } => {
                // The records of all versions have one, the pod's /dev/shm.
                mount::mount(Some(c"shm"), text(target)?, Some(c"tmpfs"), flags, Some(text(options)?))
            }
            Op::OpenRoot { path } => {
                self.child.as_ref().ok_or(Errno::EINVAL)?;
                self.root = Some(Root::at(text(path)?)?);
                Ok(())
            }
            Op::PivotRoot { new_root } => self.pivot(text(new_root)?),
            Op::Filesystem { kind, options, attributes, target } => {
                self.filesystem(text(kind)?, &options, attributes, text(target)?)
            }
            Op::Attach { slot, target, attributes, attributes_recursive, propagation, skip_missing } => {
                let Tree { mounts, source } = self.trees.take(slot)?;
                let wanted = mounts::Wanted { attributes, is_recursive: attributes_recursive, propagation };
                let attach = |root: &Root, mounts: &Fd| {
                    mounts::attach_tree(root, mounts, text(target)?, &wanted, skip_missing)
                };
                let attached = attach(self.root()?, &mounts);
                match (attached, source) {
                    (Err(Errno::ELOOP), Some(source)) => {
                        let host = self.host()?;
                        let mounts = self.trees.clone_without_namespaces(&source, host)?;
                        attach(self.root()?, &mounts)
                    }
                    (attached, _) => attached,
                }
            }
            Op::Mask { slot, target } => {
                let tree = self.trees.take(slot)?;
                mounts::mask(self.root()?, &tree.mounts, text(target)?)
            }
            Op::ReadOnly { target } => mounts::read_only(self.root()?, text(target)?),
            Op::ReadOnlyRoot => mounts::read_only_root(self.root()?),
            Op::Node { path, mode, device } => {
                self.root()?.in_parent(text(path)?, |parent, name| fs::make_node(parent, name, mode, device))
            }
            Op::Symlink { content, path } => {
                let content = text(content)?;
                self.root()?.in_parent(text(path)?, |parent, name| {
                    match fs::make_symlink(content, parent, name) {
                        Err(Errno::EEXIST) => Ok(()),
                        made => made,
                    }
                })
            }
            Op::Directory { path, mode } => {
                self.root()?.find_or_make(text(path)?, Make::Directory(mode)).map(drop)
            }
            Op::HostName { name } => process::set_host_name(name),
            Op::LoopbackUp => socket::loopback_up(),
            Op::Limit { resource, soft, hard } => match process::set_limit(resource, soft, hard) {
                Err(Errno::EPERM) => Ok(()),
                set => set,
            },
            Op::Terminal => self.terminal(),
            Op::WorkingDirectory { path, create } => {
                let (root, path) = (self.root()?, text(path)?);
                let flags = fs::O_PATH | fs::O_DIRECTORY;
                if create {
                    root.find_or_make(path, Make::Directory(0o755))?;
                }
                fs::change_directory(root.find(path, flags)?.borrow())
            }
            Op::BoundingSet { keep } => {
                self.close_descriptors()?;
                drop_bounding(keep)
            }
            Op::Groups { gids } => process::set_groups(gids),
            Op::User { uid, gid } => set_user(uid, gid),
            Op::Capabilities { effective, permitted, inheritable, ambient } => {
                process::set_capabilities(effective, permitted, inheritable)?;
                process::control(Control::ClearAmbient)?;
                (0..64)
                    .filter(|capability| ambient >> capability & 1 == 1)
                    .try_for_each(|capability| process::control(Control::RaiseAmbient(capability)))
            }
            Op::NoNewPrivileges => process::control(Control::NoNewPrivileges),
            Op::Seccomp { program, flags } => {
                self.reset_slice();
                if self.child.as_ref().is_some_and(|child| child.second.is_some()) {
                    stay_on_this_cpu();
                }
                self.has_filter = true;
                match self.mark {
                    Some(mark) => bpf::set_filter_but_for(mark, program, flags),
                    None => bpf::set_filter(program, flags),
                }
            }
            Op::Umask { mask } => {
                self.umask = mask;
                Ok(())
            }
            Op::ActAs { uid, gid } => {
                process::control(Control::KeepEffective(uid != 0))?;
                process::set_effective(uid, gid)
            }
            Op::IdmapOver { path } => self.idmap_over(text(path)?),
            Op::Idmap { slot } => self.trees.idmap(slot, self.user_namespace()?, self.host()?),
            Op::OpenBelow { slot, base, path } => self.open_below(slot, text(base)?, text(path)?),
            Op::BindSelf { path } => mounts::image_volume(self.root()?, text(path)?),
            Op::GiveStreams { uid } => give_streams(uid, |stat| stat.mode & fs::S_IFMT == fs::S_IFIFO),
            Op::UserNamespace => self.enter_user_namespace(),
            Op::Wait => self.wait(),
            Op::JoinNamespace { path, flag } => {
                let path = text(path)?;
                // A FIFO would delay the start until its time limit; setns refuses it.
                let flags = fs::O_RDONLY | fs::O_NONBLOCK;
                let (host, open) = (self.host()?, || fs::open(FdRef::WORKING_DIRECTORY, path, flags, 0));
                let file = self.trees.on_the_host(host, open)?;
                self.has_own(u64::from(flag));
                self.trees.forget_own_namespace();
                process::setns(file.borrow(), u64::from(flag))
            }
            Op::Schedule { policy, flags, nice, priority, times: [runtime, deadline, period] } => {
                let scheduling =
                    sched::Scheduling { policy, flags, nice, priority, runtime, deadline, period };
                sched::set_scheduling(scheduling)
            }
            Op::IoPriority { class, level } => sched::set_io_priority(class, level),
            Op::MemoryPolicy { mode, nodes: [0, 0] } => sched::set_memory_policy(mode, &[]),
            Op::MemoryPolicy { mode, nodes } => sched::set_memory_policy(mode, &nodes),
            Op::Owner { path, uid, gid } => self
                .root()?
                .in_parent(text(path)?, |parent, name| fs::change_owner_of(parent, name, uid, gid)),
            Op::SpareOwnCalls => {
                let hands_over = self.child.as_ref().is_some_and(|child| child.second.is_some());
                self.mark = if hands_over { Some(Mark::new()?) } else { None };
                Ok(())
            }
            Op::Keyring => keyring::join(&self.child.as_ref().ok_or(Errno::EINVAL)?.keyring),
            Op::SharedPidNamespace if self.child.is_none() => {
                self.init = Some(init::start()?);
                Ok(())
            }
            Op::SharedPidNamespace => Err(Errno::EINVAL),
            Op::Verify { kernel, root_read_only, masked, read_only } => {
                verify(self.root()?, &Wanted { kernel, root_read_only, masked, read_only })
            }
            Op::Exec { candidates, arguments, environment } => {
                self.child.as_ref().ok_or(Errno::EINVAL)?;
                self.close_descriptors()?;
                self.reset_slice();
                process::set_umask(self.umask);
                let (errno, found) = exec(&candidates, &arguments, &environment);
                self.found = found;
                Err(errno)
            }
        }
    }

    /// Records the kinds of namespaces (CLONE_NEW…) that the process has created or joined in place of the pod's.
    fn has_own(&mut self, kinds: u64) {
        if let Some(memory) = self.child.as_mut().and_then(|child| child.memory.as_mut()) {
            memory.own |= kinds;
        }
    }

    #[inline(never)]
    fn filesystem(
        &mut self,
        kind: &CStr,
        options: &Block<'_>,
        attributes: u64,
        target: &CStr,
    ) -> Result<(), Errno> {
        let (Some(root), Some(child)) = (&self.root, &mut self.child) else { return Err(Errno::EINVAL) };
        if kind != c"proc" {
            return mounts::filesystem(root, kind, options, attributes, target).map(drop);
        }
        let identity = match child.proc()? {
            Some(proc) => proc.mount(root, options, attributes, target)?,
            None => mounts::filesystem(root, kind, options, attributes, target)?,
        };
        if let Some(memory) = child.memory.as_mut().filter(|_| target == c"/proc") {
            memory.proc = Some(identity);
        }
        Ok(())
    }

    /// The container's root directory.
    ///
    /// # Errors
    /// EINVAL before the root is opened or entered.
    fn root(&self) -> Result<&Root, Errno> {
        self.root.as_ref().ok_or(Errno::EINVAL)
    }

    /// Resets the scheduler slice to the default: the monitor's short slices are for the start, not for the container's
    /// program. This comes before the seccomp filter, which may forbid the call. An error is ignored, because the
    /// monitor's own call then failed too.
    fn reset_slice(&mut self) {
        if !core::mem::replace(&mut self.takes_usual_turns, true) {
            let _ = sched::set_slice(0, InheritOnFork::Yes);
        }
    }

    /// Reports to the monitor that the process waits, with one byte on the report pipe (a failure has six bytes, EOF
    /// means exec), and waits for the answer on the socket.
    #[inline(never)]
    fn wait(&self) -> Result<(), Errno> {
        let child = self.child.as_ref().ok_or(Errno::EINVAL)?;
        // The socket is non-blocking, because the monitor must not block.
        let epoll = socket::epoll()?;
        socket::watch(epoll.borrow(), child.terminal, socket::EPOLLIN, 0)?;
        fs::write(child.report, b"w")?;
        let mut events = [MaybeUninit::uninit(); socket::EVENTS_MAX];
        while socket::wait(epoll.borrow(), &mut events, -1)?.is_empty() {}
        match socket::receive(child.terminal, &mut [0; 1])?.length {
            0 => Err(Errno::EPIPE),
            _ => Ok(()),
        }
    }

    #[inline(never)]
    fn idmap_over(&self, path: &CStr) -> Result<(), Errno> {
        let tree = mount::clone_tree(FdRef::WORKING_DIRECTORY, path, 0)?;
        trees::map_owners(&tree, self.user_namespace()?, false)?;
        let covered = fs::open(FdRef::WORKING_DIRECTORY, path, fs::O_PATH | fs::O_DIRECTORY, 0)?;
        mount::attach(tree.borrow(), covered.borrow())
    }

    #[inline(never)]
    fn open_below(&mut self, slot: u16, base: &CStr, path: &CStr) -> Result<(), Errno> {
        let found = Root::at(base)?.find(path, fs::O_PATH)?;
        let mounts = mount::clone_tree(found.borrow(), c"", mount::AT_EMPTY_PATH)?;
        self.trees.keep(slot, Tree { mounts, source: None })
    }

    #[inline(never)]
    fn enter_user_namespace(&self) -> Result<(), Errno> {
        process::setns(self.user_namespace()?, process::CLONE_NEWUSER)?;
        process::unshare(process::CLONE_NEWNS)?;
        become_root()
    }

    fn user_namespace(&self) -> Result<FdRef<'static>, Errno> {
        match &self.child {
            Some(ChildState { home: Destination::New { user: Some(user), .. }, .. }) => Ok(*user),
            Some(_) | None => Err(Errno::EINVAL),
        }
    }

    /// The descriptor of the host's mount namespace.
    fn host(&self) -> Result<FdRef<'static>, Errno> {
        self.child.as_ref().ok_or(Errno::EINVAL)?.host()
    }

    /// Makes `new_root` the root directory and unmounts the old root. Both are stacked on the same mount point, so that
    /// no directory is needed for the old root (pivot_root(2), "pivot_root(".", ".")").
    fn pivot(&mut self, new_root: &CStr) -> Result<(), Errno> {
        if self.child.is_none() {
            return Err(Errno::EINVAL);
        }
        // An open root stays, with the mounts that it has recorded. It is entered through its descriptor: a hook may have
        // mounted something on its path.
        match &self.root {
            Some(root) => fs::change_directory(root.directory())?,
            None => fs::change_directory_to(new_root)?,
        }
        mount::pivot_root(c".", c".")?;
        mount::unmount(c".", mount::MNT_DETACH)?;
        fs::change_directory_to(c"/")?;
        if self.root.is_none() {
            self.root = Some(Root::open()?);
        }
        Ok(())
    }

    fn terminal(&mut self) -> Result<(), Errno> {
        const TTYAUX_MAJOR: u32 = 5;
        let (Some(child), root) = (&self.child, self.root()?) else { return Err(Errno::EINVAL) };
        let found = root.find(c"/dev/pts/ptmx", fs::O_PATH)?;
        let stat = fs::stat(found.borrow())?;
        if stat.mode & fs::S_IFMT != fs::S_IFCHR || stat.device_major != TTYAUX_MAJOR {
            return Err(Errno::ENXIO);
        }
        let master = root.find(c"/dev/pts/ptmx", fs::O_RDWR | fs::O_NOCTTY)?;
        let slave = fs::open_terminal_peer(master.borrow())?;
        socket::send(child.terminal, b"t", &[master.borrow()])?;
        (0..3).try_for_each(|stream| fs::duplicate_to(slave.borrow(), stream, false))?;
        // Otherwise the session leader, which is the second process, sets it.
        if child.second.is_none() {
            fs::set_controlling_terminal(slave.borrow(), Mark::NONE)?;
        }
        // An exec has its own terminal; /dev/console stays the container's.
        if matches!(child.home, Destination::New { .. }) {
            let tree = mount::clone_tree(slave.borrow(), c"", mount::AT_EMPTY_PATH)?;
            let console = root.find_or_make(c"/dev/console", Make::File)?;
            // A volume on /dev may contain a link to the kernel's files there (CVE-2025-52565).
            let itself = root.find(c"/dev/console", fs::O_PATH | fs::O_NOFOLLOW)?;
            if fs::stat(itself.borrow())?.mode & fs::S_IFMT == fs::S_IFLNK {
                return Err(Errno::ELOOP);
            }
            mounts::check_target(root, c"/dev/console", &console)?;
            mount::attach(tree.borrow(), console.borrow())?;
        }
        self.has_terminal = true;
        Ok(())
    }
}

/// Changes to a directory inside the process's root.
fn enter(path: Text<'_>) -> Result<(), Errno> {
    let directory = Root::open()?.find(text(path)?, fs::O_PATH | fs::O_DIRECTORY)?;
    fs::change_directory(directory.borrow())
}

fn text(text: Text<'_>) -> Result<&CStr, Errno> {
    text.as_cstr().ok_or(DAMAGED)
}

fn write_file(path: &CStr, data: &[u8], is_optional: bool) -> Result<(), Errno> {
    let written = fs::open(FdRef::WORKING_DIRECTORY, path, fs::O_WRONLY, 0)
        .and_then(|file| fs::write(file.borrow(), data))
        .and_then(|length| if length == data.len() { Ok(()) } else { Err(Errno::EIO) });
    match written {
        Err(Errno::EPERM | Errno::EACCES | Errno::ENOENT) if is_optional => Ok(()),
        written => written,
    }
}

/// Changes the user and group. Before that, changes the owner of pipes and terminals among the standard streams, so
/// that the user can open /dev/stdout (runc: fixStdioPermissions).
fn set_user(uid: u32, gid: u32) -> Result<(), Errno> {
    const TERMINAL_MAJORS: core::ops::RangeInclusive<u32> = 136..=143;
    give_streams(uid, |stat| match stat.mode & fs::S_IFMT {
        fs::S_IFIFO => true,
        fs::S_IFCHR => TERMINAL_MAJORS.contains(&stat.device_major),
        _ => false,
    })?;
    process::control(Control::KeepCapabilities)?;
    process::set_group(gid)?;
    process::set_user(uid)?;
    // A change of ids resets the dumpable attribute to fs.suid_dumpable.
    process::control(Control::NotDumpable)
}

/// Changes the owner of the standard streams that `which` selects to `uid`.
fn give_streams(uid: u32, which: impl Fn(fs::Stat) -> bool) -> Result<(), Errno> {
    for stream in FdRef::STANDARD_STREAMS {
        if which(fs::stat(stream)?) {
            // In a user namespace the owner of a file from outside cannot be changed; the open descriptor works anyway.
            let _ = fs::change_owner(stream, uid);
        }
    }
    Ok(())
}

/// Becomes root of the user namespace: a process that has entered a user namespace has the overflow IDs and all
/// capabilities.
pub(crate) fn become_root() -> Result<(), Errno> {
    process::set_group(0)?;
    process::set_user(0)?;
    process::control(Control::NotDumpable)
}

/// Executes the first candidate that can be executed; returns only an error. If a candidate exists whose interpreter or
/// loader is missing, which is the same error as that of a missing file, also returns its number, from 1.
fn exec(candidates: &Block<'_>, arguments: &Block<'_>, environment: &Block<'_>) -> (Errno, u16) {
    let pointers = match pointers(arguments, environment) {
        Ok(pointers) => pointers,
        Err(errno) => return (errno, 0),
    };
    let mut answer = Errno::ENOENT;
    for (candidate, number) in candidates.iter().zip(1..) {
        match process::exec(candidate, &pointers) {
            Errno::ENOENT if fs::open(FdRef::WORKING_DIRECTORY, candidate, fs::O_PATH, 0).is_ok() => {
                return (Errno::ENOENT, number);
            }
            Errno::ENOENT | Errno::ENOTDIR => {}
            Errno::EACCES => answer = Errno::EACCES,
            errno => return (errno, 0),
        }
    }
    (answer, 0)
}

fn pointers<'a>(arguments: &Block<'a>, environment: &Block<'a>) -> Result<Pointers<'a>, Errno> {
    if [arguments, environment].iter().any(|block| block.iter().count() != block.count as usize) {
        return Err(DAMAGED);
    }
    let mut pointers = Pointers::with_capacity(arguments.count as usize, environment.count as usize)?;
    arguments.iter().try_for_each(|text| pointers.push_argument(text))?;
    environment.iter().try_for_each(|text| pointers.push_variable(text))?;
    Ok(pointers)
}

#[cfg(test)]
mod tests {
    use coracle_wire::{Propagation, RECORD_VERSION, RecordHeader};

    use super::*;

    fn record(version: u16, ops: &[Op<'_>]) -> Vec<u8> {
        let mut bytes = postcard::to_allocvec(&RecordHeader { version }).unwrap();
        for op in ops {
            bytes.extend(postcard::to_allocvec(op).unwrap());
        }
        bytes
    }

    /// A record of operations that change only the state of the walker.
    fn harmless() -> Vec<u8> {
        record(RECORD_VERSION, &[Op::Umask { mask: 0o27 }, Op::Umask { mask: 0o77 }])
    }

    #[test]
    fn every_cut_of_a_record_names_the_operation_it_cuts() {
        let whole = harmless();
        assert_eq!(Walker::new(None).walk(&whole), Ok(2));
        let damaged = |index| Err(Failure { index, errno: DAMAGED });
        let first = record(RECORD_VERSION, &[Op::Umask { mask: 0o27 }]).len();
        for cut in 0..whole.len() {
            let expected = match cut {
                0 => damaged(0),
                1 => Ok(0),
                cut if cut < first => damaged(0),
                cut if cut == first => Ok(1),
                _ => damaged(1),
            };
            assert_eq!(Walker::new(None).walk(&whole[..cut]), expected, "cut at {cut}");
        }
    }

    #[test]
    fn a_newer_record_is_refused() {
        let newer = record(RECORD_VERSION + 1, &[]);
        assert_eq!(Walker::new(None).walk(&newer), Err(Failure { index: 0, errno: DAMAGED }));
    }

    #[test]
    fn operations_of_containers_are_refused_in_a_setup_record() {
        let empty = Block { count: 0, bytes: b"" };
        let text = Text::new(c"/");
        let cases = [
            Op::OpenRoot { path: text },
            Op::PivotRoot { new_root: text },
            Op::ReadOnlyRoot,
            Op::Terminal,
            Op::Mask { slot: 0, target: text },
            Op::Exec { candidates: empty, arguments: empty, environment: empty },
        ];
        for op in cases {
            let bytes = record(RECORD_VERSION, &[Op::Umask { mask: 0 }, op]);
            let expected = Err(Failure { index: 1, errno: Errno::EINVAL });
            assert_eq!(Walker::new(None).walk(&bytes), expected, "{op:?}");
        }
    }

    #[test]
    fn a_text_without_a_nul_byte_is_refused() {
        let mut bytes = record(RECORD_VERSION, &[Op::PivotRoot { new_root: Text::new(c"/") }]);
        *bytes.last_mut().unwrap() = b'x';
        assert_eq!(Walker::new(None).walk(&bytes), Err(Failure { index: 0, errno: DAMAGED }));
    }

    #[test]
    fn a_block_with_a_wrong_count_is_refused() {
        let whole = Block { count: 2, bytes: b"a\0b\0" };
        for damaged in [Block { count: u32::MAX, bytes: b"a\0b\0" }, Block { count: 2, bytes: b"a\0b" }] {
            assert_eq!(pointers(&damaged, &whole).err(), Some(DAMAGED));
            assert_eq!(pointers(&whole, &damaged).err(), Some(DAMAGED));
        }
        assert!(pointers(&whole, &whole).is_ok());
    }

    #[test]
    fn a_failure_survives_encoding() {
        let failure = Failure { index: 300, errno: Errno(95) };
        assert_eq!(Failure::from_bytes(failure.to_bytes()), failure);
    }

    #[test]
    fn propagation_becomes_its_mount_flag() {
        assert_eq!(mounts::flag(Propagation::Slave), mount::MS_SLAVE);
    }
}
