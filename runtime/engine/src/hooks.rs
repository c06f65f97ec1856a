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
use coracle_sandbox::collect::ordered;
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
    /// Status `creating`: the namespaces exist, and the root file system with its mounts, which is not entered yet. With a
    /// monitor before version 8 of the frames the mounts follow later.
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
        let (groups, is_fatal): (Vec<(Vec<Hook>, i32)>, bool) = match point {
            Point::Creating => {
                let outside = [(hooks.prestart, 0), (hooks.create_runtime, 0)];
                (outside.into_iter().chain([(hooks.create_container, pid)]).collect(), true)
            }
            Point::Created => (vec![(hooks.start_container, pid)], true),
            Point::Running => (vec![(hooks.poststart, 0)], false),
            Point::Stopped => (vec![(hooks.poststop, 0)], false),
        };
        for (hooks, inside) in groups.into_iter().filter(|(hooks, _)| !hooks.is_empty()) {
            let directory = match self.write_bundle(point, inside) {
                Err(error) if is_fatal => return Err(error),
                Err(error) => {
                    log::warn!("cannot write the bundle for OCI hooks"; pod = self.pod.id, ctr = self.id, error = error);
                    self.bundle()
                }
                Ok(directory) => directory,
            };
            for hook in hooks {
                // Without its process a hook of the container would run in the node's namespaces.
                if is_fatal && (pid == 0 || self.pid() != pid) {
                    let text = format!("{}: has ended before hook {}", self.title(), hook.path);
                    return Err(Error::new(Kind::FailedPrecondition, text));
                }
                let _wait = waits::begin(self.pod.id, self.pod.name(), format!("hook {}", hook.path));
                let (state, directory) = (self.state(point), directory.clone());
                match self.node().run_hook(hook, inside, state, directory).await {
                    Err(error) if is_fatal => return Err(error),
                    Err(error) => log::warn!("OCI hook failed"; pod = self.pod.id, ctr = self.id,
                        name = self.pod.name(), container = self.name(), error = error),
                    Ok(()) => {}
                }
            }
        }
        Ok(())
    }

    fn state(&self, point: Point) -> String {
        let record = self.record();
        let annotations: serde_json::Map<_, _> =
            ordered(record.spec.annotations.iter().map(|(key, value)| (key.clone(), json!(value))));
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

    /// Writes the bundle for hooks that run at `point` in the namespaces of the process `inside`, or in the runtime's if it is 0.
    /// Returns their working directory, as in runc: the root before pivot_root in the container's namespaces, the bundle in the
    /// runtime's.
    fn write_bundle(&self, point: Point, inside: i32) -> Result<PathBuf, Error> {
        let (bundle, mounted) = (self.bundle(), self.node().paths.root_mountpoint(self.pod.id));
        let (root, directory) = match (point, inside) {
            // The root is mounted in the container's mount namespace only, where the process still has the host's root.
            (Point::Creating, 0) => {
                (PathBuf::from(format!("/proc/{}/root{}", self.pid(), mounted.display())), bundle.clone())
            }
            (Point::Creating, _) => (mounted.clone(), mounted),
            (_, 0) => (mounted, bundle.clone()),
            (_, _) => (mounted, "/".into()),
        };
        let path = bundle.join("config.json");
        make_directory(&bundle)?;
        let record = self.record();
        let environment: Vec<_> =
            record.process.environment.iter().map(|text| String::from_utf8_lossy(text)).collect();
        let config = json!({
            "ociVersion": OCI_VERSION,
            "hostname": crate::files::hostname(&self.pod.record().spec),
            "root": {
                "path": root,
                "readonly": record.spec.security.readonly_rootfs,
            },
            "process": {
                "args": record.process.arguments,
                "env": environment,
                "cwd": record.process.working_directory,
                "user": {"uid": record.process.identity.uid, "gid": record.process.identity.gid},
            },
            "annotations": ordered::<_, std::collections::BTreeMap<_, _>>(record.spec.annotations.iter().cloned()),
        });
        disk::write_unsynced(&path, config.to_string().as_bytes())
            .map_err(|error| failed("write", &path, &error))?;
        Ok(directory)
    }
}

impl Node {
    async fn run_hook(
        &self,
        hook: Hook,
        inside: i32,
        state: String,
        directory: PathBuf,
    ) -> Result<(), Error> {
        let limit = match hook.timeout_s {
            0 => HOOK_LIMIT,
            seconds => Duration::from_secs(seconds.into()),
        };
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let job = Job::Hook(HookJob { hook, state, inside, directory, limit_ms });
        match self.host.workers.run(job).await? {
            Outcome::Hooked => Ok(()),
            other => Err(Error::new(Kind::Internal, format!("unexpected answer of the worker: {other:?}"))),
        }
    }
}
