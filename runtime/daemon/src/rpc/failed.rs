//! Logs failed calls: one warning for each, with the pod, the container and the image that the request names. Calls that change
//! nothing are not logged, because a kubelet also requests removed objects, to detect their removal.

use std::fmt::Display;

use coracle_base::error::Error;
use coracle_base::log::{self, Level};

use super::v1;
use crate::daemon::Daemon;

/// The objects that a request names; a field is empty if the request does not have it.
#[derive(Default)]
pub(super) struct Subject {
    /// ID of the pod sandbox, or a prefix of it.
    pod: String,
    /// Name of the pod: `namespace/name`.
    name: String,
    /// ID of the container, or a prefix of it.
    ctr: String,
    /// Name of the container.
    container: String,
    /// Reference of the image.
    image: String,
}

/// Implemented by requests that change an object.
pub(super) trait Change {
    /// The objects that the request names.
    fn subject(&self) -> Subject;
}

/// Logs the failed call, unless the failed operation has already logged its error.
pub(super) fn log(daemon: &Daemon, method: &str, code: &str, mut subject: Subject, error: &Error) {
    if error.is_logged() || !log::is_enabled(Level::Warn) {
        return;
    }
    subject.complete(daemon);
    let mut fields: Vec<(&str, &dyn Display)> = vec![("call", &method)];
    let known = [
        ("pod", &subject.pod),
        ("ctr", &subject.ctr),
        ("name", &subject.name),
        ("container", &subject.container),
        ("image", &subject.image),
    ];
    fields
        .extend(known.iter().filter(|(_, value)| !value.is_empty()).map(|(key, value)| (*key, *value as _)));
    fields.push(("code", &code));
    fields.push(("error", error));
    log::write(Level::Warn, &"call failed", &fields);
}

impl Subject {
    pub(super) fn of_pod(id: &str) -> Subject {
        Subject { pod: id.to_owned(), ..Subject::default() }
    }

    pub(super) fn of_container(id: &str) -> Subject {
        Subject { ctr: id.to_owned(), ..Subject::default() }
    }

    /// Adds the names of the objects with these IDs.
    fn complete(&mut self, daemon: &Daemon) {
        if !self.ctr.is_empty()
            && let Some(container) = daemon.pods.container_for_plugin(&self.ctr)
        {
            self.pod = container.pod.id.to_string();
            self.container = container.name();
            self.name = container.pod.name();
        }
        if self.name.is_empty() && !self.pod.is_empty() {
            let pods = daemon.pods.pods();
            self.name = pods
                .iter()
                .find(|pod| pod.id.to_string() == self.pod)
                .map_or_else(String::new, |pod| pod.name());
        }
    }
}

fn short_name(config: Option<&v1::PodSandboxConfig>) -> String {
    let metadata = config.and_then(|config| config.metadata.as_ref());
    metadata.map_or_else(String::new, |metadata| format!("{}/{}", metadata.namespace, metadata.name))
}

/// The image name that the user specified, not the ID to which a kubelet resolved it.
fn image_name(image: Option<&v1::ImageSpec>) -> String {
    image.map_or_else(String::new, |image| match image.user_specified_image.as_str() {
        "" => image.image.clone(),
        name => name.to_owned(),
    })
}

impl Change for v1::RunPodSandboxRequest {
    fn subject(&self) -> Subject {
        Subject { name: short_name(self.config.as_ref()), ..Subject::default() }
    }
}

impl Change for v1::CreateContainerRequest {
    fn subject(&self) -> Subject {
        let config = self.config.as_ref();
        let metadata = config.and_then(|config| config.metadata.as_ref());
        Subject {
            pod: self.pod_sandbox_id.clone(),
            name: short_name(self.sandbox_config.as_ref()),
            container: metadata.map_or_else(String::new, |metadata| metadata.name.clone()),
            image: image_name(config.and_then(|config| config.image.as_ref())),
            ..Subject::default()
        }
    }
}

impl Change for v1::PullImageRequest {
    fn subject(&self) -> Subject {
        Subject {
            name: short_name(self.sandbox_config.as_ref()),
            image: image_name(self.image.as_ref()),
            ..Subject::default()
        }
    }
}

impl Change for v1::RemoveImageRequest {
    fn subject(&self) -> Subject {
        Subject { image: image_name(self.image.as_ref()), ..Subject::default() }
    }
}

impl Change for v1::UpdateRuntimeConfigRequest {
    fn subject(&self) -> Subject {
        Subject::default()
    }
}
