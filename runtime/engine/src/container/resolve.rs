//! Resolves a request: image, user, capabilities, environment, mounts, limits. Pure except for look-ups of
//! the image's record and of host devices. All invalid requests are refused here, at create.

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_job::{ContainerEdits, ImageRecord, UsersFiles};
use coracle_sandbox::cgroup::DeviceAccess;
use coracle_sandbox::{ContainerId, capability, device, identity, lsm, plan, probe, seccomp};

use super::devices::{self, GivenDevice};
use super::on_host::OnHost;
use super::resolved::Resolved;
use crate::record::{Adjusted, ContainerImage, ContainerRecord, ImageVolumeUse, Notified};
use crate::spec::{self, ContainerSpec, GroupsPolicy, Sharing};
use crate::{Engine, Pod, files, state};

impl Pod {
    pub(crate) fn resolve(
        &self,
        id: ContainerId,
        asked: ContainerSpec,
        (edits, on_host): (&ContainerEdits, OnHost),
    ) -> Result<Resolved, Error> {
        let node = self.node();
        // The container gets the edits of its devices; its status shows the request.
        let spec = devices::edited(&asked, edits);
        self.pid_namespace(spec.pid)?; // refused here; asked again at start, when a target may have ended
        let view = node.images.resolve(&spec.image)?;
        let image = node.images.record(&view.id)?;
        let process = self.process(&spec, &image, &on_host.users)?;
        let log_path = log_path(&self.record().spec.log_directory, &spec.log_path);
        let image_volumes = self.node().image_volumes(&spec)?;
        let labels = self.labels(&spec.security)?;
        let nodes = on_host.devices.iter().map(|device| device.node_for(&process.identity)).collect();
        let plan = self.plan(id, &spec, (&image, &image_volumes), (&on_host, nodes), labels.as_ref())?;
        let confinement = plan::Confinement {
            seccomp: filter(&spec.security, process.capabilities.bounding, on_host.profile.as_deref())?,
            apparmor: self.engine().apparmor(&spec.security)?,
            selinux: labels.and_then(|labels| labels.process),
        };
        let record = ContainerRecord {
            id,
            pod: self.id,
            created_at_ns: node.kernel.clock.now_ns(),
            image: ContainerImage {
                id: image.id.clone(),
                name: view.tags.first().unwrap_or(&spec.image).clone(),
                reference: view.digests.first().unwrap_or(&image.id).clone(),
                layers: image.layers.clone(),
            },
            process,
            log_path,
            stop_signal: stop_signal(spec.stop_signal, &image.config.stop_signal, |text| {
                log::warn!("the image's StopSignal is not a signal, SIGTERM is used"; image = image.id, signal = text);
            })?,
            state: state::Container::Creating,
            image_volumes,
            limits: None,
            adjusted: Adjusted { hooks: edits.hooks.clone(), ..Adjusted::default() },
            notified: Notified::default(),
            spec: asked,
        };
        let devices = match spec.security.privileged {
            true => DeviceAccess::All,
            false => DeviceAccess::Only(on_host.devices.iter().map(GivenDevice::rule).collect()),
        };
        Ok(Resolved { record, devices, confinement, plan, joins: Vec::new(), net_devices: Vec::new() })
    }

    fn process(
        &self,
        spec: &ContainerSpec,
        image: &ImageRecord,
        users: &UsersFiles,
    ) -> Result<plan::Process, Error> {
        let arguments = arguments(spec, image)?;
        let security = &spec.security;
        let request = identity::Request {
            user: security.run_as_user.map(i64::from),
            user_name: security.run_as_username.clone(),
            group: security.run_as_group.map(i64::from),
            supplemental_groups: security.supplemental_groups.iter().map(|gid| i64::from(*gid)).collect(),
            policy: match security.groups_policy {
                GroupsPolicy::Merge => identity::GroupPolicy::Merge,
                GroupsPolicy::Strict => identity::GroupPolicy::Strict,
            },
            image_user: image.config.user.clone(),
        };
        let resolved = identity::resolve(&request, &users.passwd, &users.group)?;
        let request = capability::Request {
            add: security.add_capabilities.clone(),
            drop: security.drop_capabilities.clone(),
            add_ambient: security.ambient_capabilities.clone(),
            privileged: security.privileged,
        };
        let (capabilities, warnings) = capability::resolve(&request, self.node().kernel.capabilities)?;
        for warning in warnings {
            self.engine().warn_once(warning);
        }
        let hostname = files::hostname(&self.record().spec);
        let working_directory =
            match (spec.working_directory.is_empty(), image.config.working_directory.is_empty()) {
                (false, _) => spec.working_directory.clone(),
                (true, false) => image.config.working_directory.clone(),
                (true, true) => "/".to_owned(),
            };
        Ok(plan::Process {
            arguments,
            environment: environment(spec, image, &hostname, &resolved.home),
            working_directory,
            identity: resolved.identity,
            capabilities,
            attributes: security.attributes.clone(),
            oom_score_adj: oom_score(spec.resources.oom_score_adj),
        })
    }

