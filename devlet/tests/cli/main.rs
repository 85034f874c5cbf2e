//! Commands of the built binary: on files, without a daemon, and against a daemon.

// Clippy does not treat helper functions as tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod cdi;
mod checkpoint;
mod documents;
mod node;
mod node_claims;
mod node_live;
mod packaging;

devlet_testkit::plugin_process!();
