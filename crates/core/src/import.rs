//! Pods and claims that an import is writing. Other operations on them wait until the write ends.

use alloc::collections::{BTreeMap, BTreeSet};

use crate::dra::claims::ClaimKey;
use crate::id::{ClaimUid, PodUid};
use crate::node::Node;

/// Pods and claims of a kubelet's file that is being imported.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Importing {
    /// All pods of the file.
    pub pods: BTreeSet<PodUid>,
    /// The claims of the file that were unknown before.
    pub claims: BTreeMap<ClaimUid, ClaimKey>,
}

impl Node {
    /// Begins an import. Its pods must not be in flight, and its claims must be neither known nor
    /// [being imported](Node::is_importing). Ends with [`Node::end_import`].
    pub fn begin_import(&mut self, importing: &Importing) {
        self.importing.pods.extend(importing.pods.iter().cloned());
        let claims = importing.claims.iter();
        let claims = claims.map(|(uid, key)| (uid.clone(), key.clone()));
        self.importing.claims.extend(claims);
        self.changes += 1;
    }

    /// Ends an import. If it is on disk, [`Node::put_claim`] and [`Node::put`] follow.
    pub fn end_import(&mut self, importing: &Importing) {
        for pod in &importing.pods {
            self.importing.pods.remove(pod);
        }
        for claim in importing.claims.keys() {
            self.importing.claims.remove(claim);
        }
        self.changes += 1;
    }

    /// Returns `true` if a claim, or another claim of its name, is being imported. No pod can join it until that ends.
    pub fn is_importing(&self, uid: &ClaimUid, key: &ClaimKey) -> bool {
        let claims = &self.importing.claims;
        claims.contains_key(uid) || claims.values().any(|each| each == key)
    }
}
