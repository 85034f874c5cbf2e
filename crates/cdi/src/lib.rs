//! Container Device Interface: names, annotations, spec files, and edits to OCI runtime specs.
//!
//! A CDI *spec* is a JSON or YAML file in `/etc/cdi` or `/var/run/cdi`. It lists the changes that a container
//! needs to use a device. This crate reads, validates and writes such files, finds devices by their qualified
//! names, and applies the changes to an OCI runtime spec. It follows version 1.1.1 of the reference
//! implementation in Go.
//!
//! ```
//! use devlet_cdi::{ContainerEdits, Device, Registry, Spec};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let directory = directory.path();
//! let spec = Spec {
//!     kind: "vendor.com/widget".into(),
//!     devices: vec![Device {
//!         name: "w0".into(),
//!         container_edits: ContainerEdits { env: vec!["WIDGET=0".into()], ..Default::default() },
//!         ..Default::default()
//!     }],
//!     ..Default::default()
//! };
//! let path = spec.write(directory, &spec.file_name()?)?;
//! assert_eq!(path, directory.join("vendor.com-widget.yaml"));
//!
//! let registry = Registry::load([directory]);
//! let mut oci = serde_json::json!({ "ociVersion": "1.2.0", "process": { "env": ["PATH=/bin"] } });
//! registry.inject(&mut oci, ["vendor.com/widget=w0"])?;
//! assert_eq!(oci["process"]["env"], serde_json::json!(["PATH=/bin", "WIDGET=0"]));
//! # Ok(())
//! # }
//! ```
//!
//! Deliberately absent: a process-wide registry, watching of directories, logging, async.
#![warn(missing_docs)]

pub mod annotations;
mod field;
mod file;
mod host;
mod inject;
mod name;
mod oci;
mod parse;
mod registry;
mod spec;
mod validate;
mod version;
mod write;

pub use file::{ReadError, SpecFile};
pub use host::{HostNode, LookupError, NodeType};
pub use inject::{InjectError, Reason, Unresolvable, Unresolved};
pub use name::{InvalidName, Part, QualifiedName};
pub use oci::ApplyError;
pub use parse::{MAX_SPEC_BYTES, ParseError};
pub use registry::{DEFAULT_DIRECTORIES, Definition, DefinitionState, Problem, Registry};
pub use spec::{ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec};
pub use validate::{InvalidAnnotations, InvalidEdits, InvalidSpec, Place, Warning};
pub use version::{UnknownVersion, Version};
pub use write::{InvalidFileName, RemoveError, WriteError};
