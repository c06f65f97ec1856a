//! The protocol of the control socket `--state/control.sock`, over which `coracle image …`, `coracle why` and the lists of
//! pods and containers send requests to the running daemon. The lists are also available over the CRI socket,
//! but a gRPC client (an HTTP/2 client, and code to encode requests and decode answers) would enlarge the
//! command line on every node; lines of JSON do not. Only root may connect. Command line and daemon are of one
//! release, so the protocol may change with a release.
//!
//! ```text
//! client: one Request, one line of JSON ──>
//!                                         <── daemon: Answers, one line of JSON each; the last is `end`
//! ```
//!
//! An operation continues if its client disconnects: closing a terminal does not cancel an import.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Maximum length of a request in bytes: thousands of paths, or an image with the maximum number of names.
pub const LINE_BYTES_MAX: usize = 1 << 20;

/// Maximum length of an answer in bytes: a list contains all labels and annotations of its objects, which may
/// have 16 MiB in a CRI request, and JSON needs up to six bytes per character.
pub const ANSWER_BYTES_MAX: usize = 96 << 20;

/// Path of the socket.
pub fn socket(state: &Path) -> PathBuf {
    state.join("control.sock")
}

/// A client's request.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[expect(missing_docs, reason = "the comment of a variant says what its fields are")]
pub enum Request {
    /// Import these archives (absolute paths) in order.
    Import { files: Vec<PathBuf> },
    /// Import all images of a namespace in the store of a containerd (its root directory, an absolute path), or
    /// say which images would be imported.
    TakeOver {
        store: PathBuf,
        namespace: String,
        #[serde(default)]
        dry_run: bool,
    },
    /// List all images.
    List {},
    /// List the running pulls.
    Pulling {},
    /// List the endpoints from which these references would be pulled.
    Explain { names: Vec<String> },
    /// Pull these references with the credentials in the node's files.
    Pull { names: Vec<String> },
    /// Add a name to this image.
    Tag { name: String, tag: String },
    /// Remove every image that is not pinned and that no container uses.
    Prune {},
    /// Report the disk space that images use.
    Usage {},
    /// Remove the images with these names or IDs; pinned images only if forced.
    Remove {
        names: Vec<String>,
        #[serde(default)]
        force: bool,
    },
    /// Pin these images until they are unpinned.
    Pin { names: Vec<String> },
    /// Remove the manual pins of these images.
    Unpin { names: Vec<String> },
    /// Export the images with these names or IDs to this file, an absolute path.
    Export { names: Vec<String>, file: PathBuf },
    /// Verify all parts of all images, and repair or remove damaged ones.
    Check {
        #[serde(default)]
        repair: bool,
    },
    /// Judge all images by the image policy.
    Judge {},
    /// List all pod sandboxes, including those that are being created.
    Pods {},
    /// List all containers.
    Containers {},
    /// List the resource usage of all running containers.
    Stats {},
    /// Send every change of a pod or container from now on, until the client disconnects.
    Events {},
    /// Run a command in the container with this ID. The answer `started` is sent with descriptors
    /// (SCM_RIGHTS): the other ends of standard input (if requested), output and error; with `tty` only that
    /// of the terminal.
    Exec { container: String, command: Vec<String>, stdin: bool, tty: bool },
    /// List the waits of operations in progress.
    Waits {},
    /// List the conditions of the RPC Status.
    Conditions {},
    /// Report which configuration is in force.
    Configuration {},
    /// Send the metrics in Prometheus' text format.
    Metrics {},
}

