//! Lists the images of the containerd that a node used before, for `coracle k3s enable --dry-run` and `coracle kubeadm enable
//! --dry-run`, which run without a daemon. A worker reads containerd's store, as for `coracle image take-over`.

use std::path::Path;
use std::process::Command;

use coracle_config::Config;
use coracle_preflight::{answer_of, program};
use coracle_setup::OldImage;
use serde_json::Value;

/// Namespace of the images of a kubelet's containerd.
const NAMESPACE: &str = "k8s.io";

/// Lists the images in the store of a containerd. Blocks until the worker ends, so the daemon must not call it.
///
/// # Errors
/// One line: the worker could not be started or read the store.
pub(crate) fn list(config: &Config, store: &Path) -> Result<Vec<OldImage>, String> {
    let mut worker = Command::new(program(config, coracle_job::WORKER));
    // The worker starts in the directory, which it may not be able to find by its path.
    worker.current_dir(store).args(["list-containerd", ".", NAMESPACE]);
    let answer = answer_of(worker, "the worker")?;
    let images: Vec<Value> = serde_json::from_str(&answer).map_err(|error| format!("the worker: {error}"))?;
    Ok(images.iter().map(one).collect())
}

fn one(image: &Value) -> OldImage {
    let names = image["names"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let problem = || image["problem"].as_str().unwrap_or_default().to_owned();
    let tag = names.clone().find(|name| !name.contains('@') && !name.starts_with("sha256:"));
    let name = tag.or(names.clone().next()).or(image["digest"].as_str()).unwrap_or_default();
    OldImage { name: name.to_owned(), size_bytes: image["size_bytes"].as_u64().ok_or_else(problem) }
}
