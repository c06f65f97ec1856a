//! The protocol modules of the daemon, compiled in as they are: they have no I/O and need nothing else of it.

#[path = "../../../runtime/daemon/src/stream/event.rs"]
pub(crate) mod event;
#[path = "../../../runtime/daemon/src/stream/spdy/mod.rs"]
pub(crate) mod spdy;
#[path = "../../../runtime/daemon/src/stream/websocket/mod.rs"]
pub(crate) mod websocket;
