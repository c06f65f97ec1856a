//! `coracle image explain`: the endpoints from which an image would be pulled. A worker reads the registry
//! configuration in the same way as for a pull.

use coracle_base::error::{Error, Kind};
use coracle_job::{ExplainJob, ExplainedEndpoint, Job, Outcome};

use super::Images;
use super::reference::Reference;

impl Images {
    /// Returns the normalised reference, and its endpoints in the order in which they would be tried.
    ///
    /// # Errors
    /// `name` is not a valid reference, or the worker failed.
    pub async fn explain(&self, name: &str) -> Result<(String, Vec<ExplainedEndpoint>), Error> {
        let reference = Reference::parse(name)
            .map_err(|invalid| Error::new(Kind::InvalidArgument, format!("explain {name:?}: {invalid}")))?;
        let job = Job::Explain(ExplainJob {
            root: self.disk.root().to_owned(),
            registry: reference.registry().into(),
            repository: reference.repository().into(),
            registries: self.sources.registries.borrow().clone(),
        });
        match self.workers.run(job, |_, _| {}).await.map_err(Error::from) {
            Ok(Outcome::Explained(endpoints)) => Ok((reference.to_string(), endpoints)),
            Ok(_) => Err(Error::new(Kind::Internal, "unexpected answer of the worker")),
            Err(error) => Err(error.context(format!("explain {reference}"))),
        }
    }
}
