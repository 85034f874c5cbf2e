//! Client of one connected plugin of a driver.

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

/// Calls one connected plugin of a driver.
#[derive(Debug, Clone)]
pub struct DriverClient {
    dialed: PeerConnection,
    service: NodeService,
    health: Option<HealthService>,
    rpcs: DriverRpcs,
    limits: Arc<Limits>,
}

impl DriverClient {
    /// Creates a client. `rpcs` measures its calls.
    pub fn new(dialed: &PeerConnection, services: &Services, rpcs: DriverRpcs, limits: &Limits) -> Self {
        Self {
            dialed: dialed.clone(),
            service: services.node,
            health: services.health,
            rpcs,
            limits: Arc::new(limits.clone()),
        }
    }

    /// Returns the measurements of the calls.
    pub(crate) fn rpcs(&self) -> &DriverRpcs {
        &self.rpcs
    }

    /// Calls `NodePrepareResources`.
    pub async fn prepare(
        &self,
        claims: &[(ClaimUid, ClaimKey)],
        deadline: CallDeadline,
    ) -> Result<Prepared, CallError> {
        let (took, answer) = self
            .call(PREPARE, self.service.prepare(), claims, deadline)
            .await?;
        let decoded = wire::decode_prepared(answer, self.service, claims.len(), &self.limits);
        self.record_answer(PREPARE, took, decoded)
    }

    /// Calls `NodeUnprepareResources`.
    pub async fn unprepare(
        &self,
        claims: &[(ClaimUid, ClaimKey)],
        deadline: CallDeadline,
    ) -> Result<Unprepared, CallError> {
        let (took, answer) = self
            .call(UNPREPARE, self.service.unprepare(), claims, deadline)
            .await?;
        self.record_answer(UNPREPARE, took, wire::decode_unprepared(answer, claims.len()))
    }

    /// Returns `true` if the plugin implements the service. Calls `NodeUnprepareResources` without claims to find out.
    pub async fn has_service(&self, deadline: Duration) -> Result<bool, CallError> {
        let path = self.service.unprepare();
        match self.call(UNPREPARE, path, &[], CallDeadline::of(deadline)).await {
            Ok((took, _)) => {
                call::log_answer(UNPREPARE, self.dialed.channel.path(), took, None);
                Ok(true)
            }
            Err(CallError::Refused { status, .. }) => Ok(status.code() != Code::Unimplemented),
            Err(error) => Err(error),
        }
    }

    /// Opens the stream of health reports. Returns `None` if the plugin does not list a health service.
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
        deadline: CallDeadline,
    ) -> Result<(Duration, Bytes), CallError> {
        let mut request = Request::new(wire::encode_request(claims));
        request.set_timeout(deadline.end().saturating_duration_since(Instant::now()));
        let max_bytes = self.limits.answer_bytes;
        let call = call::unary(&self.dialed.channel, path, request, max_bytes);
        let limit = (Limit::ANSWER_BYTES, max_bytes);
        let (took, ended) =
            call::call_with_deadline_unlogged(method, deadline, limit, &self.dialed, call).await;
        self.rpcs.took(path, took, &ended);
        Ok((took, ended?))
    }

    /// Counts and logs an answer. It may contain errors for some of the claims.
    fn record_answer<T>(
        &self,
        method: &'static str,
        took: Duration,
        decoded: Result<BTreeMap<ClaimUid, Result<T, String>>, call::InvalidAnswer>,
    ) -> Result<BTreeMap<ClaimUid, Result<T, String>>, CallError> {
        let decoded = decoded.map_err(|problem| CallError::Invalid { method, problem });
        let error = match &decoded {
            Ok(results) => results.values().find_map(|each| each.as_ref().err().cloned()),
            Err(error) => Some(error.to_string()),
        };
        call::log_answer(method, self.dialed.channel.path(), took, error.as_deref());
        decoded.inspect_err(|error| self.rpcs.failed(error))
    }
}
