//! OCI hooks: programs that plugins and CDI devices want run at points of a container's life. Workers run them, so that
//! one that hangs costs its own limit and nothing of the daemon.
//!
//! A container has no bundle here; hooks that want one get a directory with the `config.json` they read: the root, the
//! process, the annotations (docs/nri.md says what is in it).

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_job::{Hook, HookJob, Job, Outcome};
use serde_json::json;

use crate::filesystem::make_directory;
use crate::{Container, Pods};
use coracle_base::error::failed;

/// Longest time of a hook that says nothing of its own.
const HOOK_LIMIT: Duration = Duration::from_secs(60);

/// The version of the runtime specification that states and bundles follow.
const OCI_VERSION: &str = "1.2.0";

/// When hooks run, and what the state calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// Namespaces are made, the root is mounted and not entered.
    Creating,
    /// All is done but the program.
    Created,
    /// The program runs.
    Running,
    /// The container is gone.
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

impl Pods {
    /// Runs the hooks of a point, in order; the first that fails ends it where the container can still be refused.
    pub(crate) async fn run_hooks(&self, container: &Rc<Container>, point: Point) -> Result<(), Error> {
        let hooks = container.record().adjusted.hooks.clone();
        // With the process whose namespaces they run in, and whether failing matters.
        let pid = container.pid();
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
        self.write_bundle(container)?;
        let state = self.state(container, point);
        for (hook, inside) in run {
            match self.run_hook(hook, inside, state.clone()).await {
                Err(error) if is_fatal => return Err(error),
                Err(error) => log::warn!("hook"; ctr = container.id, error = error),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    async fn run_hook(&self, hook: Hook, inside: i32, state: String) -> Result<(), Error> {
        let limit = match hook.timeout_s {
            0 => HOOK_LIMIT,
            seconds => Duration::from_secs(seconds.into()),
        };
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let job = Job::Hook(HookJob { hook, state, inside, limit_ms });
        match self.node.host.workers.run(job, |_, _| ()).await? {
            Outcome::Hooked => Ok(()),
            other => Err(Error::new(Kind::Internal, format!("the worker did another job: {other:?}"))),
        }
    }

    fn state(&self, container: &Container, point: Point) -> String {
        let record = container.record();
        let annotations: serde_json::Map<_, _> =
            record.spec.annotations.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
        let mut state = json!({
            "ociVersion": OCI_VERSION,
            "id": container.id.to_string(),
            "status": point.status(),
            "bundle": self.bundle(container),
            "annotations": annotations,
        });
        if point != Point::Stopped {
            state["pid"] = json!(container.pid());
        }
        state.to_string()
    }

    fn bundle(&self, container: &Container) -> PathBuf {
        self.node.paths.bundle(container.pod.id).join(container.id.to_string())
    }

    fn write_bundle(&self, container: &Container) -> Result<(), Error> {
        let directory = self.bundle(container);
        let path = directory.join("config.json");
        if path.exists() {
            return Ok(());
        }
        make_directory(&directory)?;
        let record = container.record();
        let environment: Vec<_> =
            record.process.environment.iter().map(|text| String::from_utf8_lossy(text)).collect();
        let config = json!({
            "ociVersion": OCI_VERSION,
            "hostname": crate::files::hostname(&container.pod.record().spec),
            "root": {
                "path": self.node.paths.root_mountpoint(container.pod.id),
                "readonly": record.spec.security.readonly_rootfs,
            },
            "process": {
                "args": record.process.arguments,
                "env": environment,
                "cwd": record.process.working_directory,
                "user": {"uid": record.process.uid, "gid": record.process.gid},
            },
            "annotations": record.spec.annotations.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        });
        std::fs::write(&path, config.to_string()).map_err(|error| failed("write", &path, &error))
    }
}
