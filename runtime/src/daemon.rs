//! What the daemon holds.

use std::rc::Rc;

use crate::image::Images;

/// Everything that handlers work on.
pub(crate) struct Daemon {
    /// All images.
    pub(crate) images: Rc<Images>,
}
