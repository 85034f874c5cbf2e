//! Real plugin processes with scripted behaviour, for tests.
//!
//! ```text
//!   test ──── Script (JSON) ────► plugin process ──── gRPC on unix sockets ────► devlet, kubelet
//!     │ ───── commands (stdin) ──►      │
//!     └ ◄──── events (stdout) ──────────┘
//! ```
//!
//! A test describes the plugin with a [`Script`], or a DRA driver with a [`DriverScript`]. It starts the process
//! ([`Plugin::start`], [`Plugin::driver`]) and then waits only for its events: there are no sleeps. The process exits
//! when its standard input ends, so it never outlives the test.
//!
//! Cargo does not build the binaries of other packages for a test, so the process is the test's own executable,
//! started again. Each test binary with plugins calls [`plugin_process!`] once. The example `testkit-plugin` offers the
//! same to people and scripts. It is an example, so that `cargo run` runs devlet.
//!
//! The crate depends only on the kubelet's protocols, not on devlet.

// This is test code: it reports errors by panics.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod calls;
mod commands;
mod driver;
mod events;
mod kubelet;
mod lists;
mod node;
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
pub use kubelet::{Kubelet, RegisteredPlugin};
pub use node::{KubeletPod, KubeletPods, PodContainer, Reports, Runtime};
pub use output::{print_lines, skip};
pub use process::{PATIENCE, Plugin, Role, become_plugin_if_asked, run};
pub use raw::{Babbler, nonsense_of_a_client, nonsense_of_a_server};
pub use script::{Answer, Api, Device, DeviceNode, Door, Fault, Faults, Mount, Options, Script};

/// Lets the executable of this test binary run as a plugin process. Belongs in the root module.
#[macro_export]
macro_rules! plugin_process {
    () => {
        #[test]
        fn plugin_process() {
            $crate::become_plugin_if_asked();
        }
    };
}
