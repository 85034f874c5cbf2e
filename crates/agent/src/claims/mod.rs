//! Where a pod's ResourceClaims come from, and whether it may use them.
//!
//! [`ClaimSource`] is all that the node asks of whoever keeps claims: it gets a name and answers with a claim. Manifests
//! are one source ([`crate::manifest::GivenClaims`]). What a claim must be like so that a pod may use it is the same
//! for all of them: [`UnresolvedPod::resolve`]. Neither changes anything.

mod resolve;

use std::fmt::Display;

use devlet_core::ClaimUid;
use devlet_core::dra::claims::{AllocationResult, ClaimKey};

pub use resolve::{ClaimOrigin, PodResourceClaim, ResolveError, UnresolvedPod};

/// Keeps claims.
pub trait ClaimSource: Sync {
    /// Why it has none of that name, in words for people.
    type Error: Display + Send;

    /// The claim of that name as it is now.
    fn claim(&self, key: &ClaimKey) -> impl Future<Output = Result<ResourceClaim, Self::Error>> + Send;
}

/// A ResourceClaim, as far as a node is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceClaim {
    /// Its name.
    pub key: ClaimKey,
    /// Its UID.
    pub uid: ClaimUid,
    /// Whom it was made for.
    pub controller: Option<Controller>,
    /// The names of its requests.
    pub requests: Vec<String>,
    /// Who may use it.
    pub reserved_for: Vec<Consumer>,
    /// What it got; `None` if it has not been allocated.
    pub allocation: Option<Vec<AllocationResult>>,
}

/// The owner of a claim that made it.
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

/// Somebody who may use a claim.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Consumer {
    /// Empty for pods.
    pub api_group: String,
    /// In the plural: `pods`.
    pub resource: String,
    /// Its name.
    pub name: String,
    /// Its UID; may be empty in a manifest that somebody wrote by hand, and then the name counts.
    pub uid: String,
}
