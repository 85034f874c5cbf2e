//! Real plugin processes with scripted behaviour, for tests.
//!
//! ```text
//!   test ──── Script (JSON) ────► plugin process ──── gRPC on unix sockets ────► devlet, kubelet
//!     │ ───── commands (stdin) ──►      │
//!     └ ◄──── events (stdout) ──────────┘
//! ```
//!
//! A test says what the plugin is like ([`Script`], or [`DriverScript`] for a DRA driver), starts it
//! ([`Plugin::start`], [`Plugin::driver`]), and from then on only reacts to what it tells: there are no sleeps. The
//! process ends when its standard input does, so that it never outlives the test.
//!
//! Cargo does not build the binaries of other packages for a test, so the process is the test's own executable,
//! started again: each test binary that uses plugins says [`plugin_process!`] once. The example `testkit-plugin` is the
//! same for people and scripts; an example, so that `cargo run` means devlet.
//!
//! Knows nothing of devlet: only the kubelet's protocols.

// This is test code: a panic is how it reports.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod calls;
mod commands;
mod driver;
mod events;
mod lists;
mod output;
mod plugin;
mod process;
mod raw;
mod script;
mod serve;
mod sockets;
mod wire;

pub use driver::{DeviceHealth, DriverEndpoint, DriverScript, PreparedDevice};
pub use events::{Claim, Event};
pub use output::{print_lines, skip};
pub use process::{PATIENCE, Plugin, Role, become_plugin_if_asked, run};
pub use raw::{Babbler, nonsense_of_a_client, nonsense_of_a_server};
pub use script::{Answer, Api, Device, DeviceNode, Door, Fault, Faults, Mount, Options, Script};

/// Lets the executable of this test binary be a plugin process. Belongs in the root module.
#[macro_export]
macro_rules! plugin_process {
    () => {
        #[test]
        fn plugin_process() {
            $crate::become_plugin_if_asked();
        }
    };
}
