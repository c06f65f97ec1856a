//! The table of all RPCs and their handlers, one line each. To implement another RPC, replace `unserved` by its handler.
//!
//! A row of `changes` names the object of the request for the log; requests that name several implement `Change` in `failed`.
//!
//! A handler is `async fn name(daemon: Rc<Daemon>, request: v1::XRequest) -> Result<v1::XResponse, Error>`; for a stream it
//! returns `Result<impl Stream<Item = Result<v1::XResponse, Error>>, Error>`. Handlers may use `Rc`: tonic's `Send` bound is
//! satisfied by [`SendWrapper`], which checks the thread at each access. A handler is dropped when its caller disconnects, so
//! operations that must complete run as separate tasks.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Instant;

use coracle_base::counters;
use coracle_base::error::{Error, Kind};
use send_wrapper::SendWrapper;
use smol::stream::{Stream, StreamExt};
use tonic::{Code, Request, Response, Status};

use super::failed::{self, Change, Subject};
use super::peers::AnswerBytes;
use super::v1::image_service_server::ImageService;
use super::v1::runtime_service_server::RuntimeService;
use super::{status, v1};
use crate::cri;
use crate::daemon::Daemon;

/// The daemon as the implementation of both CRI services.
pub(crate) struct Service(SendWrapper<Rc<Daemon>>);

impl Service {
    /// Creates the services for `daemon`.
    pub(crate) fn new(daemon: Rc<Daemon>) -> Service {
        Service(SendWrapper::new(daemon))
    }
}

macro_rules! serve {
    ($service:ident
        changes { $($change:ident $([$of:ident $field:ident])?: $wanted:ident => $done:ident = $doer:path,)* }
        looks { $($method:ident: $request:ident => $response:ident = $handler:path,)* }
        streams { $($stream:ident [$type:ident]: $asked:ident => $item:ident = $source:path,)* }
    ) => {
        $($(
            impl Change for v1::$wanted {
                fn subject(&self) -> Subject {
                    Subject::$of(&self.$field)
                }
            }
        )?)*

        #[tonic::async_trait]
        impl $service for Service {
            $(
                async fn $change(&self, request: Request<v1::$wanted>) -> Result<Response<v1::$done>, Status> {
                    let subject = request.get_ref().subject();
                    answer(self, stringify!($change), Some(subject), request, $doer).await
                }
            )*
            $(
                async fn $method(&self, request: Request<v1::$request>) -> Result<Response<v1::$response>, Status> {
                    answer(self, stringify!($method), None, request, $handler).await
                }
            )*
            $(
                type $type = Items<v1::$item>;

                async fn $stream(&self, request: Request<v1::$asked>) -> Result<Response<Self::$type>, Status> {
                    items(self, stringify!($stream), request, $source).await
                }
            )*
        }
    };
}

serve! { RuntimeService
    changes {
        run_pod_sandbox: RunPodSandboxRequest => RunPodSandboxResponse = cri::run_pod_sandbox::run_pod_sandbox,
        stop_pod_sandbox [of_pod pod_sandbox_id]: StopPodSandboxRequest => StopPodSandboxResponse = cri::stop_pod_sandbox::stop_pod_sandbox,
        remove_pod_sandbox [of_pod pod_sandbox_id]: RemovePodSandboxRequest => RemovePodSandboxResponse = cri::remove_pod_sandbox::remove_pod_sandbox,
        create_container: CreateContainerRequest => CreateContainerResponse = cri::create_container::create_container,
        start_container [of_container container_id]: StartContainerRequest => StartContainerResponse = cri::start_container::start_container,
        stop_container [of_container container_id]: StopContainerRequest => StopContainerResponse = cri::stop_container::stop_container,
        remove_container [of_container container_id]: RemoveContainerRequest => RemoveContainerResponse = cri::remove_container::remove_container,
        update_container_resources [of_container container_id]: UpdateContainerResourcesRequest => UpdateContainerResourcesResponse = cri::update_container_resources::update_container_resources,
        reopen_container_log [of_container container_id]: ReopenContainerLogRequest => ReopenContainerLogResponse = cri::reopen_container_log::reopen_container_log,
        exec_sync [of_container container_id]: ExecSyncRequest => ExecSyncResponse = cri::exec_sync::exec_sync,
        exec [of_container container_id]: ExecRequest => ExecResponse = cri::exec::exec,
        attach [of_container container_id]: AttachRequest => AttachResponse = cri::attach::attach,
        port_forward [of_pod pod_sandbox_id]: PortForwardRequest => PortForwardResponse = cri::port_forward::port_forward,
        update_runtime_config: UpdateRuntimeConfigRequest => UpdateRuntimeConfigResponse = cri::update_runtime_config::update_runtime_config,
        update_pod_sandbox_resources [of_pod pod_sandbox_id]: UpdatePodSandboxResourcesRequest => UpdatePodSandboxResourcesResponse = cri::update_pod_sandbox_resources::update_pod_sandbox_resources,
    }
    looks {
        version: VersionRequest => VersionResponse = cri::version::version,
        pod_sandbox_status: PodSandboxStatusRequest => PodSandboxStatusResponse = cri::pod_sandbox_status::pod_sandbox_status,
        list_pod_sandbox: ListPodSandboxRequest => ListPodSandboxResponse = cri::list_pod_sandbox::list_pod_sandbox,
        list_containers: ListContainersRequest => ListContainersResponse = cri::list_containers::list_containers,
        container_status: ContainerStatusRequest => ContainerStatusResponse = cri::container_status::container_status,
        container_stats: ContainerStatsRequest => ContainerStatsResponse = cri::container_stats::container_stats,
        list_container_stats: ListContainerStatsRequest => ListContainerStatsResponse = cri::container_stats::list_container_stats,
        pod_sandbox_stats: PodSandboxStatsRequest => PodSandboxStatsResponse = cri::pod_sandbox_stats::pod_sandbox_stats,
        list_pod_sandbox_stats: ListPodSandboxStatsRequest => ListPodSandboxStatsResponse = cri::pod_sandbox_stats::list_pod_sandbox_stats,
        status: StatusRequest => StatusResponse = cri::status::status,
        checkpoint_container: CheckpointContainerRequest => CheckpointContainerResponse = unserved,
        checkpoint_pod: CheckpointPodRequest => CheckpointPodResponse = unserved,
        restore_pod: RestorePodRequest => RestorePodResponse = unserved,
        list_metric_descriptors: ListMetricDescriptorsRequest => ListMetricDescriptorsResponse = cri::pod_sandbox_metrics::list_metric_descriptors,
        list_pod_sandbox_metrics: ListPodSandboxMetricsRequest => ListPodSandboxMetricsResponse = cri::pod_sandbox_metrics::list_pod_sandbox_metrics,
        runtime_config: RuntimeConfigRequest => RuntimeConfigResponse = cri::runtime_config::runtime_config,
    }
    streams {
        stream_pod_sandboxes [StreamPodSandboxesStream]: StreamPodSandboxesRequest => StreamPodSandboxesResponse = cri::list_pod_sandbox::stream_pod_sandboxes,
        stream_containers [StreamContainersStream]: StreamContainersRequest => StreamContainersResponse = cri::list_containers::stream_containers,
        stream_container_stats [StreamContainerStatsStream]: StreamContainerStatsRequest => StreamContainerStatsResponse = cri::container_stats::stream_container_stats,
        stream_pod_sandbox_stats [StreamPodSandboxStatsStream]: StreamPodSandboxStatsRequest => StreamPodSandboxStatsResponse = cri::pod_sandbox_stats::stream_pod_sandbox_stats,
        get_container_events [GetContainerEventsStream]: GetEventsRequest => ContainerEventResponse = cri::get_container_events::get_container_events,
        stream_pod_sandbox_metrics [StreamPodSandboxMetricsStream]: StreamPodSandboxMetricsRequest => StreamPodSandboxMetricsResponse = cri::pod_sandbox_metrics::stream_pod_sandbox_metrics,
    }
}

