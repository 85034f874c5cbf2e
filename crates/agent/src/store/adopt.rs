//! Adoption of kubelet's files at a start.

use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};

use devlet_core::dra::claims::Claim;

use super::claims_file::ImportedClaims;
use super::contest::{self, Contest, Disagreement};
use super::devices_file::ImportedDevices;
use super::file_on_disk::SoundFile;
use super::import::Content;
use super::import_report::Difference;
use super::kubelet_file::{KubeletFile, PendingFile};
use super::mirror_hashes::MirrorFileState;
use super::open::Startup;
use super::open_report::{Contested, OpenError};
use super::persisted_state::PersistedState;
use super::row::Row;
use super::{dump, fs};

impl Startup<'_> {
    /// Copies a file that disagrees with the record, and lets pods hold the devices of both sides.
    fn contest(
        &mut self,
        persisted: &mut PersistedState,
        file: KubeletFile,
        sound: &SoundFile,
        disagreement: &Disagreement,
    ) -> Result<Contest, OpenError> {
        let original = self.path_of(file);
        let name = original.file_name().unwrap_or_default().to_string_lossy();
        let name = format!("{name}.contested-{}", fs::timestamp(self.now));
        let path = self.file.path.with_file_name(name);
        let copy = fs::write_new(&path, &sound.bytes);
        let copy = copy.map_err(|source| OpenError::Archive { path, source })?;
        let difference = contest::difference(persisted, &sound.content, disagreement);
        let (pods, changed) = match &sound.content {
            Content::Devices(imported) => contest::hold_both(persisted, imported),
            Content::Claims(_) => Default::default(),
        };
        let contest = Contest {
            file: copy.display().to_string(),
            hash: sound.hash,
            difference: difference.clone(),
            unanswered: contest::unanswered(persisted, &changed),
            pods,
        };
        self.report.contested.push(Contested {
            original,
            copy,
            difference,
        });
        Ok(contest)
    }

    /// Adopts kubelet's files and their hashes, or contests them. Returns the rows to write, and the changes to pods.
    pub(super) fn adopt(
        &mut self,
        persisted: &mut PersistedState,
        found: &[(KubeletFile, SoundFile)],
        has_record: bool,
    ) -> Result<(Vec<Row>, Difference), OpenError> {
        let before = persisted.clone();
        let contested = &before.metadata.contested;
        let mut rows = Vec::new();
        let mut adopted = Vec::new();
        for (file, sound) in found {
            let SoundFile { content, hash, .. } = sound;
            let mirror = persisted
                .metadata
                .mirrors(*file)
                .next(*hash, MirrorFileState::Hash(*hash));
            rows.push(Row::Mirror(*file, mirror));
            self.file_states.insert(*file, MirrorFileState::Hash(*hash));
            let disagreement = match has_record {
                true => contest::disagreement(persisted, content),
                false => Disagreement::default(),
            };
            // This file does not end open contests about its kind: an operator has to decide.
            let open = contested.iter().filter(|(id, _)| id.kind == *file);
            let is_contested = open.clone().next().is_some();
            if is_contested
                && (open.clone().any(|(_, contest)| contest.hash == *hash)
                    || contest::is_on_record(persisted, content))
            {
                continue;
            }
            if is_contested || !disagreement.is_empty() {
                let contest = self.contest(persisted, *file, sound, &disagreement)?;
                let id = PendingFile::next(*file, contested.keys().copied());
                persisted.metadata.contested.insert(id, contest);
                continue;
            }
            adopted.push(content);
            rows.extend(adopt_content(persisted, content));
        }
        rows.iter().for_each(|row| persisted.metadata.apply(row));
        let (changed, difference) = changes(&before, persisted);
        rows.extend(changed);
        for content in adopted {
            self.report_adopted(content, &before, persisted, &difference);
        }
        Ok((rows, difference))
    }

    /// Adds an adopted file to the report.
    fn report_adopted(
        &mut self,
        content: &Content,
        before: &PersistedState,
        after: &PersistedState,
        difference: &Difference,
    ) {
        match content {
            Content::Devices(imported) => {
                self.report.imported = Some(imported.report(difference.clone(), Vec::new()));
            }
            Content::Claims(imported) => {
                let mut report = imported.report(difference.clone());
                let claims = after.claims.keys();
                let new = claims.filter(|uid| !before.claims.contains_key(*uid));
                report.claims = new.cloned().collect();
                self.report.imported_claims = Some(report);
            }
        }
    }

    /// Removes the copies of a failed start. The next one writes them again.
    pub(super) fn remove_copies(&self, archive: &Path) {
        let copies = self.report.contested.iter().map(|each| each.copy.as_path());
        for path in copies.chain([archive]) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Syncs the directory, so that a power loss does not bring back an earlier file.
    pub(super) fn sync_directory_of(&self, file: KubeletFile) -> Result<(), OpenError> {
        let Some(path) = self.options.path_of(file) else {
            return Ok(());
        };
        fs::sync_directory_of(path).map_err(|error| OpenError::Disk {
            path: path.to_owned(),
            reason: error.to_string(),
        })
    }

    /// Writes devlet's state from before an adoption to the archive.
    pub(super) fn archive(&self, persisted: &PersistedState) -> Result<PathBuf, OpenError> {
        let directory = self.file.path.with_file_name("archive");
        let path = directory.join(format!("{}.json", fs::timestamp(self.now)));
        let archive = format!("{:#}\n", dump::to_json(persisted));
        fs::write_new(&path, archive.as_bytes()).map_err(|source| OpenError::Archive { path, source })
    }
}

