//! The life of pods and containers as a kubelet lives it: every call over the real socket, every claim checked on real
//! kernel objects. Files stand in the order of life.
#![forbid(unsafe_code)]

mod containers;
mod devices;
mod events;
mod exec;
mod inside;
mod limits;
mod logs;
mod metrics;
mod modes;
mod mount_plan;
mod namespaces;
mod old_monitors;
mod pid_namespaces;
mod pods;
mod prometheus;
mod refuse;
mod seccomp;
mod service;
mod stats;
mod stop;
mod userns;
mod volumes;
