//! The library on real sockets, with real files, and with plugin processes of the test kit.

// Clippy does not treat helper functions as tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod driver;

mod drivers;
mod embedded;
mod grpc_socket;
mod host;
mod host_claims;
mod shield;
mod store_syncs;

devlet_testkit::plugin_process!();
