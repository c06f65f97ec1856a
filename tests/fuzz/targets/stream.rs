//! The protocol modules of the daemon, compiled in as they are: they have no I/O and need nothing else of it.

#[path = "../../../runtime/streaming/src/event.rs"]
pub(crate) mod event;
#[path = "../../../runtime/streaming/src/spdy/mod.rs"]
pub(crate) mod spdy;
#[path = "../../../runtime/streaming/src/websocket/mod.rs"]
pub(crate) mod websocket;
