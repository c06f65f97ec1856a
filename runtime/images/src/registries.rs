//! Reports whether the registry configuration files are valid (REG-10). Workers read the files for each pull;
//! this module checks them at the start, after a reload and after each pull, so that errors are shown in
//! Status and not only logged.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use coracle_base::log;
use coracle_base::reactor;
use coracle_job::{Job, Outcome, Registries};

use super::Images;

/// Maximum number of invalid files that are named in Status.
const SHOWN_MAX: usize = 8;

/// The result of the last check.
#[derive(Default)]
pub(super) struct Health {
    /// Descriptions of the invalid files, one line each.
    broken: RefCell<Vec<String>>,
    /// Whether a worker is checking the registry configuration files.
    is_looking: Cell<bool>,
    /// Whether another check was requested during the running one.
    is_due: Cell<bool>,
}

impl Images {
    /// Applies the registry configuration after a reload; running pulls are not affected.
    pub fn set_registries(self: &Rc<Self>, registries: Registries) {
        *self.sources.registries.borrow_mut() = registries;
        self.look_at_registries();
    }

    /// Starts a check in a worker unless there are no files. Returns at once.
    pub fn look_at_registries(self: &Rc<Self>) {
        let health = &self.sources.health;
        health.is_due.set(true);
        if health.is_looking.replace(true) {
            return;
        }
        let images = Rc::clone(self);
        reactor::spawn(async move {
            while images.sources.health.is_due.replace(false) {
                let broken = images.broken_registries().await;
                images.sources.health.take(broken);
            }
            images.sources.health.is_looking.set(false);
        })
        .detach();
    }

    async fn broken_registries(&self) -> Vec<String> {
        let registries = self.sources.registries.borrow().clone();
        if !registries.config.exists() && !registries.certs_dir.exists() {
            return Vec::new();
        }
        let job = Job::CheckRegistries { root: self.disk.root().to_owned(), registries };
        match self.workers.run(job).await {
            Ok(Outcome::RegistriesChecked(broken)) => broken,
            Ok(_) => vec!["check the registry configuration: unexpected answer of the worker".to_owned()],
            Err(error) => vec![format!("check the registry configuration: {error}")],
        }
    }

    /// Human-readable description of the invalid registry configuration files; `None` if all are valid.
    pub fn registries_trouble(&self) -> Option<String> {
        let broken = self.sources.health.broken.borrow();
        let more = match broken.len().saturating_sub(SHOWN_MAX) {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        (!broken.is_empty()).then(|| broken[..broken.len().min(SHOWN_MAX)].join("; ") + &more)
    }
}

impl Health {
    fn take(&self, broken: Vec<String>) {
        if *self.broken.borrow() == broken {
            return;
        }
        for line in &broken {
            log::warn!("registry configuration file is invalid"; error = line);
        }
        if broken.is_empty() {
            log::info!("registry configuration files are valid again");
        }
        *self.broken.borrow_mut() = broken;
    }
}
