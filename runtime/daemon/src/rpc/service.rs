//! The table of all RPCs and their handlers, one line each. To implement another RPC, replace `unserved` by its handler.
//!
//! A row of `changes` names the object of the request for the log; requests that name several implement `Change` in `failed`.
//!
//! A handler is `async fn name(daemon: Rc<Daemon>, request: v1::XRequest) -> Result<v1::XResponse, Error>`; for a stream it
//! returns `Result<impl Stream<Item = Result<v1::XResponse, Error>>, Error>`. A handler is dropped when its caller disconnects,
//! so operations that must complete run as separate tasks.
//!
//! tonic sees only encoded messages ([`Raw`]). Its generated server would compile the whole way of a call once for each RPC.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Instant;

use bytes::Bytes;
use coracle_base::counters;
use coracle_base::error::{Error, Kind};
use prost::Message;
use send_wrapper::SendWrapper;
use smol::stream::{Stream, StreamExt};
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::{Code, Request, Response, Status};

use super::dispatch::Answer;
use super::failed::{self, Change, Subject};
use super::peers::{AnswerBytes, Streamed};
use super::raw::Raw;
use super::{MESSAGE_BYTES_MAX, status, v1};
use crate::cri;
use crate::daemon::Daemon;

/// One RPC.
struct Method {
    /// The name of the RPC in lower case with underscores, which is also that of its metrics.
    name: &'static str,
    handler: Handler,
}

/// Decodes a request and handles it.
#[derive(Clone, Copy)]
enum Handler {
    Message(fn(Rc<Daemon>, Bytes) -> Handled),
    Stream(fn(Rc<Daemon>, Bytes) -> Opened),
}

/// The encoded response to a call.
type Handled<E = Status> = Pin<Box<dyn Future<Output = Result<Response<Vec<u8>>, E>>>>;
/// The encoded responses to a call.
type Opened = Pin<Box<dyn Future<Output = Result<Response<Messages>, Status>>>>;
/// The stream type that tonic requires.
type Messages = Pin<Box<dyn Stream<Item = Result<Vec<u8>, Status>> + Send>>;

/// Returns the handler of the requests to the CRI's socket.
pub(crate) fn answers(daemon: Rc<Daemon>) -> Answer {
    Rc::new(move |request| {
        let (daemon, found) = (Rc::clone(&daemon), find(request.uri().path()));
        Box::pin(async move {
            let mut grpc = Grpc::new(Raw)
                .apply_max_message_size_config(Some(MESSAGE_BYTES_MAX), Some(MESSAGE_BYTES_MAX));
            Ok::<_, Infallible>(match found {
                Ok(Handler::Message(handler)) => grpc.unary(Call { daemon, handler }, request).await,
                Ok(Handler::Stream(handler)) => {
                    grpc.server_streaming(Call { daemon, handler }, request).await
                }
                Err(status) => status.into_http(),
            })
        })
    })
}

/// Finds the handler for a path: `/SERVICE/METHOD`.
fn find(path: &str) -> Result<Handler, Status> {
    let (service, method) = path.strip_prefix('/').and_then(|path| path.split_once('/')).unwrap_or_default();
    let Some((_, methods)) = SERVICES.iter().find(|(name, _)| *name == service) else {
        return Err(Status::unimplemented(format!("service {service:?} is not served, only runtime.v1")));
    };
    let found = methods.iter().find(|known| is_named(method, known.name));
    found
        .map(|method| method.handler)
        .ok_or_else(|| Status::unimplemented(format!("service {service} has no method {method:?}")))
}

/// Whether `method` is the name of an RPC, which is given in lower case with underscores.
fn is_named(method: &str, name: &str) -> bool {
    let mut rest = method;
    name.split('_').all(|word| {
        let first = word.chars().next().map(|letter| letter.to_ascii_uppercase());
        let next = first.and_then(|first| rest.strip_prefix(first)?.strip_prefix(&word[1..]));
        next.map(|next| rest = next).is_some()
    }) && rest.is_empty()
}

