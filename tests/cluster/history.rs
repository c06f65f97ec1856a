//! What the runtime did for each pod of the namespace `default`, from the daemon's log, which has one line for each
//! transition. The log is read piece by piece, because that of a long run is large.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use crate::cluster::Cluster;

/// How often each kind of transition happened, by the name of the pod.
#[derive(Default)]
pub(crate) struct History {
    offset: u64,
    /// Sandboxes that became ready.
    pub(crate) sandboxes: BTreeMap<String, u32>,
    created: BTreeMap<String, u32>,
    /// Containers that were started.
    pub(crate) started: BTreeMap<String, u32>,
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
            let counts = if line.contains("msg=\"pod sandbox ready\"") {
                &mut self.sandboxes
            } else if line.contains("msg=\"container created\"") {
                &mut self.created
            } else if line.contains("msg=\"container started\"") {
                &mut self.started
            } else {
                continue;
            };
            *counts.entry(name.to_owned()).or_default() += 1;
        }
    }

    /// Number of containers that were created and never started.
    pub(crate) fn unstarted(&self) -> u32 {
        self.created.values().sum::<u32>() - self.started.values().sum::<u32>()
    }
}

/// The pods with more than one.
pub(crate) fn repeated(counts: &BTreeMap<String, u32>) -> Vec<&String> {
    counts.iter().filter(|(_, count)| **count > 1).map(|(name, _)| name).collect()
}

/// The part of a file from this byte on.
pub(crate) fn read_from(path: &Path, offset: u64) -> String {
    let mut bytes = Vec::new();
    let mut file = fs::File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_to_end(&mut bytes)).expect("a log");
    String::from_utf8_lossy(&bytes).into_owned()
}
