//! Objects as an API server sends them: one at a time, without `apiVersion` and `kind` in lists.

use devlet_core::Source;
use serde::Deserialize;

use super::object::Object;
use super::{InvalidManifest, ResourceClaim, UnresolvedPod, claim, pod};

/// A Pod object, as far as devices are concerned. Other fields are dropped while it is decoded.
#[derive(Debug, Clone, Deserialize)]
#[serde(transparent)]
pub struct PodObject(Object);

impl PodObject {
    /// Converts the object into a request. Resources that match `foreign` are left out.
    pub fn into_unresolved(
        self,
        source: Source,
        foreign: &[String],
    ) -> Result<UnresolvedPod, InvalidManifest> {
        pod::unresolved(self.0, source, foreign)
    }
}

/// A ResourceClaim object, as far as a node is concerned. Other fields are dropped while it is decoded.
#[derive(Debug, Clone, Deserialize)]
#[serde(transparent)]
pub struct ClaimObject(Object);

impl TryFrom<ClaimObject> for ResourceClaim {
    type Error = InvalidManifest;

    fn try_from(object: ClaimObject) -> Result<Self, InvalidManifest> {
        claim::resource_claim(object.0)
    }
}
