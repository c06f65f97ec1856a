//! Whether the files that say where images are can be read (REG-10). Workers read them anew for each pull; this looks at
//! them at the start, after a reload and after each pull, so that a mistake shows in Status and not only in the log.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use coracle_base::log;
use coracle_base::reactor;
use coracle_job::{Job, Outcome, Registries};

use super::Images;

/// Broken files that are named in Status.
const SHOWN_MAX: usize = 8;

/// What is known of the files.
#[derive(Default)]
pub(super) struct Health {
    /// One line for each broken file.
    broken: RefCell<Vec<String>>,
    /// A worker is looking.
    is_looking: Cell<bool>,
    /// Somebody wanted a look since it began.
    is_due: Cell<bool>,
}

impl Images {
    /// Takes over what a reload says of registries; pulls under way go on as they began.
    pub fn set_registries(self: &Rc<Self>, registries: Registries) {
        *self.registries.borrow_mut() = registries;
        self.look_at_registries();
    }

    /// Has a worker look, unless there is nothing to be looked at. Returns at once.
    pub fn look_at_registries(self: &Rc<Self>) {
        let health = &self.registries_health;
        health.is_due.set(true);
        if health.is_looking.replace(true) {
            return;
        }
        let images = Rc::clone(self);
        reactor::spawn(async move {
            while images.registries_health.is_due.replace(false) {
                let broken = images.broken_registries().await;
                images.registries_health.take(broken);
            }
            images.registries_health.is_looking.set(false);
        })
        .detach();
    }

    async fn broken_registries(&self) -> Vec<String> {
        let registries = self.registries.borrow().clone();
        if !registries.config.exists() && !registries.certs_dir.exists() {
            return Vec::new();
        }
        let job = Job::CheckRegistries { root: self.disk.root().to_owned(), registries };
        match self.workers.run(job, |_, _| {}).await {
            Ok(Outcome::RegistriesChecked(broken)) => broken,
            Ok(_) => vec!["the files of registries: the worker did another job".to_owned()],
            Err(error) => vec![format!("look at the files of registries: {error}")],
        }
    }

    /// For people, where a file is broken.
    pub fn registries_trouble(&self) -> Option<String> {
        let broken = self.registries_health.broken.borrow();
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
            log::warn!("registries file is broken"; error = line);
        }
        if broken.is_empty() {
            log::info!("registries files can be read again");
        }
        *self.broken.borrow_mut() = broken;
    }
}
