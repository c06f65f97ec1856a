//! A client of the calls of containerd's API with which the kubelet's cAdvisor looks up the pod or container of a cgroup.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use prost::Message;
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

/// Time limit of a call.
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// A connection to the socket.
pub struct Cadvisor {
    runtime: Runtime,
    channel: Channel,
}

#[derive(Clone, PartialEq, Message)]
struct GetRequest {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct GetContainerResponse {
    #[prost(message, optional, tag = "1")]
    container: Option<Container>,
}

#[derive(Clone, PartialEq, Message)]
struct Container {
    #[prost(btree_map = "string, string", tag = "2")]
    labels: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct GetTaskResponse {
    #[prost(message, optional, tag = "1")]
    process: Option<Process>,
}

#[derive(Clone, PartialEq, Message)]
struct Process {
    #[prost(uint32, tag = "3")]
    pid: u32,
}

impl Cadvisor {
    /// A client of the daemon that serves containerd's API at `socket`; the first call connects.
    pub fn new(socket: &Path) -> Cadvisor {
        let (runtime, channel) = crate::cri::connect(socket, |endpoint| endpoint.timeout(CALL_LIMIT));
        Cadvisor { runtime, channel }
    }

    /// The labels of a pod or container, by the ID in the name of its cgroup.
    ///
    /// # Errors
    /// The daemon's, NotFound for an ID that it does not know.
    pub fn labels(&self, id: &str) -> Result<BTreeMap<String, String>, Status> {
        let answer: GetContainerResponse =
            self.get("/containerd.services.containers.v1.Containers/Get", id)?;
        Ok(answer.container.unwrap_or_default().labels)
    }

    /// The PID of the process of a pod or container, whose network namespace cAdvisor reads.
    ///
    /// # Errors
    /// The daemon's, NotFound for one without a process.
    pub fn pid(&self, id: &str) -> Result<u32, Status> {
        let answer: GetTaskResponse = self.get("/containerd.services.tasks.v1.Tasks/Get", id)?;
        Ok(answer.process.unwrap_or_default().pid)
    }

    fn get<T: Message + Default + Send + 'static>(&self, path: &'static str, id: &str) -> Result<T, Status> {
        let mut client = tonic::client::Grpc::new(self.channel.clone());
        let mut request = Request::new(GetRequest { id: id.into() });
        request.metadata_mut().insert("containerd-namespace", "k8s.io".parse().expect("ASCII"));
        self.runtime.block_on(async move {
            client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::<GetRequest, T>::default();
            let answer = client
                .unary(request, tonic::codegen::http::uri::PathAndQuery::from_static(path), codec)
                .await?;
            Ok(answer.into_inner())
        })
    }
}
