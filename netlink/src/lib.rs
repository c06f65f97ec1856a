//! Netlink: configures links, addresses, routes, traffic limits, nftables and connection tracking. The kernel processes
//! a batch during sendmsg, so no function blocks: one system call creates a pod's links, two read the reply.
//!
//! ```text
//!   link, address, route, traffic, nft, rule, set, forward, conntrack ── put messages into ──> Batch ── Socket::run ──> kernel
//!                                              <── read with ── message <── answers, up to the batch's end
//! ```
//! A batch of links, addresses and routes is not rolled back if one of its messages fails: the remaining messages are
//! still processed, and the first failure is returned. A batch of nftables is one transaction. Which links, addresses and
//! rules a pod needs is decided by the callers.
//!
//! Other crates were compared (docs/notes/015-netlink.md). `rtnetlink` requires the sockets of tokio or async-io and has no
//! batches; the router of `neli` starts a thread, and the daemon has one thread. `netlink-packet-*` and `netlink-sys` have
//! neither problem, but add ten times as much to a program, have no types for token buckets, address translation, routing
//! look-ups (`fib`), iptables' matches or filters of connections, and do not decode the kernel's texts of errors.
//! `rustables` is under the GPL, `nftnl` wraps a C library, and `nftables` runs the program `nft`.
//!
//! Rules: netlink(7), rtnetlink(7); RFC 3549; Linux UAPI, include/uapi/linux/{netlink,rtnetlink,if_link,nfnetlink}.h.
//! The newest features used are strict checks of requests (NETLINK_GET_STRICT_CHK, Linux 4.20) and filters of lists of
//! connections (CTA_FILTER, Linux 5.8).
#![forbid(unsafe_code)]

mod address;
mod conntrack;
mod error;
mod forward;
mod link;
mod message;
mod nft;
mod route;
mod rule;
mod set;
mod traffic;

use std::path::Path;
use std::time::Duration;

use coracle_sys::{self as sys, Fd, netlink, process, socket};
use nix::errno::Errno;

pub use address::{CopiedAddress, Network};
pub use error::Error;
pub use link::{Bridge, Link, RemovedLinks, Veth};
pub use message::Batch;
pub use nft::{Family, FramesHook, Hook, Protocol, RulePosition, Rules};
pub use route::{Route, Scope};
pub use rule::{ETH_P_IPV6, Rule};
pub use set::{Field, Set, Value};
pub use traffic::Rate;

use message::Message;

/// Size of the receive buffer in bytes; the kernel adapts its replies to it.
const BUFFER_BYTES: usize = 16 << 10;
/// Maximum number of messages of a reply: some dumps have one per rule of the host.
const ANSWERS_MAX: usize = 1 << 20;
/// Maximum number of retries of a dump that is interrupted by a change.
const TRIES: u32 = 16;
/// Maximum number of attempts to return from another network namespace: together with the pauses, one second.
const RETURN_TRIES: u32 = 200;
const RETURN_PAUSE: Duration = Duration::from_millis(5);
/// Flag of clone(2) for a network namespace.
const CLONE_NEWNET: u64 = 0x4000_0000;

/// A netlink socket of the network namespace in which it was opened.
#[derive(Debug)]
pub struct Socket(Fd);

