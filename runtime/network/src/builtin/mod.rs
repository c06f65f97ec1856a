//! The built-in CNI plugins `bridge`, `ptp`, `host-local`, `portmap`, `bandwidth`, `firewall` and `loopback`.
//! The daemon executes them itself in a millisecond or two, without worker or program, if it supports all
//! their options. Other plugins of the same list are programs; no option is ignored.
//!
//! ```text
//! conflist, attachment ── plan::choose ──> places ── plan::parts ──> Plan ── attach::add ──> lease, links ───┐
//!                             (pure)                                        └─ chained::add ──> rules, limits ─┴─> result
//!                                                                      Plan ── chained::del, attach::del ──> all of it
//! ```
//! Built-in plugins create the same objects and use the same lease files as the plugin programs, so both can
//! be used on one node; only the nftables rules for ports and masquerading are in coracle's own table. No
//! state is kept in memory except a socket: names are derived from the pod's ID, and DEL needs only the pod's
//! record. Rules: docs/cni.md, "Built-in plugins"; the plugins' documentation at cni.dev, version 1.1.1.

mod attach;
mod chained;
mod connections;
mod filter;
mod lease;
mod mapping;
mod neighbours;
mod plan;
mod range;
mod result;
mod rules;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind, failed};
use coracle_base::log;
use coracle_job::{Attachment, CniOutcome};
use coracle_sandbox::collect::ordered;
use serde_json::json;

pub(super) use self::plan::{Choice, DATA_DIR, Part, Plan};
pub(super) use self::rules::{Netfilter, owners_without_link};
use super::Recorded;
use super::arguments::INTERFACE;
use super::conf::{BUILT_IN_NAME, BUILT_IN_VERSION};

/// The network of a node without CNI configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultNetwork {
    /// Name of the network's bridge.
    pub bridge: String,
    /// Address ranges for pods, one per family, until the kubelet sets the pod CIDR.
    pub subnets: Vec<String>,
    /// Whether a pod can only use its own MAC address, and answer for its own addresses only.
    pub checks_neighbours: bool,
    /// Directory of the network's leases.
    pub data_dir: PathBuf,
}

impl DefaultNetwork {
    /// Checks whether pods can be attached to this network.
    ///
    /// # Errors
    /// The name of the invalid configuration key, as text for users.
    pub fn check(&self) -> Result<(), String> {
        choose(&self.conflist(""), &without_parameters())?.reasons.into_iter().next().map_or(Ok(()), Err)
    }

    /// The configuration of this network as a CNI list. `pod_cidr`: the pod CIDR of the node, or two separated by a comma;
    /// empty: not set yet.
    pub(super) fn conflist(&self, pod_cidr: &str) -> String {
        let told: Vec<&str> = pod_cidr.split(',').map(str::trim).filter(|cidr| !cidr.is_empty()).collect();
        let own: Vec<&str> = self.subnets.iter().map(String::as_str).collect();
        let subnets = if told.is_empty() { own } else { told };
        let default =
            |subnet: &&str| json!({ "dst": if subnet.contains(':') { "::/0" } else { "0.0.0.0/0" } });
        let ipam = json!({
            "type": "host-local",
            "dataDir": self.data_dir,
            "ranges": subnets.iter().map(|subnet| json!([{ "subnet": subnet }])).collect::<Vec<_>>(),
            "routes": subnets.iter().map(default).collect::<Vec<_>>(),
        });
        let list = json!({
            "cniVersion": BUILT_IN_VERSION,
            "name": BUILT_IN_NAME,
            "plugins": [
                { "type": "bridge", "bridge": self.bridge, "isGateway": true, "ipMasq": true, "hairpinMode": true,
                  "keepAddresses": true, "linkLocal": false, "macOfAddress": true, "checkNeighbours": self.checks_neighbours,
                  "ipam": ipam },
                { "type": "portmap", "capabilities": { "portMappings": true } },
            ],
        });
        list.to_string()
    }
}

