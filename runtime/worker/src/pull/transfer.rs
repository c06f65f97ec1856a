//! What all transfers of a pull share: endpoints, the store, limits, the progress, and the layers in which chunks are looked for.

use std::sync::Arc;

use coracle_chunked::Room;
use coracle_chunked::outline::Purpose;
use coracle_chunked::toc::Stated;
use coracle_job::Limits;
use coracle_manifest::Descriptor;

use super::partial::Donors;
use super::sources::Sources;
use crate::report::Report;
use crate::store::Store;

/// The values that all transfers of a pull share.
#[derive(Clone)]
pub(super) struct Transfer {
    pub(super) sources: Arc<Sources>,
    pub(super) store: Store,
    pub(super) limits: Limits,
    pub(super) report: Arc<Report>,
    /// The registry of the pull, if this node serves its neighbours, which may learn of downloads.
    pub(super) announced_for: Option<String>,
    /// Digest of the image's config, a blob that the registry sends without a range.
    pub(super) config: String,
    /// The memory for tables of layers.
    pub(super) tables: Arc<Room>,
    /// The node's layers, in which chunks are looked for.
    pub(super) donors: Arc<Donors>,
}

impl Transfer {
    /// The transfer of this blob. A layer in eStargz gets an outline also if the node does not serve neighbours: the next release is pulled with
    /// its headers ([`coracle_chunked::stargz`]).
    pub(super) fn of(&self, blob: &Descriptor) -> Self {
        let is_stargz = matches!(blob.contents.as_deref(), Some(Stated::Stargz(_)));
        let purpose = (is_stargz && self.donors.are_used()).then_some(Purpose::Headers);
        Self { store: self.store.with_outlines(self.store.outlines().or(purpose)), ..self.clone() }
    }
}
