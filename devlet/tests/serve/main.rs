//! `devlet serve`: the built binary with plugin and driver processes of the test kit.

// Clippy does not treat helper functions as tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../hostile/mod.rs"]
mod hostile;

mod access;
mod cluster;
mod conformance;
mod crash;
mod crash_claims;
mod crash_instants;
mod daemon;
mod defects;
mod disk;
mod host_devices;
mod hostile_calls;
mod hostile_drivers;
mod hostile_lists;
mod hostile_registrations;
mod hostile_sockets;
mod limits;
mod metrics;
mod plugins;
mod scenarios;
mod shield;

devlet_testkit::plugin_process!();
