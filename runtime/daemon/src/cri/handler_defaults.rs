//! Applies the defaults of a runtime handler (`[runtime_handlers]`) to pods and containers. A default never replaces what a
//! request says, except that a container without a seccomp profile, which the CRI calls Unconfined, gets one. Privileged
//! containers keep their privileges.

use coracle_engine::spec::{ContainerSpec, Pairs};

use coracle_config::{RUNTIME_DEFAULT, RuntimeHandlers};

fn of<'a, T>(defaults: &'a [(String, T)], handler: &'a str) -> impl Iterator<Item = &'a T> {
    defaults.iter().filter(move |(name, _)| name == handler).map(|(_, value)| value)
}

/// Adds pairs whose names are absent.
fn add<'a>(known: &mut Pairs, more: impl Iterator<Item = &'a (String, String)>) {
    for pair in more {
        if known.iter().all(|(name, _)| *name != pair.0) {
            known.push(pair.clone());
        }
    }
}

/// Adds the annotations of the handler to those of a pod or container.
pub(crate) fn annotate(annotations: &mut Pairs, handler: &str, handlers: &RuntimeHandlers) {
    add(annotations, of(&handlers.annotations, handler));
}

/// Applies the defaults of the pod's handler to a container.
pub(crate) fn apply(spec: &mut ContainerSpec, handler: &str, handlers: &RuntimeHandlers) {
    annotate(&mut spec.annotations, handler, handlers);
    for device in of(&handlers.cdi_devices, handler) {
        if !spec.cdi_devices.contains(device) {
            spec.cdi_devices.push(device.clone());
        }
    }
    add(&mut spec.resources.unified, of(&handlers.cgroup, handler));
    let security = &mut spec.security;
    if security.privileged {
        return;
    }
    security.attributes.no_new_privileges |= handlers.no_new_privileges.iter().any(|name| name == handler);
    let is_unconfined = !security.wants_default_seccomp && security.localhost_seccomp.is_empty();
    match of(&handlers.seccomp, handler).last() {
        Some(profile) if is_unconfined && profile == RUNTIME_DEFAULT => security.wants_default_seccomp = true,
        Some(path) if is_unconfined => security.localhost_seccomp.clone_from(path),
        _ => {}
    }
}
