//! `devlet cdi resolve`

use std::path::Path;

use devlet_cdi::{ApplyError, ContainerEdits};

use super::oci::{EditError, Edited};
use super::{Directories, edit_lines};
use crate::files::name_of;
use crate::output::{self, Output, table};
use crate::{Outcome, files};

pub(super) fn run(
    names: &[String],
    oci_spec: Option<&Path>,
    directories: &Directories,
    output: Output,
) -> anyhow::Result<Outcome> {
    let registry = directories.open()?;
    let edits = match registry.resolve(names) {
        Ok(edits) => edits,
        Err(unresolvable) => {
            output::warn(&format!("error: {unresolvable}"));
            output::warn(&directories.hint());
            return Ok(Outcome::Bad);
        }
    };
    let Some(path) = oci_spec else {
        output::print(output, &edits, edits_table)?;
        return Ok(Outcome::Fine);
    };
    let bytes = files::read(path)?;
    let oci = match Edited::new(&bytes, &edits) {
        Ok(oci) => oci,
        Err(error) => {
            refuse(path, &error);
            return Ok(Outcome::Bad);
        }
    };
    // A runtime spec is JSON, so that is what a table of it is.
    let text = if output == Output::Yaml {
        oci.to_yaml()?
    } else {
        oci.to_json()?
    };
    output::print_text(text)?;
    Ok(Outcome::Fine)
}

fn refuse(path: &Path, error: &EditError) {
    match error {
        EditError::Apply(ApplyError::HostDevice { .. } | ApplyError::NodeType { .. }) => {
            output::warn(&format!("error: {error}"));
            output::warn(
                "hint: device nodes whose type or numbers a spec leaves out are looked up on this host",
            );
        }
        EditError::Apply(ApplyError::HookName { .. }) => output::warn(&format!("error: {error}")),
        EditError::Apply(ApplyError::OciSpec { .. }) | EditError::Json(_) | EditError::TooDeep => {
            output::warn(&format!("error: {}: {error}", name_of(path)));
            output::warn("hint: --oci-spec takes the config.json of an OCI bundle");
        }
    }
}

fn edits_table(edits: &ContainerEdits) -> String {
    table(["EDIT", "VALUE"], edit_lines(edits))
}
