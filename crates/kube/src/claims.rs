//! ResourceClaims of the API server: one GET for each claim of an admission.
//!
//! A node may get only the claims of its pods, by name; lists and watches are forbidden.

use std::fmt;
use std::sync::Arc;

use devlet_agent::agent::Agent;
use devlet_agent::manifest::{ClaimObject, ClaimSource, ResourceClaim};
use devlet_core::dra::claims::ClaimKey;
use tokio::sync::Semaphore;

use crate::connection::{CallError, Connection};

/// The name of the task in `status`.
const TASK: &str = "claims";

/// Maximum concurrent calls: each takes a connection to the API server.
const MAX_CALLS: usize = 8;

/// The claims of the API server. Clones share the limit of calls.
#[derive(Clone)]
pub(crate) struct ApiClaims {
    agent: Agent,
    connection: Connection,
    calls: Arc<Semaphore>,
}

impl ApiClaims {
    pub(crate) fn new(agent: &Agent, connection: &Connection) -> Self {
        Self {
            agent: agent.clone(),
            connection: connection.clone(),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
        }
    }

    async fn get(&self, key: &ClaimKey) -> Result<ClaimObject, CallError> {
        let ClaimKey { namespace, name } = key;
        let path = format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}");
        self.connection
            .call(async |client| {
                let request = http::Request::get(path).body(Vec::new());
                client.request(request.map_err(kube::Error::HttpError)?).await
            })
            .await
    }
}

/// Why a claim cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Invalid(#[from] devlet_agent::manifest::InvalidManifest),
}

impl ClaimSource for ApiClaims {
    type Error = ClaimError;

    async fn claim(&self, key: &ClaimKey) -> Result<ResourceClaim, ClaimError> {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.calls).acquire_owned().await.ok();
        let (report, now) = (self.agent.cluster(), self.agent.store().now());
        match self.get(key).await {
            Ok(object) => {
                report.succeeded(TASK, now);
                Ok(object.try_into()?)
            }
            Err(error) => {
                match error.is_not_found() {
                    true => report.succeeded(TASK, now),
                    false => report.failed(TASK, now, format!("ResourceClaim {key}: {error}")),
                }
                if let Some(pause) = error.retry_after() {
                    // The permit is kept meanwhile, so that other claims are not asked for either.
                    let stop = self.agent.stopping();
                    self.agent.spawn(async move {
                        let _permit = permit;
                        let _ = tokio::time::timeout(pause, stop.cancelled()).await;
                    });
                }
                Err(error.into())
            }
        }
    }
}

impl fmt::Debug for ApiClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiClaims")
            .field("server", &self.connection.server())
            .finish_non_exhaustive()
    }
}
