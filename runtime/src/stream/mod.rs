//! kubectl exec, attach and port-forward: the streaming server (streaming facts §6).
mod event;
mod spdy;
mod websocket;
