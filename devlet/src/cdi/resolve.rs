//! `devlet cdi resolve`

use std::path::Path;

use devlet_cdi::ContainerEdits;

use super::{Directories, edit_lines};
use crate::oci::Edited;
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
    let oci = match Edited::new(&bytes, &edits.into()) {
        Ok(oci) => oci,
        Err(error) => {
            error.tell(path);
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

fn edits_table(edits: &ContainerEdits) -> String {
    table(["EDIT", "VALUE"], edit_lines(edits))
}
