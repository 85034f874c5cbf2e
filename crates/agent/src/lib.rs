//! The node as a library: everything that touches the world.
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
//! // Which pods are there? `None`: that is not known yet, and nothing is released.
//! agent.follow_pods(my_pods, Duration::from_secs(10));
//! // What can be had? Called at once, and after every change.
//! agent.on_capacity(|capacities| println!("{capacities:?}"));
//!
//! // Everything that the pod asks for is on disk, or nothing is. It is one of `my_pods` already.
//! let request = manifest::parse(pod, Source::Embedder, &agent.config().foreign)?;
//! let deadline = || Instant::now() + Duration::from_secs(60);
//! let pod = agent.admit(&request, deadline(), |reason| println!("waiting: {reason}")).await?;
//! // Before each start of a container: what the runtime must add.
//! let (options, _conflicts) = agent.start_container(&pod.uid, "main", deadline()).await?;
//! println!("{options:?}");
//!
//! agent.remove(&pod.uid, deadline()).await?;
//! agent.stop().await?;
//! # Ok(())
//! # }
//! ```
//!
//! `examples/embed.rs` is the same as a program that runs.

pub mod access;
pub mod agent;
pub mod api;
pub mod capacity;
pub mod config;
pub mod deadline;
pub mod device_plugin;
pub mod display;
pub mod dra;
pub mod grpc;

#[cfg(test)]
mod layers;
pub mod limits;
pub mod manifest;
pub mod metrics;
mod peer_text;
pub mod plugin_registry;
mod resource_name;
mod root;
pub mod run_options;
pub mod store;
pub mod workflow;
