//! The policy of signatures, for jobs that pull, import, judge or explain.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The policy of the node. Jobs without one make no additional request and read no additional file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImagePolicy {
    /// The policy with its keys, as [`Outcome::PolicyRead`](crate::Outcome::PolicyRead) has it; shared by all jobs of the daemon.
    pub bytes: Arc<[u8]>,
    /// The day `YYYY-MM-DD` by which certificates are judged if the node's clock has an earlier one; empty: none.
    pub minimum_time: String,
}

/// Programs that decide whether images may be pulled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVerifiers {
    /// The directory of the programs.
    pub directory: PathBuf,
    /// Time limit of each program in milliseconds.
    pub limit_ms: u64,
}

/// Job: checks the images of the store against the policy, with the signatures that were stored with them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JudgeJob {
    /// The store: the directory of `--root`.
    pub root: PathBuf,
    /// The policy to judge by.
    pub policy: ImagePolicy,
    /// ID of each image with its names; an image without a name is judged by its ID.
    pub images: Vec<(String, Vec<String>)>,
}

/// The judgement of one name of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judged {
    /// ID of the image.
    pub id: String,
    /// The name; the ID of an image without a name.
    pub name: String,
    /// One line for each requirement that the image meets, or the reason why the policy does not accept it.
    pub judgement: Result<Vec<String>, String>,
}
