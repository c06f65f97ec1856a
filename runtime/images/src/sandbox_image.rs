//! Applies the configuration of pins at the start and after each SIGHUP, and pulls the configured sandbox
//! image (PIN-4 and PIN-5 in CRI 2.33). No pod needs the sandbox image, only tools on the node that expect
//! it. Therefore a missing image causes no failure, and it is pulled in the background.

use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor};

use super::Images;
use super::builtin::{self, SandboxImage};
use super::credentials::Auth;
use super::pins::Pins;
use coracle_reference::Reference;

/// Minimum interval between attempts to pull the sandbox image; each new pod requests one.
const PAUSE: Duration = Duration::from_secs(60);

impl Images {
    /// Applies `pinned_images` and `sandbox_image`; pins change immediately.
    ///
    /// # Errors
    /// An invalid pattern or name, in which case nothing is changed.
    pub fn configure(self: &Rc<Self>, patterns: &[String], sandbox_image: Option<&str>) -> Result<(), Error> {
        let invalid = |key: &str, why: String| Error::new(Kind::InvalidArgument, format!("{key}: {why}"));
        let pins =
            Pins::parse(patterns.iter().map(String::as_str)).map_err(|why| invalid("pinned_images", why))?;
        let name = sandbox_image
            .filter(|name| !name.is_empty() && *name != builtin::TAG)
            .map(|name| Reference::parse(name).map(|reference| reference.to_string()))
            .transpose()
            .map_err(|why| invalid("sandbox_image", why.to_string()))?;
        *self.pinning.patterns.borrow_mut() = pins.with(name.as_deref());
        *self.pinning.sandbox_image.borrow_mut() = SandboxImage { name, tried: None };
        self.want_sandbox_image();
        Ok(())
    }

    /// Pulls the configured sandbox image in the background if it is missing.
    pub fn want_sandbox_image(self: &Rc<Self>) {
        let mut wanted = self.pinning.sandbox_image.borrow_mut();
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
                Err(error) => log::warn!("cannot pull the sandbox image, pods do not need it"; error = error),
            }
        })
        .detach();
    }
}
