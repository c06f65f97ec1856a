//! An NRI plugin that sends arbitrary data: raw bytes, answers, requests. It is registered and configured, so
//! that the data reaches the multiplexer, ttrpc, events and the merge of adjustments.
#![no_main]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use coracle_nri::api;
use coracle_nri::{
    DefaultValidator, Dispatcher, Duplicates, Host, Level, Peer, Settings, Snapshot, Stream, Task, Verdict,
};
use libfuzzer_sys::fuzz_target;
use prost::Message;
use smol::LocalExecutor;
use smol::io::{AsyncRead, AsyncWrite};

/// Weak, because its tasks refer to the dispatcher, which refers to it: the executor is dropped with the run.
struct Bridge(Weak<LocalExecutor<'static>>);

impl Host for Bridge {
    fn spawn(&self, task: Task) {
        if let Some(executor) = self.0.upgrade() {
            executor.spawn(task).detach();
        }
    }

    /// Time does not pass, so timeouts do not end a run.
    fn sleep(&self, _: Duration) -> Task {
        Box::pin(std::future::pending())
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }

    fn update(&self, update: api::ContainerUpdate) -> Task<Verdict> {
        let verdict = if update.ignore_failure { Verdict::Applied } else { Verdict::Failed("no".to_owned()) };
        Box::pin(std::future::ready(verdict))
    }

    fn evict(&self, _: api::ContainerEviction) {}

    fn log(&self, _: Level, _: &str, _: &str) {}
}

#[derive(Default)]
struct PluginBytes {
    bytes: VecDeque<u8>,
    waker: Option<Waker>,
}

struct PluginReader(Rc<RefCell<PluginBytes>>);

impl AsyncRead for PluginReader {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<std::io::Result<usize>> {
        let mut said = self.0.borrow_mut();
        let count = buffer.len().min(said.bytes.len());
        if count == 0 {
            said.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        for (place, byte) in buffer.iter_mut().zip(said.bytes.drain(..count)) {
            *place = byte;
        }
        Poll::Ready(Ok(count))
    }
}

/// Discards the data that is sent to the plugin.
struct Sink;

impl AsyncWrite for Sink {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn frame(connection: u32, stream: u32, kind: u8, envelope: &[u8]) -> Vec<u8> {
    let message =
        [&(envelope.len() as u32).to_be_bytes()[..], &stream.to_be_bytes(), &[kind, 0], envelope].concat();
    [&connection.to_be_bytes()[..], &(message.len() as u32).to_be_bytes(), &message].concat()
}

/// A field of the envelope with this content.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    prost::encoding::encode_varint(bytes.len() as u64, &mut field);
    field.extend(bytes);
    field
}

fn request(stream: u32, method: &str, payload: &[u8]) -> Vec<u8> {
    let service = field(1, b"nri.pkg.api.v1alpha1.Runtime");
    frame(2, stream, 1, &[service, field(2, method.as_bytes()), field(3, payload)].concat())
}

fn settings() -> Settings {
    Settings {
        runtime_name: "fuzz".to_owned(),
        runtime_version: "v0".to_owned(),
        registration_timeout: Duration::from_secs(1),
        request_timeout: Duration::from_secs(1),
        sync_timeout: Duration::from_secs(1),
        fail_on_timeout: true,
        duplicates: Duplicates::Replace,
        max_inflight: 1,
        allow_eviction: true,
        validator: DefaultValidator { enable: true, reject_sysctl_adjustment: true, ..Default::default() },
    }
}

fuzz_target!(|bytes: &[u8]| {
    let executor = Rc::new(LocalExecutor::new());
    let dispatcher = Dispatcher::new(Rc::new(Bridge(Rc::downgrade(&executor))), settings());
    let said = Rc::new(RefCell::new(PluginBytes::default()));
    let say = |bytes: &[u8]| {
        let mut said = said.borrow_mut();
        said.bytes.extend(bytes);
        if let Some(waker) = said.waker.take() {
            waker.wake();
        }
        drop(said);
        while executor.try_tick() {}
    };
    let stream = Stream { reader: Box::new(PluginReader(Rc::clone(&said))), writer: Box::new(Sink) };
    dispatcher.accept(stream, Peer::default());
    let register = api::RegisterPluginRequest {
        plugin_name: "fuzz".to_owned(),
        plugin_idx: "10".to_owned(),
        nri_version: String::new(),
    };
    say(&request(1, "RegisterPlugin", &register.encode_to_vec()));
    // Configure and Synchronize get empty answers: all events, no updates.
    say(&frame(1, 1, 2, &[]));
    say(&frame(1, 3, 2, &[]));
    assert_eq!(dispatcher.report().len(), 1);
    let (mut asked, mut calls) = (1, 3);
    let mut rest = bytes;
    // Sections, each with a type and a length.
    while let [kind, high, low, more @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(more.len());
        let (part, more) = more.split_at(length);
        rest = more;
        match kind % 5 {
            0 => say(part),
            1 => {
                asked += 2;
                say(&request(asked, "UpdateContainers", part));
            }
            2 => {
                let dispatcher = Rc::clone(&dispatcher);
                let pod = api::PodSandbox { id: "p".to_owned(), ..Default::default() };
                let container = api::Container { id: "c".to_owned(), ..Default::default() };
                executor
                    .spawn(async move {
                        let section = dispatcher.section(&"p").await;
                        if let Ok(created) = section.create_container(&pod, &container).await {
                            // Any adjustment results in a container that can be encoded.
                            let mut shown = container.clone();
                            coracle_nri::apply_to(&mut shown, &created.adjustment);
                            shown.encode_to_vec();
                        }
                    })
                    .detach();
                while executor.try_tick() {}
                calls += 2;
                say(&frame(1, calls, 2, &field(2, part)));
            }
            // An answer to a call, and one with an unknown number.
            3 => say(&frame(1, calls, 2, part)),
            _ => say(&frame(1, u32::from(*low), *high, part)),
        }
    }
});
