//! Hashes of the kubelet's files that devlet wrote or adopted. A file with another hash is from another process.

use std::collections::BTreeMap;

use super::kubelet_file::Hash;

/// Adds the hash of a file under a new number, and removes the hashes of other numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MirrorUpdate {
    pub(crate) number: u64,
    pub(crate) hash: Hash,
    /// Numbers of hashes to remove.
    pub(crate) forget: Vec<u64>,
}

/// Content of the kubelet's file on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MirrorFileState {
    Absent,
    Hash(Hash),
    /// One of the known hashes; a crash or a power loss can still bring another one back.
    Uncertain,
}

/// Hashes of the files of one kind that devlet wrote or adopted, by number.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct MirrorHashes(pub(crate) BTreeMap<u64, Hash>);

impl MirrorHashes {
    pub(crate) fn knows(&self, hash: &Hash) -> bool {
        self.0.values().any(|known| known == hash)
    }

    /// Returns the update for a file that will replace `file_state`. The hash of the replaced file is kept until the
    /// file is gone. Other hashes are removed: a kubelet can write the same content again, and then it must be adopted.
    pub(crate) fn next(&self, hash: Hash, file_state: MirrorFileState) -> MirrorUpdate {
        let last = self.0.last_key_value().map_or(0, |(&number, _)| number);
        let may_come_back = |known: &Hash| {
            file_state == MirrorFileState::Uncertain || file_state == MirrorFileState::Hash(*known)
        };
        let forget = self.0.iter().filter(|(_, known)| !may_come_back(known));
        MirrorUpdate {
            number: last + 1,
            hash,
            forget: forget.map(|(&number, _)| number).collect(),
        }
    }

    /// Returns the update that removes all other hashes after the file with this hash is durable. `None` if there are no
    /// others.
    pub(crate) fn confirmed(&self, hash: &Hash) -> Option<MirrorUpdate> {
        let (&number, &hash) = self.0.iter().find(|(_, known)| *known == hash)?;
        let others = self.0.keys().copied().filter(|other| *other != number);
        let forget: Vec<u64> = others.collect();
        (!forget.is_empty()).then_some(MirrorUpdate { number, hash, forget })
    }
}