serve! { ImageService
    changes {
        pull_image: PullImageRequest => PullImageResponse = cri::pull_image::pull_image,
        remove_image: RemoveImageRequest => RemoveImageResponse = cri::remove_image::remove_image,
    }
    looks {
        list_images: ListImagesRequest => ListImagesResponse = cri::list_images::list_images,
        image_status: ImageStatusRequest => ImageStatusResponse = cri::image_status::image_status,
        image_fs_info: ImageFsInfoRequest => ImageFsInfoResponse = cri::image_fs_info::image_fs_info,
    }
    streams {
        stream_images [StreamImagesStream]: StreamImagesRequest => StreamImagesResponse = cri::list_images::stream_images,
    }
}

/// The stream type that tonic requires.
type Items<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Handles one unary call. If the call has a `subject`, it changes an object, and a failure is logged.
fn answer<A, B, M, F>(
    service: &Service,
    method: &'static str,
    subject: Option<Subject>,
    request: Request<A>,
    handler: impl FnOnce(Rc<Daemon>, A) -> F,
) -> SendWrapper<impl Future<Output = Result<Response<B>, Status>>>
where
    B: prost::Message,
    F: Future<Output = Result<M, Error>>,
    M: Into<Response<B>>,
{
    let daemon = Rc::clone(&service.0);
    // Boxed, because this future and tonic's around it would contain the handler's twice each.
    let handled = Box::pin(handler(Rc::clone(&daemon), request.into_inner()));
    SendWrapper::new(async move {
        let begun = Instant::now();
        match handled.await {
            Ok(message) => {
                counters::rpc(method, code(None), begun.elapsed());
                let mut response: Response<B> = message.into();
                let bytes = AnswerBytes(response.get_ref().encoded_len());
                response.extensions_mut().insert(bytes);
                Ok(response)
            }
            Err(error) => {
                let status = status::from(&error);
                let code = code(Some(&status));
                counters::rpc(method, code, begun.elapsed());
                if let Some(subject) = subject {
                    failed::log(&daemon, method, code, subject, &error);
                }
                Err(status)
            }
        }
    })
}

/// Handles one call with a streaming response.
fn items<A, B, S, F>(
    service: &Service,
    method: &'static str,
    request: Request<A>,
    source: impl FnOnce(Rc<Daemon>, A) -> F,
) -> SendWrapper<impl Future<Output = Result<Response<Items<B>>, Status>>>
where
    S: Stream<Item = Result<B, Error>> + 'static,
    F: Future<Output = Result<S, Error>>,
{
    let opened = source(Rc::clone(&service.0), request.into_inner());
    SendWrapper::new(async move {
        let begun = Instant::now();
        let stream = opened.await.map_err(|error| status::from(&error));
        counters::rpc(method, code(stream.as_ref().err()), begun.elapsed());
        let stream = stream?;
        let stream = stream.map(|item| item.map_err(|error| status::from(&error)));
        Ok(Response::new(Box::pin(SendWrapper::new(stream)) as Items<B>))
    })
}

/// Name of the gRPC code of a result.
fn code(error: Option<&Status>) -> &'static str {
    match error.map_or(Code::Ok, Status::code) {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// The handler of unsupported RPCs, for which clients have a fallback.
async fn unserved<A, B>(_: Rc<Daemon>, _: A) -> Result<Response<B>, Error> {
    Err(Error::new(Kind::Unimplemented, "not served by coracle"))
}
