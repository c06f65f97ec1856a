//! Both targets for real: a guest of each architecture boots Debian's kernel under QEMU and runs suites of `tests/` on
//! cgroup v2 with full privileges (no emulation by the host's kernel, no namespaces of it). Needs root for nothing, but
//! QEMU, Debian's kernels and the programs of both targets: `tests/tools/install qemu`, `make guests`.
//!
//! What hangs, panics or says nothing is a failure: only a guest that says how its suite ended has passed.
//! What is ignored takes too long for every `make test`; `make test-qemu` runs it all.
#![forbid(unsafe_code)]

mod cargo;
mod cuts;
mod disk;
mod edge;
mod guest;
mod initramfs;
mod modules;
mod programs;
mod random;
mod reboot;
mod suites;
mod systemd;
mod target;
mod volatile;