/// A call of tonic's.
struct Call<H> {
    daemon: Rc<Daemon>,
    handler: H,
}

impl UnaryService<Bytes> for Call<fn(Rc<Daemon>, Bytes) -> Handled> {
    type Response = Vec<u8>;
    type Future = Handled;

    fn call(&mut self, request: Request<Bytes>) -> Handled {
        (self.handler)(Rc::clone(&self.daemon), request.into_inner())
    }
}

impl ServerStreamingService<Bytes> for Call<fn(Rc<Daemon>, Bytes) -> Opened> {
    type Response = Vec<u8>;
    type ResponseStream = Messages;
    type Future = Opened;

    fn call(&mut self, request: Request<Bytes>) -> Opened {
        (self.handler)(Rc::clone(&self.daemon), request.into_inner())
    }
}

macro_rules! serve {
    ($table:ident
        changes { $($change:ident $([$of:ident $field:ident])?: $wanted:ident => $done:ident = $doer:path,)* }
        looks { $($method:ident: $request:ident => $response:ident = $handler:path,)* }
        streams { $($stream:ident: $asked:ident => $item:ident = $source:path,)* }
    ) => {
        $($(
            impl Change for v1::$wanted {
                fn subject(&self) -> Subject {
                    Subject::$of(&self.$field)
                }
            }
        )?)*

        static $table: &[Method] = &[
            $(Method {
                name: stringify!($change),
                handler: Handler::Message(|daemon, bytes| {
                    let subject = Some(<v1::$wanted as Change>::subject as fn(&v1::$wanted) -> Subject);
                    answer::<_, v1::$done, _, _>(daemon, stringify!($change), subject, bytes, $doer)
                }),
            },)*
            $(Method {
                name: stringify!($method),
                handler: Handler::Message(|daemon, bytes| {
                    answer::<v1::$request, v1::$response, _, _>(daemon, stringify!($method), None, bytes, $handler)
                }),
            },)*
            $(Method {
                name: stringify!($stream),
                handler: Handler::Stream(|daemon, bytes| {
                    items::<v1::$asked, v1::$item, _, _>(daemon, stringify!($stream), bytes, $source)
                }),
            },)*
        ];
    };
}

/// The services with their RPCs.
static SERVICES: [(&str, &[Method]); 2] =
    [("runtime.v1.RuntimeService", RUNTIME), ("runtime.v1.ImageService", IMAGE)];

serve! { RUNTIME
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
        stream_pod_sandboxes: StreamPodSandboxesRequest => StreamPodSandboxesResponse = cri::list_pod_sandbox::stream_pod_sandboxes,
        stream_containers: StreamContainersRequest => StreamContainersResponse = cri::list_containers::stream_containers,
        stream_container_stats: StreamContainerStatsRequest => StreamContainerStatsResponse = cri::container_stats::stream_container_stats,
        stream_pod_sandbox_stats: StreamPodSandboxStatsRequest => StreamPodSandboxStatsResponse = cri::pod_sandbox_stats::stream_pod_sandbox_stats,
        get_container_events: GetEventsRequest => ContainerEventResponse = cri::get_container_events::get_container_events,
        stream_pod_sandbox_metrics: StreamPodSandboxMetricsRequest => StreamPodSandboxMetricsResponse = cri::pod_sandbox_metrics::stream_pod_sandbox_metrics,
    }
}

serve! { IMAGE
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
        stream_images: StreamImagesRequest => StreamImagesResponse = cri::list_images::stream_images,
    }
}

