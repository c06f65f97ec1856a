//! CNI by execution of plugin programs: runs one network configuration list for one pod (CNI spec 1.1.0; CRI
//! 5). The daemon never executes plugins itself, because they may hang, fork and print any output; it sends a
//! [`CniJob`] to a worker. `list` creates the input of each plugin, `plugin` calls one, and `result`
//! parses the result of ADD.
//!
//! Every plugin is killed when its worker ends, also if the worker was killed: otherwise the ADD of a killed
//! worker could still run while the next daemon undoes it with DEL.

mod list;
mod plugin;
mod result;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_job::{Answer, CniCommand, CniJob, CniOutcome, Failure, FailureKind, write_message};
use nix::sys::statfs::{NSFS_MAGIC, statfs};

use self::list::{List, Plugin};
use self::plugin::{PluginError, Verb};

/// Error code "container unknown": there is nothing to remove (CNI spec 1.1.0, section "Error").
const CODE_CONTAINER_UNKNOWN: u64 = 3;
/// First CNI version whose DEL receives the result of ADD (CNI spec 0.4.0).
const DEL_HAS_RESULT_SINCE: &str = "0.4.0";
/// First CNI version with STATUS (CNI spec 1.1.0).
const STATUS_SINCE: &str = "1.1.0";
/// Default `PATH` of plugins, which search iptables, nft and ip in it.
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Executes the job's command for the whole list. Errors of plugins have the form `plugin type="bridge"
/// failed (add): why`.
pub fn run(job: CniJob) -> Result<CniOutcome, Failure> {
    // The daemon has checked the list, so an error is not the client's.
    let list = List::parse(&job.conflist).map_err(|why| Failure::new(FailureKind::Internal, why))?;
    let run = Run { job: &job, list };
    match &job.command {
        CniCommand::Add { previous_result } => run.add(previous_result.clone()),
        CniCommand::Del { previous_result } => {
            run.del(previous_result.as_deref()).map(|()| CniOutcome::default())
        }
        CniCommand::Status => run.status().map(|()| CniOutcome::default()),
    }
}

/// The state of one job.
struct Run<'a> {
    job: &'a CniJob,
    list: List,
}

impl Run<'_> {
    /// Runs ADD in order. If one fails, runs DEL of the whole list and returns the first error.
    fn add(&self, previous: Option<String>) -> Result<CniOutcome, Failure> {
        self.try_add(previous).inspect_err(|_| {
            if let Err(second) = self.del(None) {
                note(&format!("DEL after a failed ADD: {}", second.message));
            }
        })
    }

    fn try_add(&self, mut previous: Option<String>) -> Result<CniOutcome, Failure> {
        let deadline = self.deadline();
        for plugin in &self.list.plugins {
            let answer = self
                .call(Verb::Add, plugin, previous.as_deref(), deadline)
                .and_then(|stdout| {
                    result::at_version(&stdout, &self.list.version)
                        .map_err(|why| PluginError::said(0, &format!("returned {why}")))
                })
                .map_err(|error| blame(plugin, Verb::Add, &error))?;
            previous = Some(answer);
        }
        let result = previous.unwrap_or_default();
        result::outcome(result, &self.job.attachment.interface).map_err(|why| {
            Failure::new(FailureKind::Plugin, format!("network {:?} (add): {why}", self.list.name))
        })
    }

    /// Runs DEL in reverse order until the first error; missing objects are not an error (DEL-2 to DEL-4 in
    /// CRI 5.6).
    fn del(&self, previous: Option<&str>) -> Result<(), Failure> {
        let deadline = self.deadline();
        let previous = previous.filter(|_| self.list.is_since(DEL_HAS_RESULT_SINCE));
        for plugin in self.list.plugins.iter().rev() {
            let Err(error) = self.call(Verb::Del, plugin, previous, deadline) else { continue };
            if !counts_as_gone(&error, self.netns(Verb::Del), &self.job.attachment.netns) {
                return Err(blame(plugin, Verb::Del, &error));
            }
            note(&format!(
                "ignored, because the object does not exist: {}",
                blame(plugin, Verb::Del, &error).message
            ));
        }
        Ok(())
    }

    /// Runs STATUS of each plugin in order until the first failure; lists older than 1.1.0 have no STATUS.
    fn status(&self) -> Result<(), Failure> {
        if !self.list.is_since(STATUS_SINCE) {
            return Ok(());
        }
        let deadline = self.deadline();
        self.list.plugins.iter().try_for_each(|plugin| {
            self.call(Verb::Status, plugin, None, deadline)
                .map(drop)
                .map_err(|error| blame(plugin, Verb::Status, &error))
        })
    }

    /// Runs one plugin and returns its standard output if it succeeds.
    fn call(
        &self,
        verb: Verb,
        plugin: &Plugin,
        previous: Option<&str>,
        deadline: Instant,
    ) -> Result<Vec<u8>, PluginError> {
        let program = find(&plugin.kind, &self.job.bin_dirs)?;
        let capabilities = match verb {
            Verb::Status => None,
            Verb::Add | Verb::Del => Some(&self.job.attachment),
        };
        let input = plugin.input(&self.list, previous, capabilities).map_err(PluginError::Broken)?;
        report_waiting(&plugin.kind);
        plugin::call(&program, &self.environment(verb), &input, deadline)
    }

    /// The CNI variables for `verb`; the rest of the environment is the daemon's.
    fn environment(&self, verb: Verb) -> Vec<(&'static str, String)> {
        let path: Vec<_> = self.job.bin_dirs.iter().map(|dir| dir.to_string_lossy()).collect();
        let mut variables =
            vec![("CNI_COMMAND", verb.name().to_ascii_uppercase()), ("CNI_PATH", path.join(":"))];
        if std::env::var_os("PATH").is_none() {
            variables.push(("PATH", PATH_DEFAULT.to_owned()));
        }
        if verb != Verb::Status {
            let attachment = &self.job.attachment;
            let pairs: Vec<_> =
                attachment.arguments.iter().map(|(key, value)| format!("{key}={value}")).collect();
            variables.push(("CNI_CONTAINERID", attachment.container_id.clone()));
            variables.push(("CNI_NETNS", self.netns(verb).to_owned()));
            variables.push(("CNI_IFNAME", attachment.interface.clone()));
            variables.push(("CNI_ARGS", pairs.join(";")));
        }
        variables
    }

    /// Value of CNI_NETNS. For DEL it is empty if the path is no longer a network namespace (DEL-2), for
    /// example after a reboot or a manual unmount, which leaves a regular file.
    fn netns(&self, verb: Verb) -> &str {
        let path = self.job.attachment.netns.as_str();
        let gone =
            verb == Verb::Del && !statfs(path).is_ok_and(|there| there.filesystem_type() == NSFS_MAGIC);
        if gone { "" } else { path }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + Duration::from_millis(self.job.timeout_ms)
    }
}

