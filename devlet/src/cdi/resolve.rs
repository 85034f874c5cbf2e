//! `devlet cdi resolve`

use std::path::Path;

use devlet_cdi::ContainerEdits;
use serde_json::Value;

use super::{Directories, edit_lines};
use crate::output::{self, Output, table};
use crate::{Outcome, files};

pub(super) fn run(
    names: &[String],
    oci_spec: Option<&Path>,
    directories: &Directories,
    output: Output,
) -> anyhow::Result<Outcome> {
    let registry = directories.load();
    let Some(path) = oci_spec else {
        return match registry.resolve(names) {
            Ok(edits) => {
                output::print(output, &edits, edits_table)?;
                Ok(Outcome::Fine)
            }
            Err(unresolvable) => Ok(refuse(&unresolvable)),
        };
    };
    let bytes = files::read(path)?;
    let mut oci: Value = match serde_json::from_slice(&bytes) {
        Ok(value) => value,
        Err(error) => {
            output::warn(&format!(
                "error: {}: not an OCI runtime spec: {error}",
                path.display()
            ));
            return Ok(Outcome::Bad);
        }
    };
    if let Err(error) = registry.inject(&mut oci, names) {
        return Ok(refuse(&error));
    }
    // A runtime spec is JSON, so that is what a table of it is.
    let output = if output == Output::Yaml {
        Output::Yaml
    } else {
        Output::Json
    };
    output::print(output, &oci, |_| String::new())?;
    Ok(Outcome::Fine)
}

fn refuse(error: &dyn std::error::Error) -> Outcome {
    output::warn(&format!("error: {error}"));
    output::warn("hint: devlet cdi list shows what there is");
    Outcome::Bad
}

fn edits_table(edits: &ContainerEdits) -> String {
    table(["EDIT", "VALUE"], edit_lines(edits))
}
