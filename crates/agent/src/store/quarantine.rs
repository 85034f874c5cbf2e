//! Files that a start cannot use: they are quarantined, and the blocks that follow are recorded.

use std::path::Path;

use super::fs::{self, FileId};
use super::kubelet_file::KubeletFile;
use super::open::Startup;
use super::open_report::{OpenError, Quarantined};
use super::persisted_state::PersistedState;
use super::record::BlockedRecord;

impl Startup<'_> {
    /// Puts a link back in the place of the database that was created instead, which is quarantined.
    pub(super) fn put_back(&mut self, link: &Path) -> Result<Quarantined, OpenError> {
        let path = self.file.path.clone();
        let reason = format!(
            "it replaced the database that {} points to, which is available again",
            path.display()
        );
        let quarantined = self.quarantine(&path, reason)?;
        let moved = std::fs::rename(link, &path).and_then(|()| fs::sync_directory_of(&path));
        moved.map_err(|error| self.disk(error.to_string()))?;
        Ok(quarantined)
    }

    /// Returns the block for a missing database; `None` at the first start.
    pub(super) fn missing(&self) -> Option<BlockedRecord> {
        let trace = self.traces.any()?;
        let reason = format!(
            "there is no such file, though {} shows that devlet has run here",
            trace.display()
        );
        Some(self.lost(&self.options.database, reason))
    }

    /// Returns the block for a lost database. `file` is its path or the path of the quarantined file.
    pub(super) fn lost(&self, file: &Path, reason: String) -> BlockedRecord {
        let reason = match self.traces.copy() {
            Some(copy) => format!("{reason}; {copy}"),
            None => reason,
        };
        BlockedRecord {
            file: file.display().to_string(),
            reason,
            is_database: true,
            is_lost: true,
            ..BlockedRecord::default()
        }
    }

    /// Returns the block for a quarantined file.
    pub(super) fn blocked_record(&self, quarantined: &Quarantined) -> BlockedRecord {
        BlockedRecord {
            file: quarantined.kept.display().to_string(),
            reason: quarantined.reason.clone(),
            is_database: quarantined.original == self.file.path,
            ..BlockedRecord::default()
        }
    }

    pub(super) fn quarantine_file(
        &mut self,
        file: KubeletFile,
        reason: String,
    ) -> Result<Quarantined, OpenError> {
        self.quarantine(&self.path_of(file), reason)
    }

    /// Returns `true` if a file has been quarantined and recorded already, but a crash prevented its removal.
    pub(super) fn is_quarantined(&self, persisted: &PersistedState, file: KubeletFile) -> bool {
        let found = FileId::at(&self.path_of(file));
        let mut records = persisted.metadata.blocked.values();
        found.is_some() && records.any(|record| FileId::at(Path::new(&record.file)) == found)
    }

    pub(super) fn quarantine(&mut self, path: &Path, reason: String) -> Result<Quarantined, OpenError> {
        let kept = fs::quarantine(path, self.now).map_err(|source| OpenError::Quarantine {
            path: path.to_owned(),
            reason: reason.clone(),
            source,
        })?;
        let quarantined = Quarantined {
            original: path.to_owned(),
            kept,
            reason,
        };
        self.report.quarantined.push(quarantined.clone());
        Ok(quarantined)
    }

    pub(super) fn remove(&self, path: &Path) -> Result<(), OpenError> {
        fs::remove(path).map_err(|error| OpenError::Disk {
            path: path.to_owned(),
            reason: error.to_string(),
        })
    }
}
