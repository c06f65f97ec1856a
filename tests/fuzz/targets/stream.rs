//! The protocol modules of the streaming crate, compiled as they are: they do no I/O and have no other
//! dependencies.

#[path = "../../../runtime/streaming/src/event.rs"]
pub(crate) mod event;
#[path = "../../../runtime/streaming/src/spdy/mod.rs"]
pub(crate) mod spdy;
#[path = "../../../runtime/streaming/src/websocket/mod.rs"]
pub(crate) mod websocket;