impl Socket {
    /// Opens a socket for links, addresses and routes.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn route() -> Result<Self, Error> {
        Self::open(netlink::ROUTE)
    }

    /// Opens a socket for nftables and connection tracking. Closing the socket can take the kernel tens of
    /// milliseconds, because the kernel waits until removed rules are unused. A socket can be reused as long as no
    /// request has failed.
    ///
    /// # Errors
    /// [`Error`], also if the kernel has no netfilter.
    pub fn netfilter() -> Result<Self, Error> {
        Self::open(netlink::NETFILTER)
    }

    fn open(protocol: u32) -> Result<Self, Error> {
        let fd = netlink::open(protocol).map_err(|errno| refused("open", "a netlink socket", errno))?;
        for option in [netlink::SHORT_REPLIES, netlink::ERROR_TEXTS, netlink::STRICT] {
            netlink::switch_on(fd.borrow(), option)
                .map_err(|errno| refused("set an option of", "a netlink socket", errno))?;
        }
        Ok(Self(fd))
    }

    /// Sends `batch` to the kernel and waits for its reply.
    ///
    /// # Errors
    /// The first failure that the batch does not tolerate.
    pub fn run(&self, batch: Batch) -> Result<(), Error> {
        self.ask(batch, &mut |_| {}).map(drop)
    }

    /// Sends `batch` and calls `answer` with each message of the reply that is not an acknowledgement. Returns false if
    /// a dump was interrupted by a change.
    fn ask(&self, batch: Batch, answer: &mut dyn FnMut(&Message<'_>)) -> Result<bool, Error> {
        if batch.is_empty() {
            return Ok(true);
        }
        let (bytes, expectations, last) = batch.finish();
        let broken = |errno| refused("talk to", "the kernel by netlink", errno);
        socket::send(self.0.borrow(), &bytes, &[]).map_err(broken)?;
        let mut buffer = [0; BUFFER_BYTES];
        let (mut first_error, mut is_whole) = (None, true);
        for _ in 0..ANSWERS_MAX {
            let length = match socket::receive(self.0.borrow(), &mut buffer) {
                Ok(received) => received.length,
                // The last message of an aborted transaction is not acknowledged.
                Err(sys::Errno::EAGAIN) if first_error.is_some() => break,
                Err(errno) => return Err(broken(errno)),
            };
            let mut is_over = false;
            for message in message::parse(&buffer[..length]) {
                is_whole &= !message.is_torn();
                if let Some(outcome) = message.outcome() {
                    is_over |= message.sequence >= last;
                    let error = outcome.and_then(|refusal| expectations.judge(message.sequence, &refusal));
                    first_error = first_error.or(error);
                } else {
                    answer(&message);
                }
            }
            if is_over {
                break;
            }
        }
        first_error.map_or(Ok(is_whole), Err)
    }

    /// Repeats a dump until it is not interrupted by a change.
    fn dump<T>(
        &self,
        batch: impl Fn() -> Batch,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        for _ in 0..TRIES {
            let mut found = Vec::new();
            if self.ask(batch(), &mut |message| found.extend(read(message)))? {
                return Ok(found);
            }
        }
        Err(Error::new("list", "what changes all the time", Errno::EINTR))
    }
}

/// Runs `work` in the network namespace at `path`. Sockets that `work` opens stay in that namespace; during `work`,
/// `/proc/sys/net` is also that of the namespace. `work` must not block, because the whole thread is in that namespace.
/// If the kernel refuses to return to the original namespace (ENOMEM), returning is retried for a second.
///
/// # Errors
/// [`Error`] if there is no such namespace; `work` was then not run.
pub fn inside<T>(path: &Path, work: impl FnOnce() -> T) -> Result<T, Error> {
    let open =
        |path: &Path| std::fs::File::open(path).map_err(|error| Error::io("open", path.display(), &error));
    let (here, there) = (open(Path::new("/proc/thread-self/ns/net"))?, open(path)?);
    let enter = |file: &std::fs::File| process::setns(std::os::fd::AsFd::as_fd(file).into(), CLONE_NEWNET);
    enter(&there).map_err(|errno| refused("enter", &path.display().to_string(), errno))?;
    let result = work();
    let returned = retry(|| enter(&here), || process::pause(RETURN_PAUSE.as_nanos() as i64));
    // Continuing in the wrong namespace would be unsafe, so the process ends; pods keep running without it.
    returned.expect("a namespace that this process came from takes it back");
    Ok(result)
}

/// Calls `attempt` until it succeeds, or has failed [`RETURN_TRIES`] times; returns the last result.
fn retry(
    mut attempt: impl FnMut() -> Result<(), sys::Errno>,
    mut pause: impl FnMut(),
) -> Result<(), sys::Errno> {
    for _ in 1..RETURN_TRIES {
        match attempt() {
            Ok(()) => return Ok(()),
            Err(_) => pause(),
        }
    }
    attempt()
}

fn refused(op: &'static str, target: &str, errno: sys::Errno) -> Error {
    Error::new(op, target, Errno::from_raw(errno.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_return_to_the_own_namespace_that_fails_at_first_is_retried() {
        for (failures, expected) in
            [(0, Ok(())), (1, Ok(())), (RETURN_TRIES - 1, Ok(())), (RETURN_TRIES, Err(sys::Errno::ENOMEM))]
        {
            let (mut tries, mut pauses) = (0, 0);
            let outcome = retry(
                || {
                    tries += 1;
                    if tries > failures { Ok(()) } else { Err(sys::Errno::ENOMEM) }
                },
                || pauses += 1,
            );
            assert_eq!(outcome, expected, "{failures}");
            assert_eq!(pauses, failures.min(RETURN_TRIES - 1), "{failures}");
        }
    }
}
