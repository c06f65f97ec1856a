//! Moves network interfaces of the node into a pod's network namespace (OCI runtime specification,
//! config-linux.md, "Network Devices"): with a new name and their global addresses, and sets them up. It also
//! removes interfaces. Both run in a worker, because the kernel may need a long time for each of them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use coracle_job::{Failure, FailureKind};
use coracle_netlink::{self as netlink, Batch, CopiedAddress, Error, Socket};

use crate::failure::{Context, io_failure};

/// Moves all interfaces; stops at the first error.
pub(crate) fn run(netns: &Path, devices: &[(String, String)]) -> Result<(), Failure> {
    let namespace = File::open(netns).map_err(|error| io_failure("open", netns, &error))?;
    let node = Socket::route().map_err(refused)?;
    let mut moved = Vec::new();
    for (host, name) in devices {
        let addresses =
            give(&node, host, name, &namespace).context(|| format!("network interface {host}"))?;
        moved.push((name, addresses));
    }
    let pod = netlink::inside(netns, Socket::route).map_err(refused)?.map_err(refused)?;
    for (name, addresses) in moved {
        bring_up(&pod, name, &addresses).context(|| format!("network interface {name} in the pod"))?;
    }
    Ok(())
}

/// Removes an interface of the node, for which the kernel may need a long time. A missing interface is not an
/// error.
pub(crate) fn remove(name: &str) -> Result<(), Failure> {
    let mut batch = Batch::default();
    batch.remove_link(name);
    Socket::route().and_then(|node| node.run(batch)).map_err(refused)
}

/// Moves one interface and returns the global addresses that it had.
fn give(node: &Socket, host: &str, name: &str, namespace: &File) -> Result<Vec<CopiedAddress>, Failure> {
    let link = node.link(host).map_err(refused)?;
    let link = link.ok_or_else(|| Failure::new(FailureKind::Internal, "no such device"))?;
    if link.is_loopback {
        return Err(Failure::new(FailureKind::Invalid, "the loopback interface cannot be moved"));
    }
    let addresses = node.global_addresses(link.index).map_err(refused)?;
    let mut batch = Batch::default();
    batch.move_link(&link, namespace.as_raw_fd(), name);
    node.run(batch).map_err(refused)?;
    Ok(addresses)
}

fn bring_up(pod: &Socket, name: &str, addresses: &[CopiedAddress]) -> Result<(), Failure> {
    let link = pod.link(name).map_err(refused)?;
    let link = link.ok_or_else(|| Failure::new(FailureKind::Internal, "no such device"))?;
    let mut batch = Batch::default();
    for address in addresses {
        batch.add_copied_address(link.index, address);
    }
    // On its own: the kernel carries out the requests after a refused one, too.
    pod.run(batch).map_err(refused)?;
    let mut batch = Batch::default();
    batch.set_up(link.index, name);
    pod.run(batch).map_err(refused)
}

fn refused(error: Error) -> Failure {
    Failure::new(FailureKind::Internal, error.to_string())
}
