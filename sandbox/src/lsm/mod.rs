//! Security modules of the kernel, as far as containers depend on them: AppArmor's profiles and SELinux's labels.

mod apparmor;

pub use apparmor::{APPARMOR_DEFAULT, AppArmor, apparmor};

pub(crate) use apparmor::APPARMOR_EXEC;

use std::path::Path;

/// Whether SELinux is on: its file system is mounted where it is (selinux(8)).
pub fn has_selinux() -> bool {
    Path::new("/sys/fs/selinux/enforce").exists()
}
