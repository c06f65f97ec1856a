//! coracle: the daemon a kubelet calls to run pods, and the command line that goes with it. This file only tells the modules.
#![forbid(unsafe_code)]

mod cri;
mod daemon;
mod error;
mod image;
mod log;
mod network;
mod reactor;
mod rpc;
mod store;
mod workers;

fn main() {}
