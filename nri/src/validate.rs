//! The built-in validator, and the evaluation of validators' answers (NRI 4.6, 4.7).

use std::future::Future;
use std::rc::Rc;
use std::task::Poll;

use crate::adjust::{Merge, Touched};
use crate::api;
use crate::plugin::Plugin;
use crate::required::Required;
use crate::settings::DefaultValidator;

/// The built-in validator's name.
const NAME: &str = "00-default-validator";

/// The error text of a rejection.
pub(crate) fn rejected(validator: &str, reason: &str) -> String {
    format!("validator {validator:?} rejected container adjustment, reason: {reason}")
}

/// The reason why the built-in validator rejects an adjustment, the first one that is found; `None` if the adjustment
/// is accepted.
pub(crate) fn by_default(
    settings: &DefaultValidator,
    pod: &api::PodSandbox,
    container: &api::Container,
    merge: &Merge,
    everyone: &[Rc<Plugin>],
) -> Option<String> {
    let reason = touched(settings, container, merge, [Touched::Hooks, Touched::Seccomp, Touched::Namespaces])
        .or_else(|| missing(settings, pod, container, everyone))
        .or_else(|| touched(settings, container, merge, [Touched::Sysctls]))?;
    Some(rejected(NAME, &format!("validation error: {reason}")))
}

fn touched<const N: usize>(
    settings: &DefaultValidator,
    container: &api::Container,
    merge: &Merge,
    kinds: [Touched; N],
) -> Option<String> {
    kinds.into_iter().find_map(|kind| {
        let owner = merge.owner(kind)?;
        let (is_rejected, what) = match kind {
            Touched::Hooks => (settings.reject_oci_hook_adjustment, "OCI hook"),
            Touched::Seccomp => seccomp(settings, container),
            Touched::Namespaces => (settings.reject_namespace_adjustment, "namespace"),
            Touched::Sysctls => (settings.reject_sysctl_adjustment, "sysctl"),
        };
        is_rejected.then(|| format!("plugin {owner:?} attempted restricted {what} adjustment"))
    })
}

/// Whether a change of the seccomp policy is rejected, which depends on the requested profile, and the kind of profile
/// for the error.
fn seccomp(settings: &DefaultValidator, container: &api::Container) -> (bool, &'static str) {
    let profile = container.linux.as_ref().and_then(|linux| linux.seccomp_profile.as_ref());
    match profile.map(api::SecurityProfile::profile_type) {
        Some(api::ProfileType::RuntimeDefault) => {
            (settings.reject_runtime_default_seccomp_adjustment, "runtime default seccomp policy")
        }
        Some(api::ProfileType::Localhost) => {
            (settings.reject_custom_seccomp_adjustment, "custom seccomp policy")
        }
        Some(api::ProfileType::Unconfined) | None => {
            (settings.reject_unconfined_seccomp_adjustment, "unconfined seccomp policy")
        }
    }
}

fn missing(
    settings: &DefaultValidator,
    pod: &api::PodSandbox,
    container: &api::Container,
    everyone: &[Rc<Plugin>],
) -> Option<String> {
    let required = Required::of_container(settings, pod, &container.name);
    if let Some(mistake) = &required.mistake {
        return Some(mistake.clone());
    }
    let missing = required.missing(|name| everyone.iter().any(|plugin| plugin.is_called(name)));
    (!missing.is_empty()).then(|| format!("missing required plugins: {}", missing.join(", ")))
}

/// Runs futures concurrently and returns their results in order.
pub(crate) async fn all<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        for (future, answer) in futures.iter_mut().filter(|(_, answer)| answer.is_none()) {
            if let Poll::Ready(ready) = future.as_mut().poll(context) {
                *answer = Some(ready);
            }
        }
        match futures.iter().all(|(_, answer)| answer.is_some()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    futures.into_iter().filter_map(|(_, answer)| answer).collect()
}
