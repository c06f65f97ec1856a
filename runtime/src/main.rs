//! coracle: the daemon a kubelet calls to run pods, and the command line that goes with it. This file only tells the modules.
#![forbid(unsafe_code)]

mod config;
mod cri;
mod daemon;
mod error;
mod log;
mod reactor;
mod rpc;

fn main() {}
