//! The simulated kernel: time, processes, cgroups, network namespaces and the disk, as the engine uses them.
//! During each call of the engine simulated time passes, in which the rest of the node proceeds. A call may
//! fail with an injected error, and the daemon may be killed in it.

use std::cell::RefCell;
use std::ffi::OsString;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::path::Path;

use coracle_sandbox::cgroup::{CgroupPath, Entry};
use coracle_sandbox::monitor::{ConnectError, LinkError, Monitor, Spawn};
use coracle_sandbox::simulation::{SimulatedFiles, SimulatedKernel, SimulatedNode, SimulatedTime};
use coracle_sandbox::{Error, Exit};
use nix::errno::Errno;

use crate::cgroups::entered;
use crate::world::{
    CLONE, Happening, Killed, READ, REMOVE, ROOT, Role, SCARCE, SIGNAL, SOCKET, TURNS_MAX, World, descriptor,
    object_of,
};

/// The simulated node with the interface that the engine uses.
pub(crate) struct Node {
    pub(crate) world: RefCell<World>,
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn io_error(error: Errno) -> io::Error {
    error.into()
}

impl SimulatedNode for Node {}

impl SimulatedTime for Node {
    fn now_ns(&self) -> u64 {
        let world = self.world.borrow();
        let reads = world.clock_reads.get() + 1;
        world.clock_reads.set(reads);
        if reads != TURNS_MAX {
            return world.now_ns;
        }
        drop(world);
        let mut world = self.world.borrow_mut();
        world.broken(format!("the clock is read {TURNS_MAX} times: a loop does not wait"));
        world.is_daemon_dead = true;
        drop(world);
        resume_unwind(Box::new(Killed));
    }

    fn wall_ns(&self) -> u64 {
        let world = self.world.borrow();
        world.wall_ns + world.now_ns
    }

    fn turns(&self) {
        let mut world = self.world.borrow_mut();
        world.turns += 1;
        if world.turns == TURNS_MAX {
            world.broken(format!("the event loop does not come to rest within {TURNS_MAX} turns"));
            world.is_daemon_dead = true;
        }
        // The executor keeps the panic of a task for the task that awaits it.
        let is_dead = world.is_daemon_dead;
        drop(world);
        if is_dead {
            resume_unwind(Box::new(Killed));
        }
    }

    fn rest(&self, until_ns: Option<u64>) {
        let mut world = self.world.borrow_mut();
        let next = world.happenings.first_key_value().map(|((at_ns, _), _)| *at_ns);
        match until_ns.into_iter().chain(next).min() {
            Some(next) => world.pass(next),
            None => {
                world.broken("everything waits, and nothing is left to happen".to_owned());
                world.is_daemon_dead = true;
                drop(world);
                resume_unwind(Box::new(Killed));
            }
        }
    }

    fn wants_log(&self) -> bool {
        self.world.try_borrow().is_ok_and(|world| world.is_traced)
    }

    fn log(&self, line: &str) {
        let line = line.trim_end().split_once(' ').map_or(line, |(_, rest)| rest).to_owned();
        self.world.borrow_mut().note(format!("| {line}"));
    }

    fn random_id(&self) -> Result<[u8; 32], Error> {
        let mut world = self.world.borrow_mut();
        let mut bytes = [0; 32];
        for part in bytes.chunks_mut(8) {
            part.copy_from_slice(&world.random.next().to_le_bytes());
        }
        Ok(bytes)
    }
}

impl SimulatedFiles for Node {
    fn has_path(&self, path: &Path) -> bool {
        let path = text(path);
        path.starts_with("/sim/")
            || path == "/proc"
            || path.strip_prefix("/proc/").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        world.call("read", path, READ).map_err(io_error)?;
        match path.starts_with("/proc/") {
            true => world.proc_file(path).map(String::into_bytes).ok_or_else(|| Errno::ENOENT.into()),
            false => world.disk.read(path),
        }
    }

