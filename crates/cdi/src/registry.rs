//! All specs of a list of directories, with precedence between them.
//!
//! A directory's index in the list is its priority. If several files define a device, the file of the highest
//! priority takes effect and shadows the others. If two files of the same directory define it, the definition is
//! ambiguous and the device is unusable, even if a directory of higher priority defines it too. Runtimes decide
//! the same way.
//!
//! A broken file or an unreadable directory is reported as a [`Problem`]; the good files are still loaded.
//! A registry is a snapshot. There is no watching and no global registry.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::file::{Broken, ReadError, SpecFile, is_spec_name};
use crate::name::QualifiedName;
use crate::spec::Device;

/// The directories that runtimes read: specs of the administrator, and generated specs, which take precedence.
pub const DEFAULT_DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// A reason why devices are not usable.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The directory cannot be read. A directory that does not exist is not a problem.
    #[error("{}: {source}", .directory.display())]
    Directory {
        /// The directory as given.
        directory: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is invalid, so its devices cannot be used.
    #[error("{}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Index of its directory in the list of directories.
        priority: usize,
        /// Why the file is invalid.
        source: ReadError,
    },
    /// The device cannot be used, because files of the same priority define it.
    #[error("{device} is defined in {}", list_paths(.paths))]
    Conflict {
        /// The device's name.
        device: QualifiedName,
        /// The files, two or more, in order.
        paths: Vec<PathBuf>,
    },
}

impl Problem {
    /// Returns `true` if the problem is about this file or directory.
    pub fn concerns(&self, path: &Path) -> bool {
        match self {
            Self::Directory { directory, .. } => directory == path,
            Self::File { path: file, .. } => file == path,
            Self::Conflict { paths, .. } => paths.iter().any(|file| file == path),
        }
    }
}

pub(crate) fn list_paths(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(" and ")
}

/// State of a definition of a device: it takes effect, or a reason why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DefinitionState {
    /// The definition takes effect.
    Usable,
    /// A file of higher priority defines the device too.
    Shadowed {
        /// The file that takes effect instead.
        by: PathBuf,
    },
    /// Files of the same priority define the device, which makes it unusable.
    Conflicting {
        /// All conflicting files, two or more, in order.
        paths: Vec<PathBuf>,
    },
}

/// One definition of a device in one file.
#[derive(Debug, Clone)]
pub struct Definition<'r> {
    /// The device's name.
    pub name: QualifiedName,
    /// The device itself.
    pub device: &'r Device,
    /// The file with the definition.
    pub file: &'r SpecFile,
    /// `Usable` if this definition takes effect.
    pub state: DefinitionState,
}

/// The specs of a list of directories at the time of loading.
#[derive(Debug, Default)]
pub struct Registry {
    directories: Vec<PathBuf>,
    files: Vec<SpecFile>,
    problems: Vec<Problem>,
    /// Broken files as indexes into `problems`, with the names of their devices as far as they could be read.
    broken: Vec<(usize, Option<Vec<String>>)>,
    index: BTreeMap<QualifiedName, Entry>,
}

/// A definition of a device: file, and index in its list of devices, in the order of loading.
#[derive(Debug, Default)]
struct Entry {
    places: Vec<(usize, usize)>,
    /// All files of the same priority that define the device.
    conflict: Vec<PathBuf>,
}

