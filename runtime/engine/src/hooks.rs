//! OCI hooks: programs of NRI plugins and CDI devices that run at points of a container's lifecycle. Workers
//! run them, so that a blocked hook delays only its container and not the daemon.
//!
//! A container has no bundle; hooks that need one get a directory with a `config.json` that contains the
//! root, the process and the annotations (see docs/nri.md).

use std::path::PathBuf;
use std::time::Duration;

use coracle_base::error::{Error, Kind, failed};
use coracle_base::{log, waits};
use coracle_job::{Hook, HookJob, Job, Outcome};
use coracle_sandbox::disk;
use serde_json::json;

use crate::filesystem::make_directory;
use crate::{Container, Node};

/// Time limit of a hook without a timeout.
const HOOK_LIMIT: Duration = Duration::from_secs(60);

/// Version of the OCI runtime specification for states and bundles.
const OCI_VERSION: &str = "1.2.0";

/// A point of a container's lifecycle, by the status in the OCI state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// Status `creating`: the namespaces exist; the root file system is mounted but not entered.
    Creating,
    /// Status `created`: all set-up is complete; the program was not executed yet.
    Created,
    /// Status `running`: the program is running.
    Running,
    /// Status `stopped`: the container has exited.
    Stopped,
}

impl Point {
    fn status(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Created => "created",
            Self::Running => "running",
            Self::Stopped => "stopped",
        }
    }
}

impl Container {
    /// Runs the hooks of a point in order. At points where the container can still be refused, the first
    /// failure ends the sequence.
    pub(crate) async fn run_hooks(&self, point: Point) -> Result<(), Error> {
        let hooks = self.record().adjusted.hooks.clone();
        // With the process whose namespaces they enter, and whether a failure is an error.
        let pid = self.pid();
        let (run, is_fatal): (Vec<(Hook, i32)>, bool) = match point {
            Point::Creating => {
                let outside = hooks.prestart.into_iter().chain(hooks.create_runtime).map(|hook| (hook, 0));
                (outside.chain(hooks.create_container.into_iter().map(|hook| (hook, pid))).collect(), true)
            }
            Point::Created => (hooks.start_container.into_iter().map(|hook| (hook, pid)).collect(), true),
            Point::Running => (hooks.poststart.into_iter().map(|hook| (hook, 0)).collect(), false),
            Point::Stopped => (hooks.poststop.into_iter().map(|hook| (hook, 0)).collect(), false),
        };
        if run.is_empty() {
            return Ok(());
        }
        self.write_bundle()?;
        let state = self.state(point);
        for (hook, inside) in run {
            let what = format!("hook {}", hook.path);
            let _wait = waits::begin(self.pod.id, self.pod.name(), what);
            match self.node().run_hook(hook, inside, state.clone()).await {
                Err(error) if is_fatal => return Err(error),
                Err(error) => log::warn!("hook failed"; pod = self.pod.id, ctr = self.id,
                    name = self.pod.name(), container = self.name(), error = error),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn state(&self, point: Point) -> String {
        let record = self.record();
        let annotations: serde_json::Map<_, _> =
            record.spec.annotations.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
        let mut state = json!({
            "ociVersion": OCI_VERSION,
            "id": self.id.to_string(),
            "status": point.status(),
            "bundle": self.bundle(),
            "annotations": annotations,
        });
        if point != Point::Stopped {
            state["pid"] = json!(self.pid());
        }
        state.to_string()
    }

    fn bundle(&self) -> PathBuf {
        self.node().paths.bundle(self.pod.id).join(self.id.to_string())
    }

    fn write_bundle(&self) -> Result<(), Error> {
        let directory = self.bundle();
        let path = directory.join("config.json");
        if disk::inspect(&path).is_ok() {
            return Ok(());
        }
        make_directory(&directory)?;
        let record = self.record();
        let environment: Vec<_> =
            record.process.environment.iter().map(|text| String::from_utf8_lossy(text)).collect();
        let config = json!({
            "ociVersion": OCI_VERSION,
            "hostname": crate::files::hostname(&self.pod.record().spec),
            "root": {
                "path": self.node().paths.root_mountpoint(self.pod.id),
                "readonly": record.spec.security.readonly_rootfs,
            },
            "process": {
                "args": record.process.arguments,
                "env": environment,
                "cwd": record.process.working_directory,
                "user": {"uid": record.process.identity.uid, "gid": record.process.identity.gid},
            },
            "annotations": record.spec.annotations.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        });
        disk::write(&path, config.to_string().as_bytes()).map_err(|error| failed("write", &path, &error))
    }
}

impl Node {
    async fn run_hook(&self, hook: Hook, inside: i32, state: String) -> Result<(), Error> {
        let limit = match hook.timeout_s {
            0 => HOOK_LIMIT,
            seconds => Duration::from_secs(seconds.into()),
        };
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let job = Job::Hook(HookJob { hook, state, inside, limit_ms });
        match self.host.workers.run(job).await? {
            Outcome::Hooked => Ok(()),
            other => Err(Error::new(Kind::Internal, format!("unexpected answer of the worker: {other:?}"))),
        }
    }
}
