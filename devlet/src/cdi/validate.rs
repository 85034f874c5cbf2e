//! `devlet cdi validate`: a verdict on each spec file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use devlet_cdi::{Problem, QualifiedName, ReadError, Spec, SpecFile};
use serde::Serialize;

use super::Directories;
use crate::Outcome;
use crate::output::{self, Output};

pub(super) fn run(paths: &[PathBuf], directories: &Directories, output: Output) -> anyhow::Result<Outcome> {
    let mut unreadable = None;
    let mut results = Vec::new();
    if paths.is_empty() {
        let registry = directories.open()?;
        results.extend(registry.files().iter().map(Verdict::valid));
        for problem in registry.problems() {
            match problem {
                Problem::File { path, source, .. } => results.push(Verdict::invalid(path, source)),
                Problem::Directory { directory, source } => {
                    results.push(Verdict::unreadable(directory, source));
                }
                Problem::Conflict { device, paths } => add_conflict(&mut results, device, paths),
            }
        }
        results.sort_by(|one, other| one.file.cmp(&other.file));
        if results.is_empty() && matches!(output, Output::Table | Output::Wide) {
            output::warn("there are no spec files");
        }
    }
    let mut definitions: BTreeMap<QualifiedName, Vec<PathBuf>> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for path in paths {
        match SpecFile::read(path) {
            Ok(file) => {
                results.push(Verdict::valid(&file));
                // A file that is named twice does not conflict with itself.
                if seen.insert(path.canonicalize().unwrap_or_else(|_| path.clone())) {
                    let names = file
                        .spec
                        .devices
                        .iter()
                        .flat_map(|device| file.spec.qualify(device));
                    names.for_each(|name| definitions.entry(name).or_default().push(path.clone()));
                }
            }
            Err(error @ (ReadError::Io(_) | ReadError::NotAFile)) => {
                let error = anyhow::anyhow!("cannot read {}: {error}", path.display());
                if let Some(earlier) = unreadable.replace(error) {
                    output::print_error(&earlier);
                }
            }
            Err(error) => results.push(Verdict::invalid(path, &error)),
        }
    }
    for (device, paths) in definitions.iter().filter(|(_, paths)| paths.len() > 1) {
        add_conflict(&mut results, device, paths);
    }
    output::print_lines(output, &results, Verdict::line)?;
    if let Some(error) = unreadable {
        return Err(error);
    }
    let fine = results.iter().all(|result| result.problems.is_empty());
    Ok(if fine { Outcome::Fine } else { Outcome::Bad })
}

/// Adds a problem to each of the files: the others define the device, too.
fn add_conflict(results: &mut [Verdict], device: &QualifiedName, paths: &[PathBuf]) {
    for path in paths {
        let others = paths.iter().filter(|other| *other != path);
        let others: Vec<String> = others.map(|path| path.display().to_string()).collect();
        let text = format!("{device} is also defined in {}", others.join(" and "));
        let file = path.display().to_string();
        if let Some(result) = results.iter_mut().find(|result| result.file == file) {
            result.problems.push(text);
        }
    }
}

/// Output of `-o json` for each file. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Verdict {
    file: String,
    kind: Option<String>,
    cdi_version: Option<String>,
    /// The lowest version that the content needs. More runtimes read lower versions.
    minimum_version: Option<String>,
    devices: usize,
    problems: Vec<String>,
    warnings: Vec<String>,
}

impl Verdict {
    fn valid(file: &SpecFile) -> Self {
        Self {
            warnings: file.warnings.iter().map(ToString::to_string).collect(),
            ..Self::of(&file.path, &file.spec)
        }
    }

    fn of(path: &Path, spec: &Spec) -> Self {
        Self {
            file: path.display().to_string(),
            kind: Some(spec.kind.clone()),
            cdi_version: Some(spec.version.clone()),
            minimum_version: Some(spec.minimum_version().to_string()),
            devices: spec.devices.len(),
            problems: Vec::new(),
            warnings: Vec::new(),
        }
    }

    fn invalid(path: &Path, error: &ReadError) -> Self {
        match error {
            ReadError::Invalid { spec, problem } => Self {
                problems: vec![problem.to_string()],
                ..Self::of(path, spec)
            },
            error => Self::unreadable(path, error),
        }
    }

    fn unreadable(path: &Path, error: &dyn std::error::Error) -> Self {
        Self {
            file: path.display().to_string(),
            kind: None,
            cdi_version: None,
            minimum_version: None,
            devices: 0,
            problems: vec![error.to_string()],
            warnings: Vec::new(),
        }
    }

    fn line(&self) -> String {
        let mut line = format!(
            "{}: {}",
            self.file,
            if self.problems.is_empty() { "ok" } else { "BAD" }
        );
        if let (Some(kind), Some(stated), Some(needed)) =
            (&self.kind, &self.cdi_version, &self.minimum_version)
        {
            let devices = output::count(self.devices, "device");
            line.push_str(&format!(" ({kind}, {devices}, version {stated}, needs {needed})"));
        }
        if !self.problems.is_empty() {
            line.push_str(&format!(": {}", self.problems.join("; ")));
        }
        if !self.warnings.is_empty() {
            line.push_str(&format!("; warnings: {}", self.warnings.join("; ")));
        }
        output::line(&line).into_owned()
    }
}