impl Registry {
    /// Loads all spec files of the directories. The last directory has the highest priority.
    ///
    /// Spec files have names that end in `.json` or `.yaml`. Subdirectories are not read.
    pub fn load<P: AsRef<Path>>(directories: impl IntoIterator<Item = P>) -> Self {
        let mut registry = Self::default();
        for (priority, directory) in directories.into_iter().enumerate() {
            let directory = directory.as_ref();
            registry.directories.push(directory.to_owned());
            match spec_paths(directory) {
                Ok(paths) => paths.into_iter().for_each(|path| registry.add(path, priority)),
                Err(source) if source.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    let directory = directory.to_owned();
                    registry.problems.push(Problem::Directory { directory, source });
                }
            }
        }
        registry.find_conflicts();
        registry
    }

    fn add(&mut self, path: PathBuf, priority: usize) {
        match SpecFile::load(&path, priority) {
            Ok(file) => {
                for (place, device) in file.spec.devices.iter().enumerate() {
                    if let Ok(name) = file.spec.qualify(device) {
                        self.index
                            .entry(name)
                            .or_default()
                            .places
                            .push((self.files.len(), place));
                    }
                }
                self.files.push(file);
            }
            Err(Broken { error, names }) => {
                self.broken.push((self.problems.len(), names));
                self.problems.push(Problem::File {
                    path,
                    priority,
                    source: error,
                });
            }
        }
    }

    fn find_conflicts(&mut self) {
        for (device, entry) in &mut self.index {
            let priority = |&(file, _): &(usize, usize)| self.files.get(file).map(|file| file.priority);
            let by_priority = entry.places.chunk_by(|a, b| priority(a) == priority(b));
            for same in by_priority.filter(|same| same.len() > 1) {
                let files = same.iter().filter_map(|&(file, _)| self.files.get(file));
                let paths: Vec<_> = files.map(|file| file.path.clone()).collect();
                entry.conflict.extend_from_slice(&paths);
                self.problems.push(Problem::Conflict {
                    device: device.clone(),
                    paths,
                });
            }
        }
    }

    /// Returns the directories, from the lowest priority to the highest.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// Returns all valid files, by priority and then by name, with their warnings.
    pub fn files(&self) -> &[SpecFile] {
        &self.files
    }

    /// Returns all problems: first directories and files, by priority and then by name, then conflicts.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Returns all definitions of all devices, by name and then by priority.
    pub fn definitions(&self) -> impl Iterator<Item = Definition<'_>> {
        self.index
            .iter()
            .flat_map(|(name, entry)| self.definitions_in(name, entry))
    }

    /// Returns all definitions of one device in valid files, by priority.
    pub fn definitions_of(&self, name: &QualifiedName) -> impl Iterator<Item = Definition<'_>> {
        let entry = self.index.get_key_value(name);
        entry
            .into_iter()
            .flat_map(|(name, entry)| self.definitions_in(name, entry))
    }

    /// Returns the definition of a device that takes effect.
    pub fn get(&self, name: &QualifiedName) -> Option<Definition<'_>> {
        self.definitions_of(name)
            .find(|definition| definition.state == DefinitionState::Usable)
    }

    /// Returns the vendors of all valid files, each once, in order.
    pub fn vendors(&self) -> Vec<&str> {
        sorted(self.files.iter().filter_map(|file| file.spec.vendor().ok()))
    }

    /// Returns the classes of all valid files, each once, in order.
    pub fn classes(&self) -> Vec<&str> {
        sorted(self.files.iter().filter_map(|file| file.spec.class().ok()))
    }

    fn definitions_in<'r>(
        &'r self,
        name: &'r QualifiedName,
        entry: &'r Entry,
    ) -> impl Iterator<Item = Definition<'r>> {
        let last = entry.places.last().and_then(|&(file, _)| self.files.get(file));
        entry.places.iter().filter_map(move |&(file, place)| {
            let file = self.files.get(file)?;
            let device = file.spec.devices.get(place)?;
            let winner = last?;
            let state = if !entry.conflict.is_empty() {
                DefinitionState::Conflicting {
                    paths: entry.conflict.clone(),
                }
            } else if winner.priority == file.priority {
                DefinitionState::Usable
            } else {
                DefinitionState::Shadowed {
                    by: winner.path.clone(),
                }
            };
            Some(Definition {
                name: name.clone(),
                device,
                file,
                state,
            })
        })
    }

    /// Returns the broken file that would define a device if it were valid.
    pub(crate) fn broken_file_with(&self, name: &QualifiedName) -> Option<&Problem> {
        let has = |names: &Vec<String>| names.iter().any(|other| other == name.as_str());
        let (problem, _) = self
            .broken
            .iter()
            .find(|(_, names)| names.as_ref().is_some_and(has))?;
        self.problems.get(*problem)
    }

    /// Returns the unreadable files and directories: they may define any device.
    pub(crate) fn unreadable(&self) -> Vec<PathBuf> {
        let hidden = |at: usize| {
            self.broken
                .iter()
                .any(|(problem, names)| *problem == at && names.is_none())
        };
        let paths = self
            .problems
            .iter()
            .enumerate()
            .filter_map(|(at, problem)| match problem {
                Problem::Directory { directory, .. } => Some(directory.clone()),
                Problem::File { path, .. } if hidden(at) => Some(path.clone()),
                _ => None,
            });
        paths.collect()
    }
}

fn sorted<'t>(texts: impl Iterator<Item = &'t str>) -> Vec<&'t str> {
    let mut texts: Vec<_> = texts.collect();
    texts.sort_unstable();
    texts.dedup();
    texts
}

fn spec_paths(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if is_spec_name(&entry.file_name()) && !entry.file_type()?.is_dir() {
            paths.push(entry.path());
        }
    }
    paths.sort_unstable();
    Ok(paths)
}

#[cfg(test)]
mod tests;
