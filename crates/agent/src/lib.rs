//! The node as a library: everything that touches the world.

pub mod grpc;
pub mod store;
