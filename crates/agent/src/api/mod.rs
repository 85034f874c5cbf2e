//! devlet's own gRPC API, `devlet.v1`, on `devlet/devlet.sock`.
//!
//! Each method parses its request, calls the node, and converts the answer. The `.proto` file defines the meaning, the
//! workflows do the work, and `status.rs` maps each error to a gRPC code. Every process that can open the socket may
//! read. Changes require a user that the configuration allows.
//!
//! An admission ends with its stream: if the caller leaves, its reservation is released. All streams end when the node
//! stops, so that stopping does not wait for them.

mod admit;
mod convert;
mod convert_claims;
mod convert_cluster;
mod file_notes;
mod kubelet_pods;
mod lists;
mod lookup;
mod node_status;
mod problems;
mod recovery;
mod removal;
mod service;
mod shield;
mod status;
mod watch;

use std::time::Duration;

use devlet_client::shield_v1::shield_server::ShieldServer;
use devlet_client::v1::devlet_server::DevletServer;
use devlet_uds::ListenError;
use devlet_uds::server::{self, ServerLimits};
use tonic::service::Routes;

use crate::agent::Agent;
use crate::limits::{Limit, MAX_SHORT_MESSAGE};
use crate::store::OpenReport;

pub use lookup::{ClaimLookupError, NothingToAbandon, PodLookupError, UnknownDriver};
pub use recovery::ForgetError;
pub use service::{DevletService, NotAllowed};

/// Time after which a connection to the API without a call in flight is closed.
const IDLE: Duration = Duration::from_secs(300);

/// Serves the API for a node until it stops.
pub fn serve(agent: &Agent, report: &OpenReport) -> Result<(), ListenError> {
    let listener = devlet_uds::listen(agent.config().api_socket(), devlet_uds::DEFAULT_MODE)?;
    agent.serves_api_on(&listener);
    let limits = &agent.config().limits;
    let max_request = limits.request_bytes;
    let service = DevletService::new(agent.clone(), report);
    let shield = ShieldServer::new(service.clone()).max_decoding_message_size(MAX_SHORT_MESSAGE);
    let service = DevletServer::new(service).max_decoding_message_size(max_request);
    let routes = Routes::new(service).add_service(shield);
    // A caller that waits for a plugin keeps a connection or a call open, and must not block other callers.
    let callers = limits.callers_per_uid;
    let limits = ServerLimits {
        connections_per_uid: callers,
        streams_per_connection: u32::try_from(callers).unwrap_or(u32::MAX),
        idle: Some(IDLE),
        ..ServerLimits::default()
    };
    let stopping = agent.stopping().cancelled_owned();
    let serving = server::serve(
        listener,
        routes,
        limits,
        agent.metrics().on_refusal(Limit::CALLERS_PER_UID),
        stopping,
    );
    agent.spawn(async move {
        if let Err(error) = serving.await {
            tracing::error!(%error, "devlet's own API stopped");
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests;
