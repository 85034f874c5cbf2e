//! The device part of a Kubernetes node: a node of `devlet-agent` beside a real API server.
//!
//! The only crate that knows `kube` and `k8s-openapi`. Each background task compares the node with the API server and acts
//! until they agree; none holds state that a restart would lose.

mod abandon;
mod claim_status;
mod claims;
pub mod connection;
mod events;
mod health;
mod heartbeat;
mod identity;
mod node;
mod pods;
mod slices;
mod task;
mod watch;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_agent::cluster::ClusterConnection;
use devlet_agent::reconcile::slices::SliceDrivers;
use devlet_core::DriverName;
use tokio::sync::watch::channel;

use claims::ApiClaims;
use connection::Connection;
pub use connection::{Access, ConnectError};
use events::Events;
use health::SeenPods;
pub use health::{HealthSettings, OnUnhealthy};
pub use node::NodeSettings;
pub use slices::{SlicesSettings, WipeAtStart};

/// The owner of the fields that devlet writes.
const FIELD_MANAGER: &str = "devlet";

/// The part that devlet plays for a node of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The device part of the node: pods are admitted and removed, capacity is published, slices are wiped.
    #[default]
    Agent,
    /// Claims are looked up for admissions over devlet's API, and lists are shown. Nothing is written.
    Observe,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Mode {
    /// Returns its name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Observe => "observe",
        }
    }
}

/// Settings of the integration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The origin of address and credentials.
    pub access: Access,
    /// Name of the Node object.
    pub node: String,
    /// What devlet does.
    pub mode: Mode,
    /// `true` if devlet deletes Pod objects that are being deleted once their claims are unprepared.
    pub final_delete: bool,
    /// Time after which removals stop waiting for a driver that is away.
    pub abandon_after: BTreeMap<DriverName, Duration>,
    /// The Node object.
    pub node_object: NodeSettings,
    /// ResourceSlices.
    pub slices: SlicesSettings,
    /// Health of devices in the status of pods.
    pub health: HealthSettings,
}

/// Starts the tasks of the integration, which run until the node stops. Does not wait for the API server.
pub async fn start(agent: &Agent, settings: Settings) -> Result<(), ConnectError> {
    let connection = Connection::open(settings.access).await?;
    let reported = ClusterConnection {
        mode: settings.mode.name(),
        server: connection.server(),
        node: settings.node.clone(),
        identity: String::new(),
    };
    agent.cluster().update(|state| state.connection = Some(reported));
    agent.spawn(connection.clone().follow(agent.clone()));
    let (user, identity) = channel(None);
    agent.spawn(identity::run(agent.clone(), connection.clone(), user));
    let claims = ApiClaims::new(agent, &connection);
    agent.set_claim_source(Arc::new(claims.clone()));
    let (events, queue) = Events::channel();
    let (facts, seen_node) = channel(None);
    let seen_pods = SeenPods::default();
    let (lists, listed) = channel(0);
    let common = || (agent.clone(), connection.clone(), settings.node.clone());
    let (on, to, node) = common();
    agent.spawn(node::follow_node(on, to, node, facts));
    let (on, to, node) = common();
    let (drivers, seen_drivers) = channel(SliceDrivers::new());
    agent.spawn(slices::follow_slices(on, to, node, seen_node.clone(), drivers));
    if settings.mode == Mode::Agent {
        let (on, to, node) = common();
        agent.spawn(events::run(on, to, node, queue));
        // Beside a kubelet, the drivers register with the kubelet, and devlet never sees them.
        if !settings.node_object.beside_kubelet {
            let (on, to, node) = common();
            agent.spawn(slices::wipe(on, to, node, settings.slices, seen_drivers));
        }
        let (on, to, node) = common();
        agent.spawn(node::publish(
            on,
            to,
            node,
            settings.node_object,
            seen_node.clone(),
        ));
        if settings.node_object.heartbeat {
            let (on, to, node) = common();
            agent.spawn(heartbeat::run(on, to, node, seen_node));
        }
        let (on, to, _) = common();
        let beside_kubelet = settings.node_object.beside_kubelet;
        agent.spawn(health::run(
            on,
            to,
            seen_pods.clone(),
            settings.health,
            beside_kubelet,
            events.clone(),
        ));
        let (on, to, _) = common();
        agent.spawn(claim_status::run(on, to, identity, listed));
        agent.spawn(abandon::run(
            agent.clone(),
            settings.abandon_after,
            events.clone(),
        ));
    }
    let context = pods::Context {
        agent: agent.clone(),
        connection,
        node: settings.node,
        claims,
        events,
        mode: settings.mode,
        final_delete: settings.final_delete,
        beside_kubelet: settings.node_object.beside_kubelet,
        seen: seen_pods,
        lists,
    };
    agent.spawn(pods::run(context));
    Ok(())
}
