//! The daemon's side of the control socket; see `coracle_client::protocol`.

mod events;
mod exec;
mod node;
mod server;
mod take_over;

pub(crate) use server::Server;
