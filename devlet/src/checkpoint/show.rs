//! `devlet checkpoint show`: the content of a state file, in one module per kind of file.

mod device_plugin;
mod dra;
mod health;

use std::collections::BTreeMap;
use std::path::Path;

use devlet_kubelet_files::{Checksum, Document, File, read};
use serde::Serialize;

use self::device_plugin::Allocations;
use self::dra::Claims;
use self::health::HealthShown;
use super::RoleArg;
use crate::files::name_of;
use crate::output::{self, Output};
use crate::{Outcome, files};

pub(super) fn run(path: &Path, role: &RoleArg, output: Output) -> anyhow::Result<Outcome> {
    let bytes = files::read(path)?;
    let file = match read(&bytes, role.of(path)) {
        Ok(file) => file,
        Err(error) => {
            output::warn(&format!("error: {}: {error}", name_of(path)));
            output::warn("hint: devlet checkpoint repair shows the parts that can be saved");
            return Ok(Outcome::Bad);
        }
    };
    let shown = Shown::of(path, &file);
    output::print(output, &shown, |shown| shown.table(&file))?;
    Ok(Outcome::Fine)
}

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Shown {
    file: String,
    format: &'static str,
    checksum: ChecksumShown,
    #[serde(flatten)]
    content: Content,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ChecksumShown {
    stored: Option<u64>,
    computed: Option<u64>,
    valid: Option<bool>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Content {
    Devices(Allocations),
    Claims(Claims),
    Health(HealthShown),
}

impl Shown {
    fn of(path: &Path, file: &File<Document>) -> Self {
        let mut warnings = file.warnings.lines();
        if let Document::DraEnvelope(checkpoint) = file.unverified()
            && !checkpoint.has_claim_list
        {
            warnings.push("there is no list of claims: a kubelet reads this as an empty state".into());
        }
        if let Document::DraHealth(state) = file.unverified()
            && state.drivers.as_ref().is_some_and(BTreeMap::is_empty)
        {
            warnings.push("an empty object is read as a dra_health_state: the kubelet writes only that file in this form".into());
        }
        let checksum = ChecksumShown {
            stored: file.checksum.map(|checksum| checksum.stored),
            computed: file.checksum.map(|checksum| checksum.computed),
            valid: file.checksum.map(Checksum::is_valid),
        };
        let (file_name, format) = (name_of(path), file.format.name());
        Self {
            file: file_name,
            format,
            checksum,
            content: Content::of(file.unverified()),
            warnings,
        }
    }

    fn table(&self, file: &File<Document>) -> String {
        let checksum = match file.checksum {
            None => "none in this format".to_owned(),
            Some(checksum) if checksum.is_valid() => format!("{}, right", checksum.stored),
            Some(Checksum { stored, computed }) => {
                format!("{stored}, WRONG: the content has {computed}; a kubelet refuses this file")
            }
        };
        let mut text = format!(
            "File:      {}\nFormat:    {} ({})\nChecksum:  {checksum}\nContent:   {}\n",
            output::line(&self.file),
            file.format,
            file.format.description(),
            self.content.summary(),
        );
        for warning in &self.warnings {
            text.push_str(&format!("Warning:   {}\n", output::line(warning)));
        }
        text.push_str(&self.content.table());
        text
    }
}

impl Content {
    pub(super) fn of(document: &Document) -> Self {
        match document {
            Document::DevicePlugin(checkpoint) => Self::Devices(Allocations::of(checkpoint)),
            Document::DraFlat(checkpoint) => Self::Claims(Claims::of_flat(checkpoint)),
            Document::DraEnvelope(checkpoint) => Self::Claims(Claims::of(checkpoint)),
            Document::DraHealth(state) => Self::Health(HealthShown::of(state)),
        }
    }

    pub(super) fn summary(&self) -> String {
        match self {
            Self::Devices(allocations) => allocations.summary(),
            Self::Claims(claims) => claims.summary(),
            Self::Health(health) => health.summary(),
        }
    }

    pub(super) fn table(&self) -> String {
        match self {
            Self::Devices(allocations) => allocations.table(),
            Self::Claims(claims) => claims.table(),
            Self::Health(health) => health.table(),
        }
    }
}
