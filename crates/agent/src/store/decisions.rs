//! Why no pod is admitted, and how an import or an operator ends that.

use std::collections::BTreeMap;

use devlet_core::{Blocked, Pod, PodUid};

use super::State;
use super::completion::Completion;
use super::contest::{self, Contest};
use super::error::ImportError;
use super::kubelet_file::{BlockedBy, Hash, KubeletFile, PendingFile};
use super::record::BlockedRecord;
use super::row::Row;

/// Blocks that an import or an operator ends.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    pub(super) reasons: Vec<Blocked>,
    /// Blocks that remain in part: a lost database needs an import of both kinds of files.
    remaining: Vec<(BlockedBy, BlockedRecord)>,
    /// Contests that stay open, with their new content.
    pub(super) contested: BTreeMap<PendingFile, Contest>,
    /// Released when the change has ended.
    pub(super) turn: Option<Turn>,
}

/// Held by the import or forget that decides about a block: one at a time.
pub(super) type Turn = tokio::sync::OwnedMutexGuard<()>;

impl State {
    /// Returns the blocks that an import of this file ends, and the rows to write for that.
    ///
    /// An import that adds to the record (`is_news`) replaces one unreadable file. If there are several of its kind, it is
    /// unknown which one it replaces, so an operator has to forget them. Adopting a contested file only ends the contest
    /// about it, and so does the same import again, which adds nothing.
    pub(super) fn settled_by(
        &self,
        file: KubeletFile,
        is_empty: bool,
        is_incomplete: bool,
        is_news: bool,
    ) -> Result<(Settled, Vec<Row>), ImportError> {
        let (mut settled, mut rows) = (Settled::default(), Vec::new());
        // The devices in the lost parts are unknown, so an operator has to decide.
        if is_incomplete {
            return Ok((settled, rows));
        }
        let unreadable = self.blocked.keys().filter(|by| by.kind() == Some(file));
        let replaces_unreadable = unreadable.count() == 1 && (is_news || is_empty);
        for (&by, record) in &self.blocked {
            let after = match by {
                BlockedBy::Database => record.after_import(file),
                BlockedBy::File(_) if by.kind() == Some(file) && replaces_unreadable => None,
                BlockedBy::File(_) => continue,
            };
            if after.as_ref() == Some(record) {
                continue;
            }
            if is_empty {
                let file = record.file.clone();
                return Err(ImportError::Empty { file });
            }
            settled.reasons.push(record.blocked(by));
            settled.remaining.extend(after.clone().map(|record| (by, record)));
            rows.push(Row::Blocked(by, after));
        }
        Ok((settled, rows))
    }

    /// Returns the contest about a file with this hash.
    pub(super) fn contest_about(&self, file: KubeletFile, hash: &Hash) -> Option<PendingFile> {
        let mut contests = self.contested.iter();
        let contest = contests.find(|(id, contest)| id.kind == file && contest.hash == *hash);
        contest.map(|(&id, _)| id)
    }

    /// Returns the contest that an import of this file decides. Fails if another contest about the same kind is open.
    pub(super) fn adopts(
        &self,
        file: KubeletFile,
        hash: &Hash,
    ) -> Result<Option<(PendingFile, &Contest)>, ImportError> {
        let Some(id) = self.contest_about(file, hash) else {
            return Ok(None);
        };
        let mut others = self.contested.iter();
        match others.find(|(other, _)| other.kind == file && **other != id) {
            Some((_, other)) => {
                let file = other.file.clone();
                Err(ImportError::OtherContested { file })
            }
            None => Ok(self.contested.get(&id).map(|contest| (id, contest))),
        }
    }

    /// Begins to release pods that an adopted file does not have. None of them may be in flight. Returns the rows to write.
    pub(super) fn begin_removal(&mut self, pods: &[PodUid]) -> Vec<Row> {
        let mut rows = Vec::new();
        for pod in pods {
            let claims = self.node.begin_release(pod);
            rows.extend(claims.iter().flatten().map(Row::claim));
            rows.push(Row::Pod(pod.clone(), None));
        }
        rows
    }

    /// Begins to end the block about a file. `None` if there is no such block.
    pub(super) fn begin_forget(&mut self, file: &str, turn: Option<Turn>) -> Option<(Vec<Row>, Completion)> {
        let contest = self.contested.iter().find(|(_, contest)| contest.file == file);
        let Some((&id, contest)) = contest else {
            let (&by, record) = self.blocked.iter().find(|(_, record)| record.file == file)?;
            let rows = vec![Row::Blocked(by, None)];
            let completion = Completion::Forget {
                settled: Box::new(Settled {
                    reasons: vec![record.blocked(by)],
                    turn,
                    ..Settled::default()
                }),
                pods: Vec::new(),
                removed: Vec::new(),
            };
            return Some((rows, completion));
        };
        // Pods keep the devices on record and those of other contested files. Pods that were removed in the meantime, or
        // are in flight, are left alone.
        let others = || self.contested.iter().filter(|(other, _)| **other != id);
        let is_idle = |uid: &PodUid| !self.node.is_in_flight(uid);
        let (mut pods, mut removed) = (Vec::new(), Vec::new());
        for (uid, sides) in contest.pods.iter().filter(|(uid, _)| is_idle(uid)) {
            let Some(pod) = self.node.pod(uid) else {
                continue;
            };
            let others = others().map(|(_, contest)| contest);
            let allocations = contest::held(others, uid, &sides.on_record);
            if allocations.is_empty() && pod.claims.is_empty() {
                removed.push(uid.clone());
            } else if allocations != pod.allocations {
                pods.push(Pod {
                    allocations,
                    ..pod.clone()
                });
            }
        }
        let reasons = vec![contest.blocked()];
        let mut rows = vec![Row::Contested(id, None)];
        rows.extend(pods.iter().map(Row::pod));
        rows.extend(self.begin_removal(&removed));
        let completion = Completion::Forget {
            settled: Box::new(Settled {
                reasons,
                turn,
                ..Settled::default()
            }),
            pods,
            removed,
        };
        Some((rows, completion))
    }

    /// Ends blocks after that is on disk.
    pub(crate) fn settle(&mut self, settled: Settled) {
        let Settled {
            reasons,
            remaining,
            contested,
            turn: _turn,
        } = settled;
        self.node.unblock(|reason| reasons.contains(reason));
        self.blocked
            .retain(|by, record| !reasons.contains(&record.blocked(*by)));
        self.contested
            .retain(|_, contest| !reasons.contains(&contest.blocked()));
        self.contested.extend(contested);
        for (by, record) in remaining {
            let blocked = record.blocked(by);
            // Another import may have changed the record in the meantime.
            if let Some(before) = self.blocked.insert(by, record) {
                let before = before.blocked(by);
                self.node.unblock(|reason| *reason == before);
            }
            self.node.block(blocked);
        }
    }
}