/// An attachment without host ports and capabilities, for checks of a list.
fn without_parameters() -> Attachment {
    Attachment { container_id: "a".to_owned(), interface: INTERFACE.to_owned(), ..Attachment::default() }
}

/// Chooses the plugins of a list that are built in for this attachment. `Err`: the reasons why no plugin is
/// built in.
pub(super) fn choose(conflist: &str, attachment: &Attachment) -> Result<Choice, String> {
    plan::choose(conflist, attachment, &|firewall| filter::check(Path::new("/"), firewall))
}

/// The plugins of a list that are programs for every pod, as a list; `None` if there are none.
pub(super) fn programs(conflist: &str) -> Option<String> {
    let Ok(choice) = choose(conflist, &without_parameters()) else { return Some(conflist.to_owned()) };
    if choice.reasons.is_empty() { None } else { plan::without(conflist, &choice.places) }
}

/// Splits a pod's recorded list into parts in the order of ADD. If `is_ours` is set, all plugins are treated
/// as built in, regardless of the record.
pub(super) fn parts(recorded: &Recorded, is_ours: bool) -> Result<Vec<Part>, Error> {
    let is_ours = is_ours || recorded.is_built_in;
    if !is_ours && recorded.built_in.is_empty() {
        return Ok(vec![Part::Programs(recorded.conflist.clone())]);
    }
    let is_chosen = |place| is_ours || recorded.built_in.contains(&place);
    plan::parts(&recorded.conflist, &recorded.attachment, &is_chosen)
        .map_err(|why| Error::new(Kind::Internal, format!("the pod's network is not built in: {why}")))
}

/// The links of the node that the result of a pod's ADD names. `interface` is the pod's.
pub(super) fn links(result: &str, interface: &str) -> Vec<String> {
    result::read(result, interface).links
}

/// The links of the node that the main plugin of a part makes for a pod: the node's end of the pair, and the bridge; `None` if the
/// part has no main plugin.
pub(super) fn main_links(plan: &Plan, attachment: &Attachment) -> Option<(String, Option<String>)> {
    plan.base.as_ref().map(|base| attach::links(base, attachment))
}

/// Whether the built-in plugins can detach a pod that plugin programs attached: they can remove its links,
/// leases, limits and accepted addresses, but not the other rules of the programs.
pub(super) fn can_take_over(recorded: &Recorded) -> bool {
    let finds = |part: &Part| matches!(part, Part::BuiltIn(plan) if !plan.has_rules());
    recorded.built_in.is_empty()
        && choose(&recorded.conflist, &recorded.attachment).is_ok_and(|choice| choice.reasons.is_empty())
        && parts(recorded, true).is_ok_and(|parts| parts.iter().all(finds))
}

/// Executes ADD of one part; `before` is the result of the preceding plugins. After an error the caller must
/// call [`del`].
pub(super) async fn add(
    netfilter: &Netfilter,
    plan: &Plan,
    attachment: &Attachment,
    before: Option<CniOutcome>,
) -> Result<CniOutcome, Error> {
    let work = async {
        let mut outcome = match &plan.base {
            Some(base) => attach::add(plan, base, attachment).await?,
            None => before.unwrap_or_default(),
        };
        chained::add(netfilter, plan, attachment, &mut outcome)?;
        if plan.base.is_some() {
            attach::wait_until_running(attachment).await?;
        }
        Ok(outcome)
    };
    work.await.map_err(|error: Error| error.context(format!("built-in network {:?} (add)", plan.network)))
}

/// Executes DEL of one part; missing objects are not an error. `result` is the result of ADD; `None` if ADD
/// did not succeed. Returns the name of a link that must still be removed.
pub(super) async fn del(
    netfilter: &Netfilter,
    plan: &Plan,
    attachment: &Attachment,
    result: Option<&str>,
) -> Result<Option<String>, Error> {
    let made = result.map(|text| result::read(text, &attachment.interface)).unwrap_or_default();
    let work = async {
        let left = chained::del(netfilter, plan, attachment, &made)?;
        if let Some(base) = &plan.base
            && attach::del(base, attachment, &made).await?
        {
            rules::forget_networks(netfilter, plan, &made.addresses)?;
        }
        Ok(left)
    };
    work.await.map_err(|error: Error| error.context(format!("built-in network {:?} (del)", plan.network)))
}

