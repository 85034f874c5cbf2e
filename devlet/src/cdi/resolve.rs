//! `devlet cdi resolve`: the changes of devices to a container, or to an OCI runtime spec.

use std::path::Path;

use devlet_cdi::{ContainerEdits, QualifiedName};

use super::{Directories, edit_lines};
use crate::oci::Edited;
use crate::output::{self, Output, table};
use crate::{Outcome, files};

pub(super) fn run(
    names: &[QualifiedName],
    oci_spec: Option<&Path>,
    directories: &Directories,
    output: Output,
) -> anyhow::Result<Outcome> {
    let oci = match oci_spec {
        Some(path) => Some((path, files::read(path)?)),
        None => None,
    };
    let registry = directories.open()?;
    let edits = match registry.resolve(names.iter().map(QualifiedName::as_str)) {
        Ok(edits) => edits,
        Err(unresolvable) => {
            output::warn(&format!("error: {unresolvable}"));
            output::warn(&directories.hint());
            return Ok(Outcome::Bad);
        }
    };
    let Some((path, bytes)) = oci else {
        output::print(output, &edits, edits_table)?;
        return Ok(Outcome::Fine);
    };
    let oci = match Edited::new(&bytes, &edits.into()) {
        Ok(oci) => oci,
        Err(error) => {
            error.print(path);
            return Ok(Outcome::Bad);
        }
    };
    // A runtime spec is JSON: there is no table of it.
    let text = if output == Output::Yaml {
        oci.to_yaml()?
    } else {
        oci.to_json()?
    };
    output::print_text(text)?;
    Ok(Outcome::Fine)
}

fn edits_table(edits: &ContainerEdits) -> String {
    table(["EDIT", "VALUE"], edit_lines(edits))
}
