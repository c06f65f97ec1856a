//! Modes of new files. Daemon and workers run with umask 077, so that what nobody thought about is for root alone
//! (CVE-2021-41103 was a directory that everybody could enter). What others must be able to use is made with
//! [`Public`] in force: directories of logs and volumes, cgroups, sockets, and everything that another program makes.
//!
//! The mask belongs to the process, so this is for processes with one thread.

use nix::sys::stat::{Mode, umask};

/// What is taken from the mode of a file that is ours alone.
const PRIVATE: Mode = Mode::S_IRWXG.union(Mode::S_IRWXO);

/// The usual mask: only the owner may write.
const USUAL: Mode = Mode::S_IWGRP.union(Mode::S_IWOTH);

/// From now on new files are for their owner alone, unless a [`Public`] is in force.
pub fn keep_private() {
    umask(PRIVATE);
}

/// The usual mask, 022, while it lives; then again what was in force before. Not to be held across an await.
#[derive(Debug)]
#[must_use = "the mask is in force until this is dropped"]
pub struct Public {
    before: Mode,
}

impl Public {
    /// Brings the usual mask into force.
    pub fn begin() -> Self {
        Self { before: umask(USUAL) }
    }
}

impl Drop for Public {
    fn drop(&mut self) {
        umask(self.before);
    }
}
