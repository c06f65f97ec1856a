//! What the configuration says of pins, at the start and after each SIGHUP, and the sandbox image it may name (PIN-4 and
//! PIN-5 in CRI 2.33). No pod needs that image here: it is there for node tooling that expects it, so its absence
//! fails nothing and is made good in the background.

use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};

use super::Images;
use super::builtin::{self, SandboxImage};
use super::credentials::Auth;
use super::pins::Pins;
use super::reference::Reference;

/// From one attempt to pull the sandbox image to the next; each pod that is made may start one.
const PAUSE: Duration = Duration::from_secs(60);

impl Images {
    /// Takes over `pinned_images` and `sandbox_image`; pins follow at once, whatever was before.
    ///
    /// # Errors
    /// A pattern or a name that is none; nothing is changed then.
    pub fn configure(self: &Rc<Self>, patterns: &[String], sandbox_image: Option<&str>) -> Result<(), Error> {
        let invalid = |key: &str, why: String| Error::new(Kind::InvalidArgument, format!("{key}: {why}"));
        let pins =
            Pins::parse(patterns.iter().map(String::as_str)).map_err(|why| invalid("pinned_images", why))?;
        let name = sandbox_image
            .filter(|name| !name.is_empty() && *name != builtin::TAG)
            .map(|name| Reference::parse(name).map(|reference| reference.to_string()))
            .transpose()
            .map_err(|why| invalid("sandbox_image", why.to_string()))?;
        *self.pins.borrow_mut() = pins.with(name.as_deref());
        *self.sandbox_image.borrow_mut() = SandboxImage { name, tried: None };
        self.want_sandbox_image();
        Ok(())
    }

    /// Pulls the configured sandbox image where it is absent, in the background.
    pub fn want_sandbox_image(self: &Rc<Self>) {
        let mut wanted = self.sandbox_image.borrow_mut();
        let Some(name) = wanted.name.clone() else { return };
        let is_recent = wanted.tried.is_some_and(|tried| tried.elapsed() < PAUSE);
        if is_recent || !matches!(self.find(&name), Ok(None)) {
            return;
        }
        wanted.tried = Some(Instant::now());
        let images = Rc::clone(self);
        reactor::spawn(async move {
            match images.pull(&name, Auth::default()).await {
                Ok(id) => log::info!("sandbox image pulled"; name = name, image = id),
                Err(error) => log::warn!("sandbox image not pulled, pods run without it"; error = error),
            }
        })
        .detach();
    }
}
