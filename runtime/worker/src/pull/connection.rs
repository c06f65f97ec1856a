//! One endpoint of a pull, or a neighbour, which is accessed through the fetcher process.

use std::sync::Arc;

use coracle_job::Timeouts;

use super::neighbours::{Neighbours, Peer};
use super::sources::Need;
use coracle_fetch::{Asked, Body, Fetcher, Get, Head, RequestFailure};
use coracle_registries::Endpoint;

/// An endpoint, used by all threads of the pull.
#[derive(Clone)]
pub(super) struct Connection {
    /// Index of the endpoint in the fetcher's list.
    index: usize,
    endpoint: Endpoint,
    /// The URL of one blob on any host, instead of those of the endpoint.
    url: Option<String>,
    /// The neighbour that is asked instead of the endpoint.
    neighbour: Option<(Arc<Neighbours>, Arc<Peer>)>,
    fetcher: Arc<Fetcher>,
}

impl Connection {
    pub(super) fn new(index: usize, endpoint: Endpoint, fetcher: Arc<Fetcher>) -> Self {
        Self { index, endpoint, url: None, neighbour: None, fetcher }
    }

    /// A connection of the same fetcher that requests one blob from this URL.
    pub(super) fn elsewhere(&self, url: &str) -> Self {
        let mut endpoint = self.endpoint.clone();
        // The name of the connection is without the query, which may be a signature.
        url.split(['?', '#']).next().unwrap_or_default().clone_into(&mut endpoint.url);
        endpoint.can_pull = true;
        let (index, fetcher) = (self.index, self.fetcher.clone());
        Self { index, endpoint, url: Some(url.to_owned()), neighbour: None, fetcher }
    }

    /// A connection of the same fetcher to a neighbour.
    pub(super) fn neighbour(&self, neighbours: &Arc<Neighbours>, peer: &Arc<Peer>) -> Self {
        let mut endpoint = self.endpoint.clone();
        endpoint.url = format!("neighbour {}", peer.address);
        let neighbour = Some((neighbours.clone(), peer.clone()));
        Self { index: self.index, endpoint, url: None, neighbour, fetcher: self.fetcher.clone() }
    }

    /// Whether this is a neighbour, and not an endpoint of the registry.
    pub(super) fn is_neighbour(&self) -> bool {
        self.neighbour.is_some()
    }

    /// Whether a document without a known digest may be believed: that of the registry, or of a node that belongs to the site.
    pub(super) fn vouches_for(&self, head: &Head, digest: &str) -> bool {
        self.neighbour.as_ref().is_none_or(|(neighbours, _)| neighbours.vouch_for(head, digest))
    }

    /// URL of the endpoint without secret parts.
    pub(super) fn name(&self) -> &str {
        &self.endpoint.url
    }

    pub(super) fn timeouts(&self) -> &Timeouts {
        match &self.neighbour {
            Some((neighbours, _)) => neighbours.timeouts(),
            None => self.fetcher.timeouts(),
        }
    }

    /// Whether the configuration of the endpoint permits this operation.
    pub(super) fn can(&self, need: Need) -> bool {
        match need {
            Need::Resolve => self.endpoint.can_resolve,
            Need::Pull => self.endpoint.can_pull,
        }
    }

    /// Makes a request; the response has a success status.
    pub(super) fn get(&self, get: Get) -> Result<(Head, Body), RequestFailure> {
        if let Some((neighbours, peer)) = &self.neighbour {
            return neighbours.get(peer, get);
        }
        self.ask(get)?.answer()
    }

    /// Makes a request to the endpoint, which is no neighbour; its answer is read later.
    pub(super) fn ask(&self, get: Get) -> Result<Asked, RequestFailure> {
        self.fetcher.ask(Get { remote: self.index as u32, url: self.url.clone(), ..get })
    }
}
