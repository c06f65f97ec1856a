//! The daemon's side of the control socket; see `coracle_control`.

mod answers;
mod events;
mod exec;
mod node;
mod rules;
mod server;
mod take_over;

pub(crate) use server::Server;
