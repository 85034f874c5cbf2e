//! Plugin and driver processes against a minimal kubelet.

// Clippy does not treat helper functions as tests.
#![allow(clippy::unwrap_used)]

mod driver;
mod plugin;

devlet_testkit::plugin_process!();
