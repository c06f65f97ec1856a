//! `coracle image explain`: the endpoints from which an image would be pulled, and the rule of the policy for it. A worker reads the registry
//! configuration in the same way as for a pull.

use coracle_base::error::{Error, Kind};
use coracle_job::{ExplainJob, ExplainedEndpoint, Job, Outcome};

use super::{Images, unexpected};
use coracle_reference::Reference;

impl Images {
    /// Returns the normalised reference, its endpoints in the order in which they would be tried, and the rule of the policy for it.
    ///
    /// # Errors
    /// `name` is not a valid reference, or the worker failed.
    pub async fn explain(&self, name: &str) -> Result<(String, Vec<ExplainedEndpoint>, Vec<String>), Error> {
        let reference = Reference::parse(name)
            .map_err(|invalid| Error::new(Kind::InvalidArgument, format!("explain {name:?}: {invalid}")))?;
        let (policy, mistake) = match self.in_force().await {
            Ok(in_force) => (in_force.policy, None),
            // The endpoints do not depend on it.
            Err(error) => (None, Some(error.message().to_owned())),
        };
        let verifiers = self.sources.policy.configured.borrow().verifiers.clone();
        let job = Job::Explain(ExplainJob {
            root: self.disk.root().to_owned(),
            registry: reference.registry().into(),
            repository: reference.repository().into(),
            reference: reference.to_string(),
            registries: self.sources.registries.borrow().clone(),
            policy,
            verifiers,
        });
        match self.workers.run(job).await.map_err(Error::from) {
            Ok(Outcome::Explained(endpoints, mut rules)) => {
                rules.extend(mistake);
                Ok((reference.to_string(), endpoints, rules))
            }
            Ok(_) => Err(unexpected()),
            Err(error) => Err(error.context(format!("explain {reference}"))),
        }
    }
}
