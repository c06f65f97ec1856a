//! A CRI client like that of a kubelet: both services over one connection, with blocking calls and a deadline
//! for each. Each [`Cri`] has its own connection and its own single-threaded runtime; dropping it, or a call
//! of [`Cri::abandon`], is a client that disconnects.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::Frame;
use tokio::runtime::Runtime;
use tonic::codegen::{Bytes, Service as _, http};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

/// The generated messages and clients of `runtime.v1`.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    reason = "generated from cri.proto"
)]
pub mod proto {
    include!("../../../runtime/daemon/proto/runtime.v1.rs");
    include!("../../proto/runtime.v1.rs");
}

use crate::request;

use proto::image_service_client::ImageServiceClient;
use proto::runtime_service_client::RuntimeServiceClient;

/// Time limit of a test's call; the kubelet's default is two minutes.
pub const CALL_SECONDS_MAX: u64 = 60;

/// Maximum size of a message in bytes: that of kubelet and crictl.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// One connection to a node's socket.
pub struct Cri {
    runtime: Runtime,
    pods: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    channel: Channel,
    socket: PathBuf,
    /// Time limit of each call.
    limit: Duration,
}

/// Defines one blocking method per RPC.
macro_rules! calls {
    ($($field:ident: $method:ident($request:ident) -> $response:ident;)*) => {
        impl Cri {
            $(
                #[doc = concat!("`", stringify!($method), "`, with the default deadline.")]
                pub fn $method(&self, request: proto::$request) -> Result<proto::$response, Status> {
                    let mut client = self.$field.clone();
                    let mut request = Request::new(request);
                    request.set_timeout(self.limit);
                    self.wait(async move { client.$method(request).await.map(|answer| answer.into_inner()) })
                }
            )*
        }
    };
}

calls! {
    pods: version(VersionRequest) -> VersionResponse;
    pods: status(StatusRequest) -> StatusResponse;
    pods: runtime_config(RuntimeConfigRequest) -> RuntimeConfigResponse;
    pods: update_runtime_config(UpdateRuntimeConfigRequest) -> UpdateRuntimeConfigResponse;
    pods: run_pod_sandbox(RunPodSandboxRequest) -> RunPodSandboxResponse;
    pods: stop_pod_sandbox(StopPodSandboxRequest) -> StopPodSandboxResponse;
    pods: remove_pod_sandbox(RemovePodSandboxRequest) -> RemovePodSandboxResponse;
    pods: pod_sandbox_status(PodSandboxStatusRequest) -> PodSandboxStatusResponse;
    pods: list_pod_sandbox(ListPodSandboxRequest) -> ListPodSandboxResponse;
    pods: create_container(CreateContainerRequest) -> CreateContainerResponse;
    pods: start_container(StartContainerRequest) -> StartContainerResponse;
    pods: stop_container(StopContainerRequest) -> StopContainerResponse;
    pods: remove_container(RemoveContainerRequest) -> RemoveContainerResponse;
    pods: list_containers(ListContainersRequest) -> ListContainersResponse;
    pods: container_status(ContainerStatusRequest) -> ContainerStatusResponse;
    pods: update_container_resources(UpdateContainerResourcesRequest) -> UpdateContainerResourcesResponse;
    pods: update_pod_sandbox_resources(UpdatePodSandboxResourcesRequest) -> UpdatePodSandboxResourcesResponse;
    pods: exec_sync(ExecSyncRequest) -> ExecSyncResponse;
    pods: container_stats(ContainerStatsRequest) -> ContainerStatsResponse;
    pods: list_container_stats(ListContainerStatsRequest) -> ListContainerStatsResponse;
    pods: pod_sandbox_stats(PodSandboxStatsRequest) -> PodSandboxStatsResponse;
    pods: list_metric_descriptors(ListMetricDescriptorsRequest) -> ListMetricDescriptorsResponse;
    pods: list_pod_sandbox_metrics(ListPodSandboxMetricsRequest) -> ListPodSandboxMetricsResponse;
    pods: list_pod_sandbox_stats(ListPodSandboxStatsRequest) -> ListPodSandboxStatsResponse;
    pods: exec(ExecRequest) -> ExecResponse;
    pods: attach(AttachRequest) -> AttachResponse;
    pods: port_forward(PortForwardRequest) -> PortForwardResponse;
    pods: reopen_container_log(ReopenContainerLogRequest) -> ReopenContainerLogResponse;
    pods: checkpoint_container(CheckpointContainerRequest) -> CheckpointContainerResponse;
    images: list_images(ListImagesRequest) -> ListImagesResponse;
    images: image_status(ImageStatusRequest) -> ImageStatusResponse;
    images: pull_image(PullImageRequest) -> PullImageResponse;
    images: remove_image(RemoveImageRequest) -> RemoveImageResponse;
    images: image_fs_info(ImageFsInfoRequest) -> ImageFsInfoResponse;
}

