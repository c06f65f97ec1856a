//! Rules for images: the policy of signatures and the programs that verify images, for jobs that pull, import, judge or explain.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The rules of the node for images. Jobs without rules make no additional request and read no additional file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImagePolicy {
    /// The policy with its keys, as [`Outcome::PolicyRead`](crate::Outcome::PolicyRead) has it; `None`: no file is configured.
    pub signatures: Option<Vec<u8>>,
    /// The programs that judge each image.
    pub verifiers: Option<Verifiers>,
    /// The day `YYYY-MM-DD` by which certificates are judged if the node's clock has an earlier one; empty: none.
    pub minimum_time: String,
}

/// Programs that judge images, by the convention of containerd's image verifiers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verifiers {
    /// The directory of the programs; all have to accept an image.
    pub directory: PathBuf,
    /// Time limit of each program in milliseconds.
    pub limit_ms: u64,
}

/// Job: judges images of the store by the signatures that were stored with them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JudgeJob {
    /// The store: the directory of `--root`.
    pub root: PathBuf,
    /// The rules.
    pub policy: ImagePolicy,
    /// ID of each image with its names: tags, or digests of an image without tags.
    pub images: Vec<(String, Vec<String>)>,
}

/// The judgement of one name of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judged {
    /// ID of the image.
    pub id: String,
    /// The name.
    pub name: String,
    /// One line for each requirement that the image meets, or the reason why a pull of the name would be refused.
    pub judgement: Result<Vec<String>, String>,
}
