//! The lifecycle of pods and containers from a kubelet's point of view: all calls over the real socket, all
//! results checked on kernel objects. The files are in the order of the lifecycle.
#![forbid(unsafe_code)]

mod client;
mod configuration;
mod containers;
mod daemon_log;
mod devices;
mod events;
mod exec;
mod host_paths;
mod inside;
mod limits;
mod lists;
mod logs;
mod metrics;
mod modes;
mod mount_plan;
mod namespaces;
mod old_monitors;
mod pid_namespaces;
mod pods;
mod private_paths;
mod prometheus;
mod refuse;
mod screen;
mod seccomp;
mod service;
mod stats;
mod stop;
mod support;
mod userns;
mod volumes;
mod why;
