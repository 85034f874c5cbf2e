//! `devlet checkpoint verify`: a verdict on each state file.

use std::path::{Path, PathBuf};

use devlet_kubelet_files::verify;
use serde::Serialize;

use super::RoleArg;
use crate::files::name_of;
use crate::output::{self, Output};
use crate::{Outcome, files};

pub(super) fn run(paths: &[PathBuf], role: &RoleArg, output: Output) -> anyhow::Result<Outcome> {
    // A path that cannot be read does not stop the check of the others.
    let mut unreadable = None;
    let mut results = Vec::new();
    for path in paths {
        match files::read(path) {
            Ok(bytes) => results.push(Verdict::of(path, &bytes, role)),
            Err(error) => {
                if let Some(earlier) = unreadable.replace(error) {
                    output::print_error(&earlier);
                }
            }
        }
    }
    output::print_lines(output, &results, Verdict::line)?;
    if let Some(error) = unreadable {
        return Err(error);
    }
    let fine = results.iter().all(|result| result.loads);
    Ok(if fine { Outcome::Fine } else { Outcome::Bad })
}

/// Output of `-o json` for each file. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Verdict {
    file: String,
    format: Option<&'static str>,
    /// `true` if a kubelet of 1.37 loads everything that the document contains.
    loads: bool,
    problems: Vec<String>,
    warnings: Vec<String>,
    loaded_by_older: Option<&'static str>,
}

impl Verdict {
    fn of(path: &Path, bytes: &[u8], role: &RoleArg) -> Self {
        let verdict = verify(bytes, role.of(path));
        Self {
            file: name_of(path),
            format: verdict.format.map(|format| format.name()),
            loads: verdict.is_fine(),
            problems: verdict.problems.iter().map(ToString::to_string).collect(),
            warnings: verdict.warnings,
            loaded_by_older: verdict.loaded_by_older,
        }
    }

    fn line(&self) -> String {
        let format = self.format.unwrap_or("cannot be decoded");
        let mut line = format!(
            "{}: {} ({format})",
            self.file,
            if self.loads { "ok" } else { "BAD" }
        );
        if !self.problems.is_empty() {
            line.push_str(&format!(": {}", self.problems.join("; ")));
        }
        if !self.loads {
            match self.loaded_by_older {
                Some(releases) => line.push_str(&format!("; kubelets that load it: {releases}")),
                None => line.push_str("; no kubelet loads all of it"),
            }
        }
        if !self.warnings.is_empty() {
            line.push_str(&format!("; warnings: {}", self.warnings.join("; ")));
        }
        output::line(&line).into_owned()
    }
}
