//! The kernel's security modules as this daemon found them: what it loaded at its start, what is wrong with them, and what
//! confines a container that asks for the runtime's default.

use std::cell::RefCell;

use coracle_sandbox::lsm;
use serde_json::{Value, json};

use crate::log;

/// AppArmor and SELinux of this node.
pub(crate) struct Modules {
    /// Why the default profile could not be loaded the last time that this was tried.
    apparmor_trouble: RefCell<Option<String>>,
}

impl Modules {
    /// Looks at the kernel, and loads the default AppArmor profile where it has AppArmor: also over one of that name, which
    /// may be an older version's. Without it the daemon runs all the same and says so in Status.
    pub(crate) fn start() -> Self {
        let modules = Self { apparmor_trouble: RefCell::new(None) };
        if let Some(apparmor) = lsm::apparmor() {
            match modules.load(&apparmor) {
                Ok(()) => log::info!("AppArmor profile loaded"; profile = lsm::APPARMOR_DEFAULT),
                Err(why) => log::warn!("the default AppArmor profile is not loaded"; reason = why),
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
    pub(super) fn default_profile(&self, apparmor: &lsm::AppArmor<'_>) -> Result<String, String> {
        if !apparmor.is_loaded(lsm::APPARMOR_DEFAULT) {
            self.load(apparmor)?;
        }
        Ok(lsm::APPARMOR_DEFAULT.to_owned())
    }

    /// What is wrong, as a reason and a message of Status.
    pub(crate) fn trouble(&self) -> Option<(&'static str, String)> {
        let why = self.apparmor_trouble.borrow().clone()?;
        Some(("AppArmorProfileNotLoaded", format!("profile {}: {why}", lsm::APPARMOR_DEFAULT)))
    }

    /// For the verbose Status.
    pub(crate) fn report(&self) -> Value {
        let is_loaded = self.apparmor_trouble.borrow().is_none();
        let apparmor =
            lsm::apparmor().map(|_| json!({ "profile": lsm::APPARMOR_DEFAULT, "loaded": is_loaded }));
        json!({ "apparmor": apparmor })
    }
}
