//! Faults: the daemon killed at any moment, records damaged, disks full or read-only, clients that vanish. In each, other
//! pods are not disturbed, nothing leaks, and the next daemon knows the truth.
#![forbid(unsafe_code)]

mod crash;
mod disk;
mod hang;
mod images;
mod lost;
mod monitors;
mod records;
mod vanish;
