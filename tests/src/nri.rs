//! An NRI plugin without NRI libraries: the multiplexer and ttrpc over a plain socket. The test determines
//! its answers, which may be invalid.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use prost::Message;

use crate::host::{wait_for, wait_until};
use crate::node::Node;

/// NRI's messages.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    reason = "generated from nri.proto"
)]
pub mod api {
    include!("../../nri/proto/nri.pkg.api.v1alpha1.rs");
}

/// Messages of ttrpc's envelope.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    reason = "generated from ttrpc.proto"
)]
pub mod ttrpc {
    include!("../proto/ttrpc.rs");
}

const PLUGIN: u32 = 1;
const RUNTIME: u32 = 2;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

/// Bit mask of all events except validation, which would make the plugin a validator.
pub const EVENTS: i32 = 0x1fff;

/// A call of the runtime that the plugin has received.
#[derive(Clone, Debug)]
pub struct Heard {
    /// Time at which the call arrived.
    pub at: Instant,
    /// Name of the method, for example `RunPodSandbox`.
    pub method: String,
    /// The caller's timeout in nanoseconds.
    pub timeout_nano: i64,
    /// The request in its encoding.
    pub payload: Vec<u8>,
}

/// The answer of a plugin.
pub enum Answer {
    /// A response with the encoded message.
    Ok(Vec<u8>),
    /// An error status with this code and text.
    Refuse(i32, &'static str),
    /// No response.
    Silence,
    /// No response: the plugin disconnects.
    HangUp,
    /// A response with bytes that are not a message.
    Garbage,
    /// Half a frame, after which the plugin disconnects.
    Half,
    /// A normal response, after a response to an unknown call and before a second response to this call.
    Thrice,
}

impl Answer {
    /// A response with an empty message, which is usual for most events.
    pub fn empty() -> Answer {
        Answer::Ok(Vec::new())
    }

    /// A response with this message.
    pub fn message(message: &impl Message) -> Answer {
        Answer::Ok(message.encode_to_vec())
    }

    /// A response to CreateContainer with this adjustment.
    pub fn adjust(adjust: api::ContainerAdjustment) -> Answer {
        Answer::message(&api::CreateContainerResponse { adjust: Some(adjust), ..Default::default() })
    }

    /// An error response in the format of a Go plugin's handler.
    pub fn error(text: &'static str) -> Answer {
        Answer::Refuse(2, text)
    }
}

impl Heard {
    /// Decodes the request as a message with a pod in field 1 and a container in field 2, which all events
    /// have.
    fn pair(&self) -> api::StartContainerRequest {
        if self.method == "StateChange" {
            let event = api::StateChangeEvent::decode(&self.payload[..]).expect("an event");
            return api::StartContainerRequest { pod: event.pod, container: event.container };
        }
        if self.method.ends_with("PodSandbox") {
            let pod = api::RunPodSandboxRequest::decode(&self.payload[..]).expect("a request of NRI").pod;
            return api::StartContainerRequest { pod, container: None };
        }
        api::StartContainerRequest::decode(&self.payload[..]).expect("a request of NRI")
    }

    /// The pod of the event.
    pub fn pod(&self) -> api::PodSandbox {
        self.pair().pod.expect("every event has a pod")
    }

    /// The container of the event.
    pub fn container(&self) -> api::Container {
        self.pair().container.expect("the event is about a container")
    }

    /// Decodes the request.
    pub fn request<T: Message + Default>(&self) -> T {
        T::decode(&self.payload[..]).expect("the request decodes")
    }

