//! `devlet checkpoint convert`

use std::path::Path;

use anyhow::bail;
use devlet_kubelet_files::convert::ConvertError;
use devlet_kubelet_files::{Format, convert, read};

use super::{RoleArg, Target, name_of};
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
    let bytes = files::read(path)?;
    let converted = match read(&bytes, role.of(path)) {
        Ok(file) => convert(file),
        Err(error) => {
            refuse(path, &error.to_string());
            return Ok(Outcome::Bad);
        }
    };
    let converted = match converted {
        Ok(converted) => converted,
        Err(error @ ConvertError::Corrupted(_)) => {
            refuse(path, &error.to_string());
            return Ok(Outcome::Bad);
        }
        Err(error @ ConvertError::OnlyOneFormat) => bail!("{}: {error}", name_of(path)),
    };
    let wanted = match to {
        None => converted.format,
        Some(Target::DevicePluginV2) => Format::DevicePluginV2,
        Some(Target::DraEnvelopeV1) => Format::DraEnvelopeV1,
    };
    if wanted != converted.format {
        bail!(
            "{} cannot become {wanted}: its newest format is {}",
            name_of(path),
            converted.format
        );
    }
    for remark in &converted.remarks {
        output::warn(&format!("note: {remark}"));
    }
    if in_place {
        let backup = files::back_up(path, &bytes)?;
        files::write_atomically(path, converted.text.as_bytes())?;
        output::warn(&format!("note: the old file is kept as {}", backup.display()));
    } else if let Some(out) = out {
        files::write_atomically(out, converted.text.as_bytes())?;
    } else {
        output::out(&converted.text)?;
    }
    Ok(Outcome::Fine)
}

fn refuse(path: &Path, problem: &str) {
    output::warn(&format!("error: {}: {problem}", name_of(path)));
    output::warn("hint: devlet checkpoint repair saves what is sound");
}