    /// The SELinux labels of the container; `None`: the node or the container has none.
    fn labels(&self, security: &spec::Security) -> Result<Option<lsm::Labels>, Error> {
        let level = &self.record().selinux_level;
        self.node().kernel.modules.labels(security.selinux.as_ref(), level, security.privileged)
    }

    /// Names of layers for the options of an overlay mount.
    ///
    /// # Errors
    /// The pod has a user namespace and a layer is that of an additional store: only the directory of layers is mounted with mapped owners.
    pub(crate) fn lowers<'a>(
        &self,
        layers: impl IntoIterator<Item = &'a str> + Clone,
    ) -> Result<Vec<String>, Error> {
        let images = &self.node().images;
        if self.record().spec.user_mappings().is_some() && images.are_shipped(layers.clone()) {
            let text =
                "an image with layers of an additional store cannot be used in a pod with a user namespace";
            return Err(Error::new(Kind::FailedPrecondition, text));
        }
        images.mount_names(layers)
    }

    fn plan(
        &self,
        id: ContainerId,
        spec: &ContainerSpec,
        (image, volumes): (&ImageRecord, &[ImageVolumeUse]),
        (on_host, nodes): (&OnHost, Vec<plan::DeviceNode>),
        labels: Option<&lsm::Labels>,
    ) -> Result<plan::ContainerPlan, Error> {
        let node = self.node();
        let record = self.record();
        let directory = node.paths.container(self.id, id);
        let pod_directory = node.paths.pod(self.id);
        let cgroup = record.cgroup(&id)?;
        let has_cgroup_namespace =
            node.cgroups.version() == coracle_sandbox::cgroup::Version::V2 && !spec.security.privileged;
        let all_nodes = match spec.security.privileged {
            true => device::all()?,
            false => Vec::new(),
        };
        Ok(plan::ContainerPlan {
            root: plan::Root {
                layers_directory: node.paths.root.join("layers"),
                lowers: self.lowers(image.layers.iter().rev().map(|layer| layer.name.as_str()))?,
                upper: directory.join("upper"),
                work: directory.join("work"),
                mountpoint: node.paths.root_mountpoint(self.id),
                read_only: spec.security.readonly_rootfs,
                label: labels.map(|labels| labels.file.clone()),
            },
            cgroup_joins: Vec::new(),
            has_cgroup_namespace,
            has_kcore: std::path::Path::new("/proc/kcore").exists(),
            cgroup_mount: node.cgroups.view(&cgroup, has_cgroup_namespace),
            is_cgroup_mount_writable: false,
            mounts: self.mounts(spec, (volumes, &on_host.sources), &directory.join("empty"))?,
            image_volumes: image.config.volumes.clone(),
            files: plan::Files {
                hosts: pod_directory.join("hosts"),
                host_name: pod_directory.join("hostname"),
                resolv_conf: pod_directory.join("resolv.conf"),
            },
            shm: match record.spec.namespaces.ipc {
                Sharing::Pod => node.paths.shm(self.id),
                Sharing::Node => "/dev/shm".into(),
            },
            // Requested devices are first, because the first of several with the same path is used.
            devices: nodes.into_iter().chain(all_nodes).collect(),
            scheduling: plan::Scheduling::default(),
            masked_paths: spec.security.masked_paths.clone(),
            readonly_paths: readonly_paths(&spec.security),
            privileged: spec.security.privileged,
            user_namespace: record.spec.user_mappings(),
            without_mounts: Vec::new(),
            namespaces: Vec::new(),
            sysctls: Vec::new(),
            own_namespaces: record.spec.own_namespaces(),
        })
    }
}

impl Engine {
    /// The AppArmor profile of the container's processes. A profile that is requested by name, including the
    /// runtime's default, must exist; without a request, a node that cannot load the default profile runs
    /// containers without one.
    fn apparmor(&self, security: &spec::Security) -> Result<Option<String>, Error> {
        let name = security.apparmor.as_str();
        let refused = |kind: Kind, why: &str| {
            Err(Error::new(kind, format!("config.linux.security_context.apparmor: {name:?}: {why}")))
        };
        let modules = &self.node.kernel.modules;
        match (name, lsm::apparmor()) {
            (spec::APPARMOR_UNCONFINED, _) | ("", None) => Ok(None),
            (_, None) => refused(Kind::InvalidArgument, "this kernel has no AppArmor"),
            ("", Some(apparmor)) => match modules.default_profile(&apparmor) {
                Ok(profile) => Ok(Some(profile)),
                Err(why) => {
                    self.warn_once(format!("containers run without AppArmor: {why}"));
                    Ok(None)
                }
            },
            (spec::APPARMOR_RUNTIME_DEFAULT, Some(apparmor)) => match modules.default_profile(&apparmor) {
                Ok(profile) => Ok(Some(profile)),
                Err(why) => refused(Kind::FailedPrecondition, &why),
            },
            (name, Some(apparmor)) if apparmor.is_loaded(name) => Ok(Some(name.to_owned())),
            (_, Some(_)) => refused(Kind::InvalidArgument, "the profile is not loaded"),
        }
    }
}

