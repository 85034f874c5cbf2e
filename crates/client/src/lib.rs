//! The API of a running devlet: bindings, a client, and where to find the socket.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use devlet_client::{Client, locate, v1};
//!
//! # async fn admit() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect_any(&locate::sockets(None), Duration::from_secs(10)).await?;
//! let manifest = std::fs::read_to_string("pod.yaml")?;
//! let mut events = client.admit(v1::AdmitRequest { manifest, ..Default::default() }).await?;
//! while let Some(event) = events.message().await? {
//!     if let Some(v1::admit_event::Event::Admitted(pod)) = event.event {
//!         println!("{pod:?}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The messages, client and server under [`v1`] are generated from `proto/devlet/v1/devlet.proto`, which documents
//! them, and checked in; `src/tests.rs` generates them.

mod admission;
mod client;
mod deadline;
pub mod locate;
#[cfg(test)]
mod tests;
mod watch;

pub use admission::Admission;
pub use client::{Client, ConnectError, MAX_MESSAGE_BYTES};
pub use deadline::NoAnswer;
pub use devlet_uds::channel;
pub use tonic::{Code, Status};
pub use watch::Watch;

/// The messages and the service of package `devlet.v1`.
// tonic qualifies every name.
#[allow(unused_qualifications, clippy::needless_pass_by_value)]
pub mod v1 {
    include!("generated/devlet/v1.rs");
}

/// The messages and the service of package `devlet.shield.v1`, of a devlet beside a kubelet.
#[allow(unused_qualifications, clippy::needless_pass_by_value)]
pub mod shield_v1 {
    include!("generated/shield/v1.rs");
}
