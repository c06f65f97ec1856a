//! What the daemon holds.

use std::rc::Rc;

use coracle_job::Limits;

use crate::config::Config;
use crate::error::{Error, Kind};
use crate::image::{Images, Options, Pins};
use crate::workers::{self, Setup, Workers};
use crate::{control, reactor};

/// Everything that handlers work on.
pub(crate) struct Daemon {
    /// As at start; what SIGHUP changes comes on top.
    pub(crate) config: Config,
    /// All images.
    pub(crate) images: Rc<Images>,
    /// Slow work.
    pub(crate) workers: Rc<Workers>,
}

impl Daemon {
    /// Brings up what answers calls.
    ///
    /// # Errors
    /// What keeps it from serving.
    pub(crate) async fn start(config: Config) -> Result<Rc<Daemon>, Error> {
        let program = workers::program(config.program_dir.as_deref());
        let workers = Workers::new(Setup { program, confine: None });
        let pins = Pins::parse(config.pinned_images.iter().map(String::as_str));
        let options = Options {
            root: config.root.clone(),
            keep_blobs: config.image.keep_blobs,
            limits: Limits::default(),
            pins: pins.map_err(|why| Error::new(Kind::InvalidArgument, format!("pinned_images: {why}")))?,
        };
        let images = Images::open(options, workers.clone())?;
        // Whatever brings containers back does so before this, and retains their layers.
        images.sweep();
        let socket = control::socket(&config.state);
        reactor::spawn(control::Server::bind(&socket, images.clone())?.run()).detach();
        Ok(Rc::new(Daemon { config, images, workers }))
    }
}
