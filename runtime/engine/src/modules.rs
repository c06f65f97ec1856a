//! The kernel's security modules as this daemon found them: what it loaded at its start, what is wrong with them, and what
//! confines a container by them.

use std::cell::RefCell;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_sandbox::lsm;
use serde_json::{Value, json};

use crate::spec::SelinuxLabel;

/// The request's field that asks for a label.
const OPTIONS: &str = "config.linux.security_context.selinux_options";

/// Whether containers get SELinux labels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Selinux {
    /// Where the kernel has SELinux and its policy types for containers.
    #[default]
    Auto,
    /// No container runs without a label.
    Required,
    /// Never; what requests say of labels is ignored.
    Off,
}

/// AppArmor and SELinux of this node.
pub struct Modules {
    /// Why the default profile could not be loaded the last time that this was tried.
    apparmor_trouble: RefCell<Option<String>>,
    selinux: Labelling,
    /// No container runs without a label.
    is_selinux_required: bool,
}

/// Whether containers get labels.
enum Labelling {
    /// The kernel has no SELinux, or the configuration does not want it.
    Off,
    /// It has, and nothing for containers in its policy: why.
    Unable(String),
    On(Box<lsm::Policy>),
}

impl Modules {
    /// Looks at the kernel, and loads the default AppArmor profile where it has AppArmor: also over one of that name, which
    /// may be an older version's. Without it the daemon runs all the same and says so in Status.
    pub fn start(selinux: Selinux) -> Self {
        let modules = Self {
            apparmor_trouble: RefCell::new(None),
            selinux: Labelling::find(selinux),
            is_selinux_required: selinux == Selinux::Required,
        };
        if let Some(apparmor) = lsm::apparmor() {
            match modules.load(&apparmor) {
                Ok(()) => log::info!("AppArmor profile loaded"; profile = lsm::APPARMOR_DEFAULT),
                Err(why) => log::warn!("the default AppArmor profile is not loaded"; reason = why),
            }
        }
        match &modules.selinux {
            Labelling::Off => {}
            Labelling::Unable(why) => log::warn!("containers get no SELinux labels"; reason = why),
            Labelling::On(policy) => {
                log::info!("SELinux labels"; process = policy.process_type(), file = policy.file_type())
            }
        }
        modules
    }

    fn load(&self, apparmor: &lsm::AppArmor<'_>) -> Result<(), String> {
        let loaded = apparmor.load_default().map_err(|error| error.to_string());
        *self.apparmor_trouble.borrow_mut() = loaded.as_ref().err().cloned();
        loaded
    }

    /// Makes sure that the default profile is loaded: whoever restarts the node's AppArmor service unloads profiles that it
    /// does not know.
    ///
    /// # Errors
    /// Why it is not loaded, naming the kernel's file.
    pub(crate) fn default_profile(&self, apparmor: &lsm::AppArmor<'_>) -> Result<String, String> {
        if !apparmor.is_loaded(lsm::APPARMOR_DEFAULT) {
            self.load(apparmor)?;
        }
        Ok(lsm::APPARMOR_DEFAULT.to_owned())
    }

    /// The SELinux level of a new pod: the one that is asked for, or two categories that no other pod has. Empty where
    /// containers get no labels. What is asked for is refused where it could not be applied.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION`, naming the field, or that no level is free; `INVALID_ARGUMENT` for an unknown label.
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

    /// The label of the files that all containers of a pod share.
    pub(crate) fn pod_file_label(&self, level: &str) -> Option<String> {
        match &self.selinux {
            Labelling::On(policy) => Some(policy.pod_file(level)),
            Labelling::Off | Labelling::Unable(_) => None,
        }
    }

    /// The labels of a container in a pod of this level; `None` where containers get none.
    ///
    /// # Errors
    /// As for [`Modules::pod_level`].
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

    /// What is wrong, as a reason and a message of Status.
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

    /// For the verbose Status.
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