    /// Method and object, for example `RunPodSandbox web` or `StopContainer c1`, for comparing orders.
    pub fn title(&self) -> String {
        let pair = self.pair();
        let about = pair.container.map(|container| container.name);
        let name = about.or(pair.pod.map(|pod| pod.name)).unwrap_or_default();
        format!("{} {name}", self.method)
    }
}

/// Determines the answer to a call.
pub type Handler = Box<dyn FnMut(&Caller, &Heard) -> Answer + Send>;

/// The plugin's connection for calls to the runtime.
#[derive(Clone)]
pub struct Caller {
    stream: Arc<Mutex<UnixStream>>,
    calls: Arc<Mutex<HashMap<u32, Sender<ttrpc::Response>>>>,
    last: Arc<Mutex<u32>>,
}

impl Caller {
    fn new(stream: &UnixStream) -> Caller {
        Caller {
            stream: Arc::new(Mutex::new(stream.try_clone().expect("another handle"))),
            calls: Arc::default(),
            last: Arc::default(),
        }
    }

    /// Calls the Runtime service; returns the response, or the socket's error.
    pub fn call(&self, method: &str, payload: Vec<u8>) -> io::Result<ttrpc::Response> {
        let receiver = self.send(method, payload)?;
        let gone = |_| io::Error::other("no answer");
        receiver.recv_timeout(Duration::from_secs(30)).map_err(gone)
    }

    fn send(&self, method: &str, payload: Vec<u8>) -> io::Result<Receiver<ttrpc::Response>> {
        let (sender, receiver) = channel();
        let mut last = self.last.lock().expect("no panic in between");
        *last = if *last == 0 { 1 } else { *last + 2 };
        self.calls.lock().expect("no panic in between").insert(*last, sender);
        let request = ttrpc::Request {
            service: "nri.pkg.api.v1alpha1.Runtime".into(),
            method: method.into(),
            payload,
            timeout_nano: 20_000_000_000,
            metadata: Vec::new(),
        };
        self.write(&frame(RUNTIME, &message(*last, REQUEST, &request.encode_to_vec())))?;
        Ok(receiver)
    }

    /// Writes arbitrary bytes to the socket.
    pub fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.stream.lock().expect("no panic in between").write_all(bytes)
    }

    /// Calls RegisterPlugin; returns the status code of the response, 0 for OK, and its text.
    pub fn register(&self, index: &str, name: &str) -> io::Result<(i32, String)> {
        let request = api::RegisterPluginRequest {
            plugin_name: name.into(),
            plugin_idx: index.into(),
            nri_version: "v0.12.2".into(),
        };
        let response = self.call("RegisterPlugin", request.encode_to_vec())?;
        Ok(response.status.map(|status| (status.code, status.message)).unwrap_or_default())
    }

    /// Calls UpdateContainers; returns the status code, 0 for OK, its text, and the failed updates.
    pub fn update(&self, update: Vec<api::ContainerUpdate>) -> io::Result<(i32, String, Vec<String>)> {
        let request = api::UpdateContainersRequest { update, evict: Vec::new() };
        let response = self.call("UpdateContainers", request.encode_to_vec())?;
        let failed = api::UpdateContainersResponse::decode(&response.payload[..]).expect("a response").failed;
        let (code, text) = response.status.map(|status| (status.code, status.message)).unwrap_or_default();
        Ok((code, text, failed.into_iter().map(|update| update.container_id).collect()))
    }

    /// Closes the connection.
    pub fn hang_up(&self) {
        let _ = self.stream.lock().expect("no panic in between").shutdown(Shutdown::Both); // it may be over
    }
}

/// A plugin that is registered, or a connection before the registration.
pub struct Plugin {
    caller: Caller,
    heard: Arc<Mutex<Vec<Heard>>>,
    over: Arc<Mutex<bool>>,
    is_deaf: Arc<AtomicBool>,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.caller.hang_up();
    }
}

