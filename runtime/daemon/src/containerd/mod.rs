//! Three read-only calls of containerd's API for the kubelet's cAdvisor, which uses only this API to find the pod, container
//! and image of a cgroup (kubernetes/kubernetes#139870); otherwise `/metrics/cadvisor` has no such labels.
//!
//! | call | caller | answer |
//! |---|---|---|
//! | `containerd.services.version.v1.Version/Version` | once, to detect containerd | coracle's version |
//! | `containerd.services.containers.v1.Containers/Get` | for each cgroup whose name has 64 hexadecimal digits | labels, image, a spec without secrets |
//! | `containerd.services.tasks.v1.Tasks/Get` | for the same cgroups | PID and state |
//!
//! The API has its own socket ([`Socket`]) and supports only the namespace `k8s.io`. Other clients of containerd cannot use it,
//! and a kubelet with PodAndContainerStatsFromCRI does not need it.

mod messages;
mod socket;

use std::convert::Infallible;
use std::rc::Rc;

use bytes::Bytes;
use coracle_engine::{self, state};
use coracle_sandbox::collect::ordered;
use http::{Request, Response};
use prost::Message;
use smol::future::FutureExt;
use tonic::body::Body;
use tonic::server::{Grpc, UnaryService};
use tonic::{Code, Status};

use self::messages::{
    Any, Container, GetContainerResponse, GetRequest, GetTaskResponse, Process, Runtime, TaskStatus,
    VersionResponse,
};
use crate::daemon::Daemon;
use crate::rpc::{Answer, Counted, Raw};

pub(crate) use self::socket::Socket;

/// containerd's namespace for Kubernetes.
const NAMESPACE: &str = "k8s.io";
/// Metadata key of containerd's namespace.
const NAMESPACE_KEY: &str = "containerd-namespace";
/// Maximum length in bytes of a request, which contains only an ID.
const REQUEST_BYTES_MAX: usize = 4096;
/// Type URL of a spec in containerd.
const SPEC_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";
/// The label that distinguishes pod sandboxes from containers: cAdvisor reports network counters for
/// sandboxes.
const KIND: &str = "io.cri-containerd.kind";

/// Returns the handler of all requests of a connection to this socket.
fn service(daemon: Rc<Daemon>) -> Answer {
    Rc::new(move |request| {
        let method = Method { daemon: Rc::clone(&daemon), path: request.uri().path().to_owned() };
        async move { Ok::<Response<Body>, Infallible>(answer(method, request).await) }.boxed_local()
    })
}

async fn answer(method: Method, request: Request<Counted>) -> Response<Body> {
    Grpc::new(Raw).apply_max_message_size_config(Some(REQUEST_BYTES_MAX), None).unary(method, request).await
}

/// A call of one RPC, chosen by its path.
struct Method {
    daemon: Rc<Daemon>,
    path: String,
}

impl UnaryService<Bytes> for Method {
    type Response = Vec<u8>;
    type Future = std::future::Ready<Result<tonic::Response<Vec<u8>>, Status>>;

    fn call(&mut self, request: tonic::Request<Bytes>) -> Self::Future {
        std::future::ready(self.answer(&request).map(tonic::Response::new))
    }
}

impl Method {
    fn answer(&self, request: &tonic::Request<Bytes>) -> Result<Vec<u8>, Status> {
        let id = || -> Result<String, Status> {
            let is_ours = request
                .metadata()
                .get(NAMESPACE_KEY)
                .is_some_and(|name| name.as_bytes() == NAMESPACE.as_bytes());
            let asked = GetRequest::decode(request.get_ref().as_ref())
                .map_err(|error| Status::invalid_argument(format!("the request: {error}")))?;
            match is_ours {
                true => Ok(asked.id),
                false => Err(Status::not_found(format!("only the namespace {NAMESPACE} is served"))),
            }
        };
        match self.path.as_str() {
            "/containerd.services.version.v1.Version/Version" => {
                let version = env!("CARGO_PKG_VERSION").to_owned();
                Ok(VersionResponse { version, revision: "coracle".into() }.encode_to_vec())
            }
            "/containerd.services.containers.v1.Containers/Get" => {
                let container = Some(self.container(&id()?)?);
                Ok(GetContainerResponse { container }.encode_to_vec())
            }
            "/containerd.services.tasks.v1.Tasks/Get" => {
                let process = Some(self.process(&id()?)?);
                Ok(GetTaskResponse { process }.encode_to_vec())
            }
            other => Err(Status::new(Code::Unimplemented, format!("{other} is not served by coracle"))),
        }
    }

    fn container(&self, id: &str) -> Result<Container, Status> {
        let (labels, image, kind) = match self.find(id)? {
            Found::Container(container) => {
                let record = container.record();
                (record.spec.labels.clone(), record.image.name.clone(), "container")
            }
            Found::Pod(pod) => (pod.record().spec.labels.clone(), String::new(), "sandbox"),
        };
        let kind = (KIND.to_owned(), kind.to_owned());
        Ok(Container {
            id: id.to_owned(),
            labels: ordered(labels.into_iter().chain([kind])),
            image,
            runtime: Some(Runtime { name: "coracle".into() }),
            // The environment is omitted, because it may contain secrets and the caller is not authenticated.
            spec: Some(Any {
                type_url: SPEC_TYPE.into(),
                value: br#"{"ociVersion":"1.2.0","process":{"cwd":"/","env":[]}}"#.to_vec(),
            }),
        })
    }

    fn process(&self, id: &str) -> Result<Process, Status> {
        let (pid, status, exit_status) = match self.find(id)? {
            Found::Container(container) => match &container.record().state {
                state::Container::Exited { ended, .. } => (0, TaskStatus::Stopped, ended.exit_code()),
                state if state.is_running() => (container.pid(), TaskStatus::Running, 0),
                _ => return Err(Status::not_found(format!("container {id:.13} was not started"))),
            },
            Found::Pod(pod) if pod.pid() > 0 => (pod.pid(), TaskStatus::Running, 0),
            Found::Pod(pod) if pod.record().state.is_creating() => {
                return Err(Status::not_found(format!("pod sandbox {id:.13} has no process yet")));
            }
            Found::Pod(_) => (0, TaskStatus::Stopped, 0),
        };
        let id = id.to_owned();
        Ok(Process {
            container_id: id.clone(),
            id,
            pid: u32::try_from(pid).unwrap_or(0),
            status: status.into(),
            exit_status: u32::try_from(exit_status).unwrap_or(0),
        })
    }

    /// Finds an object by its complete ID, which cAdvisor reads from the name of a cgroup. cAdvisor asks once, when the cgroup
    /// appears; the object may then still be in creation. It repeats `Tasks/Get` for three seconds after NotFound.
    fn find(&self, id: &str) -> Result<Found, Status> {
        let pods = &self.daemon.pods;
        let container = id.parse().ok().and_then(|id| pods.any_container(&id)).map(Found::Container);
        let pod = || id.parse().ok().and_then(|id| pods.any_pod(&id)).map(Found::Pod);
        container.or_else(pod).ok_or_else(|| Status::not_found(format!("container {id:?}: not found")))
    }
}

enum Found {
    Container(Rc<coracle_engine::Container>),
    Pod(Rc<coracle_engine::Pod>),
}
