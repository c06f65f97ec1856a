//! What the runtime did for each pod of the namespace `default`, from the daemon's log, which has one line for each
//! transition. The log is read piece by piece, because that of a long run is large.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use crate::cluster::Cluster;

/// Transitions by the name of the pod.
#[derive(Default)]
pub(crate) struct History {
    offset: u64,
    /// Sandboxes that became ready.
    pub(crate) sandboxes: BTreeMap<String, u32>,
    created: u32,
    /// Beginnings of the IDs of the containers that were started, in this order.
    pub(crate) started: BTreeMap<String, Vec<String>>,
}

impl History {
    /// Reads what the daemon has logged since the last call.
    pub(crate) fn read(&mut self, cluster: &Cluster) {
        let text = read_from(&cluster.node.folder().join("daemon.log"), self.offset);
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        self.offset += whole as u64;
        for line in text[..whole].lines() {
            let name = line.split(' ').find_map(|word| word.strip_prefix("name=default/"));
            let Some(name) = name else { continue };
            if line.contains("msg=\"pod sandbox ready\"") {
                *self.sandboxes.entry(name.to_owned()).or_default() += 1;
            } else if line.contains("msg=\"container created\"") {
                self.created += 1;
            } else if line.contains("msg=\"container started\"") {
                let id = line.split(' ').find_map(|word| word.strip_prefix("ctr=")).unwrap_or_default();
                self.started.entry(name.to_owned()).or_default().push(id.to_owned());
            }
        }
    }

    /// Number of containers that were created and never started.
    pub(crate) fn unstarted(&self) -> u32 {
        self.created - self.starts()
    }

    /// Number of containers that were started.
    pub(crate) fn starts(&self) -> u32 {
        self.started.values().map(|ids| ids.len() as u32).sum()
    }

    /// The pods with more than one sandbox.
    pub(crate) fn with_second_sandbox(&self) -> Vec<&String> {
        self.sandboxes.iter().filter(|(_, count)| **count > 1).map(|(name, _)| name).collect()
    }

    /// The pods with more than one start, and the containers that were replaced.
    pub(crate) fn restarted(&self) -> BTreeMap<&String, &[String]> {
        let replaced = self.started.iter().map(|(name, ids)| (name, &ids[..ids.len() - 1]));
        replaced.filter(|(_, ids)| !ids.is_empty()).collect()
    }
}

/// The part of a file from this byte on.
pub(crate) fn read_from(path: &Path, offset: u64) -> String {
    let mut bytes = Vec::new();
    let mut file = fs::File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_to_end(&mut bytes)).expect("a log");
    String::from_utf8_lossy(&bytes).into_owned()
}
