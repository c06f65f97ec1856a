//! Linux security modules for containers: AppArmor profiles and SELinux labels.

mod apparmor;
mod selinux;

pub use apparmor::{APPARMOR_DEFAULT, AppArmor, apparmor};
pub use selinux::{Context, Labels, Options, Policy, Refusal, has_selinux, labelling_files};

pub(crate) use apparmor::APPARMOR_EXEC;
pub(crate) use selinux::{SELINUX_EXEC, SELINUX_KEYS};