/// An answer of the daemon.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the comment of a variant says what its fields are")]
pub enum Answer {
    /// A pod sandbox in a list.
    Pod(Pod),
    /// A container in a list.
    Container(Container),
    /// The resource usage of a container.
    Stats(Stats),
    /// A change of a pod or container.
    Event(Event),
    /// The command is running.
    Started {},
    /// The command has ended with this code, 0 to 255.
    Exited { code: i32 },
    /// A wait in progress; `pod` is empty for a wait that does not concern a pod.
    Wait { pod: String, name: String, what: String, since_s: u64 },
    /// A condition of Status.
    Condition { kind: String, is_true: bool, reason: String, message: String },
    /// The configuration in force.
    Configuration(Configuration),
    /// The metrics in Prometheus' text format.
    Metrics { text: String },
    /// A listed or imported image.
    Image {
        id: String,
        tags: Vec<String>,
        digests: Vec<String>,
        size_bytes: u64,
        pinned: bool,
        #[serde(default)]
        user: String,
    },
    /// An image in the store of a containerd: it would be imported, or it is known already.
    Found { id: String, names: Vec<String>, size_bytes: u64, known: bool },
    /// A running pull: bytes, layers, rate in bytes per second, and estimated remaining time.
    Pulling {
        name: String,
        bytes_done: u64,
        bytes_total: u64,
        layers_done: u32,
        layers_total: u32,
        rate: u64,
        left_s: Option<u64>,
        since_s: u64,
    },
    /// The bytes of an image that was pulled: compressed, and from where they are.
    Moved { bytes_total: u64, reused: u64, neighbours: u64, registry: u64 },
    /// The endpoints of this normalised reference follow as further answers.
    Explained { name: String },
    /// One line about the rule of the image policy for a reference.
    Rule { text: String },
    /// The image policy accepts this name of an image; one line for each requirement.
    Accepted { name: String, signed: Vec<String> },
    /// One endpoint of a reference, without secrets.
    Endpoint { url: String, source: String, credentials: String, tls: String, proxy: String },
    /// The image with this name was removed.
    Removed { name: String },
    /// The image with this name was pinned manually.
    Pinned { name: String },
    /// The pin with this name was removed.
    Unpinned { name: String },
    /// Disk space that images use, and free space on their file system; `None`: unknown.
    Usage { used_bytes: u64, free_bytes: Option<u64>, images: usize, directory: PathBuf },
    /// The archive was written.
    Exported { file: PathBuf },
    /// The image has no defects, after the parts in `repaired` were repaired. `not_compared`: number of layers
    /// that could not be compared with a blob.
    Whole { name: String, repaired: Vec<String>, not_compared: u32 },
    /// A part of the request failed; the other parts are still executed.
    Failed { message: String },
    /// The last answer to a request.
    End {},
}

/// The configuration in force, and the outcome of the last reload.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// The main file, whether it exists or not; drop-ins are in `conf.d` beside it.
    pub file: PathBuf,
    /// The files that were read, with the times of their last change in nanoseconds since 1970.
    pub read: BTreeMap<PathBuf, i64>,
    /// Time at which they were read, in nanoseconds since 1970.
    pub at_ns: i64,
    /// Whether they were read by a reload, not at the start.
    pub is_reload: bool,
    /// Names of keys whose values in these files take effect after a restart.
    pub needs_restart: Vec<String>,
    /// Time of the last reload in nanoseconds since 1970 if it failed, else 0.
    pub refused_at_ns: i64,
    /// Number of mistakes that the last reload found if it failed.
    pub mistakes_count: usize,
    /// The first mistakes.
    pub mistakes: Vec<String>,
}

/// A pod sandbox in a list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    /// ID of the sandbox, 64 hexadecimal digits.
    pub id: String,
    /// Name of the pod.
    pub name: String,
    /// Kubernetes namespace of the pod.
    pub namespace: String,
    /// Kubernetes UID of the pod.
    pub uid: String,
    /// Number of sandboxes that were created for the pod before.
    pub attempt: u32,
    /// Name of the sandbox's state.
    pub state: String,
    /// Time of the creation, wall clock in nanoseconds since 1970.
    pub created_at_ns: i64,
    /// The requested runtime handler; empty: the default.
    pub runtime_handler: String,
    /// Addresses of the pod, the primary one first.
    pub addresses: Vec<String>,
    /// Labels of the pod.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the pod; they may contain secrets.
    pub annotations: BTreeMap<String, String>,
}

/// A container in a list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// ID of the container, 64 hexadecimal digits.
    pub id: String,
    /// ID of the container's pod sandbox.
    pub pod_id: String,
    /// Name of the container's pod.
    pub pod_name: String,
    /// Kubernetes namespace of the container's pod.
    pub namespace: String,
    /// Name of the container in the pod.
    pub name: String,
    /// Number of earlier attempts to create the container.
    pub attempt: u32,
    /// The image name in the request.
    pub image: String,
    /// The image name in the pod's specification; empty if the kubelet has not sent it.
    pub user_specified_image: String,
    /// A name of the image for users.
    pub image_name: String,
    /// The image reference that the kubelet compares.
    pub image_ref: String,
    /// ID of the image.
    pub image_id: String,
    /// Name of the container's state.
    pub state: String,
    /// Time of the creation, wall clock in nanoseconds since 1970.
    pub created_at_ns: i64,
    /// Time of the start in nanoseconds since 1970; 0 if the container never ran.
    pub started_at_ns: i64,
    /// Time of the end in nanoseconds since 1970; 0 if the container has not ended.
    pub finished_at_ns: i64,
    /// Exit code; 0 if the container has not ended.
    pub exit_code: i32,
    /// Reason of the end in one word; empty if the container has not ended.
    pub reason: String,
    /// Text about the end of the container; may be empty.
    pub message: String,
    /// PID of the main process on the node; 0 if it is not running.
    pub pid: i32,
    /// Absolute path of the log file; empty if there is none.
    pub log_path: String,
    /// Labels of the container.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the container; they may contain secrets.
    pub annotations: BTreeMap<String, String>,
}

