//! Removes pods, and gives up on drivers and claims.

use std::collections::BTreeSet;

use devlet_client::v1;
use devlet_core::{ClaimUid, DriverName};
use tonic::Status;

use super::lookup::{self, PodLookupError};
use super::service::DevletService;
use super::{convert, convert_claims};
use crate::store::{ForgetClaimError, is_unknown_pod};

impl DevletService {
    pub(super) async fn remove(
        &self,
        request: v1::RemovePodRequest,
    ) -> Result<v1::RemovePodResponse, Status> {
        let found = self.read(|node| {
            let pod = lookup::find_to_remove(node, &request.pod)?;
            let id = convert::pod_id(node, &pod);
            Ok::<_, PodLookupError>((pod, id))
        });
        let (pod, id) = found.map_err(|error| self.not_admitted(error))?;
        if is_unknown_pod(&pod) {
            return Err(Status::failed_precondition(format!(
                "{pod} stands for a pod whose UID could not be read; when that pod is gone: devlet forget --pod {pod}"
            )));
        }
        let drivers = request.abandon_drivers.into_iter().map(DriverName::from);
        let drivers: BTreeSet<DriverName> = drivers.collect();
        if !drivers.is_empty() {
            self.read(|node| lookup::check_abandoned(node, &pod, &drivers))?;
        }
        let deadline = self.deadline(request.wait_ms);
        let abandoned = self.agent.remove_without(&pod, &drivers, deadline).await?;
        let label = if id.name.is_empty() {
            "-".to_owned()
        } else {
            format!("{}/{}", id.namespace, id.name)
        };
        tracing::info!(pod = %label, uid = %pod, "pod removed");
        let mut abandoned: Vec<v1::ClaimId> = abandoned
            .iter()
            .map(|each| convert_claims::id(&each.claim, &each.uid))
            .collect();
        abandoned.dedup();
        Ok(v1::RemovePodResponse {
            pod: Some(id),
            abandoned,
        })
    }

    pub(super) async fn abandon(
        &self,
        request: v1::AbandonClaimRequest,
    ) -> Result<v1::AbandonClaimResponse, Status> {
        let drivers: BTreeSet<DriverName> = request.drivers.into_iter().map(DriverName::from).collect();
        let uids = self.read(|node| lookup::find_to_abandon(node, &request.claim, &drivers))?;
        for uid in &uids {
            for driver in &drivers {
                self.agent.abandon_claim(uid, driver).await?;
            }
        }
        let now = self.now();
        let claims = self.read(|node| {
            let views = uids.iter().filter_map(|uid| node.claim(uid));
            views
                .map(|view| convert_claims::claim(node, &view, now))
                .collect()
        });
        Ok(v1::AbandonClaimResponse { claims })
    }

    /// Forgets the abandoned claims of a name, and returns them.
    pub(super) async fn forget_claims(&self, name: &str) -> Result<Vec<v1::ClaimId>, Status> {
        let ids = self.read(|node| lookup::claim_ids(node, name))?;
        let (mut forgotten, mut kept) = (Vec::new(), None);
        for id in ids {
            match self.agent.forget_claim(&ClaimUid::from(id.uid.as_str())).await {
                Ok(()) => forgotten.push(id),
                Err(ForgetClaimError::Refused(reason)) => {
                    kept.get_or_insert(reason);
                }
                Err(error) => return Err(error.into()),
            }
        }
        match kept {
            // If only some claims of the name were abandoned, the others are not an error.
            Some(reason) if forgotten.is_empty() => Err(ForgetClaimError::from(reason).into()),
            _ => Ok(forgotten),
        }
    }
}
