//! The plugins `bridge`, `ptp`, `host-local`, `portmap`, `bandwidth`, `firewall` and `loopback`, built in: what of a list is
//! theirs, with options that are known here, is done by the daemon itself in a millisecond or two, with no worker and no
//! program. Other plugins of the same list are programs; no option is ever ignored.
//!
//! ```text
//!   conflist, attachment ── conf::choose ──> places ── conf::parts ──> Plan ── attach::add ──> lease, links ─┐
//!                             (pure)                                        └─ chain::add ──> rules, limits ─┴─> result
//!                                                                      Plan ── chain::del, attach::del ──> all of it
//! ```
//! What is made is what the plugins make, from the same files of leases, so that both take turns on one node: only the rules
//! of nftables for ports and masquerading are in a table of our own. Nothing is kept in memory but a socket: names follow from
//! the pod's id, and everything can be undone from the pod's record.
//! Rules: docs/cni.md, "Built in"; the plugins' own documents at cni.dev, as of their version 1.1.1.

mod attach;
mod chain;
mod conf;
mod filter;
mod lease;
mod range;
mod result;
mod rules;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind, failed};
use coracle_job::{Attachment, CniOutcome};
use serde_json::json;

pub(super) use self::conf::{Choice, DATA_DIR, Part, Plan};
pub(super) use self::rules::Netfilter;
use super::Recorded;
use super::conf::{BUILT_IN_NAME, BUILT_IN_VERSION};
use super::plan::INTERFACE;

/// The network that is there without configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultNetwork {
    /// Its bridge.
    pub bridge: String,
    /// Its ranges, one per family, for as long as the kubelet has not said which is the node's.
    pub subnets: Vec<String>,
    /// Where its leases are.
    pub data_dir: PathBuf,
}

impl DefaultNetwork {
    /// Whether pods can be attached to it, else what is wrong.
    ///
    /// # Errors
    /// What is wrong with its keys, for people.
    pub fn check(&self) -> Result<(), String> {
        choose(&self.conflist(""), &nobody())?.reasons.into_iter().next().map_or(Ok(()), Err)
    }

    /// Its configuration as a file would have it. `pod_cidr`: the node's range or ranges, with a comma between; empty:
    /// not known.
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
                  "keepAddresses": true, "linkLocal": false, "macOfAddress": true, "ipam": ipam },
                { "type": "portmap", "capabilities": { "portMappings": true } },
            ],
        });
        list.to_string()
    }
}

/// A pod that asks for nothing.
fn nobody() -> Attachment {
    Attachment { container_id: "a".to_owned(), interface: INTERFACE.to_owned(), ..Attachment::default() }
}

/// Which plugins of a list need no program to attach a pod. `Err`: all of them do.
pub(super) fn choose(conflist: &str, attachment: &Attachment) -> Result<Choice, String> {
    conf::choose(conflist, attachment, &|firewall| filter::check(Path::new("/"), firewall))
}

/// Those plugins of a list that are programs for every pod, as a list; `None`: there are none.
pub(super) fn programs(conflist: &str) -> Option<String> {
    let Ok(choice) = choose(conflist, &nobody()) else { return Some(conflist.to_owned()) };
    if choice.reasons.is_empty() { None } else { conf::without(conflist, &choice.places) }
}

/// A pod's list in the order of ADD, as it is recorded; `is_ours`: all of it is built in, whatever is recorded.
pub(super) fn parts(recorded: &Recorded, is_ours: bool) -> Result<Vec<Part>, Error> {
    let is_ours = is_ours || recorded.is_built_in;
    if !is_ours && recorded.built_in.is_empty() {
        return Ok(vec![Part::Programs(recorded.conflist.clone())]);
    }
    let is_chosen = |place| is_ours || recorded.built_in.contains(&place);
    conf::parts(&recorded.conflist, &recorded.attachment, &is_chosen)
        .map_err(|why| Error::new(Kind::Internal, format!("the pod's network is not built in: {why}")))
}

/// Whether built-in code can detach a pod that plugins attached: it finds links, leases, limits and what the host's filter
/// accepts, but not their other rules.
pub(super) fn can_take_over(recorded: &Recorded) -> bool {
    let finds = |part: &Part| matches!(part, Part::BuiltIn(plan) if !plan.has_rules());
    recorded.built_in.is_empty()
        && choose(&recorded.conflist, &recorded.attachment).is_ok_and(|choice| choice.reasons.is_empty())
        && parts(recorded, true).is_ok_and(|parts| parts.iter().all(finds))
}

/// Does its part of ADD; `before` is what plugins before came to. After an error [`del`] is due.
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
        chain::add(netfilter, plan, attachment, &mut outcome)?;
        if plan.base.is_some() {
            attach::wait_until_running(attachment).await?;
        }
        Ok(outcome)
    };
    work.await.map_err(|error: Error| error.context(format!("built-in network {:?} (add)", plan.network)))
}

/// Does its part of DEL; what is already gone is success. `result` is that of ADD, if it came to one. What comes back is the
/// name of a link that is still to be removed.
pub(super) async fn del(
    netfilter: &Netfilter,
    plan: &Plan,
    attachment: &Attachment,
    result: Option<&str>,
) -> Result<Option<String>, Error> {
    let made = result.map(|text| result::read(text, &attachment.interface)).unwrap_or_default();
    let work = async {
        let left = chain::del(netfilter, plan, attachment, &made)?;
        if let Some(base) = &plan.base {
            attach::del(base, attachment, &made).await?;
        }
        Ok(left)
    };
    work.await.map_err(|error: Error| error.context(format!("built-in network {:?} (del)", plan.network)))
}

/// Takes back what can be found by a pod's id alone: its rules, and its leases below each of `parents` and in the directory
/// of `conflist`. Its link goes with its namespace.
///
/// # Errors
/// Something may be left: to be tried again.
pub(super) async fn forget(
    netfilter: &Netfilter,
    id: &str,
    parents: &[PathBuf],
    conflist: Option<&str>,
) -> Result<(), Error> {
    let work = async {
        rules::remove_all(netfilter, id)?;
        let mut directories: BTreeSet<PathBuf> = conflist.and_then(lease_directory).into_iter().collect();
        for parent in parents {
            directories.extend(subdirectories(parent).map_err(|error| failed("list", parent, &error))?);
        }
        for directory in directories {
            if !directory.try_exists().map_err(|error| failed("look at", &directory, &error))? {
                continue;
            }
            let addresses = lease::release_all(&directory, id).await?;
            netfilter.with(|socket| Ok(socket.forget_forwarded(&addresses)?))?;
        }
        Ok(())
    };
    work.await.map_err(|error: Error| error.context("network of a pod without a record"))
}

/// Where a list's leases are, if its first plugin is known here.
fn lease_directory(conflist: &str) -> Option<PathBuf> {
    let choice = choose(conflist, &nobody()).ok()?;
    let is_chosen = |place| choice.reasons.is_empty() || choice.places.contains(&place);
    let parts = conf::parts(conflist, &nobody(), &is_chosen).ok()?;
    parts.into_iter().find_map(|part| match part {
        Part::BuiltIn(plan) => plan.base.map(|base| base.ipam.directory),
        Part::Programs(_) => None,
    })
}

/// Directories in a directory, which may be missing.
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
