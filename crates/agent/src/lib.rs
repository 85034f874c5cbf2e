//! The node as a library: sockets, disk, plugins and drivers around the rules of `devlet-core`.
//!
//! A program that knows which pods there are, and starts their containers, embeds a node like this:
//!
//! ```no_run
//! # use std::collections::BTreeSet;
//! # use std::time::Duration;
//! # use devlet_agent::{agent::Agent, config::Config, manifest};
//! # use devlet_core::{PodUid, Source};
//! # use tokio::time::Instant;
//! # async fn my_pods() -> Option<BTreeSet<PodUid>> { None }
//! # async fn embed(pod: &str) -> Result<(), Box<dyn std::error::Error>> {
//! // From here on device plugins can register.
//! let (agent, _report) = Agent::start(Config::new("/var/lib/kubelet")).await?;
//! // Which pods exist? `None` means unknown: nothing is released.
//! agent.follow_pods(my_pods, Duration::from_secs(10));
//! // Called with the capacity at once, and after each change.
//! agent.on_capacity(|capacities| println!("{capacities:?}"));
//!
//! // Either everything that the pod requests is on disk, or nothing. The pod is already one of `my_pods`.
//! let request = manifest::parse(pod, Source::Embedder, &agent.config().foreign)?;
//! let deadline = || Instant::now() + Duration::from_secs(60);
//! let pod = agent.admit(&request, deadline(), |reason| println!("waiting: {reason}")).await?;
//! // Before each start of a container: the options that the runtime must add.
//! let (options, _conflicts) = agent.start_container(&pod.uid, "main", deadline()).await?;
//! println!("{options:?}");
//!
//! agent.remove(&pod.uid, deadline()).await?;
//! agent.stop().await?;
//! # Ok(())
//! # }
//! ```
//!
//! `examples/embed.rs` is a complete program.

pub mod access;
pub mod agent;
pub mod api;
mod backoff;
pub mod cluster;
pub mod config;
pub mod deadline;
pub mod device_plugin;
pub mod display;
pub mod dra;
pub mod grpc;
#[cfg(test)]
mod layers;
pub mod lease;
pub mod limits;
mod long_decode;
pub mod manifest;
pub mod metrics;
mod peer_text;
pub mod plugin_registry;
pub mod reconcile;
pub mod registration;
mod resource_name;
pub mod run_options;
pub mod shield;
pub mod store;
pub mod workflow;

pub use reconcile::capacity;
