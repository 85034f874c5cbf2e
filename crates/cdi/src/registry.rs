//! All specs of a list of directories, and which spec has the say about a device.
//!
//! A directory's place in the list is its priority. A device that several files define is taken from the file
//! of the highest priority; the others are shadowed. If two files of the same directory define it, nobody can
//! say which is meant, and the device is unusable, even if a directory of higher priority defines it too.
//! Runtimes decide the same way.
//!
//! A broken file or an unreadable directory is a [`Problem`] beside the good files, never instead of them.
//! A registry is a snapshot: there is no watching and no global registry.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::file::{Broken, ReadError, SpecFile, is_spec_name};
use crate::name::QualifiedName;
use crate::spec::Device;

/// The directories that runtimes look into: for specs of the administrator, and for generated ones, which win.
pub const DEFAULT_DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Something that hides devices.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The directory's files are not known. One that does not exist is no problem.
    #[error("{}: {source}", .directory.display())]
    Directory {
        /// The directory as given.
        directory: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file's devices cannot be used.
    #[error("{}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The place of its directory in the list of directories.
        priority: usize,
        /// What is wrong with it.
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
    /// Whether the problem is one of this file or directory.
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

/// Whether a definition of a device is the one that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// This is what a container gets.
    Usable,
    /// A file of higher priority defines the device too.
    Shadowed {
        /// The file that counts instead.
        by: PathBuf,
    },
    /// Files of the same priority define the device, which makes it unusable.
    Conflicting {
        /// All files that take part, two or more, in order.
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
    /// The file that it is in.
    pub file: &'r SpecFile,
    /// Whether this definition counts.
    pub standing: Standing,
}

/// The specs of a list of directories, as they were when it was loaded.
#[derive(Debug, Default)]
pub struct Registry {
    directories: Vec<PathBuf>,
    files: Vec<SpecFile>,
    problems: Vec<Problem>,
    /// Broken files, as places in `problems`, with the names of their devices if they could be seen.
    broken: Vec<(usize, Option<Vec<String>>)>,
    index: BTreeMap<QualifiedName, Entry>,
}

/// Where a device is defined: file and place in its list of devices, in the order of loading.
#[derive(Debug, Default)]
struct Entry {
    places: Vec<(usize, usize)>,
    /// All files that share the device with another one of the same priority.
    conflict: Vec<PathBuf>,
}

impl Registry {
    /// Loads all spec files of the directories, the last of which has the highest priority.
    ///
    /// Spec files are those whose names end in `.json` or `.yaml`. Directories within are not entered.
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

    /// The directories, from the lowest priority to the highest.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// All good files, by priority and then by name, with their warnings.
    pub fn files(&self) -> &[SpecFile] {
        &self.files
    }

    /// All that hides devices: first directories and files, by priority and then by name, then conflicts.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// All definitions of all devices, by name and then by priority.
    pub fn definitions(&self) -> impl Iterator<Item = Definition<'_>> {
        self.index
            .iter()
            .flat_map(|(name, entry)| self.definitions_in(name, entry))
    }

    /// All definitions of one device, by priority. None if no good file defines it.
    pub fn definitions_of(&self, name: &QualifiedName) -> impl Iterator<Item = Definition<'_>> {
        let entry = self.index.get_key_value(name);
        entry
            .into_iter()
            .flat_map(|(name, entry)| self.definitions_in(name, entry))
    }

    /// The definition of a device that a container gets.
    pub fn get(&self, name: &QualifiedName) -> Option<Definition<'_>> {
        self.definitions_of(name)
            .find(|definition| definition.standing == Standing::Usable)
    }

    /// The vendors of all good files, each once, in order.
    pub fn vendors(&self) -> Vec<&str> {
        sorted(self.files.iter().filter_map(|file| file.spec.vendor().ok()))
    }

    /// The classes of all good files, each once, in order.
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
            let standing = if !entry.conflict.is_empty() {
                Standing::Conflicting {
                    paths: entry.conflict.clone(),
                }
            } else if winner.priority == file.priority {
                Standing::Usable
            } else {
                Standing::Shadowed {
                    by: winner.path.clone(),
                }
            };
            Some(Definition {
                name: name.clone(),
                device,
                file,
                standing,
            })
        })
    }

    /// The broken file that would define a device if it were good.
    pub(crate) fn broken_file_with(&self, name: &QualifiedName) -> Option<&Problem> {
        let has = |names: &Vec<String>| names.iter().any(|other| other == name.as_str());
        let (problem, _) = self
            .broken
            .iter()
            .find(|(_, names)| names.as_ref().is_some_and(has))?;
        self.problems.get(*problem)
    }

    /// The files and directories that may define any device at all.
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
