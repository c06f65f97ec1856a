//! Tests that run only inside the guests of `tests/qemu`, because they change the whole machine: coracle as a
//! systemd unit, reboots, power cuts, security modules, a wrong clock, full tables of the kernel. The harness outside selects tests by name and boots
//! as often as they need.
#![forbid(unsafe_code)]

mod apparmor;
mod clock;
mod cuts;
mod reboot;
mod selinux;
mod shelf;
mod store;
mod systemd;
mod tables;
