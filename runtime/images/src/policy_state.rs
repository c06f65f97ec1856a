//! The policy of signatures in force, and the jobs that wait for it. `policy` reads it and judges by it.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::sync::Arc;

use coracle_base::error::{Error, Kind};
use coracle_job::{ImagePolicy, ImageVerifiers};
use smol::Task;
use smol::channel::Sender;

/// Beginning of the text of a refused pull, with code UNKNOWN, which the kubelet parses (CRI 1.3).
pub(super) const VALIDATION_FAILED: &str = "SignatureValidationFailed";

/// The configured options of the image policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyOptions {
    /// Path of the policy of signatures; `None`: there is none.
    pub file: Option<PathBuf>,
    /// The day by which certificates are judged at least; empty: none.
    pub minimum_time: String,
    /// Programs that are asked before a pull; `None`: none.
    pub verifiers: Option<ImageVerifiers>,
}

/// The policy in force, and its judgements about the images of the store.
#[derive(Default)]
pub(super) struct Policy {
    pub(super) configured: RefCell<PolicyOptions>,
    /// The policy with its keys, or the mistake; `None`: it was not read yet, or there is none.
    pub(super) read: RefCell<Option<Result<Arc<[u8]>, String>>>,
    /// Number of changes of the policy, its keys or the clock: a judgement with an earlier number does not count.
    pub(super) generation: Cell<u64>,
    /// Callers that wait for the policy to be read.
    pub(super) waiting: RefCell<Vec<Sender<()>>>,
    /// Reads the policy and judges the store. Dropped, and so cancelled, by the next configuration: of two reads only the later counts.
    pub(super) task: RefCell<Option<Task<()>>>,
    /// The mistake that the last read of the policy found.
    pub(super) mistake: RefCell<Option<String>>,
    /// The reason why the images of the store are not judged by the policy in force.
    pub(super) not_judged: RefCell<Option<String>>,
    /// Names of images in the store that the policy does not accept.
    pub(super) refused: RefCell<Vec<String>>,
}

/// The policy by which a job judges.
pub(super) struct InForce {
    /// The policy for the job; `None`: there is none.
    pub(super) policy: Option<ImagePolicy>,
    /// The programs for a pull; `None`: none.
    pub(super) verifiers: Option<ImageVerifiers>,
    pub(super) generation: u64,
}

impl Policy {
    /// The policy for a job; `None`: it was not read yet.
    pub(super) fn look(&self) -> Option<Result<InForce, Error>> {
        let (configured, generation) = (self.configured.borrow(), self.generation.get());
        let verifiers = configured.verifiers.clone();
        if configured.file.is_none() {
            return Some(Ok(InForce { policy: None, verifiers, generation }));
        }
        let read = self.read.borrow();
        let bytes = match read.as_ref()? {
            Ok(bytes) => Arc::clone(bytes),
            Err(why) => return Some(Err(refused(why))),
        };
        let policy = Some(ImagePolicy { bytes, minimum_time: configured.minimum_time.clone() });
        Some(Ok(InForce { policy, verifiers, generation }))
    }

    /// Wakes the callers that wait for a read of the policy.
    pub(super) fn wake(&self) {
        for waiting in self.waiting.take() {
            // Fails if the caller has disconnected.
            let _ = waiting.try_send(());
        }
    }

    /// Number of changes of the policy, its keys or the clock.
    pub(super) fn generation(&self) -> u64 {
        self.generation.get()
    }
}

/// Whether an import failed because of the policy.
pub(super) fn is_refusal(error: &Error) -> bool {
    // The worker's and [`refused`]'s.
    matches!(error.kind(), Kind::FailedPrecondition | Kind::Unknown)
}

/// The error of a pull or an import without a policy that can be applied.
fn refused(why: impl std::fmt::Display) -> Error {
    Error::new(Kind::FailedPrecondition, why.to_string()).context(VALIDATION_FAILED).with_kind(Kind::Unknown)
}
