//! Imports of a kubelet's file into the running store, and decisions of an operator to forget one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use devlet_core::dra::claims::Claim;
use devlet_core::dra::view::ClaimView;
use devlet_core::{Blocked, ClaimUid, Importing, Node, Pod, PodUid};
use devlet_kubelet_files::Document;
use sha2::{Digest as _, Sha256};

use super::claims_file::ImportedClaims;
use super::commit_queue::in_time;
use super::completion::Completion;
use super::contest::{self, Contest};
use super::decisions::Turn;
use super::devices_file::ImportedDevices;
use super::error::{ForgetFileError, ImportError, WriteError};
use super::import_report::{Difference, ImportReport, UnreadableFile};
use super::kubelet_file::{Hash, KubeletFile, PendingFile};
use super::record::ResourceRecord;
use super::row::Row;
use super::{State, Store, done};

/// The content of a file of either kind.
pub(crate) enum Content {
    Devices(ImportedDevices),
    Claims(ImportedClaims),
}

/// Reads a file. Its kind follows from its content.
fn read(bytes: &[u8]) -> Result<Content, UnreadableFile> {
    let file = devlet_kubelet_files::read(bytes, None)?;
    let format = file.format;
    match file.verified()? {
        Document::DevicePlugin(checkpoint) => Ok(Content::Devices(ImportedDevices::new(format, checkpoint))),
        document => ImportedClaims::new(format, document).map(Content::Claims),
    }
}

impl Store {
    /// Imports a kubelet's file of any version. New pods are added, and known pods get the allocations of the file. Pods that
    /// it does not have stay. A file about claims adds claims and their pods. The import ends a block that it resolves.
    pub async fn import(&self, file: &[u8]) -> Result<ImportReport, ImportError> {
        let content = read(file)?;
        let hash: Hash = Sha256::digest(file).into();
        let kind = match content {
            Content::Devices(_) => KubeletFile::Devices,
            Content::Claims(_) => KubeletFile::Claims,
        };
        let contest = |state: &State| {
            let id = state.contest_about(kind, &hash)?;
            state.contested.get(&id).map(|contest| contest.file.clone())
        };
        let chosen = contest(&self.shared.lock());
        let turn = self.turn().await?;
        let (written, mut report) = {
            let mut report = None;
            let written = self.begin(|state| {
                if let Some(file) = chosen.filter(|_| contest(state).is_none()) {
                    return Err(ImportError::Settled { file });
                }
                let (rows, mut completion) = match &content {
                    Content::Devices(imported) => {
                        let (rows, completion, difference) = state.begin_import(imported, &hash)?;
                        report = Some(imported.report(difference, Vec::new()));
                        (rows, completion)
                    }
                    Content::Claims(imported) => {
                        let (rows, completion, of_claims) = state.begin_claims_import(imported, &hash)?;
                        report = Some(of_claims);
                        (rows, completion)
                    }
                };
                if let Completion::Import { settled, .. } = &mut completion {
                    settled.turn = turn;
                }
                Ok(Some((rows, completion)))
            })?;
            (written, report.ok_or(WriteError::Stopped)?)
        };
        done(written).await?;
        if let Content::Devices(_) = content {
            report.doubly_held = self.read(Node::doubly_held);
        }
        Ok(report)
    }

    /// Ends the first block; see [`Store::forget_reason`].
    pub async fn forget(&self) -> Result<Vec<PodUid>, ForgetFileError> {
        match self.read(|node| node.blocked().cloned()) {
            Some(reason) => self.forget_reason(&reason).await,
            None => Ok(Vec::new()),
        }
    }

    /// Ends a block: an operator confirms that lost or unreadable state held nothing besides the record, or rejects a
    /// contested file. Returns the pods that only the contested file had: they are removed.
    pub async fn forget_reason(&self, reason: &Blocked) -> Result<Vec<PodUid>, ForgetFileError> {
        let turn = self.turn().await?;
        let file = reason.file();
        let mut gone = Vec::new();
        let written = self.begin(|state| {
            let Some(change) = state.begin_forget(file, turn) else {
                let file = file.to_owned();
                return Err(ForgetFileError::Settled { file });
            };
            if let (_, Completion::Forget { removed, .. }) = &change {
                gone.clone_from(removed);
            }
            Ok(Some(change))
        })?;
        done(written).await?;
        Ok(gone)
    }

