//! `devlet cdi show`: one CDI device.

use std::collections::BTreeMap;

use devlet_cdi::{ContainerEdits, QualifiedName};
use serde::Serialize;

use super::list::DefinitionShown;
use super::{Directories, edit_lines};
use crate::Outcome;
use crate::output::{self, Output, table};

pub(super) fn run(
    name: &QualifiedName,
    directories: &Directories,
    output: Output,
) -> anyhow::Result<Outcome> {
    let registry = directories.open()?;
    let edits = match registry.resolve([name.as_str()]) {
        Ok(edits) => edits,
        Err(unresolvable) => {
            output::warn(&format!("error: {unresolvable}"));
            output::warn(&directories.hint());
            return Ok(Outcome::Bad);
        }
    };
    // Resolving succeeded, so the device exists.
    let Some(definition) = registry.get(name) else {
        return Ok(Outcome::Bad);
    };
    let shown = Shown {
        name: name.to_string(),
        vendor: name.vendor().to_owned(),
        class: name.class().to_owned(),
        file: definition.file.path.display().to_string(),
        cdi_version: definition.file.spec.version.clone(),
        annotations: definition.device.annotations.clone(),
        definitions: registry
            .definitions_of(name)
            .map(|each| DefinitionShown::of(&each))
            .collect(),
        edits,
    };
    output::print(output, &shown, Shown::table)?;
    Ok(Outcome::Fine)
}

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    name: String,
    vendor: String,
    class: String,
    file: String,
    cdi_version: String,
    annotations: BTreeMap<String, String>,
    /// All files that define the device, including the one that is used.
    definitions: Vec<DefinitionShown>,
    /// Edits for the container: those of the spec as a whole, then those of the device.
    edits: ContainerEdits,
}

impl Shown {
    fn table(&self) -> String {
        let mut text = format!(
            "Name:     {}\nVendor:   {}\nClass:    {}\nFile:     {}\nVersion:  {}\n",
            output::line(&self.name),
            output::line(&self.vendor),
            output::line(&self.class),
            output::line(&self.file),
            output::line(&self.cdi_version),
        );
        for other in self.definitions.iter().filter(|definition| !definition.usable) {
            text.push_str(&format!(
                "Also in:  {} ({})\n",
                output::line(&other.file),
                output::line(&other.state)
            ));
        }
        let annotations = self.annotations.iter();
        let mut rows: Vec<[String; 2]> = annotations
            .map(|(key, value)| ["annotation".to_owned(), format!("{key}={value}")])
            .collect();
        rows.extend(edit_lines(&self.edits));
        text.push_str(&format!("\n{}", table(["EDIT", "VALUE"], rows)));
        text
    }
}
