//! What the daemon holds.

/// Everything that handlers work on.
pub(crate) struct Daemon;
