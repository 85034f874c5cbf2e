//! A hash of the device requests of a pod, foreign resources included: the configuration may change.
//!
//! Only the spec counts. The claim that was created from a template, and its allocation, are in the status of objects.
//! They may differ when the pod is admitted again; the core decides whether the pod still holds the same devices.

use std::collections::BTreeMap;

use devlet_core::ContainerKind;
use sha2::{Digest as _, Sha256};

use super::object::{PodClaim, Resources};
use super::quantity::quantity;
use crate::resource_name;

#[derive(Default)]
pub(super) struct Fingerprint {
    hash: Sha256,
}

impl Fingerprint {
    fn add(&mut self, text: &str) {
        // With its length, so that different lists of texts have different input.
        self.hash.update((text.len() as u64).to_be_bytes());
        self.hash.update(text);
    }

    pub(super) fn add_container(&mut self, kind: ContainerKind, name: &str, resources: &Resources) {
        self.add(match kind {
            ContainerKind::Init => "init",
            ContainerKind::Sidecar => "sidecar",
            ContainerKind::App => "app",
        });
        self.add(name);
        let limits = resources.limits.iter().flatten();
        let asked: BTreeMap<&str, String> = limits
            .filter(|(resource, _)| resource_name::is_ours(resource, &[]))
            .map(|(resource, value)| {
                let count = quantity(&value.0).map_or_else(|_| value.0.clone(), |count| count.to_string());
                (resource.as_str(), count)
            })
            // A quantity of zero is not a request.
            .filter(|(_, count)| count != "0")
            .collect();
        self.add(&asked.len().to_string());
        for (resource, count) in asked {
            self.add(resource);
            self.add(&count);
        }
        self.add_list("claims", &resources.claims, |fingerprint, claim| {
            fingerprint.add(claim.name.as_deref().unwrap_or_default());
            fingerprint.add(claim.request.as_deref().unwrap_or_default());
        });
    }

    pub(super) fn add_claims(&mut self, claims: &Option<Vec<PodClaim>>) {
        self.add_list("resourceClaims", claims, |fingerprint, claim| {
            fingerprint.add(claim.name.as_deref().unwrap_or_default());
            fingerprint.add(claim.resource_claim_name.as_deref().unwrap_or_default());
            fingerprint.add(claim.resource_claim_template_name.as_deref().unwrap_or_default());
        });
    }

    /// Adds nothing for an empty list, so that hashes of older records stay valid.
    fn add_list<T>(&mut self, what: &str, list: &Option<Vec<T>>, add: impl Fn(&mut Self, &T)) {
        let list = list.as_deref().unwrap_or_default();
        if !list.is_empty() {
            self.add(what);
            self.add(&list.len().to_string());
            list.iter().for_each(|each| add(self, each));
        }
    }

    /// Returns the fingerprint. It is never 0, which means unknown.
    pub(super) fn finish(self) -> u64 {
        let hash = self.hash.finalize();
        let first = hash
            .iter()
            .take(8)
            .fold(0, |number, byte| number << 8 | u64::from(*byte));
        if first == 0 { 1 } else { first }
    }
}