/// The requested read-only paths and, if there are any, kernel files that root may write without a capability
/// and that kubelets do not list. A request without any is `procMount: Unmasked`.
fn readonly_paths(security: &spec::Security) -> Vec<String> {
    let mut paths = security.readonly_paths.clone();
    if !paths.is_empty() {
        let missing = plan::KERNEL_CONTROLS
            .iter()
            .filter(|path| !security.readonly_paths.iter().any(|one| one == *path));
        paths.extend(missing.map(|path| (*path).to_owned()));
    }
    paths
}

/// Compiles the requested seccomp filter for the container's capabilities.
fn filter(
    security: &spec::Security,
    capabilities: u64,
    profile: Option<&[u8]>,
) -> Result<Option<plan::Seccomp>, Error> {
    let path = security.localhost_seccomp.as_str();
    let profile = match (profile, security.wants_default_seccomp) {
        (None, false) => return Ok(None),
        (None, true) => seccomp::runtime_default(capabilities),
        (Some(text), _) => {
            let named = |error: Error| {
                error
                    .context(format!("config.linux.security_context.seccomp: {path}"))
                    .with_kind(Kind::InvalidArgument)
            };
            seccomp::parse(text, capabilities, &probe::release()?).map_err(|error| named(error.into()))?
        }
    };
    Ok(Some(super::compile_filter(&security.localhost_seccomp, &profile)?))
}

/// The requested OOM score adjustment. One that is no `i32` becomes the nearest, which the plan refuses as out of range: the kernel
/// refuses it under containerd, and zero would be another value than asked for.
fn oom_score(asked: i64) -> i32 {
    let nearest = if asked < 0 { i32::MIN } else { i32::MAX };
    i32::try_from(asked).unwrap_or(nearest)
}

/// The arguments of the main process by the rule of Kubernetes: a command replaces entrypoint and cmd,
/// arguments without a command replace cmd. An entrypoint of one empty text is none: Dockerfiles reset the one of their
/// base image so (containerd's CRI: `WithProcessArgs`).
fn arguments(spec: &ContainerSpec, image: &ImageRecord) -> Result<Vec<String>, Error> {
    let of_image: &[String] = match &image.config.entrypoint[..] {
        [only] if only.is_empty() => &[],
        entrypoint => entrypoint,
    };
    let entrypoint = if spec.command.is_empty() { of_image } else { &spec.command[..] };
    let rest = match (spec.arguments.is_empty(), spec.command.is_empty()) {
        (false, _) => &spec.arguments[..],
        (true, true) => &image.config.command[..],
        (true, false) => &[],
    };
    let arguments: Vec<String> = entrypoint.iter().chain(rest).cloned().collect();
    if arguments.is_empty() {
        return Err(Error::new(
            Kind::InvalidArgument,
            "config.command: no command specified, and the image has none",
        ));
    }
    Ok(arguments)
}

/// Merges the default environment, the image's and the request's; the last value of a name is used, at the
/// position of the first.
fn environment(spec: &ContainerSpec, image: &ImageRecord, hostname: &str, home: &[u8]) -> Vec<Vec<u8>> {
    let mut variables: Vec<(Vec<u8>, Vec<u8>)> =
        vec![(b"PATH".to_vec(), plan::PATH_DEFAULT.into()), (b"HOSTNAME".to_vec(), hostname.into())];
    if spec.tty {
        variables.push((b"TERM".to_vec(), b"xterm".to_vec()));
    }
    let of_image = image.config.environment.iter().filter_map(|text| text.split_once('='));
    let of_image = of_image.map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()));
    let of_request = spec.environment.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.clone()));
    for (name, value) in of_image.chain(of_request) {
        match variables.iter_mut().find(|(known, _)| *known == name) {
            Some(known) => known.1 = value,
            None => variables.push((name, value)),
        }
    }
    match variables.iter_mut().find(|(name, _)| name == b"HOME") {
        // An empty value counts as none (runc).
        Some((_, value)) if value.is_empty() => *value = home.to_vec(),
        Some(_) => {}
        None => variables.push((b"HOME".to_vec(), home.to_vec())),
    }
    variables.into_iter().map(|(name, value)| [&name[..], b"=", &value].concat()).collect()
}