/// Handles one call with one response. If the call has a `subject`, it changes an object, and a failure is logged.
fn answer<A, B, M, F>(
    daemon: Rc<Daemon>,
    method: &'static str,
    subject: Option<fn(&A) -> Subject>,
    request: Bytes,
    handler: impl FnOnce(Rc<Daemon>, A) -> F,
) -> Handled
where
    A: Message + Default,
    B: Message,
    F: Future<Output = Result<M, Error>> + 'static,
    M: Into<Response<B>>,
{
    let request = match decode::<A>(request) {
        Ok(request) => request,
        Err(status) => return Box::pin(ready(Err(status))),
    };
    let subject = subject.map(|of| of(&request));
    let handled = handler(Rc::clone(&daemon), request);
    let encoded =
        async move { handled.await.map(|message| message.into().map(|message| message.encode_to_vec())) };
    count(daemon, method, subject, Box::pin(encoded))
}

/// Counts a call and its time, and logs its failure.
fn count(
    daemon: Rc<Daemon>,
    method: &'static str,
    subject: Option<Subject>,
    handled: Handled<Error>,
) -> Handled {
    Box::pin(async move {
        let begun = Instant::now();
        match handled.await {
            Ok(mut response) => {
                counters::rpc(method, code(None), begun.elapsed());
                let bytes = AnswerBytes(response.get_ref().len());
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

/// Handles one call with a stream of responses.
fn items<A, B, S, F>(
    daemon: Rc<Daemon>,
    method: &'static str,
    request: Bytes,
    source: impl FnOnce(Rc<Daemon>, A) -> F,
) -> Opened
where
    A: Message + Default,
    B: Message,
    S: Stream<Item = Result<B, Error>> + 'static,
    F: Future<Output = Result<S, Error>> + 'static,
{
    let request = match decode::<A>(request) {
        Ok(request) => request,
        Err(status) => return Box::pin(ready(Err(status))),
    };
    let opened = source(daemon, request);
    Box::pin(async move {
        let begun = Instant::now();
        let stream = opened.await.map_err(|error| status::from(&error));
        counters::rpc(method, code(stream.as_ref().err()), begun.elapsed());
        let encoded = |item: Result<B, Error>| match item {
            Ok(message) => Ok(message.encode_to_vec()),
            Err(error) => Err(status::from(&error)),
        };
        // tonic wants `Send`; the wrapper checks the thread at each access.
        let mut response = Response::new(Box::pin(SendWrapper::new(stream?.map(encoded))) as Messages);
        response.extensions_mut().insert(Streamed);
        Ok(response)
    })
}

fn decode<A: Message + Default>(request: Bytes) -> Result<A, Status> {
    A::decode(request).map_err(|error| Status::internal(error.to_string()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_of_the_cri_is_in_the_table() {
        let mut service = "";
        let mut count = 0;
        for line in include_str!("../../proto/cri.proto").lines() {
            let mut words =
                line.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
            match (words.next(), words.next()) {
                (Some("service"), Some(name)) => service = name,
                (Some("rpc"), Some(name)) => {
                    count += 1;
                    let found = find(&format!("/runtime.v1.{service}/{name}")).expect(line);
                    assert_eq!(
                        matches!(found, Handler::Stream(_)),
                        line.contains("returns (stream"),
                        "{line}"
                    );
                }
                _ => {}
            }
        }
        assert_eq!(count, SERVICES.iter().map(|(_, methods)| methods.len()).sum::<usize>());
    }

    #[test]
    fn other_paths_have_no_handler() {
        for path in [
            "",
            "/",
            "*",
            "//Version",
            "/runtime.v1.RuntimeService",
            "/runtime.v1.RuntimeService/",
            "/runtime.v1.RuntimeService/version",
            "/runtime.v1.RuntimeService/VersionX",
            "/runtime.v1.RuntimeService/Run_pod_sandbox",
            "/runtime.v1.RuntimeService/PullImage",
            "/runtime.v1.ImageService/Version",
            "runtime.v1.RuntimeService/Version",
        ] {
            assert_eq!(find(path).err().map(|status| status.code()), Some(Code::Unimplemented), "{path:?}");
        }
    }
}
