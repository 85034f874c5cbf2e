//! The kubelet's on-disk device state, every version of it.
//!
//! A kubelet keeps three files: the holder of each device (`kubelet_internal_checkpoint`), prepared DRA claims
//! (`dra_manager_state`), and the health of DRA devices (`dra_health_state`). This crate reads all formats that
//! releases from 1.8 on have written. It accepts and rejects the same input as the kubelet's own decoder. It
//! writes the newest formats byte for byte as a kubelet does.
//!
//! - [`read`] detects the format of a file and decodes it; [`device_plugin`] and [`dra`] hold the formats.
//! - [`verify()`] reports how a kubelet would load a file, [`convert()`] rewrites it in the newest format, and
//!   [`salvage()`] extracts the sound parts of a damaged file.
//!
//! The crate does not access the file system and does not panic on any input. Memory stays within a small
//! multiple of the input (`tests/memory.rs`).

pub mod convert;
pub mod device_plugin;
pub mod dra;
mod file;
mod format;
mod go_json;
mod go_print;
mod kind;
mod loose;
mod position;
pub mod salvage;
pub mod verify;

pub use convert::convert;
pub use file::{Checksum, ChecksumMismatch, File, ReadError, UnknownKind, Warning, WarningKind, Warnings};
pub use format::{Format, UnknownFormat};
pub use kind::Role;
pub use position::Position;
pub use salvage::salvage;
pub use verify::verify;

use kind::FileKind;

/// The content of any of the files.
#[derive(Debug, Clone, PartialEq)]
pub enum Document {
    /// A `kubelet_internal_checkpoint`.
    DevicePlugin(device_plugin::Checkpoint),
    /// A `dra_manager_state` of 1.27 to 1.30.
    DraFlat(dra::flat::Checkpoint),
    /// A `dra_manager_state` of 1.31 or later.
    DraEnvelope(dra::envelope::Checkpoint),
    /// A `dra_health_state`.
    DraHealth(dra::health::HealthState),
}

/// Reads a file of any kind and version. `role` follows from the file's name, see [`Role::of_file_name`]. It
/// decides only for documents that could be more than one file, such as `{}`.
pub fn read(bytes: &[u8], role: Option<Role>) -> Result<File<Document>, ReadError> {
    Ok(match kind::of(bytes, role)? {
        FileKind::DevicePluginV0 => device_plugin::v0::read(bytes)?.map(Document::DevicePlugin),
        FileKind::DevicePlugin => device_plugin::read(bytes)?.map(Document::DevicePlugin),
        FileKind::DraFlat => dra::flat::read(bytes)?.map(Document::DraFlat),
        FileKind::DraEnvelope => dra::envelope::read(bytes)?.map(Document::DraEnvelope),
        FileKind::DraHealth => dra::health::read(bytes)?.map(Document::DraHealth),
    })
}
