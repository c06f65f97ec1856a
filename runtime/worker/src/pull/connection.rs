//! One endpoint of a pull, which is accessed through the fetcher process.

use std::sync::Arc;

use coracle_job::Timeouts;

use super::sources::Need;
use crate::fetch::{Body, Fetcher, Head, RequestFailure};
use crate::registries::Endpoint;

/// An endpoint, used by all threads of the pull.
pub(super) struct Connection {
    /// Index of the endpoint in the fetcher's list.
    index: usize,
    endpoint: Endpoint,
    fetcher: Arc<Fetcher>,
}

impl Connection {
    pub(super) fn new(index: usize, endpoint: Endpoint, fetcher: Arc<Fetcher>) -> Self {
        Self { index, endpoint, fetcher }
    }

    /// URL of the endpoint without secret parts.
    pub(super) fn name(&self) -> &str {
        &self.endpoint.url
    }

    pub(super) fn timeouts(&self) -> &Timeouts {
        self.fetcher.timeouts()
    }

    /// Whether the configuration of the endpoint permits this operation.
    pub(super) fn can(&self, need: Need) -> bool {
        match need {
            Need::Resolve => self.endpoint.can_resolve,
            Need::Pull => self.endpoint.can_pull,
        }
    }

    /// Requests `manifests/REFERENCE` or `blobs/DIGEST` from byte `offset` on; the response has a success
    /// status.
    pub(super) fn get(&self, what: &str, accept: &str, offset: u64) -> Result<(Head, Body), RequestFailure> {
        self.fetcher.get(self.index, what, accept, offset)
    }
}
