//! One file per RPC.

pub(crate) mod version;