/// Path of the plugin's program in the first of `bin_dirs` that contains it.
fn find(kind: &str, bin_dirs: &[PathBuf]) -> Result<PathBuf, PluginError> {
    let found = bin_dirs.iter().map(|dir| dir.join(kind)).find(|program| program.is_file());
    found.ok_or_else(|| PluginError::Absent { looked_in: display(bin_dirs) })
}

fn display(dirs: &[PathBuf]) -> String {
    dirs.iter().map(|dir| Path::display(dir).to_string()).collect::<Vec<_>>().join(", ")
}

/// Whether DEL counts as successful although it failed with `error`, because there is nothing to remove: the
/// plugin does not know the container, or an object is missing. If no namespace was passed (`told` is empty),
/// any missing file counts, and also a missing plugin program; otherwise only the missing namespace `path`. A
/// missing program that the plugin executes (`executable file not found`) never counts, because the plugin's
/// rules may still exist.
fn counts_as_gone(error: &PluginError, told: &str, path: &str) -> bool {
    let (code, message) = match error {
        PluginError::Absent { .. } => return told.is_empty(),
        PluginError::ChildMessage { code, message } => (*code, message.to_ascii_lowercase()),
        PluginError::Late { .. } | PluginError::Broken(_) => return false,
    };
    if code == CODE_CONTAINER_UNKNOWN {
        return true;
    }
    if message.contains("executable file not found") || message.contains("command not found") {
        return false;
    }
    let says = |texts: &[&str]| texts.iter().any(|text| message.contains(text));
    let misses_file = says(&["no such file or directory"]);
    says(&["not found", "no such device", "no such container", "unknown ns path", "does not exist"])
        || misses_file && (told.is_empty() || message.contains(&path.to_ascii_lowercase()))
}

/// The failure of one plugin with the plugin's type and command.
fn blame(plugin: &Plugin, verb: Verb, error: &PluginError) -> Failure {
    let kind = match error {
        PluginError::Broken(_) => FailureKind::Internal,
        PluginError::Absent { .. } | PluginError::ChildMessage { .. } | PluginError::Late { .. } => {
            FailureKind::Plugin
        }
    };
    Failure::new(kind, format!("plugin type={:?} failed ({}): {error}", plugin.kind, verb.name()))
}

/// Reports to the daemon for which plugin the job waits. An error of the write is ignored: the daemon may
/// have ended, and DEL must still be completed.
fn report_waiting(plugin: &str) {
    let _ = write_message(&mut std::io::stdout(), &Answer::Waiting(format!("CNI plugin {plugin}")));
}

/// Writes a line to standard error, the worker's log. An error of the write is ignored: the daemon, which
/// reads the log, may have ended, and DEL must still be completed.
fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "cni: {line}");
}

#[cfg(test)]
mod tests {
    use super::{PluginError, counts_as_gone};

    #[test]
    fn del_ignores_missing_objects() {
        let said = |message: &str| PluginError::said(999, message);
        let path = "/run/netns/cni-1";
        let cases = [
            (PluginError::said(3, "who?"), path, true),
            (said("Link not found"), path, true),
            (said("failed to Statfs \"/run/netns/cni-1\": no such file or directory"), path, true),
            (said("open /var/lib/cni/x: no such file or directory"), path, false),
            (said("open /var/lib/cni/x: no such file or directory"), "", true),
            (said("exec: \"iptables\": executable file not found in $PATH"), "", false),
            (said("sh: iptables: command not found"), "", false),
            (said("device busy"), "", false),
            (PluginError::Absent { looked_in: "/opt".into() }, path, false),
            (PluginError::Absent { looked_in: "/opt".into() }, "", true),
            (PluginError::Late { limit_ms: 1 }, "", false),
            (PluginError::Broken("fork: not found".into()), "", false),
        ];
        for (error, told, expected) in cases {
            assert_eq!(counts_as_gone(&error, told, path), expected, "{error} told {told:?}");
        }
    }
}
