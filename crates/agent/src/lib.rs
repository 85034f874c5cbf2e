//! The node as a library: everything that touches the world.

pub mod access;
pub mod agent;
pub mod config;
pub mod device_plugin;
pub mod grpc;
pub mod host;
pub mod manifest;
pub mod metrics;
pub mod plugin_registry;
pub mod store;
pub mod workflow;
