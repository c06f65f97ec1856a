//! Fault injection: the daemon is killed at any moment, records are damaged, disks are full or read-only,
//! clients disconnect. In each case other pods are not affected, no object leaks, and the next daemon has the
//! correct state.
#![forbid(unsafe_code)]

mod broken_nodes;
mod compared;
mod crash;
mod disk;
mod hang;
mod images;
mod inject;
mod limits;
mod lost;
mod monitors;
mod moved;
mod records;
mod two_daemons;
mod unfinished;
mod vanish;
