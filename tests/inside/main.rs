//! What runs inside the guests of `tests/qemu` and nowhere else, as it takes the machine for its own: coracle as a unit of
//! systemd, reboots, power cuts, security modules. The harness outside picks tests by name and boots as often as they need.
#![forbid(unsafe_code)]

mod apparmor;
mod cuts;
mod reboot;
mod selinux;
mod shelf;
mod store;
mod systemd;
