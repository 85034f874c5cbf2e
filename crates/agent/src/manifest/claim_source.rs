//! Sources of ResourceClaims.
//!
//! [`ClaimSource`] is the port through which a node looks up claims by name. Manifests are one source ([`GivenClaims`]).
//! The rules for the use of a claim are the same for all sources: [`UnresolvedPod::resolve`](super::UnresolvedPod).

use std::collections::BTreeMap;
use std::fmt::{Debug, Display};

use devlet_core::ClaimUid;
use devlet_core::dra::claims::{AllocationResult, ClaimKey};
use futures_util::future::BoxFuture;

/// Looks up claims by name.
pub trait ClaimSource: Sync {
    /// The reason why a lookup failed.
    type Error: Display + Send;

    /// Returns the current claim of that name.
    fn claim(&self, key: &ClaimKey) -> impl Future<Output = Result<ResourceClaim, Self::Error>> + Send;
}

/// A [`ClaimSource`] behind a pointer, with errors as text. Every source is one.
pub trait DynClaimSource: Debug + Send + Sync {
    /// Returns the current claim of that name.
    fn claim<'a>(&'a self, key: &'a ClaimKey) -> BoxFuture<'a, Result<ResourceClaim, String>>;
}

impl<S: ClaimSource + Debug + Send> DynClaimSource for S {
    fn claim<'a>(&'a self, key: &'a ClaimKey) -> BoxFuture<'a, Result<ResourceClaim, String>> {
        Box::pin(async {
            let claim = ClaimSource::claim(self, key).await;
            claim.map_err(|error| error.to_string())
        })
    }
}

/// A ResourceClaim, as far as a node is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceClaim {
    /// Its name.
    pub key: ClaimKey,
    /// Its UID.
    pub uid: ClaimUid,
    /// The owner that it was created for.
    pub controller: Option<Controller>,
    /// The names of its requests.
    pub requests: Vec<String>,
    /// The pods and groups that may use it.
    pub reserved_for: Vec<Consumer>,
    /// The allocated devices; `None` if it has not been allocated.
    pub allocation: Option<Vec<AllocationResult>>,
}

/// The owner that a claim was created for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Controller {
    /// Its `apiVersion`.
    pub api_version: String,
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// A pod or group that may use a claim.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Consumer {
    /// Empty for pods.
    pub api_group: String,
    /// In the plural: `pods`.
    pub resource: String,
    /// Its name.
    pub name: String,
    /// Its UID. If it is empty, as in a manifest written by hand, the name counts.
    pub uid: String,
}

/// The claims in manifests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GivenClaims {
    pub(super) claims: BTreeMap<ClaimKey, ResourceClaim>,
}

/// A claim is not among the manifests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{claim} is not among the manifests{}; add it with its status, as in `devlet admit -f pod.yaml -f claim.yaml`, where \
     claim.yaml is what `kubectl get resourceclaims -n {} {} -o yaml` says", but(.others), .claim.namespace, .claim.name
)]
pub struct NotGiven {
    /// The claim.
    pub claim: ClaimKey,
    /// Some of the claims in the manifests.
    pub others: Vec<ClaimKey>,
}

fn but(others: &[ClaimKey]) -> String {
    let others: Vec<String> = others.iter().map(ToString::to_string).collect();
    match others.len() {
        0 => String::new(),
        _ => format!(" (which have {})", others.join(", ")),
    }
}

impl GivenClaims {
    pub(super) fn find(&self, key: &ClaimKey) -> Result<ResourceClaim, NotGiven> {
        /// Maximum claims that the error lists.
        const MAX_LISTED: usize = 3;
        self.claims.get(key).cloned().ok_or_else(|| NotGiven {
            claim: key.clone(),
            others: self.claims.keys().take(MAX_LISTED).cloned().collect(),
        })
    }
}

impl ClaimSource for GivenClaims {
    type Error = NotGiven;

    async fn claim(&self, key: &ClaimKey) -> Result<ResourceClaim, NotGiven> {
        self.find(key)
    }
}
