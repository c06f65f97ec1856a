//! One endpoint of a pull, as the worker asks it: through the process that has the network.

use std::sync::Arc;

use coracle_job::Patience;

use super::sources::Need;
use crate::fetch::{Body, Fetcher, Head, Trouble};
use crate::registries::Endpoint;

/// An endpoint that is being asked, by any of the pull's threads.
pub(super) struct Connection {
    /// In the list that the fetcher has.
    index: usize,
    endpoint: Endpoint,
    fetcher: Arc<Fetcher>,
}

impl Connection {
    pub(super) fn new(index: usize, endpoint: Endpoint, fetcher: Arc<Fetcher>) -> Self {
        Self { index, endpoint, fetcher }
    }

    /// The endpoint without what may be secret.
    pub(super) fn name(&self) -> &str {
        &self.endpoint.url
    }

    pub(super) fn patience(&self) -> &Patience {
        self.fetcher.patience()
    }

    /// Whether it is configured for this.
    pub(super) fn can(&self, need: Need) -> bool {
        match need {
            Need::Resolve => self.endpoint.can_resolve,
            Need::Pull => self.endpoint.can_pull,
        }
    }

    /// GET of `manifests/REFERENCE` or `blobs/DIGEST`, from byte `offset` on; the answer is a success.
    pub(super) fn get(&self, what: &str, accept: &str, offset: u64) -> Result<(Head, Body), Trouble> {
        self.fetcher.get(self.index, what, accept, offset)
    }
}
