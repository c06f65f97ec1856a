//! AppArmor and SELinux of this node: what was detected and loaded at the start, problems for Status, and the
//! labels and profiles of containers.

use std::cell::RefCell;

use coracle_base::error::{Error, Kind, describe_io};
use coracle_base::log;
use coracle_base::settings::Selinux;
use coracle_sandbox::lsm;
use serde_json::{Value, json};

use crate::spec::SelinuxLabel;

/// Name of the request field with the SELinux labels, for errors.
const OPTIONS: &str = "config.linux.security_context.selinux_options";

/// AppArmor and SELinux of this node.
pub struct Modules {
    /// The error of the last attempt to load the default profile; `None` if it is loaded.
    apparmor_trouble: RefCell<Option<String>>,
    selinux: Labelling,
    /// Whether containers without a label are refused.
    is_selinux_required: bool,
}

/// The SELinux state of the node.
enum Labelling {
    /// The kernel has no SELinux, or it is disabled in the configuration.
    Off,
    /// The policy has no types for containers; the value is the reason.
    Unable(String),
    On(Box<lsm::Policy>),
}

impl Modules {
    /// Detects the security modules and loads the default AppArmor profile if the kernel has AppArmor; an
    /// existing one may be an older version and is replaced. If it cannot be loaded, the daemon runs and
    /// reports it in Status.
    pub fn start(selinux: Selinux) -> Self {
        let modules = Self {
            apparmor_trouble: RefCell::new(None),
            selinux: Labelling::find(selinux),
            is_selinux_required: selinux == Selinux::Required,
        };
        if let Some(apparmor) = lsm::apparmor() {
            match modules.load(&apparmor) {
                Ok(()) => log::info!("AppArmor profile loaded"; profile = lsm::APPARMOR_DEFAULT),
                Err(why) => log::warn!("cannot load the default AppArmor profile"; reason = why),
            }
        }
        match &modules.selinux {
            Labelling::Off => {}
            Labelling::Unable(why) => log::warn!("containers get no SELinux labels"; reason = why),
            Labelling::On(policy) => {
                log::info!("containers get SELinux labels"; process = policy.process_type(), file = policy.file_type())
            }
        }
        modules
    }

    fn load(&self, apparmor: &lsm::AppArmor<'_>) -> Result<(), String> {
        let loaded = apparmor.load_default().map_err(|error| describe_io(&error));
        *self.apparmor_trouble.borrow_mut() = loaded.as_ref().err().cloned();
        loaded
    }

    /// Ensures that the default profile is loaded: a restart of the node's AppArmor service unloads profiles
    /// that it does not know.
    ///
    /// # Errors
    /// The reason why the profile is not loaded, with the path of the kernel's file.
    pub(crate) fn default_profile(&self, apparmor: &lsm::AppArmor<'_>) -> Result<String, String> {
        if !apparmor.is_loaded(lsm::APPARMOR_DEFAULT) {
            self.load(apparmor)?;
        }
        Ok(lsm::APPARMOR_DEFAULT.to_owned())
    }

    /// The SELinux level of a new pod: the requested one, or two categories that no other pod has. Empty if
    /// containers get no labels. A requested level that cannot be applied is refused.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` with the name of the field if labels are not supported, or if no level is free;
    /// `INVALID_ARGUMENT` for an invalid label.
    pub(crate) fn pod_level(
        &self,
        asked: Option<&SelinuxLabel>,
        taken: impl Fn(&str) -> bool,
    ) -> Result<String, Error> {
        let Some(policy) = self.policy(asked)? else { return Ok(String::new()) };
        let asked = asked.cloned().unwrap_or_default();
        if !asked.level.is_empty() {
            labels(policy, &asked, "", false)?;
            return Ok(asked.level);
        }
        let random =
            || coracle_sandbox::random_id().map_or(0, |id| u32::from_le_bytes([id[0], id[1], id[2], id[3]]));
        match policy.free_level(random, taken) {
            Some(level) => Ok(level),
            None if !policy.has_levels() => Ok(String::new()),
            None => Err(Error::new(Kind::ResourceExhausted, "no free pair of SELinux categories was found")),
        }
    }

