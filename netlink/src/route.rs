//! Routes of the main table.
//! Rules: rtnetlink(7); include/uapi/linux/rtnetlink.h.

use std::net::IpAddr;

use nix::errno::Errno;

use crate::address::{Network, family, octets};
use crate::message::{Batch, NLM_F_CREATE, NLM_F_EXCL};
use crate::{Error, Socket};

const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;

const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PREFSRC: u16 = 7;

const RT_TABLE_MAIN: u8 = 254;
const RTPROT_BOOT: u8 = 3;
const RTN_UNICAST: u8 = 1;
/// Size of `struct rtmsg` in bytes.
const HEADER_BYTES: usize = 12;

/// Scope of a route's destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Scope {
    /// The destination may be anywhere.
    Universe = 0,
    /// A destination on the link.
    Link = 253,
    /// A destination on this host.
    Host = 254,
    /// Any scope, for a removal.
    Any = 255,
}

/// A route to be added.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Network of destination addresses.
    pub destination: Network,
    /// Index of the link.
    pub link: u32,
    /// Gateway; `None`: the destination is directly reachable on the link.
    pub gateway: Option<IpAddr>,
    /// Source address of packets; `None`: the kernel chooses it.
    pub source: Option<IpAddr>,
    /// Scope of the destination.
    pub scope: Scope,
}

impl Route {
    /// Description of the route for error messages.
    fn title(&self) -> String {
        self.gateway.map_or_else(
            || self.destination.to_string(),
            |gateway| format!("{} via {gateway}", self.destination),
        )
    }
}

impl Batch {
    /// Adds a route. An existing route is an error, unless `is_shared`.
    pub fn add_route(&mut self, route: &Route, is_shared: bool) {
        self.route_message(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, route, "add route");
        if is_shared {
            self.tolerate(&[Errno::EEXIST]);
        }
    }

    /// Removes a route. A missing route is success.
    pub fn remove_route(&mut self, route: &Route) {
        self.route_message(RTM_DELROUTE, 0, route, "remove route");
        self.tolerate(&[Errno::ESRCH]);
    }

    fn route_message(&mut self, kind: u16, flags: u16, route: &Route, op: &'static str) {
        let destination = route.destination.base();
        let mut header = [0; HEADER_BYTES];
        header[0] = family(destination.address);
        header[1] = destination.prefix;
        header[4] = RT_TABLE_MAIN;
        if kind == RTM_NEWROUTE {
            header[5] = RTPROT_BOOT;
            header[7] = RTN_UNICAST;
        }
        header[6] = route.scope as u8;
        self.message(kind, flags, &header, op, route.title());
        if destination.prefix > 0 {
            self.attribute(RTA_DST, &octets(destination.address));
        }
        self.attribute(RTA_OIF, &route.link.to_ne_bytes());
        if let Some(gateway) = route.gateway {
            self.attribute(RTA_GATEWAY, &octets(gateway));
        }
        if let Some(source) = route.source {
            self.attribute(RTA_PREFSRC, &octets(source));
        }
    }
}

impl Socket {
    /// The index of the link through which packets to `address` leave; `None` without a route.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn link_towards(&self, address: IpAddr) -> Result<Option<u32>, Error> {
        let destination = Network::host(address);
        let mut header = [0; HEADER_BYTES];
        header[0] = family(address);
        header[1] = destination.prefix;
        let mut batch = Batch::default();
        batch.message(RTM_GETROUTE, 0, &header, "find route to", address.to_string());
        batch.tolerate(&[Errno::ENETUNREACH, Errno::EHOSTUNREACH]);
        batch.attribute(RTA_DST, &octets(address));
        batch.acknowledge();
        let mut found = None;
        self.ask(batch, &mut |message| {
            let link = message.attributes(HEADER_BYTES).find(|(kind, _)| *kind == RTA_OIF);
            found = link.and_then(|(_, value)| value.try_into().ok()).map(u32::from_ne_bytes).or(found);
        })?;
        Ok(found)
    }
}
