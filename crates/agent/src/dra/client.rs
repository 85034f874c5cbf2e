//! What is called on a plugin of a driver.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use devlet_core::ClaimUid;
use devlet_core::dra::claims::ClaimKey;
use devlet_uds::PeerConnection;
use prost::bytes::Bytes;
use tokio::time::Instant;
use tonic::codec::Streaming;
use tonic::{Code, Request, Status};

use super::services::{HealthService, NodeService, Services};
use super::{Prepared, Unprepared, wire};
use crate::grpc::call::{self, CallDeadline, CallError};
use crate::limits::{Limit, Limits};
use crate::metrics::DriverRpcs;

const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";

/// A way to call one connected plugin of a driver.
#[derive(Debug, Clone)]
pub struct DriverClient {
    dialed: PeerConnection,
    service: NodeService,
    health: Option<HealthService>,
    rpcs: DriverRpcs,
    limits: Arc<Limits>,
}

impl DriverClient {
    /// `rpcs` measures what is called.
    pub fn new(dialed: &PeerConnection, services: &Services, rpcs: DriverRpcs, limits: &Limits) -> Self {
        Self {
            dialed: dialed.clone(),
            service: services.node,
            health: services.health,
            rpcs,
            limits: Arc::new(limits.clone()),
        }
    }

    /// Measures what is called.
    pub(crate) fn rpcs(&self) -> &DriverRpcs {
        &self.rpcs
    }

    /// Has claims prepared.
    pub async fn prepare(
        &self,
        claims: &[(ClaimUid, ClaimKey)],
        patience: CallDeadline,
    ) -> Result<Prepared, CallError> {
        let (took, answer) = self
            .call(PREPARE, self.service.prepare(), claims, patience)
            .await?;
        let read = wire::prepared(answer, self.service, claims.len(), &self.limits);
        self.understood(PREPARE, took, read)
    }

    /// Has that undone.
    pub async fn unprepare(
        &self,
        claims: &[(ClaimUid, ClaimKey)],
        patience: CallDeadline,
    ) -> Result<Unprepared, CallError> {
        let (took, answer) = self
            .call(UNPREPARE, self.service.unprepare(), claims, patience)
            .await?;
        self.understood(UNPREPARE, took, wire::unprepared(answer, claims.len()))
    }

    /// Whether the plugin has the service at all: it is asked to unprepare nothing.
    pub async fn has_service(&self, patience: Duration) -> Result<bool, CallError> {
        let path = self.service.unprepare();
        match self.call(UNPREPARE, path, &[], CallDeadline::of(patience)).await {
            Ok((took, _)) => {
                call::log_answer(UNPREPARE, self.dialed.channel.path(), took, None);
                Ok(true)
            }
            Err(CallError::Refused { status, .. }) => Ok(status.code() != Code::Unimplemented),
            Err(error) => Err(error),
        }
    }

    /// What the plugin says about its devices, as it comes; `None` if it does not offer to.
    pub(crate) async fn watch(&self) -> Option<Result<Streaming<Bytes>, Status>> {
        let path = self.health?.watch();
        let request = Request::new(Bytes::new());
        Some(call::stream(&self.dialed.channel, path, request, self.limits.answer_bytes).await)
    }

    async fn call(
        &self,
        method: &'static str,
        path: &'static str,
        claims: &[(ClaimUid, ClaimKey)],
        patience: CallDeadline,
    ) -> Result<(Duration, Bytes), CallError> {
        let mut request = Request::new(wire::request(claims));
        request.set_timeout(patience.end().saturating_duration_since(Instant::now()));
        let largest = self.limits.answer_bytes;
        let call = call::unary(&self.dialed.channel, path, request, largest);
        let limit = (Limit::ANSWER_BYTES, largest);
        let (took, ended) =
            call::call_with_deadline_unlogged(method, patience, limit, &self.dialed, call).await;
        self.rpcs.took(path, took, &ended);
        Ok((took, ended?))
    }

    /// Counts and logs an answer. A driver may fail for some of the claims of a call.
    fn understood<T>(
        &self,
        method: &'static str,
        took: Duration,
        read: Result<BTreeMap<ClaimUid, Result<T, String>>, call::InvalidAnswer>,
    ) -> Result<BTreeMap<ClaimUid, Result<T, String>>, CallError> {
        let read = read.map_err(|problem| CallError::Invalid { method, problem });
        let error = match &read {
            Ok(results) => results.values().find_map(|each| each.as_ref().err().cloned()),
            Err(error) => Some(error.to_string()),
        };
        call::log_answer(method, self.dialed.channel.path(), took, error.as_deref());
        read.inspect_err(|error| self.rpcs.failed(error))
    }
}
