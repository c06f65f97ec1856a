//! The confinement of a container's processes, kept below `--state` until the container is removed: an exec gets
//! the confinement with which the container was created, whatever happens to the file of a seccomp profile later.

use coracle_base::error::{Error, Kind};
use coracle_base::store;
use coracle_sandbox::plan::Confinement;

use crate::Container;
use crate::record::{decode, encode};

/// Version of the encoding: postcard, without field names.
const VERSION: u8 = 1;

impl Container {
    /// Stores the confinement, before the container is listed.
    ///
    /// # Errors
    /// The error of the file system.
    pub(super) fn keep_confinement(&self, confinement: &Confinement) -> Result<(), Error> {
        let directory = self.node().paths.confinement(self.pod.id);
        store::note(
            &directory,
            &self.id.to_string(),
            store::Kind::Confinement,
            VERSION,
            &encode(confinement)?,
        )
    }

    /// Loads the confinement for an exec.
    ///
    /// # Errors
    /// `Internal` if it is missing, cannot be read or is damaged: a process is never started without it.
    pub(crate) fn confinement(&self) -> Result<Confinement, Error> {
        let directory = self.node().paths.confinement(self.pod.id);
        let loaded = store::load(&directory, &self.id.to_string(), store::Kind::Confinement);
        loaded.and_then(|loaded| decode(&loaded, VERSION)).map_err(|damage| {
            let path = directory.join(self.id.to_string());
            Error::new(
                Kind::Internal,
                format!("read the container's confinement: {}: {damage}", path.display()),
            )
        })
    }
}