impl Plugin {
    /// Connects to the socket and answers calls; does not register.
    pub fn connect(socket: &Path, handler: Handler) -> Plugin {
        let stream =
            UnixStream::connect(socket).unwrap_or_else(|error| panic!("{}: {error}", socket.display()));
        let plugin = Plugin {
            caller: Caller::new(&stream),
            heard: Arc::default(),
            over: Arc::default(),
            is_deaf: Arc::default(),
        };
        let (requests, queue) = channel();
        let (caller, over) = (plugin.caller.clone(), Arc::clone(&plugin.over));
        let is_deaf = Arc::clone(&plugin.is_deaf);
        std::thread::spawn(move || {
            read(stream, &caller, &requests, &is_deaf);
            *over.lock().expect("no panic in between") = true;
        });
        let (caller, heard) = (plugin.caller.clone(), Arc::clone(&plugin.heard));
        std::thread::spawn(move || answer_all(&caller, &queue, &heard, handler));
        plugin
    }

    /// Registers as plugin INDEX-NAME for `events`, and returns when it has been synchronised.
    pub fn join(node: &Node, index: &str, name: &str, events: i32, handler: Handler) -> Plugin {
        let before = activations(node, index, name);
        let plugin = Plugin::register(node, index, name, events, handler);
        wait_until(&format!("plugin {index}-{name} is active"), || activations(node, index, name) > before);
        plugin
    }

    /// Registers like [`Plugin::join`], but does not wait for the synchronisation.
    pub fn register(node: &Node, index: &str, name: &str, events: i32, mut handler: Handler) -> Plugin {
        let plugin = Plugin::connect(
            &node.nri(),
            Box::new(move |caller, heard| match handler(caller, heard) {
                // Calls that the test does not handle.
                Answer::Ok(bytes) if bytes.is_empty() => usual(heard, events),
                answer => answer,
            }),
        );
        assert_eq!(plugin.caller.register(index, name).expect("an answer"), (0, String::new()));
        plugin
    }

    /// A plugin that subscribes to all events and changes nothing.
    pub fn listener(node: &Node, index: &str, name: &str) -> Plugin {
        Plugin::join(node, index, name, EVENTS, Box::new(|_, _| Answer::empty()))
    }

    /// The connection for calls to the runtime.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// All received calls in order.
    pub fn all(&self) -> Vec<Heard> {
        self.heard.lock().expect("no panic in between").clone()
    }

    /// The received calls of one method.
    pub fn heard(&self, method: &str) -> Vec<Heard> {
        self.all().into_iter().filter(|heard| heard.method == method).collect()
    }

    /// Received events by method and name, without Configure and Synchronize.
    pub fn titles(&self) -> Vec<String> {
        let is_event = |heard: &&Heard| !matches!(heard.method.as_str(), "Configure" | "Synchronize");
        self.all().iter().filter(is_event).map(Heard::title).collect()
    }

    /// The last received call of one method.
    #[track_caller]
    pub fn last(&self, method: &str) -> Heard {
        self.heard(method).pop().unwrap_or_else(|| panic!("{method} was not called: {:?}", self.titles()))
    }

    /// Waits for a call of one method.
    #[track_caller]
    pub fn wait_for(&self, method: &str) -> Heard {
        wait_for(&format!("the plugin hears {method}"), || self.heard(method).pop())
    }

    /// Sets whether the plugin stops reading after the next frame.
    pub fn set_deaf(&self, is_deaf: bool) {
        self.is_deaf.store(is_deaf, Ordering::Relaxed);
    }

    /// Whether the runtime has closed the connection.
    pub fn is_over(&self) -> bool {
        *self.over.lock().expect("no panic in between")
    }
}

/// Number of times that a plugin with this name has become active, from the daemon's log.
pub fn activations(node: &Node, index: &str, name: &str) -> usize {
    let title = format!("{index}-{name}");
    node.log().lines().filter(|line| line.contains("active, events") && line.contains(&title)).count()
}

/// The answers of a regular plugin.
pub fn usual(heard: &Heard, events: i32) -> Answer {
    match heard.method.as_str() {
        "Configure" => Answer::message(&api::ConfigureResponse { events }),
        "Synchronize" => {
            let more = heard.request::<api::SynchronizeRequest>().more;
            Answer::message(&api::SynchronizeResponse { update: Vec::new(), more })
        }
        _ => Answer::empty(),
    }
}