/// A change of a pod or container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Time of the change, wall clock in nanoseconds since 1970.
    pub at_ns: i64,
    /// Kind of the event: `created`, `started`, `stopped` or `deleted`.
    pub happened: String,
    /// ID of the container, or of the pod sandbox for its own changes.
    pub id: String,
    /// Name of the container; empty for a change of the pod sandbox.
    pub name: String,
    /// ID of the pod sandbox.
    pub pod_id: String,
    /// Name of the pod.
    pub pod_name: String,
    /// Kubernetes namespace of the pod.
    pub namespace: String,
}

/// The resource usage of a running container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// ID of the container, 64 hexadecimal digits.
    pub id: String,
    /// Name of the container in the pod.
    pub name: String,
    /// Number of earlier attempts to create the container.
    pub attempt: u32,
    /// ID of the container's pod sandbox.
    pub pod_id: String,
    /// Name of the container's pod.
    pub pod_name: String,
    /// Kubernetes namespace of the container's pod.
    pub namespace: String,
    /// Labels of the container.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the container; they may contain secrets.
    pub annotations: BTreeMap<String, String>,
    /// Time of the reading in nanoseconds since 1970.
    pub at_ns: i64,
    /// CPU time since the container's cgroup was created, in nanoseconds; `None` if unknown.
    pub cpu_ns: Option<u64>,
    /// CPU nanoseconds per second between the daemon's last two readings; `None` before the second reading.
    pub nanocores: Option<u64>,
    /// Memory usage of the container's cgroup; `None` if unknown.
    pub memory: Option<Memory>,
    /// The last measurement of the container's writable layer; `None` before the first one.
    pub layer: Option<Layer>,
    /// Swap usage of the container's cgroup; `None` if swap is not accounted.
    pub swap: Option<Swap>,
}

/// Memory usage of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Memory that cannot be reclaimed immediately, in bytes.
    pub working_set_bytes: u64,
    /// Number of bytes below the limit; `None`: no limit.
    pub available_bytes: Option<u64>,
    /// All memory charged to the cgroup, in bytes.
    pub usage_bytes: u64,
    /// Anonymous memory in bytes.
    pub rss_bytes: u64,
    /// Number of page faults.
    pub page_faults: u64,
    /// Number of page faults that read from a disk.
    pub major_page_faults: u64,
}

/// Size of a container's writable layer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Time of the measurement in nanoseconds since 1970.
    pub at_ns: i64,
    /// Path of the layer's directory.
    pub directory: PathBuf,
    /// Number of allocated bytes.
    pub used_bytes: u64,
    /// Number of inodes in the layer.
    pub inodes: u64,
}

/// Swap usage of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Swap {
    /// Number of bytes below the limit; `None`: no limit.
    pub available_bytes: Option<u64>,
    /// Swap in use, in bytes.
    pub usage_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::{Answer, Request};

    #[test]
    fn requests_and_answers_are_parsed_as_they_are_written() {
        for (text, expected) in [
            (r#"{"import":{"files":["/a.tar"]}}"#, Request::Import { files: vec!["/a.tar".into()] }),
            (
                r#"{"take_over":{"store":"/a","namespace":"k8s.io","dry_run":false}}"#,
                Request::TakeOver { store: "/a".into(), namespace: "k8s.io".into(), dry_run: false },
            ),
            (r#"{"list":{}}"#, Request::List {}),
            (r#"{"pulling":{}}"#, Request::Pulling {}),
            (r#"{"explain":{"names":["app"]}}"#, Request::Explain { names: vec!["app".into()] }),
            (
                r#"{"remove":{"names":["app"],"force":true}}"#,
                Request::Remove { names: vec!["app".into()], force: true },
            ),
            (r#"{"pin":{"names":["app"]}}"#, Request::Pin { names: vec!["app".into()] }),
            (r#"{"unpin":{"names":["app"]}}"#, Request::Unpin { names: vec!["app".into()] }),
        ] {
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), expected);
            assert_eq!(serde_json::to_string(&expected).unwrap(), text);
        }
        assert_eq!(serde_json::to_string(&Answer::End {}).unwrap(), r#"{"end":{}}"#);
        for text in ["", "{}", "[]", r#"{"exports":{}}"#, r#"{"list":{"x":1}}"#, &"[".repeat(100_000)] {
            assert!(serde_json::from_str::<Request>(text).is_err());
        }
    }
}
