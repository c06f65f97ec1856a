//! A pod's network: its steps in the set-up and teardown (the file that refers to the network namespace, the CNI attachment, the
//! sysctls of the namespace), interfaces of the node that are moved into it, its loss (`unlinked`), and connections to its ports.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_job::{Job, Outcome};
use coracle_network::PodNetwork;
use coracle_sandbox::{Failure, Request, netns, plan};
use nix::errno::Errno;
use nix::sys::socket::{SockaddrStorage, connect, getsockopt, sockopt};

use crate::link::{ASK_LIMIT, Link, LinkError, errno_text};
use crate::record::{DurableRecord, Network, PodRecord};
use crate::state::{self, PodEvent};
use crate::{Pod, paths};

/// Time limit of a connection within the node.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

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

    /// Whether the pod has a network that another program can remove: one that ADD has completed and DEL was not called for.
    pub(crate) fn is_attached(&self) -> bool {
        let record = self.record();
        let is_up = record.state.is_creating() || record.state.is_ready();
        is_up && record.network.as_ref().is_some_and(|network| network.result.is_some())
    }

    /// Makes a pod NotReady whose links are gone, and undoes its network.
    pub(crate) async fn lose_network(self: &Rc<Self>, why: String) {
        // A pod that is being created becomes ready first.
        let _operation = self.operation.lock().await;
        if !self.record().state.is_ready() {
            return;
        }
        log::warn!("the pod lost its network, the kubelet will create a new sandbox"; pod = self.id, name = self.name(), reason = why);
        if let Err(error) = self.change(PodEvent::NetworkGone) {
            log::warn!("cannot record that a pod lost its network, the next daemon notices it"; pod = self.id, error = error);
        }
        if let Err(error) = self.unmake_network().await {
            log::warn!("cannot detach a pod from the network that it lost, StopPodSandbox will retry"; pod = self.id, error = error);
        }
    }

    /// Moves network interfaces of the node into the pod's network namespace.
    pub(crate) async fn take_net_devices(&self, devices: Vec<(String, String)>) -> Result<(), Error> {
        if devices.is_empty() {
            return Ok(());
        }
        let job = Job::TakeNetDevices { netns: paths::netns(self.id), devices };
        match self.node().host.workers.run(job).await? {
            Outcome::Moved => Ok(()),
            other => Err(Error::new(Kind::Internal, format!("unexpected answer of the worker: {other:?}"))),
        }
    }

    /// Connects to a port on the loopback interface of a pod's network namespace: by IPv4, and if that fails
    /// by IPv6.
    ///
    /// # Errors
    /// The error of the attempt by IPv6.
    pub async fn connect(&self, port: u16) -> Result<Watched, Error> {
        let link = self.link()?;
        let first = connect_to(&link, SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await;
        match first {
            Ok(socket) => Ok(socket),
            Err(first) => match connect_to(&link, SocketAddr::from((Ipv6Addr::LOCALHOST, port))).await {
                Ok(socket) => Ok(socket),
                // On a node without IPv6 the error of the first attempt is returned.
                Err(second) if second.kind() == Kind::Unimplemented => Err(first),
                Err(second) => Err(second),
            },
        }
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

async fn connect_to(link: &Link, address: SocketAddr) -> Result<Watched, Error> {
    let failed = |errno: Errno| {
        let kind = if errno == Errno::EAFNOSUPPORT { Kind::Unimplemented } else { Kind::Unavailable };
        Error::new(kind, format!("connect to {address}: {}", errno_text(errno as i32)))
    };
    let socket = match link.ask(Request::TcpSocket { is_ipv6: address.is_ipv6() }, &[], ASK_LIMIT).await {
        Ok(descriptors) => descriptors.into_iter().next(),
        Err(LinkError::Failed(Failure::Refused { errno })) => return Err(failed(Errno::from_raw(errno))),
        Err(error) => return Err(Error::new(Kind::Unknown, error.to_string())),
    };
    let socket = socket.ok_or_else(|| Error::new(Kind::Internal, "the monitor sent no socket"))?;
    let socket = Watched::new(socket)?;
    match connect(socket.fd().as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => return Ok(socket),
        Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(failed(errno)),
    }
    let connected = reactor::deadline(CONNECT_LIMIT, socket.writable()).await;
    connected.map_err(|_| failed(Errno::ETIMEDOUT))??;
    match getsockopt(&socket.fd(), sockopt::SocketError)? {
        0 => Ok(socket),
        errno => Err(failed(Errno::from_raw(errno))),
    }
}
