//! What a kubelet's file is about to say: until that is on disk nobody else changes it.

use alloc::collections::{BTreeMap, BTreeSet};

use crate::dra::claims::ClaimKey;
use crate::id::{ClaimUid, PodUid};
use crate::node::Node;

/// Pods and claims of a file that is being written down.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Importing {
    /// All pods of the file.
    pub pods: BTreeSet<PodUid>,
    /// Its claims that were not known.
    pub claims: BTreeMap<ClaimUid, ClaimKey>,
}

impl Node {
    /// A file is about to be written down. None of its pods may be in flight, none of its claims known or
    /// [being imported](Node::is_importing). Ends with [`Node::end_import`].
    pub fn begin_import(&mut self, importing: &Importing) {
        self.importing.pods.extend(importing.pods.iter().cloned());
        let claims = importing.claims.iter();
        let claims = claims.map(|(uid, key)| (uid.clone(), key.clone()));
        self.importing.claims.extend(claims);
        self.changes += 1;
    }

    /// It is on disk, to be followed by [`Node::put_claim`] and [`Node::put`]; or it could not be written.
    pub fn end_import(&mut self, importing: &Importing) {
        for pod in &importing.pods {
            self.importing.pods.remove(pod);
        }
        for claim in importing.claims.keys() {
            self.importing.claims.remove(claim);
        }
        self.changes += 1;
    }

    /// Whether a claim, or another one of its name, is being imported: nobody knows yet what it would be to join it.
    pub fn is_importing(&self, uid: &ClaimUid, key: &ClaimKey) -> bool {
        let claims = &self.importing.claims;
        claims.contains_key(uid) || claims.values().any(|each| each == key)
    }
}
