//! What the daemon holds.

use std::rc::Rc;

use crate::config::Config;
use crate::error::Error;

/// Everything that handlers work on.
pub(crate) struct Daemon {
    /// As at start; what SIGHUP changes comes on top.
    pub(crate) config: Config,
}

impl Daemon {
    /// Brings up what answers calls.
    ///
    /// # Errors
    /// What keeps it from serving.
    pub(crate) async fn start(config: Config) -> Result<Rc<Daemon>, Error> {
        Ok(Rc::new(Daemon { config }))
    }
}