    /// The SELinux label of files that all containers of a pod share; `None` if containers get no labels.
    pub(crate) fn pod_file_label(&self, level: &str) -> Option<String> {
        match &self.selinux {
            Labelling::On(policy) => Some(policy.pod_file(level)),
            Labelling::Off | Labelling::Unable(_) => None,
        }
    }

    /// The SELinux labels of a container in a pod with this level; `None` if containers get none.
    ///
    /// # Errors
    /// Those of [`Modules::pod_level`].
    pub(crate) fn labels(
        &self,
        asked: Option<&SelinuxLabel>,
        level: &str,
        privileged: bool,
    ) -> Result<Option<lsm::Labels>, Error> {
        match self.policy(asked)? {
            Some(policy) => labels(policy, &asked.cloned().unwrap_or_default(), level, privileged).map(Some),
            None => Ok(None),
        }
    }

    fn policy(&self, asked: Option<&SelinuxLabel>) -> Result<Option<&lsm::Policy>, Error> {
        let refused = |why: &str| Err(Error::new(Kind::FailedPrecondition, why.to_owned()));
        match &self.selinux {
            Labelling::On(policy) => Ok(Some(policy)),
            Labelling::Unable(why) if asked.is_some() => refused(&format!("{OPTIONS}: {why}")),
            Labelling::Unable(why) if self.is_selinux_required => {
                refused(&format!("security.selinux requires labels: {why}"))
            }
            Labelling::Off if self.is_selinux_required => {
                refused("security.selinux requires labels: this kernel has no SELinux")
            }
            Labelling::Off | Labelling::Unable(_) => Ok(None),
        }
    }

    /// The problem with a security module, as reason and message for Status; `None` if there is none.
    pub fn trouble(&self) -> Option<(&'static str, String)> {
        if let Some(why) = &*self.apparmor_trouble.borrow() {
            return Some(("AppArmorProfileNotLoaded", format!("profile {}: {why}", lsm::APPARMOR_DEFAULT)));
        }
        match &self.selinux {
            Labelling::Unable(why) => Some(("SELinuxLabelsMissing", why.clone())),
            Labelling::Off if self.is_selinux_required => {
                Some(("SELinuxLabelsMissing", "this kernel has no SELinux".to_owned()))
            }
            Labelling::Off | Labelling::On(_) => None,
        }
    }

    /// The state of both security modules for the verbose Status.
    pub fn report(&self) -> Value {
        let is_loaded = self.apparmor_trouble.borrow().is_none();
        let apparmor =
            lsm::apparmor().map(|_| json!({ "profile": lsm::APPARMOR_DEFAULT, "loaded": is_loaded }));
        let selinux = match &self.selinux {
            Labelling::Off => Value::Null,
            Labelling::Unable(why) => json!({ "labels": false, "reason": why }),
            Labelling::On(policy) => json!({
                "labels": true,
                "process": policy.process_type(),
                "file": policy.file_type(),
                "privileged": policy.privileged_type(),
            }),
        };
        json!({ "apparmor": apparmor, "selinux": selinux })
    }
}

impl Labelling {
    fn find(wanted: Selinux) -> Self {
        if wanted == Selinux::Off || !lsm::has_selinux() {
            return Self::Off;
        }
        match lsm::Policy::find() {
            Ok(policy) => Self::On(Box::new(policy)),
            Err(why) => Self::Unable(why),
        }
    }
}

fn labels(
    policy: &lsm::Policy,
    asked: &SelinuxLabel,
    level: &str,
    privileged: bool,
) -> Result<lsm::Labels, Error> {
    let options = lsm::Options {
        user: asked.user.clone(),
        role: asked.role.clone(),
        kind: asked.kind.clone(),
        level: asked.level.clone(),
    };
    policy.labels(&options, level, privileged).map_err(|refusal| match refusal {
        lsm::Refusal::Invalid(label) => {
            Error::new(Kind::InvalidArgument, format!("{OPTIONS}: the node's policy has no label {label}"))
        }
        lsm::Refusal::Kernel(why) => Error::new(Kind::Internal, format!("{OPTIONS}: {why}")),
    })
}