    fn write(&self, path: &Path, bytes: &[u8], is_synced: bool) -> io::Result<()> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        let errors = World::change_errors(path);
        world.call("create", path, errors).map_err(io_error)?;
        // The file exists before its content does.
        world.disk.write(path, &[])?;
        if let Err(errno) = world.call("write", path, errors) {
            let written = world.random.below(bytes.len() as u64 + 1) as usize;
            world.disk.write(path, &bytes[..written])?;
            return Err(errno.into());
        }
        world.disk.write(path, bytes)?;
        if is_synced {
            world.call("fsync", path, &[Errno::EIO, Errno::ENOSPC]).map_err(io_error)?;
            world.disk.sync(path)?;
        }
        Ok(())
    }

    fn write_over(&self, path: &Path, offset: u64, bytes: &[u8], is_synced: bool) -> io::Result<()> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        world.call("open", path, World::change_errors(path)).map_err(io_error)?;
        // No block is added to the file, so the disk cannot be full.
        if let Err(errno) = world.call("pwrite", path, &[Errno::EIO]) {
            let written = world.random.below(bytes.len() as u64 + 1) as usize;
            world.disk.write_over(path, offset, &bytes[..written])?;
            return Err(errno.into());
        }
        world.disk.write_over(path, offset, bytes)?;
        if is_synced {
            world.call("fdatasync", path, &[Errno::EIO]).map_err(io_error)?;
            world.disk.sync_content(path)?;
        }
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let (mut world, from) = (self.world.borrow_mut(), text(from));
        world.call("rename", from, World::change_errors(from)).map_err(io_error)?;
        world.disk.rename(from, text(to))?;
        world.report_removal(from);
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        let errors = if path.starts_with(ROOT) { REMOVE } else { &[Errno::ENOMEM] };
        world.call("unlink", path, errors).map_err(io_error)?;
        world.disk.remove_file(path)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        let errors = if path.starts_with(ROOT) { REMOVE } else { SCARCE };
        world.disk.entries(path)?;
        // One by one, because it may end in between.
        while let Some(last) = world.disk.last_below(path) {
            world.call("unlink", &last, errors).map_err(io_error)?;
            world.disk.remove_one(&last);
        }
        world.call("rmdir", path, errors).map_err(io_error)?;
        world.disk.remove_dir_all(path)?;
        world.report_removal(path);
        Ok(())
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        if !world.disk.has(path) {
            world.call("mkdir", path, World::change_errors(path)).map_err(io_error)?;
        }
        world.disk.create_dir_all(path)
    }

    fn entries(&self, path: &Path) -> io::Result<Vec<(OsString, bool)>> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        world.call("list", path, READ).map_err(io_error)?;
        match path {
            "/proc" => Ok(world.processes.keys().map(|pid| (pid.to_string().into(), true)).collect()),
            // Each process has one thread.
            _ => match path.strip_prefix("/proc/").and_then(|rest| rest.strip_suffix("/task")) {
                Some(pid) if world.proc_file(&format!("{path}/{pid}")).is_some() => {
                    Ok(vec![(pid.into(), true)])
                }
                Some(_) => Err(Errno::ENOENT.into()),
                None => world.disk.entries(path),
            },
        }
    }

    fn inspect(&self, path: &Path) -> io::Result<()> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        world.call("stat", path, &[Errno::EIO, Errno::ENOMEM]).map_err(io_error)?;
        if world.disk.has(path) { Ok(()) } else { Err(Errno::ENOENT.into()) }
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        world.call("fsync", path, &[Errno::EIO, Errno::EMFILE]).map_err(io_error)?;
        world.disk.sync(path)
    }

    fn sync_file_system(&self, path: &Path) -> io::Result<()> {
        let mut world = self.world.borrow_mut();
        world.call("syncfs", text(path), &[Errno::EIO, Errno::EMFILE]).map_err(io_error)?;
        world.disk.sync_all();
        Ok(())
    }

    fn arm_removals(&self, directory: &Path) -> io::Result<OwnedFd> {
        self.world.borrow_mut().arm_removals(text(directory)).map_err(io_error)
    }

    fn open_device(&self, path: &Path) -> io::Result<()> {
        self.world.borrow_mut().call("open", text(path), SCARCE).map_err(io_error)
    }
}

