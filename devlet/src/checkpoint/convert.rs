//! `devlet checkpoint convert`: a state file in the newest format.

use std::path::Path;

use anyhow::bail;
use devlet_kubelet_files::convert::ConvertError;
use devlet_kubelet_files::{Format, convert, read, verify};

use super::{RoleArg, Target};
use crate::files::{Destination, name_of};
use crate::{Outcome, files, output};

pub(super) fn run(
    path: &Path,
    to: Option<Target>,
    out: Option<&Path>,
    in_place: bool,
    role: &RoleArg,
) -> anyhow::Result<Outcome> {
    if in_place && path == Path::new("-") {
        bail!("--in-place needs a file, not standard input");
    }
    let out = match out {
        Some(out) => Some(Destination::beside(
            path,
            out,
            "--in-place replaces it and keeps a backup",
        )?),
        None => None,
    };
    let bytes = files::read(path)?;
    let converted = match read(&bytes, role.of(path)) {
        Ok(file) => {
            for warning in file.warnings.lines() {
                output::warn(&format!("warning: {warning}"));
            }
            convert(file)
        }
        Err(error) => {
            refuse(path, &error.to_string());
            return Ok(Outcome::Bad);
        }
    };
    let converted = match converted {
        Ok(converted) => converted,
        Err(error @ ConvertError::OnlyOneFormat) => bail!("{}: {error}", name_of(path)),
        Err(error) => {
            refuse(path, &error.to_string());
            return Ok(Outcome::Bad);
        }
    };
    let wanted = match to {
        None => converted.format,
        Some(Target::DevicePluginV2) => Format::DevicePluginV2,
        Some(Target::DraEnvelopeV1) => Format::DraEnvelopeV1,
    };
    if wanted != converted.format {
        bail!(
            "{} cannot be converted to {wanted}: its newest format is {}",
            name_of(path),
            converted.format
        );
    }
    for remark in &converted.remarks {
        output::warn(&format!("note: {remark}"));
    }
    // Problems of the old file are problems of the new one, too.
    for problem in verify(converted.text.as_bytes(), None).problems {
        output::warn(&format!("warning: in the new file, {problem}"));
    }
    if in_place {
        let backup = files::replace(path, &bytes, converted.text.as_bytes())?;
        output::warn(&format!("note: the old file is kept as {}", backup.display()));
    } else if let Some(out) = out {
        out.write(converted.text.as_bytes())?;
    } else if let Err(error) = output::out(&converted.text) {
        // A partial file is useless: a closed pipe is an error here.
        bail!("{error:#}");
    }
    Ok(Outcome::Fine)
}

fn refuse(path: &Path, problem: &str) {
    output::warn(&format!("error: {}: {problem}", name_of(path)));
    output::warn("hint: devlet checkpoint repair saves the intact parts");
}
