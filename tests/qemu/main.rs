//! System tests in QEMU for both architectures: a guest boots Debian's kernel and runs suites of `tests/`
//! with cgroup v2 and full privileges, independently of the host's kernel. Requires QEMU, Debian's kernels
//! and the programs for both targets (`tests/tools/install qemu`, `make guests`), but not root.
//!
//! A guest that hangs, panics or prints nothing is a failure: a test passes only if the guest reports the
//! result of its suite. Ignored tests run in other parts of `make test-all` than the rest (tests/runner/src/steps.rs).
#![forbid(unsafe_code)]

mod bench;
mod cargo;
mod clock;
mod conformance;
mod cuts;
mod disk;
mod edge;
mod guest;
mod initramfs;
mod modules;
mod programs;
mod reboot;
mod suites;
mod systemd;
mod tables;
mod target;
mod volatile;