impl SimulatedKernel for Node {
    fn make_cgroup(&self, path: &CgroupPath) -> Result<(), Error> {
        self.world.borrow_mut().make_cgroup(path.as_str())
    }

    fn unmake_cgroup(&self, path: &CgroupPath) -> Result<(), Error> {
        self.world.borrow_mut().remove_cgroup(path.as_str())
    }

    fn unmake_cgroup_if_unused(&self, path: &CgroupPath) -> Result<(), Error> {
        self.world.borrow_mut().remove_unused_cgroup(path.as_str())
    }

    fn has_cgroup(&self, path: &CgroupPath) -> bool {
        let mut world = self.world.borrow_mut();
        world.call("stat cgroup", path.as_str(), &[]).is_ok() && world.cgroups.contains(path.as_str())
    }

    fn apply_limits(&self, path: &CgroupPath) -> Result<(), Error> {
        self.world.borrow_mut().kernel_call("apply limits", path.as_str(), &[Errno::ENOMEM, Errno::EMFILE])
    }

    fn kill_cgroup(&self, path: &CgroupPath, in_all: bool) -> Result<bool, Error> {
        let mut world = self.world.borrow_mut();
        world.kernel_call("kill cgroup", path.as_str(), &[Errno::ENOMEM, Errno::EMFILE, Errno::EINTR])?;
        Ok(world.kill_below(path.as_str(), in_all))
    }

    fn enter_cgroup(&self, path: &CgroupPath) -> Result<Entry, Error> {
        let mut world = self.world.borrow_mut();
        world.kernel_call("open cgroup", path.as_str(), SCARCE)?;
        if !world.cgroups.is_whole(path.as_str()) {
            return Err(Error::Kernel { op: "open cgroup", target: path.to_string(), errno: Errno::ENOENT });
        }
        Ok(Entry { into: Some(descriptor(path.as_str())), join_files: Vec::new(), oom_counter: None })
    }

    fn find_cgroups(&self, is_wanted: &dyn Fn(&str) -> bool) -> Result<Vec<CgroupPath>, Error> {
        let mut world = self.world.borrow_mut();
        world.kernel_call("list cgroups", "/", READ)?;
        world.named_cgroups(is_wanted)
    }

