//! Decisions of an operator about files that devlet could not read or adopt: import and forget.

use std::collections::BTreeMap;
use std::path::Path;

use devlet_client::v1;
use devlet_core::{Blocked, PodUid};
use tonic::Status;

use super::service::DevletService;
use super::{convert, file_notes};
use crate::store::{ForgetFileError, is_unknown_pod};

/// The reason why a file is not forgotten.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForgetError {
    /// No file is waiting for a decision.
    #[error("there is no file to forget: pods are admitted")]
    NothingBlocked,
    /// Another file is waiting for a decision.
    #[error("the file to decide about is {file}")]
    OtherFile {
        /// That file.
        file: String,
    },
    /// The store keeps the file.
    #[error(transparent)]
    Refused(#[from] ForgetFileError),
}

impl DevletService {
    /// Returns the files that block admissions.
    fn blocked_by(&self) -> Vec<String> {
        self.read(|node| {
            let reasons = node.blocked_by().iter();
            reasons.map(|reason| reason.file().to_owned()).collect()
        })
    }

    pub(super) async fn import_file(&self, request: v1::ImportRequest) -> Result<v1::ImportResponse, Status> {
        let report = self.agent.store().import(&request.content).await?;
        tracing::info!(
            file = request.name,
            added = report.difference.added.len(),
            changed = report.difference.changed.len(),
            removed = report.difference.removed.len(),
            "kubelet's file imported"
        );
        let ids =
            |uids: &[PodUid]| self.read(|node| uids.iter().map(|uid| convert::pod_id(node, uid)).collect());
        Ok(v1::ImportResponse {
            added: ids(&report.difference.added),
            changed: ids(&report.difference.changed),
            notes: file_notes::of_import(&report),
            blocked_by: self.blocked_by(),
        })
    }

    pub(super) async fn forget_unknown_pod(&self, pod: String) -> Result<v1::ForgetResponse, Status> {
        let pod = PodUid::from(pod);
        if !is_unknown_pod(&pod) {
            let advice = format!("pod {pod} is not an unknown pod: devlet remove {pod}");
            return Err(Status::failed_precondition(advice));
        }
        self.agent.remove(&pod, self.deadline(None)).await?;
        tracing::warn!(%pod, "unknown pod forgotten, its devices are free");
        Ok(v1::ForgetResponse {
            removed: Vec::new(),
            blocked_by: self.blocked_by(),
        })
    }

    pub(super) async fn forget_file(&self, file: &str) -> Result<v1::ForgetResponse, Status> {
        let reasons = self.read(|node| node.blocked_by().to_vec());
        let Some(first) = reasons.first() else {
            return Err(ForgetError::NothingBlocked.into());
        };
        let reason = reasons.iter().find(|reason| is_same_file(file, reason.file()));
        let Some(reason) = reason else {
            let file = first.file().to_owned();
            return Err(ForgetError::OtherFile { file }.into());
        };
        // Collected first: the names of removed pods are gone afterwards.
        let names = self.read(|node| {
            let pods = match reason {
                Blocked::ContestedFile { pods, .. } => pods.as_slice(),
                _ => &[],
            };
            let named = |uid: &PodUid| (uid.clone(), convert::pod_id(node, uid));
            pods.iter().map(named).collect::<BTreeMap<_, _>>()
        });
        let removed = self.agent.store().forget_reason(reason).await;
        let removed = removed.map_err(ForgetError::Refused)?;
        for uid in &removed {
            tracing::warn!(%uid, file, "pod of contested file removed, its devices are free");
        }
        tracing::info!(file, removed = removed.len(), "file forgotten");
        let removed = removed.iter().filter_map(|uid| names.get(uid).cloned());
        Ok(v1::ForgetResponse {
            removed: removed.collect(),
            blocked_by: self.blocked_by(),
        })
    }
}

fn is_same_file(one: &str, other: &str) -> bool {
    let real = |path: &str| Path::new(path).canonicalize().ok();
    one == other || real(one).is_some_and(|path| Some(path) == real(other))
}
