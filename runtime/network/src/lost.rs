//! Pods whose attachment another program has removed: `k3s-killall.sh`, a deleted bridge, `ip link delete`. The kernel reports
//! each link that is removed from the node; what was removed while no daemon ran is found by [`check`].
//!
//! A report names a link, and the result of a pod's ADD names the links of the node that the pod needs. Without a report, a link
//! of a result may have never existed, because plugins may name anything: then only the objects of the built-in plugins count, and
//! for plugin programs the pod's own interface.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;

use coracle_base::error::{Error, failed};
use coracle_base::reactor::Watched;
use coracle_netlink::{Link, RemovedLinks, Socket, inside};

use super::Recorded;
use super::builtin::{self, Part};

/// The links of the node, as the kernel reports their removal.
pub struct Removals {
    reports: Rc<RemovedLinks>,
    watched: Watched<Rc<RemovedLinks>>,
}

impl Removals {
    /// Begins to listen.
    ///
    /// # Errors
    /// The kernel refuses the request.
    pub fn follow() -> Result<Removals, Error> {
        let reports = Rc::new(RemovedLinks::open()?);
        let watched = Watched::new(Rc::clone(&reports));
        let watched = watched.map_err(|error| failed("listen for", Path::new("removed links"), &error))?;
        Ok(Removals { reports, watched })
    }

    /// Waits until links are removed; returns their names. `None`: reports were lost, and any link may have been removed.
    ///
    /// # Errors
    /// The socket cannot be read.
    pub async fn next(&self) -> Result<Option<BTreeSet<String>>, Error> {
        let readable = self.watched.readable().await;
        readable.map_err(|error| failed("listen for", Path::new("removed links"), &error))?;
        Ok(self.reports.names()?)
    }
}

/// An attachment that is checked: the parameters and the result of ADD.
pub type Attached<'a> = (&'a Recorded, &'a str);

/// The reasons why attachments no longer exist, in the order of the attachments; `None` for one that exists, or about which nothing
/// is known. `removed`: the links that were removed; `None`: not known, everything is checked.
///
/// # Errors
/// The links of the node cannot be listed.
pub fn check(
    attached: &[Attached<'_>],
    removed: Option<&BTreeSet<String>>,
) -> Result<Vec<Option<String>>, Error> {
    let is_affected = |(recorded, result): &Attached<'_>| {
        // A text is searched much faster than it is parsed.
        removed.is_none_or(|removed| removed.iter().any(|name| result.contains(&format!("\"{name}\""))))
            && !recorded.attachment.netns.is_empty()
    };
    if !attached.iter().any(is_affected) {
        return Ok(vec![None; attached.len()]);
    }
    let links = Socket::route()?.links()?;
    let one = |(recorded, result): &Attached<'_>| match removed {
        Some(removed) => {
            let needed = builtin::links(result, &recorded.attachment.interface);
            without_removed(&needed, removed, &links)
        }
        None => match builtin_links(recorded) {
            Some((end, bridge)) => without_links(&end, bridge.as_deref(), &links),
            None => without_interface(recorded),
        },
    };
    Ok(attached.iter().map(|one_of| if is_affected(one_of) { one(one_of) } else { None }).collect())
}

/// The links of the node that the built-in main plugin of a list has made: the node's end of the pair, and the bridge. `None`: the
/// main plugin is a program.
fn builtin_links(recorded: &Recorded) -> Option<(String, Option<String>)> {
    let parts = builtin::parts(recorded, false).ok()?;
    parts.iter().find_map(|part| match part {
        Part::BuiltIn(plan) => builtin::main_links(plan, &recorded.attachment),
        Part::Programs(_) => None,
    })
}

/// Why a pod that needs these links has no network after some were removed.
fn without_removed(
    needed: &[String],
    removed: &BTreeSet<String>,
    links: &BTreeMap<String, Link>,
) -> Option<String> {
    let name = needed.iter().find(|name| removed.contains(*name))?;
    let Some(link) = links.get(name) else { return Some(format!("link {name} was removed")) };
    // It was made again, a bridge for example: its earlier ports are not those of the new one.
    let is_port = |name: &String| links.get(name).is_some_and(|other| other.bridge == link.index);
    (!needed.iter().any(is_port)).then(|| format!("link {name} was removed and made again"))
}

/// Why a pod with this end of its pair on the node has no network.
fn without_links(end: &str, bridge: Option<&str>, links: &BTreeMap<String, Link>) -> Option<String> {
    let Some(link) = links.get(end) else { return Some(format!("link {end} does not exist")) };
    let bridge_name = bridge?;
    let is_port = links.get(bridge_name).is_some_and(|bridge| link.bridge == bridge.index);
    (!is_port).then(|| format!("link {end} is not a port of the bridge {bridge_name}"))
}

/// Why a pod has no network: its interface is not in its namespace. An error while looking is not a fact about the interface.
fn without_interface(recorded: &Recorded) -> Option<String> {
    let attachment = &recorded.attachment;
    let socket = inside(Path::new(&attachment.netns), Socket::route).ok()?.ok()?;
    let interface = socket.link(&attachment.interface).ok()?;
    interface.is_none().then(|| format!("the pod has no interface {}", attachment.interface))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(given: &[(&str, u32, u32)]) -> BTreeMap<String, Link> {
        let link = |(name, index, bridge): &(&str, u32, u32)| {
            let link = Link { name: (*name).to_owned(), index: *index, bridge: *bridge, ..Link::default() };
            (link.name.clone(), link)
        };
        given.iter().map(link).collect()
    }

    #[test]
    fn a_report_concerns_pods_that_need_the_link() {
        let needed = ["cni0".to_owned(), "veth1".to_owned()];
        let there = [("cni0", 4, 0), ("veth1", 5, 4)];
        for (removed, now, expected) in [
            ("veth2", &there[..], None),
            ("veth1", &there[..1], Some("link veth1 was removed")),
            ("cni0", &[("veth1", 5, 0)], Some("link cni0 was removed")),
            ("cni0", &[("cni0", 9, 0), ("veth1", 5, 0)], Some("link cni0 was removed and made again")),
            // The report is about the bridge before the one of this pod.
            ("cni0", &there[..], None),
        ] {
            let removed = BTreeSet::from([removed.to_owned()]);
            assert_eq!(without_removed(&needed, &removed, &links(now)).as_deref(), expected, "{now:?}");
        }
    }

    #[test]
    fn a_pod_needs_its_pair_to_be_a_port_of_its_bridge() {
        for (bridge, now, expected) in [
            (Some("b"), &[("b", 4, 0), ("veth1", 5, 4)][..], None),
            (Some("b"), &[("b", 4, 0)], Some("link veth1 does not exist")),
            (Some("b"), &[("veth1", 5, 0)], Some("link veth1 is not a port of the bridge b")),
            (Some("b"), &[("b", 6, 0), ("veth1", 5, 0)], Some("link veth1 is not a port of the bridge b")),
            (None, &[("veth1", 5, 0)], None),
            (None, &[], Some("link veth1 does not exist")),
        ] {
            assert_eq!(without_links("veth1", bridge, &links(now)).as_deref(), expected, "{now:?}");
        }
    }
}
