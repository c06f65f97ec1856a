//! What came to the records after 0.1.0.
//!
//! ```text
//!   | body of 0.1.0 (postcard) | JSON object of the fields below |     the second part is absent in records of 0.1.0
//! ```
//!
//! Postcard has no names, so nothing can come to the middle of a body without making older ones unreadable. The fields
//! live where they belong in the spec, are skipped there, and are gathered here by name: an absent one has its default,
//! an unknown one is passed over, and 0.1.0 stops reading before the JSON. So each version reads what any other wrote.

use serde::{Deserialize, Serialize};

use super::{Adjusted, ContainerRecord, ImageVolumeUse, Limits, PodRecord, Told};
use crate::spec::{MountLater, Resources, SelinuxLabel, UserNamespace};

/// A record whose later fields are gathered, and put back.
pub(crate) trait Grown {
    /// The fields by name.
    type Later: Serialize + serde::de::DeserializeOwned + PartialEq + Default;

    /// Takes a copy of them out of the record.
    fn gather(&self) -> Self::Later;

    /// Puts them back where they belong.
    fn put(&mut self, later: Self::Later);
}

/// Of a pod sandbox.
#[derive(Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Pod {
    #[serde(skip_serializing_if = "is_default")]
    user_namespace: Option<UserNamespace>,
    #[serde(skip_serializing_if = "is_default")]
    overhead: Option<Resources>,
    #[serde(skip_serializing_if = "is_default")]
    resources: Option<Resources>,
    #[serde(skip_serializing_if = "is_default")]
    addresses: Vec<String>,
    #[serde(skip_serializing_if = "is_default")]
    told: Told,
    #[serde(skip_serializing_if = "is_default")]
    has_scopes: bool,
    #[serde(skip_serializing_if = "is_default")]
    selinux: Option<SelinuxLabel>,
    #[serde(skip_serializing_if = "is_default")]
    selinux_level: String,
}

impl Grown for PodRecord {
    type Later = Pod;

    fn gather(&self) -> Pod {
        let spec = &self.spec;
        Pod {
            user_namespace: spec.user_namespace.clone(),
            overhead: spec.overhead.clone(),
            resources: spec.resources.clone(),
            addresses: self.addresses.clone(),
            told: self.told,
            has_scopes: self.has_scopes,
            selinux: spec.selinux.clone(),
            selinux_level: self.selinux_level.clone(),
        }
    }

    fn put(&mut self, later: Pod) {
        let spec = &mut self.spec;
        spec.user_namespace = later.user_namespace;
        spec.overhead = later.overhead;
        spec.resources = later.resources;
        spec.selinux = later.selinux;
        self.selinux_level = later.selinux_level;
        self.addresses = later.addresses;
        self.told = later.told;
        self.has_scopes = later.has_scopes;
    }
}

/// Of a container.
#[derive(Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Container {
    /// One for each mount, in order; empty where all are as 0.1.0 knew them.
    #[serde(skip_serializing_if = "is_default")]
    mounts: Vec<MountLater>,
    #[serde(skip_serializing_if = "is_default")]
    localhost_seccomp: String,
    #[serde(skip_serializing_if = "is_default")]
    apparmor: String,
    #[serde(skip_serializing_if = "is_default")]
    selinux: Option<SelinuxLabel>,
    #[serde(skip_serializing_if = "is_default")]
    cdi_devices: Vec<String>,
    #[serde(skip_serializing_if = "is_default")]
    image_volumes: Vec<ImageVolumeUse>,
    #[serde(skip_serializing_if = "is_default")]
    limits: Option<Limits>,
    #[serde(skip_serializing_if = "is_default")]
    adjusted: Adjusted,
    #[serde(skip_serializing_if = "is_default")]
    told: Told,
}

impl Grown for ContainerRecord {
    type Later = Container;

    fn gather(&self) -> Container {
        let (spec, security) = (&self.spec, &self.spec.security);
        let is_plain = spec.mounts.iter().all(|mount| mount.later == MountLater::default());
        let mounts = spec.mounts.iter().map(|mount| mount.later.clone());
        Container {
            mounts: if is_plain { Vec::new() } else { mounts.collect() },
            localhost_seccomp: security.localhost_seccomp.clone(),
            apparmor: security.apparmor.clone(),
            selinux: security.selinux.clone(),
            cdi_devices: spec.cdi_devices.clone(),
            image_volumes: self.image_volumes.clone(),
            limits: self.limits.clone(),
            adjusted: self.adjusted.clone(),
            told: self.told,
        }
    }

    fn put(&mut self, later: Container) {
        let spec = &mut self.spec;
        for (mount, later) in spec.mounts.iter_mut().zip(later.mounts) {
            mount.later = later;
        }
        spec.security.localhost_seccomp = later.localhost_seccomp;
        spec.security.apparmor = later.apparmor;
        spec.security.selinux = later.selinux;
        spec.cdi_devices = later.cdi_devices;
        self.image_volumes = later.image_volumes;
        self.limits = later.limits;
        self.adjusted = later.adjusted;
        self.told = later.told;
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
