//! `devlet checkpoint repair`: the intact parts of a damaged state file.

use std::path::Path;

use devlet_kubelet_files::salvage::{Dropped, Salvage};
use devlet_kubelet_files::{Checksum, salvage};
use serde::Serialize;

use super::RoleArg;
use super::show::Content;
use crate::files::{Destination, name_of};
use crate::output::{self, Output, count};
use crate::{Outcome, files};

pub(super) fn run(
    path: &Path,
    out: Option<&Path>,
    role: &RoleArg,
    output: Output,
) -> anyhow::Result<Outcome> {
    let destination = match out {
        Some(out) => Some(Destination::beside(
            path,
            out,
            "write to another name, so that the damaged file is kept",
        )?),
        None => None,
    };
    let bytes = files::read(path)?;
    let salvaged = match salvage(&bytes, role.of(path)) {
        Ok(salvaged) => salvaged,
        Err(error) => {
            output::warn(&format!("error: {}: {error}", name_of(path)));
            return Ok(Outcome::Bad);
        }
    };
    // If everything is lost, writing an empty state would hide the loss.
    let out = out.filter(|_| !salvaged.is_lost());
    if let (Some(destination), Some(_)) = (destination, out) {
        destination.write(salvaged.text.as_bytes())?;
    }
    let report = Report::of(path, out, &salvaged);
    output::print(output, &report, Report::table)?;
    Ok(if salvaged.is_lost() || salvaged.has_losses() {
        Outcome::Bad
    } else {
        Outcome::Fine
    })
}

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    file: String,
    format: &'static str,
    undamaged: bool,
    /// Everything was lost.
    lost: bool,
    /// Parts were or may have been lost.
    incomplete: bool,
    checksum_valid: Option<bool>,
    kept: Content,
    dropped: Vec<DroppedShown>,
    notes: Vec<String>,
    /// Path and format of the written result.
    written: Option<String>,
    written_format: &'static str,
}

#[derive(Debug, Serialize)]
struct DroppedShown {
    what: String,
    reason: String,
}

impl Report {
    fn of(path: &Path, out: Option<&Path>, salvaged: &Salvage) -> Self {
        let shown = |dropped: &Dropped| DroppedShown {
            what: dropped.what.clone(),
            reason: dropped.reason.clone(),
        };
        Self {
            file: name_of(path),
            format: salvaged.found.name(),
            undamaged: salvaged.is_undamaged(),
            lost: salvaged.is_lost(),
            incomplete: salvaged.incomplete,
            checksum_valid: salvaged.checksum.map(Checksum::is_valid),
            kept: Content::of(&salvaged.kept),
            dropped: salvaged.dropped.iter().map(shown).collect(),
            notes: salvaged.remarks.iter().map(ToString::to_string).collect(),
            written: out.map(|out| out.display().to_string()),
            written_format: salvaged.format.name(),
        }
    }

    fn table(&self) -> String {
        let state = if self.undamaged {
            "undamaged".to_owned()
        } else if self.dropped.is_empty() {
            "damaged: the checksum is wrong, so any value may be wrong".to_owned()
        } else {
            format!(
                "damaged: {} lost in part or as a whole",
                count(self.dropped.len(), "part")
            )
        };
        let mut text = format!(
            "File:     {}\nFormat:   {}\nState:    {state}\nKept:     {}\n",
            output::line(&self.file),
            self.format,
            self.kept.summary(),
        );
        if self.incomplete {
            text.push_str(
                "Warning:  the devices that the lost parts held are unknown; devlet import keeps the others held, and admits \
                 pods again only after devlet forget FILE\n",
            );
        }
        for note in &self.notes {
            text.push_str(&format!("Note:     {}\n", output::line(note)));
        }
        match &self.written {
            Some(path) => text.push_str(&format!(
                "Written:  {} ({})\n",
                output::line(path),
                self.written_format
            )),
            None if self.lost => text.push_str("Written:  nothing, because everything was lost\n"),
            None => text.push_str("Written:  nothing; use --out FILE to write the kept parts\n"),
        }
        if !self.dropped.is_empty() {
            let rows = self
                .dropped
                .iter()
                .map(|part| [part.what.clone(), part.reason.clone()]);
            text.push_str(&format!("\n{}", output::table(["DROPPED", "WHY"], rows)));
        }
        text.push_str(&self.kept.table());
        text
    }
}