/// Removes all objects that can be found by a pod's ID alone: its rules, and its leases below each of
/// `parents` and in the directory of `conflist`. The kernel removes the pod's link with its namespace.
///
/// # Errors
/// An object may remain; the caller must retry.
pub(super) async fn forget(
    netfilter: &Netfilter,
    id: &str,
    parents: &[PathBuf],
    conflist: Option<&str>,
) -> Result<(), Error> {
    let work = async {
        rules::remove_all(netfilter, id)?;
        let mut directories: BTreeSet<PathBuf> = ordered(conflist.and_then(lease_directory));
        for parent in parents {
            directories.extend(subdirectories(parent).map_err(|error| failed("list", parent, &error))?);
        }
        let mut outcome = Ok(());
        for directory in directories {
            outcome = outcome.and(forget_leases(netfilter, id, &directory).await);
        }
        outcome
    };
    work.await.map_err(|error: Error| error.context("network of a pod by its id"))
}

/// Releases the leases of a pod in one directory, which may not exist, and what was allowed for its addresses.
async fn forget_leases(netfilter: &Netfilter, id: &str, directory: &Path) -> Result<(), Error> {
    if !directory.try_exists().map_err(|error| failed("look at", directory, &error))? {
        return Ok(());
    }
    let (addresses, outcome) = lease::release_all(directory, id).await;
    netfilter.with(|socket| Ok(socket.forget_forwarded(&addresses)?))?;
    netfilter.with(|socket| connections::forget_addresses(socket, &addresses))?;
    outcome
}

/// IDs of the pods that have leases in the networks whose directories are in `parent`, as far as they can be read.
pub(super) fn holders(parent: &Path) -> Result<BTreeSet<String>, Error> {
    let directories = subdirectories(parent).map_err(|error| failed("list", parent, &error))?;
    let mut found = BTreeSet::new();
    for directory in directories {
        match lease::holders(&directory) {
            Ok(holders) => found.extend(holders),
            Err(error) => log::warn!("cannot look for the leases of a network"; error = error),
        }
    }
    Ok(found)
}

/// Removes the objects of a pod like [`forget`], for a pod whose recorded configuration has unknown options.
/// In addition, sets the pod's link down and searches the directory of leases that the configuration names.
///
/// # Errors
/// An object may remain; the caller must retry.
pub(super) async fn forget_attachment(
    netfilter: &Netfilter,
    recorded: &Recorded,
    parents: &[PathBuf],
) -> Result<(), Error> {
    attach::remove_link(&recorded.attachment)?;
    let named = plan::data_directories(&recorded.conflist);
    let parents: Vec<PathBuf> = parents.iter().cloned().chain(named).collect();
    forget(netfilter, &recorded.attachment.container_id, &parents, None).await
}

/// The plugins of a pod's list that were programs, as a list; `None` if there were none.
pub(super) fn programs_of(recorded: &Recorded) -> Option<String> {
    match recorded.is_built_in {
        true => None,
        false => plan::without(&recorded.conflist, &recorded.built_in),
    }
}

/// Lease directory of a list; `None` if its first plugin is not built in.
pub(super) fn lease_directory(conflist: &str) -> Option<PathBuf> {
    let choice = choose(conflist, &without_parameters()).ok()?;
    let is_chosen = |place| choice.reasons.is_empty() || choice.places.contains(&place);
    let parts = plan::parts(conflist, &without_parameters(), &is_chosen).ok()?;
    parts.into_iter().find_map(|part| match part {
        Part::BuiltIn(plan) => plan.base.map(|base| base.ipam.directory),
        Part::Programs(_) => None,
    })
}

/// The subdirectories of a directory; empty if it does not exist.
fn subdirectories(parent: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(parent) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}