fn answer_all(
    caller: &Caller,
    queue: &Receiver<(u32, Heard)>,
    heard: &Mutex<Vec<Heard>>,
    mut handler: Handler,
) {
    while let Ok((stream, call)) = queue.recv() {
        heard.lock().expect("no panic in between").push(call.clone());
        let response = match handler(caller, &call) {
            Answer::Ok(payload) => ttrpc::Response { status: None, payload },
            Answer::Refuse(code, text) => {
                let status = Some(ttrpc::Status { code, message: text.into() });
                ttrpc::Response { status, payload: Vec::new() }
            }
            Answer::Garbage => ttrpc::Response { status: None, payload: vec![0xff; 7] },
            Answer::Silence => continue,
            Answer::HangUp => return caller.hang_up(),
            Answer::Half => {
                let whole = frame(PLUGIN, &message(stream, RESPONSE, &[0; 64]));
                let _ = caller.write(&whole[..30]); // the runtime may be gone
                return caller.hang_up();
            }
            Answer::Thrice => {
                let empty = |stream| frame(PLUGIN, &message(stream, RESPONSE, &[]));
                let _ = caller.write(&[empty(stream + 1000), empty(stream), empty(stream)].concat()); // as above
                continue;
            }
        };
        // Fails if the runtime has ended or disconnected.
        let _ = caller.write(&frame(PLUGIN, &message(stream, RESPONSE, &response.encode_to_vec())));
    }
}

fn read(mut stream: UnixStream, caller: &Caller, requests: &Sender<(u32, Heard)>, is_deaf: &AtomicBool) {
    let mut streams: HashMap<u32, Vec<u8>> = HashMap::new();
    let mut header = [0; 8];
    loop {
        while is_deaf.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if stream.read_exact(&mut header).is_err() {
            break;
        }
        let id = u32::from_be_bytes(header[..4].try_into().expect("four"));
        let length = u32::from_be_bytes(header[4..].try_into().expect("four"));
        let mut payload = vec![0; length as usize];
        if stream.read_exact(&mut payload).is_err() {
            break;
        }
        let bytes = streams.entry(id).or_default();
        bytes.extend(payload);
        while let Some((number, kind, data)) = take(bytes) {
            if (id, kind) == (PLUGIN, REQUEST) {
                let request = ttrpc::Request::decode(&data[..]).expect("a request");
                let heard = Heard {
                    at: Instant::now(),
                    method: request.method,
                    timeout_nano: request.timeout_nano,
                    payload: request.payload,
                };
                let _ = requests.send((number, heard)); // the test is over
            } else if (id, kind) == (RUNTIME, RESPONSE) {
                let response = ttrpc::Response::decode(&data[..]).expect("a response");
                if let Some(sender) = caller.calls.lock().expect("no panic in between").remove(&number) {
                    let _ = sender.send(response); // fails if there is no receiver any more
                }
            }
        }
    }
    caller.calls.lock().expect("no panic in between").clear();
}

fn take(bytes: &mut Vec<u8>) -> Option<(u32, u8, Vec<u8>)> {
    let header: [u8; 10] = bytes.get(..10)?.try_into().expect("ten");
    let length = u32::from_be_bytes(header[..4].try_into().expect("four")) as usize;
    let data = bytes.get(10..10 + length)?.to_vec();
    bytes.drain(..10 + length);
    Some((u32::from_be_bytes(header[4..8].try_into().expect("four")), header[8], data))
}

/// Encodes a frame of the multiplexer.
pub fn frame(id: u32, payload: &[u8]) -> Vec<u8> {
    [&id.to_be_bytes()[..], &(payload.len() as u32).to_be_bytes(), payload].concat()
}

/// Encodes a ttrpc message.
pub fn message(stream: u32, kind: u8, data: &[u8]) -> Vec<u8> {
    [&(data.len() as u32).to_be_bytes()[..], &stream.to_be_bytes(), &[kind, 0], data].concat()
}
