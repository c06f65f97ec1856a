//! Applies limits: performs the list of writes that `resources` computes, all or nothing.

use std::path::PathBuf;

use nix::errno::Errno;

use super::devices;
use super::files::{names_gone, read, write};
use super::resources::{DeviceAccess, Limits, Now, WhenMissing, Write, device_writes, writes};
use super::{CgroupPath, Cgroups, Layout, Version, has_word};
use crate::Error;
use crate::plan::DeviceNode;

impl Cgroups {
    /// Sets the limits of an existing cgroup. For an update pass the merged limits: the earlier values overridden by
    /// the new ones. All or nothing: if a write fails, the earlier ones are rolled back. A memory limit below the
    /// current usage is refused before anything is written (v1 and v2), because the kernel would kill processes.
    ///
    /// Returns warnings for limits that are not applied because this kernel lacks the controller.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid limits, [`Error::Kernel`] with the value and the file.
    pub fn apply(&self, path: &CgroupPath, limits: &Limits) -> Result<Vec<String>, Error> {
        self.perform(path, limits, Vec::new())
    }

    /// Sets the limits of a new cgroup like [`Cgroups::apply`], and the devices that its processes may open; `nodes` are
    /// the container's requested device nodes.
    ///
    /// On v2 an eBPF program restricts devices. If the kernel does not accept the program, or not from a nested daemon,
    /// this gives a warning: a container without CAP_MKNOD still cannot use devices for which it has no node.
    ///
    /// # Errors
    /// Those of [`Cgroups::apply`]; [`Error::Invalid`] for invalid device rules.
    pub fn apply_to_new(
        &self,
        path: &CgroupPath,
        limits: &Limits,
        access: &DeviceAccess,
        nodes: &[DeviceNode],
    ) -> Result<Vec<String>, Error> {
        #[cfg(feature = "simulation")]
        if crate::simulation::node().is_some() {
            return self.apply(path, limits);
        }
        let first = if self.version() == Version::V1 { device_writes(access, nodes)? } else { Vec::new() };
        let mut warnings = self.perform(path, limits, first)?;
        if let (Version::V2, DeviceAccess::Only(rules)) = (self.version(), access) {
            let directory = self.limit_directory(path, "devices");
            let rules = devices::all(rules, nodes)?;
            let restricted = directory.map_or(Ok(()), |directory| devices::restrict(&directory, &rules));
            warnings.extend(restricted.err().map(|error| format!("devices are not restricted: {error}")));
        }
        Ok(warnings)
    }

    /// Performs the writes in `list`, followed by those of the limits.
    fn perform(
        &self,
        path: &CgroupPath,
        limits: &Limits,
        mut list: Vec<Write>,
    ) -> Result<Vec<String>, Error> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.apply_limits(path).map(|()| Vec::new());
        }
        let mut warnings = Vec::new();
        if self.version() == Version::V1 && !limits.resources.unified.is_empty() {
            warnings.push("unified limits not applied: this host has cgroup v1".to_string());
        }
        list.extend(writes(limits, self.version(), self.now(path))?);
        let mut undo: Vec<(PathBuf, String)> = Vec::new();
        let mut next = 0;
        while next < list.len() {
            match self.carry_out(path, &list[next], &mut undo) {
                Ok(warning) => {
                    warnings.extend(warning);
                    next += 1;
                }
                Err(error) if should_wait_for_quota(&error, &list[next..]) => list.swap(next, next + 1),
                Err(error) => {
                    for (file, value) in undo.iter().rev() {
                        // Only the first error is returned; the kernel accepts a value that was set before.
                        let _ = write(file, value);
                    }
                    return Err(error);
                }
            }
        }
        Ok(warnings)
    }

    /// Performs one write; returns a warning if the file is missing and the limit is optional.
    fn carry_out(
        &self,
        path: &CgroupPath,
        change: &Write,
        undo: &mut Vec<(PathBuf, String)>,
    ) -> Result<Option<String>, Error> {
        let Some(directory) = self.limit_directory(path, change.controller) else {
            return self.missing(path, change, None);
        };
        let file = directory.join(&change.file);
        // Device rules cannot be read back, and so not be rolled back; they are only set for new cgroups.
        let before = if change.controller == "devices" { None } else { read(&file).ok() };
        match write(&file, &change.value) {
            Ok(()) => {
                undo.extend(before.map(|value| (file, value.trim().to_string())));
                Ok(None)
            }
            Err(error) if names_gone(&error) && directory.is_dir() && !file.exists() => {
                self.missing(path, change, Some(error))
            }
            Err(error) => Err(error),
        }
    }

    /// Determines the result for a limit whose file is missing: success, a warning, or an error.
    fn missing(
        &self,
        path: &CgroupPath,
        change: &Write,
        error: Option<Error>,
    ) -> Result<Option<String>, Error> {
        let file = change.file.as_str();
        match (&change.when_missing, self.why_missing(path, change.controller), error) {
            (WhenMissing::Pass, _, _) => Ok(None),
            (WhenMissing::Warn | WhenMissing::WarnWithoutController, Some(why), _) => {
                Ok(Some(format!("{file} not applied: {why}")))
            }
            (WhenMissing::Warn, None, _) => {
                Ok(Some(format!("{file} not applied: this kernel has no such file")))
            }
            (WhenMissing::Refuse, Some(why), _) => Err(Error::invalid(file, why)),
            (WhenMissing::Refuse | WhenMissing::WarnWithoutController, None, Some(error)) => Err(error),
            (WhenMissing::Refuse | WhenMissing::WarnWithoutController, None, None) => {
                Err(Error::invalid(file, "this kernel has no such file"))
            }
        }
    }

    /// The reason why a cgroup has no files of `controller`; `None` if it has other files of the controller.
    fn why_missing(&self, path: &CgroupPath, controller: &str) -> Option<String> {
        if !self.has_controller(controller) {
            return Some(format!("this host has no cgroup controller {controller}"));
        }
        let Layout::Unified { mount } = &self.layout else { return None };
        let enabled = read(&path.below(mount).join("cgroup.controllers")).unwrap_or_default();
        let is_enabled = has_word(&enabled, controller);
        (!is_enabled)
            .then(|| format!("the cgroup controller {controller} is not enabled in the parent cgroup"))
    }

    /// The directory with the files of `controller`.
    pub(super) fn limit_directory(&self, path: &CgroupPath, controller: &str) -> Option<PathBuf> {
        match &self.layout {
            Layout::Unified { mount } => Some(path.below(mount)),
            Layout::Legacy { .. } => self.layout.hierarchy(controller).map(|mount| path.below(mount)),
        }
    }

    fn now(&self, path: &CgroupPath) -> Now {
        let number = |file: &str| {
            let file = self.limit_directory(path, "memory")?.join(file);
            read(&file).ok()?.trim().parse().ok()
        };
        match self.version() {
            Version::V1 => Now {
                memory_usage: number("memory.usage_in_bytes"),
                memory_swap_limit: number("memory.memsw.limit_in_bytes"),
            },
            Version::V2 => Now { memory_usage: number("memory.current"), memory_swap_limit: None },
        }
    }
}

/// Whether a period that the kernel refused must be written after the quota: v1 compares the ratio of both with the
/// parent's at each write. Each pair is swapped only once.
fn should_wait_for_quota(error: &Error, rest: &[Write]) -> bool {
    let files = [rest.first(), rest.get(1)].map(|write| write.map(|write| write.file.as_str()));
    error.errno() == Some(Errno::EINVAL) && files == [Some("cpu.cfs_period_us"), Some("cpu.cfs_quota_us")]
}