    /// Waits until no other import or forget is deciding. Returns `None` if the node is not blocked.
    async fn turn(&self) -> Result<Option<Turn>, WriteError> {
        if self.read(|node| node.blocked().is_none()) {
            return Ok(None);
        }
        let deadline = tokio::time::Instant::now() + self.shared.write_timeout;
        let turn = Arc::clone(&self.deciding).lock_owned();
        in_time(deadline, async { Ok(Some(turn.await)) }).await
    }
}

impl State {
    fn check_idle(&self, pods: &BTreeSet<PodUid>) -> Result<(), ImportError> {
        match pods.iter().find(|pod| self.node.is_in_flight(pod)) {
            Some(pod) => Err(ImportError::InFlight { pod: pod.clone() }),
            None => Ok(()),
        }
    }

    /// Returns `true` if a claim is being unprepared. Until that has ended, no pod can hold it.
    fn is_leaving(&self, uid: &ClaimUid) -> bool {
        self.node.claim(uid).is_some_and(|view| view.pods.is_empty())
    }

    /// Checks that at least one pod of a known claim is neither being admitted nor removed. Otherwise all of them could
    /// release the claim before the pods of the file hold it.
    fn check_stays(&self, known: &ClaimView<'_>) -> Result<(), ImportError> {
        let is_in_flight = |pod: &PodUid| self.node.is_in_flight(pod);
        match known.pods.first() {
            Some(pod) if known.pods.iter().all(is_in_flight) => {
                Err(ImportError::InFlight { pod: pod.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Begins to import a file about devices. No other operation changes its pods until that has ended.
    fn begin_import(
        &mut self,
        imported: &ImportedDevices,
        hash: &Hash,
    ) -> Result<(Vec<Row>, Completion, Difference), ImportError> {
        let adopted = self.adopts(KubeletFile::Devices, hash)?;
        let is_empty = imported.pods.is_empty() && adopted.is_none();
        let mut importing = Importing {
            pods: imported.pods.keys().cloned().collect(),
            claims: BTreeMap::new(),
        };
        let (mut pods, mut difference) = imported.against(|uid| self.node.pod(uid));
        let is_news = !pods.is_empty() && adopted.is_none();
        let (mut settled, mut unblocked) =
            self.settled_by(KubeletFile::Devices, is_empty, imported.is_incomplete, is_news)?;
        if let Some((id, contest)) = adopted {
            let lost = self.lose_devices(imported, &mut difference);
            importing.pods.extend(lost.iter().map(|pod| pod.uid.clone()));
            pods.extend(lost);
            self.count_as_added(contest, &mut difference);
            settled.reasons.push(contest.blocked());
            unblocked.push(Row::Contested(id, None));
        } else {
            settled.contested = self.with_contested(imported, &mut pods);
            let changed: BTreeSet<&PodUid> = pods.iter().map(|pod| &pod.uid).collect();
            difference.changed.retain(|uid| changed.contains(uid));
            let contests = settled.contested.iter();
            unblocked.extend(contests.map(|(&id, contest)| Row::Contested(id, Some(contest.clone()))));
        }
        self.check_idle(&importing.pods)?;
        self.check_idle(&difference.removed.iter().cloned().collect())?;
        unblocked.extend(self.begin_removal(&difference.removed));
        let mut rows: Vec<Row> = pods.iter().map(Row::pod).collect();
        let known = self.node.known_resources();
        let new = imported
            .resources
            .iter()
            .filter(|name| !known.contains_key(*name));
        rows.extend(new.map(|name| Row::Resource(name.clone(), Some(ResourceRecord::default()))));
        rows.extend(unblocked);
        self.node.begin_import(&importing);
        let resources = imported.resources.clone();
        let completion = Completion::Import {
            pods,
            removed: difference.removed.clone(),
            importing,
            resources,
            claims: Vec::new(),
            settled: Box::new(settled),
        };
        Ok((rows, completion, difference))
    }

    /// Returns the pods on record that an adopted file does not have, without devices. Pods that hold nothing then are only
    /// added to the difference.
    fn lose_devices(&self, imported: &ImportedDevices, difference: &mut Difference) -> Vec<Pod> {
        let mut changed = Vec::new();
        let lost = self
            .node
            .pods()
            .filter(|pod| !imported.pods.contains_key(&pod.uid));
        for pod in lost.filter(|pod| !pod.allocations.is_empty()) {
            if pod.claims.is_empty() {
                difference.removed.push(pod.uid.clone());
            } else {
                difference.changed.push(pod.uid.clone());
                let allocations = Vec::new();
                changed.push(Pod {
                    allocations,
                    ..pod.clone()
                });
            }
        }
        changed
    }

    /// Counts the pods that only an adopted file has as added, although they held its devices during the contest.
    fn count_as_added(&self, contest: &Contest, difference: &mut Difference) {
        let has_claims = |uid| self.node.pod(uid).is_some_and(|pod| !pod.claims.is_empty());
        let new = contest.pods.iter();
        let new = new.filter(|(uid, sides)| sides.on_record.is_empty() && !has_claims(uid));
        let new: BTreeSet<PodUid> = new.map(|(uid, _)| uid.clone()).collect();
        difference.changed.retain(|uid| !new.contains(uid));
        // A pod that was removed in the meantime is listed already.
        difference.added.retain(|uid| !new.contains(uid));
        difference.added.extend(new);
    }

    /// Adds the devices of contested files to the pods of an import. Returns the contests about these pods, with the
    /// imported allocations as those on record.
    fn with_contested(
        &self,
        imported: &ImportedDevices,
        pods: &mut Vec<Pod>,
    ) -> BTreeMap<PendingFile, Contest> {
        let mut contested = self.contested.clone();
        if contested.is_empty() {
            return contested;
        }
        // Unchanged pods count as imported, too.
        let known = imported.pods.keys().filter_map(|uid| self.node.pod(uid));
        let mut all: BTreeMap<PodUid, Pod> = known.map(|pod| (pod.uid.clone(), pod.clone())).collect();
        all.extend(pods.drain(..).map(|pod| (pod.uid.clone(), pod)));
        for (uid, pod) in &mut all {
            contest::set_on_record(contested.values_mut(), uid, &pod.allocations);
            pod.allocations = contest::held(contested.values(), uid, &pod.allocations);
        }
        let changed = all
            .into_values()
            .filter(|pod| self.node.pod(&pod.uid) != Some(pod));
        pods.extend(changed);
        contested.retain(|id, contest| self.contested.get(id) != Some(contest));
        contested
    }

    /// Begins to import a file about claims; see [`State::begin_import`]. Known claims stay as they are, and pods keep their
    /// other claims.
    fn begin_claims_import(
        &mut self,
        imported: &ImportedClaims,
        hash: &Hash,
    ) -> Result<(Vec<Row>, Completion, ImportReport), ImportError> {
        let mut imported = imported.clone();
        let adopted = self.adopts(KubeletFile::Claims, hash)?;
        let adopted = adopted.map(|(id, contest)| (id, contest.blocked()));
        let is_empty = imported.claims.is_empty() && adopted.is_none();
        let left_out = self.leave_out_taken(&mut imported);
        let mut importing = Importing {
            pods: imported.pods.keys().cloned().collect(),
            claims: BTreeMap::new(),
        };
        self.check_idle(&importing.pods)?;
        let claims = self.new_claims(&imported)?;
        let keys = claims.iter().map(|claim| (claim.uid.clone(), claim.key.clone()));
        importing.claims.extend(keys);
        let mut rows: Vec<Row> = claims.iter().map(Row::claim).collect();
        let mut difference = Difference::default();
        if adopted.is_some() {
            self.lose_claims(&imported, &mut importing.pods, &mut difference);
            self.check_idle(&importing.pods)?;
            self.check_idle(&difference.removed.iter().cloned().collect())?;
        }
        let pods = self.with_claims(&imported, &importing.pods, adopted.is_some(), &mut difference);
        let is_news = !(claims.is_empty() && pods.is_empty()) && adopted.is_none();
        let (mut settled, mut unblocked) =
            self.settled_by(KubeletFile::Claims, is_empty, imported.is_incomplete, is_news)?;
        let decides = adopted.is_some() || !settled.reasons.is_empty();
        if let Some(claim) = left_out.first().filter(|_| decides) {
            // Its devices would be free after this decision.
            let claim = claim.key.clone();
            return Err(ImportError::LeftOut { claim });
        }
        if let Some((id, blocked)) = adopted {
            settled.reasons.push(blocked);
            unblocked.push(Row::Contested(id, None));
            unblocked.extend(self.begin_removal(&difference.removed));
        }
        rows.extend(pods.iter().map(Row::pod));
        rows.extend(unblocked);
        self.node.begin_import(&importing);
        let removed = difference.removed.clone();
        let mut report = imported.report(difference);
        report.claims = claims.iter().map(|claim| claim.uid.clone()).collect();
        report.left_out = left_out.into_iter().map(|claim| claim.key).collect();
        let completion = Completion::Import {
            pods,
            removed,
            importing,
            resources: BTreeSet::new(),
            claims,
            settled: Box::new(settled),
        };
        Ok((rows, completion, report))
    }

    /// Adds to `importing` the pods that lose their claims, because an adopted file does not have them. Pods that then hold
    /// nothing are added to the difference instead, as removed.
    fn lose_claims(
        &self,
        imported: &ImportedClaims,
        importing: &mut BTreeSet<PodUid>,
        difference: &mut Difference,
    ) {
        let lost = self
            .node
            .pods()
            .filter(|pod| !imported.pods.contains_key(&pod.uid));
        for pod in lost.filter(|pod| !pod.claims.is_empty()) {
            match imported.pod(pod) {
                Some(_) => _ = importing.insert(pod.uid.clone()),
                None => difference.removed.push(pod.uid.clone()),
            }
        }
    }

    /// Removes claims from a file that cannot be imported: pods hold another claim of the same name, or the claim is being
    /// unprepared. Returns the removed claims.
    fn leave_out_taken(&self, imported: &mut ImportedClaims) -> Vec<Claim> {
        let is_taken = |claim: &&Claim| {
            let named = self.node.claim_named(&claim.key);
            named.is_some_and(|other| other.claim.uid != claim.uid && !other.pods.is_empty())
                || self.is_leaving(&claim.uid)
        };
        let left_out: Vec<Claim> = imported.claims.values().filter(is_taken).cloned().collect();
        for claim in &left_out {
            imported.leave_out(&claim.uid);
        }
        left_out
    }

    /// Returns the claims of a file that are not on record. Fails if a claim cannot be imported at present.
    fn new_claims(&self, imported: &ImportedClaims) -> Result<Vec<Claim>, ImportError> {
        let mut new = Vec::new();
        for (uid, claim) in &imported.claims {
            if self.node.is_importing(uid, &claim.key) {
                let claim = claim.key.clone();
                return Err(ImportError::ClaimInFlight { claim });
            }
            let Some(known) = self.node.claim(uid) else {
                new.push(claim.clone());
                continue;
            };
            if claim.has_more_than(known.claim) {
                let (claim, pods) = (claim.key.clone(), known.pods);
                return Err(ImportError::OtherDevices { claim, pods });
            }
            self.check_stays(&known)?;
        }
        Ok(new)
    }

    /// Returns the pods that get or lose claims by an import, and adds them to the difference. An adopted file has all claims
    /// of a pod; otherwise its claims are added.
    fn with_claims(
        &self,
        imported: &ImportedClaims,
        uids: &BTreeSet<PodUid>,
        is_adopted: bool,
        difference: &mut Difference,
    ) -> Vec<Pod> {
        let mut pods = Vec::new();
        for uid in uids {
            let Some(pod) = self.node.pod(uid) else {
                difference.added.push(uid.clone());
                pods.push(imported.new_pod(uid));
                continue;
            };
            let changed = match is_adopted {
                true => imported.pod(pod).unwrap_or_else(|| pod.clone()),
                false => imported.pod_with_more(pod),
            };
            if changed != *pod {
                difference.changed.push(uid.clone());
                pods.push(changed);
            }
        }
        pods
    }
}