macro_rules! streams {
    ($($client:ident: $name:ident($request:ident) -> $response:ident;)*) => {
        impl Cri {
            $(
                /// Makes this streaming call; returns all messages of the answer.
                pub fn $name(&self, request: proto::$request) -> Result<Vec<proto::$response>, Status> {
                    let mut client = self.$client.clone();
                    self.wait(async move {
                        let mut stream = client.$name(request).await?.into_inner();
                        let mut messages = Vec::new();
                        while let Some(message) = stream.message().await? {
                            messages.push(message);
                        }
                        Ok(messages)
                    })
                }
            )*
        }
    };
}

streams! {
    pods: stream_pod_sandboxes(StreamPodSandboxesRequest) -> StreamPodSandboxesResponse;
    pods: stream_containers(StreamContainersRequest) -> StreamContainersResponse;
    pods: stream_container_stats(StreamContainerStatsRequest) -> StreamContainerStatsResponse;
    pods: stream_pod_sandbox_metrics(StreamPodSandboxMetricsRequest) -> StreamPodSandboxMetricsResponse;
    pods: stream_pod_sandbox_stats(StreamPodSandboxStatsRequest) -> StreamPodSandboxStatsResponse;
    images: stream_images(StreamImagesRequest) -> StreamImagesResponse;
}

/// A runtime for a client, and its channel to the daemon at `socket`, which the first call connects; `set_up` changes its settings.
pub fn connect(socket: &Path, set_up: impl FnOnce(Endpoint) -> Endpoint) -> (Runtime, Channel) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .expect("a runtime for the client");
    let channel = {
        let _inside = runtime.enter();
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
        set_up(endpoint.expect("a socket path is a valid endpoint")).connect_lazy()
    };
    (runtime, channel)
}

impl Cri {
    /// Creates a client of the daemon at `socket`; the first call connects.
    pub fn new(socket: &Path) -> Cri {
        let (runtime, channel) = connect(socket, |endpoint| endpoint);
        Cri {
            runtime,
            pods: RuntimeServiceClient::new(channel.clone())
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
            images: ImageServiceClient::new(channel.clone())
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
            channel,
            socket: socket.to_owned(),
            limit: Duration::from_secs(CALL_SECONDS_MAX),
        }
    }

    /// Creates another connection, whose calls have this time limit.
    pub fn within(&self, limit: Duration) -> Cri {
        Cri { limit, ..self.another() }
    }

    /// Creates another connection to the same daemon, for another thread.
    pub fn another(&self) -> Cri {
        Cri::new(&self.socket)
    }

    /// Sends RunPodSandbox and disconnects after `patience` if there is no answer yet; `Some` if there was
    /// one. No deadline is sent to the daemon, so that it observes the disconnection of the client.
    pub fn abandon(
        self,
        request: proto::RunPodSandboxRequest,
        patience: Duration,
    ) -> Option<Result<proto::RunPodSandboxResponse, Status>> {
        let mut client = self.pods.clone();
        let answer = self
            .runtime
            .block_on(async move { tokio::time::timeout(patience, client.run_pod_sandbox(request)).await });
        answer.ok().map(|answer| answer.map(|answer| answer.into_inner()))
    }

    /// Connects, makes a call, and disconnects after `patience` if there is no answer yet; `Some` if there
    /// was one. As in [`Cri::abandon`], no deadline is sent to the daemon.
    pub fn vanish<T, F: Future<Output = T>>(
        self,
        patience: Duration,
        call: impl FnOnce(RuntimeServiceClient<Channel>) -> F,
    ) -> Option<T> {
        self.version(proto::VersionRequest::default()).expect("the daemon answers");
        let client = self.pods.clone();
        self.runtime.block_on(async move { tokio::time::timeout(patience, call(client)).await.ok() })
    }

    /// Subscribes to events, runs `act`, and reads until `count` events have arrived; returns them, or the
    /// error of the stream. No event is read before `act` has completed.
    pub fn events_during(
        &self,
        count: usize,
        act: impl FnOnce(),
    ) -> Result<Vec<proto::ContainerEventResponse>, Status> {
        let mut client = self.pods.clone();
        let mut stream = self
            .wait(async move { client.get_container_events(proto::GetEventsRequest {}).await })?
            .into_inner();
        act();
        self.wait(async move {
            let mut events = Vec::new();
            while events.len() < count {
                match stream.message().await? {
                    Some(event) => events.push(event),
                    None => break,
                }
            }
            Ok(events)
        })
    }

    /// Makes a unary call with this deadline as `grpc-timeout`.
    pub fn exec_sync_within(
        &self,
        request: proto::ExecSyncRequest,
        deadline: Duration,
    ) -> Result<proto::ExecSyncResponse, Status> {
        let mut client = self.pods.clone();
        let mut request = Request::new(request);
        request.set_timeout(deadline);
        self.wait(async move { client.exec_sync(request).await.map(|answer| answer.into_inner()) })
    }