    fn pin_netns(&self, pid: u32, path: &Path) -> Result<(), Error> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        world.kernel_call("bind network namespace", path, SCARCE)?;
        let is_there = i32::try_from(pid).is_ok_and(|pid| world.processes.contains_key(&pid));
        if !is_there {
            return Err(Error::Kernel { op: "bind", target: path.to_owned(), errno: Errno::ENOENT });
        }
        world.namespaces.insert(path.to_owned());
        Ok(())
    }

    fn unpin_netns(&self, path: &Path) -> Result<(), Error> {
        let (mut world, path) = (self.world.borrow_mut(), text(path));
        world.kernel_call("unmount network namespace", path, &[Errno::ENOMEM])?;
        world.namespaces.remove(path);
        Ok(())
    }

    fn has_netns(&self, path: &Path) -> bool {
        let mut world = self.world.borrow_mut();
        world.call("stat network namespace", text(path), &[]).is_ok() && world.namespaces.contains(text(path))
    }

    fn spawn_monitor(&self, spawn: &Spawn<'_>, meanwhile: &mut dyn FnMut()) -> Result<Monitor, Error> {
        let directory = text(spawn.directory);
        let cgroup = object_of(spawn.cgroup.expect("a cgroup"));
        self.world.borrow_mut().listen(directory)?;
        let pid = {
            let mut world = self.world.borrow_mut();
            world.kernel_call("clone monitor", directory, CLONE)?;
            world.clone_process(Role::Blocked, &entered(&cgroup), 1)
        };
        let started = self.release_monitor(pid, directory, meanwhile);
        if started.is_err() {
            let mut world = self.world.borrow_mut();
            if !world.is_daemon_dead {
                // The caller waits for its end and removes the file.
                world.processes.remove(&pid);
                world.monitors.remove(&pid);
                let _ = world.disk.remove_file(&format!("{directory}/monitor.pid"));
            }
        }
        started
    }

    fn connect_monitor(&self, directory: &Path) -> Result<Monitor, ConnectError> {
        let mut world = self.world.borrow_mut();
        let directory = text(directory);
        let failed = ConnectError::Failed;
        world.kernel_call("connect to monitor", directory, SCARCE).map_err(failed)?;
        let pid = world.monitor_of(directory).ok_or(ConnectError::NotThere)?;
        if !world.disk.has(&format!("{directory}/monitor.sock")) {
            return Err(ConnectError::NotThere);
        }
        world.connect(pid).ok_or(ConnectError::NotThere)
    }

    fn monitor_pid(&self, directory: &Path) -> Result<Option<i32>, Error> {
        let mut world = self.world.borrow_mut();
        world.kernel_call("read monitor.pid", text(directory), SCARCE)?;
        Ok(world.monitor_of(text(directory)))
    }

    fn remake_monitor_files(&self, directory: &Path, pid: i32) -> Result<[OwnedFd; 2], Error> {
        self.world.borrow_mut().remake_monitor_files(text(directory), pid)
    }

    fn sends(&self, monitor: i32) -> Result<(), LinkError> {
        let mut world = self.world.borrow_mut();
        world.kernel_call("send frame", "to monitor", SOCKET).map_err(LinkError::Failed)?;
        let delay = world.moment();
        world.schedule(delay, Happening::MonitorReads(monitor));
        Ok(())
    }

    fn receives(&self, pid: i32) -> Result<(), LinkError> {
        let mut world = self.world.borrow_mut();
        world.kernel_call("receive frame", "from monitor", SOCKET).map_err(LinkError::Failed)?;
        if let Some(monitor) = world.monitors.get_mut(&pid) {
            // The answer is there as soon as Hello is.
            monitor.is_heard |= monitor.connection().is_some();
        }
        Ok(())
    }

    fn is_monitor_gone(&self, monitor: i32) -> bool {
        !self.world.borrow().monitors.contains_key(&monitor)
    }

    fn kill_process(&self, pid: i32) -> Result<(), Error> {
        let mut world = self.world.borrow_mut();
        world.kernel_call("kill process", &pid.to_string(), SIGNAL)?;
        world.kill(pid, Exit::Signal(9));
        Ok(())
    }

    fn pid_of(&self, pidfd: BorrowedFd<'_>) -> Option<i32> {
        let mut world = self.world.borrow_mut();
        world.call("read fdinfo", "of a pidfd", SCARCE).ok()?;
        object_of(pidfd).parse().ok().filter(|pid| world.processes.contains_key(pid))
    }
}

impl Node {
    pub(crate) fn new(world: World) -> Self {
        Self { world: RefCell::new(world) }
    }

    fn release_monitor(
        &self,
        pid: i32,
        directory: &str,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Monitor, Error> {
        let mut world = self.world.borrow_mut();
        world.write_pid_file(directory, pid)?;
        world.kernel_call("release monitor", directory, &[])?;
        world.start_monitor(pid, directory);
        drop(world);
        meanwhile();
        let mut world = self.world.borrow_mut();
        world.kernel_call("execute monitor", directory, &[Errno::ENOMEM])?;
        world.kernel_call("connect to monitor", directory, SCARCE)?;
        let refused =
            || Error::Kernel { op: "connect", target: directory.to_owned(), errno: Errno::ECONNREFUSED };
        world.connect(pid).ok_or_else(refused)
    }
}
