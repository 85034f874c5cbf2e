//! gRPC over unix sockets, as the peers of a kubelet speak it.

pub mod authority;
pub mod call;
pub(crate) mod chatter;
pub mod fields;
mod huffman;
pub(crate) mod oversize;
mod presence;
pub mod server;
mod severable;
pub mod uds;