    /// Makes a PullImage call with this deadline as `grpc-timeout`.
    pub fn pull_image_within(
        &self,
        request: proto::PullImageRequest,
        deadline: Duration,
    ) -> Result<proto::PullImageResponse, Status> {
        let mut client = self.images.clone();
        let mut request = Request::new(request);
        request.set_timeout(deadline);
        let call = async move { client.pull_image(request).await.map(|answer| answer.into_inner()) };
        self.wait_for(deadline, call)
    }

    /// Begins this many calls, each with the first half of a message of `bytes`, and lets the connection work for a moment. The calls stay
    /// unfinished as long as the client lives.
    pub fn begin_calls(&self, calls: usize, bytes: usize) {
        const MOMENT: Duration = Duration::from_millis(50);
        let channel = self.channel.clone();
        self.runtime.block_on(async move {
            for _ in 0..calls {
                let request = http::Request::post("http://localhost/runtime.v1.RuntimeService/Version")
                    .header("content-type", "application/grpc")
                    .header("te", "trailers")
                    .body(tonic::body::Body::new(Half::of(bytes)))
                    .expect("a request");
                let mut channel = channel.clone();
                tokio::spawn(async move {
                    let is_ready = std::future::poll_fn(|context| channel.poll_ready(context)).await.is_ok();
                    // The daemon may close the connection.
                    if is_ready {
                        let _ = channel.call(request).await;
                    }
                });
            }
            tokio::time::sleep(MOMENT).await;
        });
    }

    /// Runs the connection until the call has completed. tonic aborts the call at its deadline, this function
    /// two seconds later.
    fn wait<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        self.wait_for(Duration::from_secs(CALL_SECONDS_MAX), call)
    }

    /// Waits for a call whose deadline is in this time.
    fn wait_for<T>(
        &self,
        deadline: Duration,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        const OVERTIME: Duration = Duration::from_secs(2);
        self.runtime
            .block_on(async { tokio::time::timeout(deadline + OVERTIME, call).await })
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("the test's client waited long enough")))
    }
}

/// The first half of a message, after which no more comes.
struct Half(Option<Bytes>);

impl Half {
    fn of(bytes: usize) -> Half {
        let mut begun = vec![0; 1 + bytes / 2];
        begun.splice(1..1, (bytes as u32).to_be_bytes());
        Half(Some(begun.into()))
    }
}

impl http_body::Body for Half {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.0.take().map_or(Poll::Pending, |bytes| Poll::Ready(Some(Ok(Frame::data(bytes)))))
    }
}

/// The most used calls; each panics on an error.
impl Cri {
    /// Runs a pod; panics with the error.
    #[track_caller]
    pub fn run_pod(&self, pod: &proto::PodSandboxConfig) -> String {
        self.run_pod_sandbox(request::run(pod)).unwrap_or_else(|error| panic!("run: {error}")).pod_sandbox_id
    }

    /// Creates a container; panics with the error.
    #[track_caller]
    pub fn create(
        &self,
        pod_id: &str,
        config: &proto::ContainerConfig,
        pod: &proto::PodSandboxConfig,
    ) -> String {
        let made = self.create_container(request::create(pod_id, config, pod));
        made.unwrap_or_else(|error| panic!("create: {error}")).container_id
    }

    /// Creates and starts a container; panics with the error.
    #[track_caller]
    pub fn run_container(
        &self,
        pod_id: &str,
        config: &proto::ContainerConfig,
        pod: &proto::PodSandboxConfig,
    ) -> String {
        let container_id = self.create(pod_id, config, pod);
        let request = proto::StartContainerRequest { container_id: container_id.clone() };
        self.start_container(request).unwrap_or_else(|error| panic!("start: {error}"));
        container_id
    }

    /// A container's status; panics with the error.
    #[track_caller]
    pub fn container(&self, container_id: &str) -> proto::ContainerStatus {
        let request = proto::ContainerStatusRequest { container_id: container_id.into(), verbose: false };
        let answer = self.container_status(request).unwrap_or_else(|error| panic!("status: {error}"));
        answer.status.expect("an answer without an error has a status")
    }

    /// Waits until a container has exited; returns its status.
    #[track_caller]
    pub fn exited(&self, container_id: &str) -> proto::ContainerStatus {
        crate::host::wait_for(&format!("container {container_id} exits"), || {
            let status = self.container(container_id);
            (status.state() == proto::ContainerState::ContainerExited).then_some(status)
        })
    }

    /// Stops and removes a pod; panics with the error.
    #[track_caller]
    pub fn remove_pod(&self, id: &str) {
        let stop = proto::StopPodSandboxRequest { pod_sandbox_id: id.into() };
        self.stop_pod_sandbox(stop).unwrap_or_else(|error| panic!("stop pod {id}: {error}"));
        let remove = proto::RemovePodSandboxRequest { pod_sandbox_id: id.into() };
        self.remove_pod_sandbox(remove).unwrap_or_else(|error| panic!("remove pod {id}: {error}"));
    }
}
