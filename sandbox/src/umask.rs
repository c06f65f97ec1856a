//! Modes of new files. Daemon and workers run with umask 077, so that files are accessible to root only by default
//! (CVE-2021-41103 was a directory that every user could enter). Files that other users need are created while a
//! [`Public`] exists: directories of logs and volumes, cgroups, sockets, and files that other programs create.
//!
//! The umask is an attribute of the process, so this module is for processes with one thread.

use nix::sys::stat::{Mode, umask};

/// Umask for private files.
const PRIVATE: Mode = Mode::S_IRWXG.union(Mode::S_IRWXO);

/// The usual umask: only the owner may write new files.
const USUAL: Mode = Mode::S_IWGRP.union(Mode::S_IWOTH);

/// Makes new files accessible to their owner only, unless a [`Public`] exists.
pub fn keep_private() {
    umask(PRIVATE);
}

/// Sets the umask 022, for a process that only executes programs of others.
pub fn set_public() {
    umask(USUAL);
}

/// Sets the umask 022 while the value exists; dropping it restores the previous umask. The value must not be held
/// across an await.
#[derive(Debug)]
#[must_use = "the mask is in force until this is dropped"]
pub struct Public {
    before: Mode,
}

impl Public {
    /// Sets the umask 022.
    pub fn begin() -> Self {
        Self { before: umask(USUAL) }
    }
}

impl Drop for Public {
    fn drop(&mut self) {
        umask(self.before);
    }
}