/// Returns the rows that change one state into another, except for those of the mirrors and resources.
fn changes(before: &PersistedState, after: &PersistedState) -> (Vec<Row>, Difference) {
    let contests = after.metadata.contested.iter();
    let contests = contests.filter(|(id, contest)| before.metadata.contested.get(*id) != Some(*contest));
    let contests = contests.map(|(&id, contest)| Row::Contested(id, Some(contest.clone())));
    let mut rows: Vec<Row> = contests.collect();
    let difference = Difference::between(&before.pods, &after.pods);
    let uids = difference.added.iter().chain(&difference.changed);
    rows.extend(uids.filter_map(|uid| after.pods.get(uid)).map(Row::pod));
    let removed = difference.removed.iter();
    rows.extend(removed.map(|uid| Row::Pod(uid.clone(), None)));
    let is_same = |claim: &&Claim| before.claims.get(&claim.uid) == Some(claim);
    let changed = after.claims.values().filter(|claim| !is_same(claim));
    rows.extend(changed.map(Row::claim));
    let gone = before
        .claims
        .keys()
        .filter(|uid| !after.claims.contains_key(*uid));
    rows.extend(gone.map(|uid| Row::Claim(uid.clone(), None)));
    (rows, difference)
}

/// Adopts a file. Returns the rows of resources that were unknown.
fn adopt_content(persisted: &mut PersistedState, content: &Content) -> Vec<Row> {
    match content {
        Content::Devices(imported) => {
            adopt_devices(persisted, imported);
            let known = &persisted.metadata.resources;
            let resources = imported.resources.iter();
            let new = resources.filter(|name| !known.contains_key(*name));
            new.map(|name| Row::Resource(name.clone(), Some(Default::default())))
                .collect()
        }
        Content::Claims(imported) => {
            adopt_claims(persisted, imported);
            Vec::new()
        }
    }
}

/// Adopts a file about devices. A pod that the file does not have holds no devices.
fn adopt_devices(persisted: &mut PersistedState, imported: &ImportedDevices) {
    let (pods, _) = imported.against(|uid| persisted.pods.get(uid));
    persisted
        .pods
        .extend(pods.into_iter().map(|pod| (pod.uid.clone(), pod)));
    persisted.pods.retain(|uid, pod| {
        if !imported.pods.contains_key(uid) {
            pod.allocations.clear();
        }
        imported.pods.contains_key(uid) || !pod.claims.is_empty()
    });
}

/// Adopts a file about claims. A claim that the file lacks is not held by a pod on record, so it is being prepared or
/// unprepared. It stays, and its drivers unprepare it, even if a kubelet has already done so.
fn adopt_claims(persisted: &mut PersistedState, imported: &ImportedClaims) {
    let mut claims = imported.claims.clone();
    for (uid, known) in std::mem::take(&mut persisted.claims) {
        match claims.entry(uid) {
            Entry::Occupied(mut claim) => claim.get_mut().merge_earlier(&known),
            Entry::Vacant(vacant) => _ = vacant.insert(known),
        }
    }
    persisted.claims = claims;
    let known = std::mem::take(&mut persisted.pods);
    let kept = known.into_values().filter_map(|pod| imported.pod(&pod));
    persisted.pods = kept.map(|pod| (pod.uid.clone(), pod)).collect();
    for uid in imported.pods.keys() {
        let pod = || imported.new_pod(uid);
        persisted.pods.entry(uid.clone()).or_insert_with(pod);
    }
}
