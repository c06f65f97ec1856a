//! The plugins `bridge`, `ptp`, `host-local`, `portmap` and `loopback`, built in: a list that names only these, with options
//! that are known here, is attached by the daemon itself in a millisecond or two, with no worker and no program. Everything
//! else goes to the plugins' programs as a whole; no option is ever ignored.
//!
//! ```text
//!   conflist, attachment ── conf::plan ──> Plan ── attach::add ──> lease ── links ── rules ──> result
//!                             (pure)       Plan ── attach::del ──> rules, links, lease
//! ```
//! What is made is what the plugins make, from the same files of leases, so that both take turns on one node: only the rules
//! of nftables are in a table of our own. Nothing is kept in memory but a socket: names follow from the pod's id, and everything can
//! be undone from the pod's record.
//! Rules: docs/cni.md, "Built in"; the plugins' own documents at cni.dev, as of their version 1.1.1.

mod attach;
mod conf;
mod lease;
mod range;
mod result;
mod rules;

use std::path::Path;

use coracle_job::{Attachment, CniOutcome};
use serde_json::json;

pub(super) use self::rules::Netfilter;
use super::Recorded;
use super::conf::{BUILT_IN_NAME, BUILT_IN_VERSION};
use super::plan::INTERFACE;
use crate::error::{Error, Kind, plain};

/// The network that is there without configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DefaultNetwork {
    /// Its bridge.
    pub(crate) bridge: String,
    /// Its ranges, one per family, for as long as the kubelet has not said which is the node's.
    pub(crate) subnets: Vec<String>,
    /// Where its leases are.
    pub(crate) data_dir: std::path::PathBuf,
}

impl DefaultNetwork {
    /// Whether pods can be attached to it, else what is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        fits(
            &self.conflist(""),
            &Attachment {
                container_id: "a".to_owned(),
                interface: INTERFACE.to_owned(),
                ..Attachment::default()
            },
        )
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
                  "keepAddresses": true, "ipam": ipam },
                { "type": "portmap", "capabilities": { "portMappings": true } },
            ],
        });
        list.to_string()
    }
}

/// Whether pods can be attached without the plugins' programs, else what stands against it.
pub(super) fn fits(conflist: &str, attachment: &Attachment) -> Result<(), String> {
    conf::plan(conflist, attachment).map(drop)
}

/// Whether built-in code can detach a pod that plugins attached: it finds links and leases, but not their rules.
pub(super) fn can_take_over(recorded: &Recorded) -> bool {
    conf::plan(&recorded.conflist, &recorded.attachment).is_ok_and(|plan| !plan.has_rules())
}

/// Attaches a pod. After an error [`del`] is due.
pub(super) async fn add(netfilter: &Netfilter, recorded: &Recorded) -> Result<CniOutcome, Error> {
    let plan = replan(recorded)?;
    attach::add(netfilter, &plan, &recorded.attachment)
        .await
        .map_err(|error| error.context(format!("built-in network {:?} (add)", plan.network)))
}

/// Detaches a pod; what is already gone is success. `result` is that of ADD, if it came to one.
pub(super) async fn del(
    netfilter: &Netfilter,
    recorded: &Recorded,
    result: Option<&str>,
) -> Result<(), Error> {
    let plan = replan(recorded)?;
    attach::del(netfilter, &plan, &recorded.attachment, result)
        .await
        .map_err(|error| error.context(format!("built-in network {:?} (del)", plan.network)))
}

fn replan(recorded: &Recorded) -> Result<conf::Plan, Error> {
    conf::plan(&recorded.conflist, &recorded.attachment)
        .map_err(|why| Error::new(Kind::Internal, format!("the pod's network is not built in: {why}")))
}

/// A file operation that did not work. Not NotFound, which to a kubelet means that the pod is gone.
fn failed(op: &str, path: &Path, error: &std::io::Error) -> Error {
    let kind = match Error::from(std::io::Error::from(error.kind())).kind() {
        Kind::ResourceExhausted => Kind::ResourceExhausted,
        _ => Kind::Internal,
    };
    Error::new(kind, format!("{op} {}: {}", path.display(), plain(error)))
}
