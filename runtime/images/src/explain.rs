//! Where an image would be asked for: `coracle image explain`. A worker reads the files, as at a pull, so what it says is
//! what a pull does.

use coracle_base::error::{Error, Kind};
use coracle_job::{ExplainJob, ExplainedEndpoint, Job, Outcome};

use super::Images;
use super::reference::Reference;

impl Images {
    /// The name in normal form, and its endpoints in the order they would be tried.
    ///
    /// # Errors
    /// Not a reference; or the worker's.
    pub async fn explain(&self, name: &str) -> Result<(String, Vec<ExplainedEndpoint>), Error> {
        let reference = Reference::parse(name)
            .map_err(|invalid| Error::new(Kind::InvalidArgument, format!("explain {name:?}: {invalid}")))?;
        let job = Job::Explain(ExplainJob {
            root: self.disk.root().to_owned(),
            registry: reference.registry().into(),
            repository: reference.repository().into(),
            registries: self.registries.borrow().clone(),
        });
        match self.workers.run(job, |_, _| {}).await.map_err(Error::from) {
            Ok(Outcome::Explained(endpoints)) => Ok((reference.to_string(), endpoints)),
            Ok(_) => Err(Error::new(Kind::Internal, "the worker did another job")),
            Err(error) => Err(error.context(format!("explain {reference}"))),
        }
    }
}