fn log_path(directory: &str, path: &str) -> String {
    match directory.is_empty() || path.is_empty() {
        true => String::new(),
        false => format!("{}/{path}", directory.trim_end_matches('/')),
    }
}

/// The stop signal as the kernel's number: the signal in the request, otherwise the image's, otherwise
/// SIGTERM. `warn` receives a text of the image that is not a signal, which prevents no start under containerd either.
fn stop_signal(asked: i32, of_image: &str, warn: impl FnOnce(&str)) -> Result<i32, Error> {
    use crate::signal;
    match (asked, of_image) {
        (0, "") => Ok(signal::SIGTERM),
        (0, text) => Ok(signal::parse(text).unwrap_or_else(|| {
            warn(text);
            signal::SIGTERM
        })),
        (number, _) => signal::of_cri(number).ok_or_else(|| {
            Error::new(Kind::InvalidArgument, format!("config.stop_signal: {number} is unknown"))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use coracle_job::ImageConfig;

    #[test]
    fn an_oom_score_that_is_too_big_does_not_become_zero() {
        assert_eq!([-998, 0, 1001].map(oom_score), [-998, 0, 1001]);
        assert_eq!([i64::MIN, i64::MAX, 1 << 40].map(oom_score), [i32::MIN, i32::MAX, i32::MAX]);
    }

    fn image(entrypoint: &[&str], command: &[&str], environment: &[&str]) -> ImageRecord {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        ImageRecord {
            id: String::new(),
            tags: Vec::new(),
            digests: Vec::new(),
            size_bytes: 1,
            layers: Vec::new(),
            blobs: Vec::new(),
            config: ImageConfig {
                entrypoint: words(entrypoint),
                command: words(command),
                environment: words(environment),
                ..ImageConfig::default()
            },
        }
    }

    fn spec(command: &[&str], arguments: &[&str]) -> ContainerSpec {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let (command, arguments) = (words(command), words(arguments));
        ContainerSpec { command, arguments, ..ContainerSpec::plain("c", "i") }
    }

    #[test]
    fn command_and_arguments_replace_those_of_the_image_as_kubernetes_says() {
        let no_command = image(&[], &[], &[]);
        let image = image(&["/e"], &["c1", "c2"], &[]);
        for (command, arguments_given, expected) in [
            (&[][..], &[][..], &["/e", "c1", "c2"][..]),
            (&[], &["a"], &["/e", "a"]),
            (&["/x"], &[], &["/x"]),
            (&["/x"], &["a"], &["/x", "a"]),
        ] {
            assert_eq!(arguments(&spec(command, arguments_given), &image).unwrap(), expected);
        }
        let reset = self::image(&[""], &["c1"], &[]);
        assert_eq!(arguments(&spec(&[], &[]), &reset).unwrap(), ["c1"]);
        assert_eq!(arguments(&spec(&[], &["a"]), &reset).unwrap(), ["a"]);
        assert_eq!(arguments(&spec(&["/x"], &[]), &reset).unwrap(), ["/x"]);
        assert!(
            arguments(&spec(&[], &[]), &no_command).unwrap_err().to_string().contains("no command specified")
        );
    }

    /// Regression: a container of an image whose StopSignal is not a signal was refused.
    #[test]
    fn a_stop_signal_of_the_image_that_is_none_is_sigterm() {
        for (asked, of_image, expected, is_warning) in [
            (0, "SIGUSR1", Some(10), false),
            (0, "text", Some(15), true),
            (0, "0", Some(15), true),
            (0, "65", Some(15), true),
            (13, "text", Some(9), false),
            (0, "", Some(15), false),
            (999, "text", None, false),
        ] {
            let mut warned = false;
            let found = stop_signal(asked, of_image, |_| warned = true).ok();
            assert_eq!((found, warned), (expected, is_warning), "{asked} {of_image:?}");
        }
    }

    #[test]
    fn the_last_value_of_a_variable_wins() {
        let mut spec = spec(&[], &[]);
        spec.environment =
            vec![("A".into(), b"1".to_vec()), ("PATH".into(), b"/x".to_vec()), ("A".into(), vec![255])];
        let variables = environment(&spec, &image(&[], &[], &["PATH=/image", "B=b=c"]), "host", b"/root");
        let expected: Vec<&[u8]> = vec![b"PATH=/x", b"HOSTNAME=host", b"B=b=c", b"A=\xff", b"HOME=/root"];
        assert_eq!(variables, expected);
        spec.environment = vec![("HOME".into(), Vec::new()), ("Z".into(), b"z".to_vec())];
        let variables = environment(&spec, &image(&[], &[], &["HOME=/image"]), "host", b"/root");
        let tail: [&[u8]; 2] = [b"HOME=/root", b"Z=z"];
        assert_eq!(variables[2..], tail, "an empty HOME is filled");
    }
}
