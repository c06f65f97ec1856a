//! The steps of a pod's network: the file that refers to its network namespace, the CNI attachment, and the sysctls of the
//! namespace.

use coracle_base::error::Error;
use coracle_network::PodNetwork;
use coracle_sandbox::{netns, plan};

use crate::record::{DurableRecord, Network, PodRecord};
use crate::{Pod, paths, state};

impl Pod {
    pub(crate) fn make_netns(&self) -> Result<(), Error> {
        if !self.has_network() {
            return Ok(());
        }
        let pid = u32::try_from(self.pid()).unwrap_or_default();
        Ok(netns::pin(pid, &paths::netns(self.id))?)
    }

    pub(crate) async fn make_network(&self) -> Result<(), Error> {
        if !self.has_network() {
            return Ok(());
        }
        let planned = match &mut self.record.borrow_mut().state {
            state::Pod::Creating { planned, .. } => planned.take(),
            _ => None,
        };
        let is_durable = planned.is_some();
        let request = planned.map_or_else(|| self.plan_network(), |planned| Ok(*planned))?;
        // Committed before ADD, so that a crash during ADD is followed by a DEL.
        let mut record = self.record().clone();
        record.network = Some(Network { request: request.clone(), addresses: Vec::new(), result: None });
        match is_durable {
            true => record.note(&self.node().paths)?,
            false => record.commit(self.node())?,
        }
        *self.record.borrow_mut() = record;
        let outcome = self.node().network.cni.add(&request).await?;
        if let Some(network) = &mut self.record.borrow_mut().network {
            network.addresses = outcome.addresses;
            network.result = Some(outcome.result);
        }
        Ok(()) // committed with the state Ready
    }

    /// Writes the pod's sysctls of its network namespace.
    pub(crate) fn set_network_sysctls(&self) -> Result<(), Error> {
        let record = self.record();
        let sysctls = plan::network_sysctls(&record.spec.sysctls, record.spec.own_namespaces())?;
        if sysctls.is_empty() {
            return Ok(());
        }
        coracle_network::set_sysctls(&paths::netns(self.id), &sysctls)
    }

    pub(crate) fn plan_network(&self) -> Result<coracle_network::Recorded, Error> {
        let (id, netns) = (self.id.to_string(), paths::netns(self.id).to_string_lossy().into_owned());
        let pod_cidr = self.node().network.pod_cidr.borrow();
        self.node().network.cni.plan(&network_of(&self.record(), &id, &netns, &pod_cidr))
    }

    pub(crate) async fn unmake_network(&self) -> Result<(), Error> {
        let Some(network) = self.record().network.clone() else { return Ok(()) };
        // After a reboot or a manual unmount, plugins release only what is outside of the namespace (DEL-2).
        let request = match netns::exists(&paths::netns(self.id)) {
            true => network.request,
            false => network.request.without_namespace(),
        };
        self.node().network.cni.del(&request, network.result.as_deref()).await?;
        let mut record = self.record().clone();
        record.addresses = network.addresses;
        record.network = None;
        record.note(&self.node().paths)?;
        *self.record.borrow_mut() = record;
        Ok(())
    }
}

fn network_of<'a>(record: &'a PodRecord, id: &'a str, netns: &'a str, pod_cidr: &'a str) -> PodNetwork<'a> {
    let spec = &record.spec;
    PodNetwork {
        id,
        name: &spec.name.name,
        namespace: &spec.name.namespace,
        uid: &spec.name.uid,
        netns,
        port_mappings: &spec.ports,
        dns: spec.dns.as_ref().map(|dns| coracle_network::Dns {
            servers: &dns.servers,
            searches: &dns.searches,
            options: &dns.options,
        }),
        cgroup_parent: &record.cgroup_parent,
        annotations: &spec.annotations,
        pod_cidr,
    }
}
