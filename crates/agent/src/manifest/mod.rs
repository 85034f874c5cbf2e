//! Kubernetes manifests, as far as devices are concerned: one Pod, and the ResourceClaims that it uses.
//!
//! Fields that are not about devices are ignored: they are for other programs. Fields about devices must follow the rules
//! of the Kubernetes API. Otherwise a misplaced request for devices would be ignored, and the pod admitted without them.
//! Containers request extended resources in `limits`, and claims from `spec.resourceClaims` by name.
//!
//! `syntax` parses the documents of a text into the types of `object`, and `collect` finds the pod and the claims among
//! them. `pod` and `claim` check and convert these, `resolve` connects them, and `place` locates errors. Objects of an API
//! server (`api_object`) take the same path after their decoding.

mod api_object;
mod claim;
mod claim_source;
mod collect;
mod error;
mod fingerprint;
mod names;
mod object;
mod place;
mod pod;
mod quantity;
mod resolve;
pub mod syntax;

use std::collections::BTreeMap;

use devlet_core::dra::claims::ClaimKey;
use devlet_core::{PodName, PodRequest, PodUid, Source};
use uuid::Uuid;

pub use api_object::{ClaimObject, PodObject};
pub use claim_source::{
    ClaimSource, Consumer, Controller, DynClaimSource, GivenClaims, NotGiven, ResourceClaim,
};
pub use error::InvalidManifest;
pub use place::{Place, Position, position_of};
pub use quantity::{InvalidQuantity, quantity};
pub use resolve::{ClaimOrigin, PodResourceClaim, ResolveError, UnresolvedPod};

/// Namespace of derived UIDs, which are UUIDs of version 5 of `namespace/name`. It never changes, so that other programs
/// can derive the same UIDs. For claims the text is `resourceclaims/namespace/name`.
pub const UID_NAMESPACE: Uuid = Uuid::from_u128(0x6f1d_5c0e_8a7b_4b0f_9d53_2b7c_41e6_90a4);

/// A pod, and the claims in the same manifests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifests {
    /// The pod.
    pub pod: UnresolvedPod,
    /// The claims.
    pub claims: GivenClaims,
}

/// Parses one manifest into the request of its pod, with the claims in the same text.
///
/// Resources that are not for device plugins, or that match `foreign`, are left out.
pub fn parse(text: &str, source: Source, foreign: &[String]) -> Result<PodRequest, InvalidManifest> {
    request([text], source, foreign)
}

/// Parses manifests into the request of their pod, with the claims in them. See [`read`].
pub fn request<'a, T: Into<Text<'a>>>(
    texts: impl IntoIterator<Item = T>,
    source: Source,
    foreign: &[String],
) -> Result<PodRequest, InvalidManifest> {
    let texts: Vec<Text<'_>> = texts.into_iter().map(Into::into).collect();
    let parsed = Parsed::new(&texts, source, foreign)?;
    parsed.resolve(&texts, &BTreeMap::new())
}

/// Parsed manifests, whose claims have not been checked yet.
pub(crate) struct Parsed {
    manifests: Manifests,
    origins: collect::Origins,
}

/// Claims that were looked up elsewhere, or the reasons why they could not be.
pub(crate) type LookedUp = BTreeMap<ClaimKey, Result<ResourceClaim, String>>;

impl Parsed {
    pub(crate) fn new(
        texts: &[Text<'_>],
        source: Source,
        foreign: &[String],
    ) -> Result<Self, InvalidManifest> {
        let (manifests, origins) = collect::collect(texts, source, foreign)?;
        Ok(Self { manifests, origins })
    }

    /// Returns the claims of the pod that are not among the manifests.
    pub(crate) fn missing(&self) -> Vec<ClaimKey> {
        let Manifests { pod, claims } = &self.manifests;
        let mut keys = pod.claim_keys();
        keys.retain(|key| claims.find(key).is_err());
        keys
    }

    /// Returns the request of the pod, if it may use its claims. `texts` are those that were parsed.
    pub(crate) fn resolve(
        self,
        texts: &[Text<'_>],
        looked_up: &LookedUp,
    ) -> Result<PodRequest, InvalidManifest> {
        let (Manifests { pod, claims }, origins) = (self.manifests, self.origins);
        let namespace = pod.request.name.namespace.clone();
        let resolved = pod.resolve_with(|key| {
            let given = claims.find(key);
            given.or_else(|not_given| match looked_up.get(key) {
                Some(found) => found.clone(),
                None => Err(not_given.to_string()),
            })
        });
        resolved.map_err(|error| match error {
            ResolveError::Several(errors) => {
                let errors = errors.into_iter();
                InvalidManifest::Several(
                    errors
                        .map(|error| origins.locate(texts, &namespace, error))
                        .collect(),
                )
            }
            error => origins.locate(texts, &namespace, error),
        })
    }
}

/// A text, and its name in errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text<'a> {
    /// A name such as that of the file; may be empty.
    pub name: &'a str,
    /// One or more documents, JSON or YAML.
    pub text: &'a str,
}

impl<'a> From<&'a str> for Text<'a> {
    fn from(text: &'a str) -> Self {
        Self { name: "", text }
    }
}

/// Parses the pod and the claims in texts, each with one or more documents, in any order.
pub fn read<'a, T: Into<Text<'a>>>(
    texts: impl IntoIterator<Item = T>,
    source: Source,
    foreign: &[String],
) -> Result<Manifests, InvalidManifest> {
    let texts: Vec<Text<'_>> = texts.into_iter().map(Into::into).collect();
    Ok(collect::collect(&texts, source, foreign)?.0)
}

/// Returns the UID of a pod whose manifest does not have one.
pub fn derived_uid(name: &PodName) -> PodUid {
    PodUid::from(derived(&format!("{}/{}", name.namespace, name.name)))
}

/// Returns the version 5 UUID of a text.
fn derived(text: &str) -> String {
    Uuid::new_v5(&UID_NAMESPACE, text.as_bytes()).to_string()
}

#[cfg(test)]
mod tests;
