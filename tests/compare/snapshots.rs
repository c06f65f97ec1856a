//! The directories of containerd's layers, by its API for snapshots (`api/services/snapshots/v1/snapshots.proto` of
//! containerd): only the messages and fields that are needed.

use std::path::{Path, PathBuf};

use prost::Message;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

/// A client of the service.
pub(crate) struct Snapshots {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
}

const SNAPSHOTTER: &str = "overlayfs";

#[derive(Clone, PartialEq, Message)]
struct ViewRequest {
    #[prost(string, tag = "1")]
    snapshotter: String,
    #[prost(string, tag = "2")]
    key: String,
    #[prost(string, tag = "3")]
    parent: String,
    #[prost(map = "string, string", tag = "4")]
    labels: std::collections::HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct ViewResponse {
    #[prost(message, repeated, tag = "1")]
    mounts: Vec<Mount>,
}

#[derive(Clone, PartialEq, Message)]
struct Mount {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "2")]
    source: String,
    #[prost(string, tag = "3")]
    target: String,
    #[prost(string, repeated, tag = "4")]
    options: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct RemoveRequest {
    #[prost(string, tag = "1")]
    snapshotter: String,
    #[prost(string, tag = "2")]
    key: String,
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

impl Snapshots {
    /// Connects to the socket of containerd.
    pub(crate) fn new(socket: &Path) -> Snapshots {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime for the client");
        let channel = {
            let _inside = runtime.enter();
            let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
            endpoint.expect("a socket path is a valid endpoint").connect_lazy()
        };
        Snapshots { runtime, channel }
    }

    /// The directories of a chain of layers, topmost first.
    pub(crate) fn directories(&self, chain_id: &str) -> Result<Vec<PathBuf>, Status> {
        const KEY: &str = "compared";
        // The garbage collection after the removal of the last image may still run.
        let labels = [("containerd.io/gc.root".to_owned(), "now".to_owned())].into();
        let view =
            ViewRequest { snapshotter: SNAPSHOTTER.into(), key: KEY.into(), parent: chain_id.into(), labels };
        let answer: ViewResponse = self.call("View", view)?;
        let _: Empty =
            self.call("Remove", RemoveRequest { snapshotter: SNAPSHOTTER.into(), key: KEY.into() })?;
        let mount = answer.mounts.first().expect("a view has a mount");
        if mount.kind == "bind" {
            return Ok(vec![PathBuf::from(&mount.source)]);
        }
        let lower = mount.options.iter().find_map(|option| option.strip_prefix("lowerdir="));
        let lower = lower.unwrap_or_else(|| panic!("a view without layers: {mount:?}"));
        Ok(lower.split(':').map(PathBuf::from).collect())
    }

    fn call<T, U>(&self, method: &str, message: T) -> Result<U, Status>
    where
        T: Message + Send + Sync + 'static,
        U: Message + Default + Send + Sync + 'static,
    {
        let path = format!("/containerd.services.snapshots.v1.Snapshots/{method}");
        let path = PathAndQuery::try_from(path).expect("a path");
        let mut request = Request::new(message);
        request.metadata_mut().insert("containerd-namespace", "k8s.io".parse().expect("ASCII"));
        let mut client = Grpc::new(self.channel.clone());
        self.runtime.block_on(async move {
            client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            client.unary(request, path, ProstCodec::<T, U>::default()).await.map(|answer| answer.into_inner())
        })
    }
}
