//! Processes of a cgroup: joining the cgroup, checking whether it contains processes, and killing all of them.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::Pid;

use super::files::{self, names_gone, read, tree, write};
use super::layout::Tracking;
use super::{CgroupPath, Cgroups, Layout};
use crate::Error;
use crate::collect;

/// The way in which a new process joins a cgroup, and the cgroup's OOM counter.
#[derive(Debug)]
pub struct Entry {
    /// Descriptor of the cgroup2 directory (v2 and hybrid), for `CLONE_INTO_CGROUP`; `None` on v1.
    pub into: Option<OwnedFd>,
    /// On v1, the files to which the process writes "0", through its launch record; otherwise empty.
    pub join_files: Vec<PathBuf>,
    /// `memory.events` (v2) or `memory.oom_control` (v1), open for reading; both contain a line `oom_kill N`. `None`
    /// without the memory controller.
    pub oom_counter: Option<OwnedFd>,
}

/// Maximum number of times that one call lists and kills the processes of a cgroup without `cgroup.kill`. If processes
/// fork faster, the next call continues.
const KILL_ROUNDS_MAX: usize = 4;

impl Cgroups {
    /// Opens the files through which a container's process joins its cgroup, which must exist.
    ///
    /// # Errors
    /// [`Error::Kernel`] naming the directory.
    pub fn entry(&self, path: &CgroupPath) -> Result<Entry, Error> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.enter_cgroup(path);
        }
        Ok(Entry {
            into: self.open_unified(path)?,
            join_files: self.join_files(path),
            oom_counter: self.open_oom_counter(path)?,
        })
    }

    /// Creates the cgroup `exec` for one exec below the container's ([`CgroupPath::exec`]) and returns how to join it, so
    /// that [`Cgroups::kill`] of it kills exactly the exec's processes. On v1 and hybrid hosts it exists only in the tracking
    /// hierarchy; in the others the exec is in the container's cgroup. The container's limits apply in each case.
    ///
    /// # Errors
    /// [`Error::Kernel`] with the directory; ENOENT if the container's cgroup does not exist any more.
    pub fn make_exec(&self, container: &CgroupPath, exec: &CgroupPath) -> Result<Entry, Error> {
        files::make_directory(&self.tracking_directory(exec))?;
        self.entry_of_exec(container, exec)
    }

    /// Opens the cgroup of an earlier exec for another exec; `None` if it no longer exists. The caller has found no process
    /// in it; a process that a privileged container moves into it afterwards is killed together with the exec.
    ///
    /// # Errors
    /// [`Error::Kernel`] naming the file that cannot be opened.
    pub fn reuse_exec(&self, container: &CgroupPath, exec: &CgroupPath) -> Result<Option<Entry>, Error> {
        if !self.is_tracked(exec) {
            return Ok(None);
        }
        self.entry_of_exec(container, exec).map(Some)
    }

    fn entry_of_exec(&self, container: &CgroupPath, exec: &CgroupPath) -> Result<Entry, Error> {
        let join_files = self.join_files_of(container, Some(exec));
        Ok(Entry { into: self.open_unified(exec)?, join_files, oom_counter: None })
    }

    /// Whether a process is in the cgroup or its descendants; false if the cgroup does not exist.
    ///
    /// # Errors
    /// [`Error::Kernel`] if a file cannot be read.
    pub fn is_populated(&self, path: &CgroupPath) -> Result<bool, Error> {
        match self.layout.tracking() {
            Tracking::Unified(mount) => match read(&path.below(mount).join("cgroup.events")) {
                Ok(events) => Ok(events.lines().any(|line| line == "populated 1")),
                Err(error) if names_gone(&error) => Ok(false),
                Err(error) => Err(error),
            },
            Tracking::Legacy(mount) => {
                for directory in tree(&path.below(mount))? {
                    if !processes(&directory)?.trim().is_empty() {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }

    /// Sends SIGKILL to every process in the cgroup and its descendants, frozen ones included. Does not wait for their end;
    /// check [`Cgroups::is_populated`]. A missing cgroup is success.
    ///
    /// # Errors
    /// [`Error::Kernel`] naming the file or the process.
    pub fn kill(&self, path: &CgroupPath) -> Result<(), Error> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.kill_cgroup(path, false).map(drop);
        }
        self.signal_all(path).and(self.thaw(path))
    }

    /// [`Cgroups::kill`], and if no process is left by which the cgroup is tracked, of each process that is in it in another
    /// hierarchy: another program has moved it, and it keeps the cgroup from being removed. Returns whether that was done; otherwise call
    /// this again when the processes by which the cgroup is tracked have ended.
    ///
    /// # Errors
    /// [`Error::Kernel`] naming the file or the process.
    pub fn kill_in_all(&self, path: &CgroupPath) -> Result<bool, Error> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.kill_cgroup(path, true);
        }
        self.kill(path)?;
        match &self.layout {
            // Its own processes are still exiting while the cgroup is populated.
            Layout::Legacy { hierarchies, .. } if !self.is_populated(path)? => {
                let mut outcome = Ok(());
                for hierarchy in hierarchies {
                    outcome = outcome.and(kill_one_by_one(&path.below(&hierarchy.mount)));
                }
                outcome.map(|()| true)
            }
            Layout::Legacy { .. } => Ok(false),
            Layout::Unified { .. } => Ok(true),
        }
    }

    /// Thaws a cgroup on v1, where a frozen process does not end by a signal before it is thawed. Not needed on v2.
    fn thaw(&self, path: &CgroupPath) -> Result<(), Error> {
        let Some(mount) = self.layout.hierarchy("freezer") else { return Ok(()) };
        for directory in tree(&path.below(mount))? {
            let file = directory.join("freezer.state");
            let thawed = match read(&file) {
                Ok(state) if state.trim() == "THAWED" => Ok(()),
                Ok(_) => write(&file, "THAWED"),
                Err(error) => Err(error),
            };
            match thawed {
                Err(error) if !names_gone(&error) => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    fn signal_all(&self, path: &CgroupPath) -> Result<(), Error> {
        let directory = self.tracking_directory(path);
        if let Tracking::Unified(_) = self.layout.tracking() {
            // One write kills all processes, including concurrent forks (Linux 5.14).
            match write(&directory.join("cgroup.kill"), "1") {
                Err(error) if names_gone(&error) => {}
                outcome => return outcome,
            }
        }
        kill_one_by_one(&directory)
    }

    /// All cgroups, anywhere in the tree of any hierarchy, whose last name satisfies `is_wanted`, parents first. For cgroups
    /// whose path is not recorded.
    ///
    /// # Errors
    /// [`Error::Kernel`] if a directory cannot be listed.
    pub fn find(&self, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<CgroupPath>, Error> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.find_cgroups(&is_wanted);
        }
        let mut found = Vec::new();
        for mount in self.mounts() {
            for directory in tree(mount)? {
                let name = directory.file_name().and_then(|name| name.to_str());
                if name.is_some_and(&is_wanted)
                    && let Some(below) = directory.strip_prefix(mount).ok().and_then(Path::to_str)
                {
                    found.push(CgroupPath::parse(&format!("/{below}"))?);
                }
            }
        }
        collect::sort(&mut found);
        found.dedup();
        Ok(found)
    }

    fn open_unified(&self, path: &CgroupPath) -> Result<Option<OwnedFd>, Error> {
        let Tracking::Unified(mount) = self.layout.tracking() else { return Ok(None) };
        let directory = path.below(mount);
        open(&directory, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
            .map(Some)
            .map_err(|errno| Error::kernel("open cgroup", directory.display(), errno))
    }

    /// Opens the OOM counter; `None` without the memory controller, and OOM kills are then not detected.
    fn open_oom_counter(&self, path: &CgroupPath) -> Result<Option<OwnedFd>, Error> {
        let file = match &self.layout {
            Layout::Unified { mount } => path.below(mount).join("memory.events"),
            Layout::Legacy { .. } => match self.layout.hierarchy("memory") {
                Some(mount) => path.below(mount).join("memory.oom_control"),
                None => return Ok(None),
            },
        };
        match open(&file, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()) {
            Ok(counter) => Ok(Some(counter)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(Error::kernel("open", file.display(), errno)),
        }
    }

    /// On v1, the files to which a container's process writes "0", through its launch record; otherwise empty.
    pub fn join_files(&self, path: &CgroupPath) -> Vec<PathBuf> {
        self.join_files_of(path, None)
    }

    /// The file `tasks` of `path` in every v1 hierarchy; in the tracking hierarchy the file of `tracked`, if given.
    ///
    /// `cgroup.procs` is not used: it moves a whole process and takes a lock over all processes, which waits for an RCU
    /// grace period (20 ms). The process that writes "0" has one thread, and since Linux 5.15 moving that does not take
    /// the lock.
    fn join_files_of(&self, path: &CgroupPath, tracked: Option<&CgroupPath>) -> Vec<PathBuf> {
        let Layout::Legacy { hierarchies, .. } = &self.layout else { return Vec::new() };
        let tracking = self.layout.tracking();
        hierarchies
            .iter()
            .map(|hierarchy| match tracked {
                Some(tracked) if tracking == Tracking::Legacy(&hierarchy.mount) => {
                    tracked.below(&hierarchy.mount)
                }
                _ => path.below(&hierarchy.mount),
            })
            .map(|directory| directory.join("tasks"))
            .collect()
    }
}

fn kill_one_by_one(directory: &Path) -> Result<(), Error> {
    let own = Pid::this();
    for _ in 0..KILL_ROUNDS_MAX {
        let mut is_empty = true;
        for cgroup in tree(directory)? {
            // 0 stands for a process outside of this PID namespace; for kill(2) it means the caller's own process
            // group, so it must be skipped.
            for pid in processes(&cgroup)?.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0)
            {
                let pid = Pid::from_raw(pid);
                if pid == own {
                    return Err(Error::invalid(
                        "cgroup",
                        format!("{} holds this runtime itself", cgroup.display()),
                    ));
                }
                is_empty = false;
                match kill(pid, Signal::SIGKILL) {
                    Ok(()) | Err(Errno::ESRCH) => {}
                    Err(errno) => return Err(Error::kernel("kill process", pid, errno)),
                }
            }
        }
        if is_empty {
            break;
        }
    }
    Ok(())
}

/// The complete lines of `cgroup.procs`; empty if the cgroup does not exist. A list that is longer than the read limit
/// may end in the middle of a number, which would be the pid of another process.
fn processes(cgroup: &Path) -> Result<String, Error> {
    match read(&cgroup.join("cgroup.procs")) {
        Ok(text) => Ok(whole_lines(text)),
        Err(error) if names_gone(&error) => Ok(String::new()),
        Err(error) => Err(error),
    }
}

fn whole_lines(mut text: String) -> String {
    let end = text.rfind('\n').map_or(0, |newline| newline + 1);
    text.truncate(end);
    text
}

#[cfg(test)]
mod tests {
    use super::whole_lines;

    #[test]
    fn an_incomplete_pid_is_dropped() {
        for (text, expected) in [("", ""), ("1\n22\n", "1\n22\n"), ("1\n22\n3", "1\n22\n"), ("345", "")] {
            assert_eq!(whole_lines(text.into()), expected);
        }
    }
}
