//! Files of a container below `--state`, which are written when it is created: its plan, from which its launch record is
//! compiled when it starts, and the confinement of its processes. An exec gets the confinement with which the container was
//! created, whatever happens to the file of a seccomp profile later.

use std::path::Path;

use coracle_base::error::{Error, Kind};
use coracle_base::store;
use coracle_sandbox::disk;
use coracle_sandbox::plan::{Confinement, ContainerPlan};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Container;
use crate::record::{decode, encode};

/// Version of the encoding of a plan: postcard, without field names.
const PLAN_VERSION: u8 = 1;
/// Version of the encoding of a confinement.
const CONFINEMENT_VERSION: u8 = 1;

impl Container {
    /// Stores the plan, before the container is listed. The file is removed when the container has started.
    ///
    /// # Errors
    /// The error of the file system.
    pub(super) fn keep_plan(&self, plan: &ContainerPlan) -> Result<(), Error> {
        self.keep(&self.node().paths.plans(self.pod.id), store::Kind::Plan, PLAN_VERSION, plan)
    }

    /// Loads the plan for the start.
    ///
    /// # Errors
    /// `Internal` if it is missing, cannot be read or is damaged.
    pub(super) fn plan(&self) -> Result<ContainerPlan, Error> {
        self.kept("plan", &self.node().paths.plans(self.pod.id), store::Kind::Plan, PLAN_VERSION)
    }

    /// Removes the plan of a container that has started: it is started once. If this fails, the file is removed with the
    /// container.
    pub(super) fn forget_plan(&self) {
        let _ = disk::remove_file(&self.node().paths.plans(self.pod.id).join(self.id.to_string()));
    }

    /// Stores the confinement, before the container is listed.
    ///
    /// # Errors
    /// The error of the file system.
    pub(super) fn keep_confinement(&self, confinement: &Confinement) -> Result<(), Error> {
        let directory = self.node().paths.confinement(self.pod.id);
        self.keep(&directory, store::Kind::Confinement, CONFINEMENT_VERSION, confinement)
    }

    /// Loads the confinement for the start or an exec.
    ///
    /// # Errors
    /// `Internal` if it is missing, cannot be read or is damaged: a process is never started without it.
    pub(crate) fn confinement(&self) -> Result<Confinement, Error> {
        let directory = self.node().paths.confinement(self.pod.id);
        self.kept("confinement", &directory, store::Kind::Confinement, CONFINEMENT_VERSION)
    }

    fn keep<T: Serialize>(
        &self,
        directory: &Path,
        kind: store::Kind,
        version: u8,
        value: &T,
    ) -> Result<(), Error> {
        store::note(directory, &self.id.to_string(), kind, version, &encode(value)?)
    }

    fn kept<T: DeserializeOwned>(
        &self,
        what: &str,
        directory: &Path,
        kind: store::Kind,
        version: u8,
    ) -> Result<T, Error> {
        let loaded = store::load(directory, &self.id.to_string(), kind);
        let kept = loaded.and_then(|loaded| decode(&loaded, version));
        kept.map_err(|damage| self.unreadable(what, directory, &damage))
    }

    #[cold]
    fn unreadable(&self, what: &str, directory: &Path, damage: &store::Damage) -> Error {
        let path = directory.join(self.id.to_string());
        Error::new(Kind::Internal, format!("read the container's {what}: {}: {damage}", path.display()))
    }
}
