//! `devlet cdi list`: all CDI devices, and the definition that is used for each.

use devlet_cdi::{Definition, DefinitionState, Problem, Registry};
use serde::Serialize;

use super::Directories;
use crate::Outcome;
use crate::output::{self, Output, table};

pub(super) fn run(directories: &Directories, output: Output) -> anyhow::Result<Outcome> {
    let registry = directories.open()?;
    let listed = Listed::of(&registry);
    if matches!(output, Output::Table | Output::Wide) {
        for problem in &listed.problems {
            output::warn(&format!("warning: {problem}"));
        }
        if listed.devices.is_empty() {
            let searched: Vec<String> = registry
                .directories()
                .iter()
                .map(|directory| directory.display().to_string())
                .collect();
            output::warn(&format!("no devices in {}", searched.join(" and ")));
            return Ok(Outcome::Fine);
        }
    }
    output::print(output, &listed, Listed::table)?;
    Ok(Outcome::Fine)
}

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
struct Listed {
    devices: Vec<DefinitionShown>,
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DefinitionShown {
    pub(super) name: String,
    pub(super) file: String,
    pub(super) cdi_version: String,
    pub(super) usable: bool,
    /// Why it is not usable.
    pub(super) state: String,
}

impl DefinitionShown {
    pub(super) fn of(definition: &Definition<'_>) -> Self {
        let state = match &definition.state {
            DefinitionState::Usable => "usable".to_owned(),
            DefinitionState::Shadowed { by } => format!("shadowed by {}", by.display()),
            DefinitionState::Conflicting { paths } => {
                let others = paths.iter().filter(|path| **path != definition.file.path);
                let others: Vec<String> = others.map(|path| path.display().to_string()).collect();
                format!("in conflict with {}", others.join(" and "))
            }
        };
        Self {
            name: definition.name.to_string(),
            file: definition.file.path.display().to_string(),
            cdi_version: definition.file.spec.version.clone(),
            usable: definition.state == DefinitionState::Usable,
            state,
        }
    }
}

impl Listed {
    fn of(registry: &Registry) -> Self {
        // Conflicts are listed with the devices.
        let beside = |problem: &&Problem| !matches!(problem, Problem::Conflict { .. });
        Self {
            devices: registry
                .definitions()
                .map(|definition| DefinitionShown::of(&definition))
                .collect(),
            problems: registry
                .problems()
                .iter()
                .filter(beside)
                .map(ToString::to_string)
                .collect(),
        }
    }

    fn table(&self) -> String {
        let rows = self
            .devices
            .iter()
            .map(|device| [&device.name, &device.state, &device.cdi_version, &device.file].map(Clone::clone));
        table(["DEVICE", "STATE", "VERSION", "FILE"], rows)
    }
}
