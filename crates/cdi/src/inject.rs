//! Resolves device names to their edits, and applies these to an OCI runtime spec.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::host::{HostNode, LookupError};
use crate::name::{InvalidName, QualifiedName};
use crate::oci::ApplyError;
use crate::registry::{DefinitionState, Problem, Registry, list_paths};
use crate::spec::ContainerEdits;

/// Why a name could not be resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// It is not a qualified name.
    #[error(transparent)]
    Name(InvalidName),
    /// No file defines it.
    #[error("no such device{}", unreadable_hint(.unreadable))]
    Unknown {
        /// Files and directories that could not be read: they may define the device.
        unreadable: Vec<PathBuf>,
    },
    /// Files of the same priority define it.
    #[error("defined in {}", list_paths(.paths))]
    Conflicting {
        /// The files, two or more, in order.
        paths: Vec<PathBuf>,
    },
    /// The only file that defines it is invalid.
    #[error("defined in {}, which is broken: {message}", .path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// Why the file is invalid.
        message: String,
    },
}

fn unreadable_hint(paths: &[PathBuf]) -> String {
    if paths.is_empty() {
        String::new()
    } else {
        format!(", but {} cannot be read", list_paths(paths))
    }
}

/// A name that could not be resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unresolved {
    /// The name as given.
    pub name: String,
    /// Why it could not be resolved.
    pub reason: Reason,
}

/// All names of one request that could not be resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unresolvable {
    /// In the order of the request; at least one.
    pub names: Vec<Unresolved>,
}

impl fmt::Display for Unresolvable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unresolvable CDI devices: ")?;
        for (place, Unresolved { name, reason }) in self.names.iter().enumerate() {
            let separator = if place == 0 { "" } else { "; " };
            write!(f, "{separator}{name} ({reason})")?;
        }
        Ok(())
    }
}

impl std::error::Error for Unresolvable {}

/// Why devices could not be injected.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// Some names could not be resolved.
    #[error(transparent)]
    Unresolvable(#[from] Unresolvable),
    /// The edits cannot be applied.
    #[error(transparent)]
    Apply(#[from] ApplyError),
}

impl Registry {
    /// Merges the edits of the named devices, in the order of the names.
    ///
    /// The edits of the whole spec are merged once, before those of the first of its devices. A repeated device is
    /// merged once.
    pub fn resolve<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<ContainerEdits, Unresolvable> {
        let mut edits = ContainerEdits::default();
        let mut seen_devices = BTreeSet::new();
        let mut seen_files: BTreeSet<(usize, &Path)> = BTreeSet::new();
        let mut unresolved = Vec::new();
        for name in names {
            let name = name.as_ref();
            let qualified: QualifiedName = match name.parse() {
                Ok(qualified) => qualified,
                Err(error) => {
                    unresolved.push(Unresolved {
                        name: name.to_owned(),
                        reason: Reason::Name(error),
                    });
                    continue;
                }
            };
            let Some(definition) = self.get(&qualified) else {
                unresolved.push(Unresolved {
                    name: name.to_owned(),
                    reason: self.unresolved_reason(&qualified),
                });
                continue;
            };
            let file = definition.file;
            if seen_files.insert((file.priority, &file.path)) {
                edits.append(&file.spec.container_edits);
            }
            if seen_devices.insert(qualified) {
                edits.append(&definition.device.container_edits);
            }
        }
        if unresolved.is_empty() {
            Ok(edits)
        } else {
            Err(Unresolvable { names: unresolved })
        }
    }

    /// Applies the edits of the named devices to an OCI runtime spec. On any error the spec stays unchanged.
    pub fn inject<N: AsRef<str>>(
        &self,
        oci: &mut Value,
        names: impl IntoIterator<Item = N>,
    ) -> Result<(), InjectError> {
        self.inject_with(oci, names, HostNode::lookup)
    }

    /// Like [`Registry::inject`], with another source of host device nodes.
    pub fn inject_with<N: AsRef<str>>(
        &self,
        oci: &mut Value,
        names: impl IntoIterator<Item = N>,
        lookup: impl Fn(&Path) -> Result<HostNode, LookupError>,
    ) -> Result<(), InjectError> {
        Ok(self.resolve(names)?.apply_with(oci, lookup)?)
    }

    fn unresolved_reason(&self, name: &QualifiedName) -> Reason {
        let conflict = self
            .definitions_of(name)
            .find_map(|definition| match definition.state {
                DefinitionState::Conflicting { paths } => Some(Reason::Conflicting { paths }),
                _ => None,
            });
        let unknown = || Reason::Unknown {
            unreadable: self.unreadable(),
        };
        conflict.or_else(|| self.broken_by(name)).unwrap_or_else(unknown)
    }

    fn broken_by(&self, name: &QualifiedName) -> Option<Reason> {
        match self.broken_file_with(name)? {
            Problem::File { path, source, .. } => Some(Reason::Broken {
                path: path.clone(),
                message: source.to_string(),
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
