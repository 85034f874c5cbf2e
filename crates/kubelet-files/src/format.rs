//! Names of the file formats.

use std::fmt;
use std::str::FromStr;

use crate::kind::Role;

/// A file format that some kubelet writes. A file that is valid in two formats is called
/// [`Format::DevicePluginV2`] or [`Format::DraFlat1_27`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Format {
    /// `kubelet_internal_checkpoint` of 1.8 to 1.10, without checksum.
    DevicePluginV0,
    /// `kubelet_internal_checkpoint` of 1.11 to 1.19.
    DevicePluginV1,
    /// `kubelet_internal_checkpoint` since 1.20.
    DevicePluginV2,
    /// `dra_manager_state` of 1.27.
    DraFlat1_27,
    /// `dra_manager_state` of 1.28 and 1.29.
    DraFlat1_28,
    /// `dra_manager_state` of 1.30.
    DraFlat1_30,
    /// `dra_manager_state` since 1.31.
    DraEnvelopeV1,
    /// `dra_health_state`, since 1.34.
    DraHealth,
}

impl Format {
    /// All formats, oldest first.
    pub const ALL: [Self; 8] = [
        Self::DevicePluginV0,
        Self::DevicePluginV1,
        Self::DevicePluginV2,
        Self::DraFlat1_27,
        Self::DraFlat1_28,
        Self::DraFlat1_30,
        Self::DraEnvelopeV1,
        Self::DraHealth,
    ];

    /// Returns the name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::DevicePluginV0 => "device-plugin-v0",
            Self::DevicePluginV1 => "device-plugin-v1",
            Self::DevicePluginV2 => "device-plugin-v2",
            Self::DraFlat1_27 => "dra-flat-1.27",
            Self::DraFlat1_28 => "dra-flat-1.28",
            Self::DraFlat1_30 => "dra-flat-1.30",
            Self::DraEnvelopeV1 => "dra-envelope-v1",
            Self::DraHealth => "dra-health",
        }
    }

    /// Returns the file that is written in this format.
    pub fn role(self) -> Role {
        match self {
            Self::DevicePluginV0 | Self::DevicePluginV1 | Self::DevicePluginV2 => Role::DevicePlugin,
            Self::DraFlat1_27 | Self::DraFlat1_28 | Self::DraFlat1_30 | Self::DraEnvelopeV1 => {
                Role::DraManager
            }
            Self::DraHealth => Role::DraHealth,
        }
    }

    /// Describes the content of the file and the releases that wrote it.
    pub fn description(self) -> &'static str {
        match self {
            Self::DevicePluginV0 => "device plugin allocations, as kubelets 1.8 to 1.10 wrote them",
            Self::DevicePluginV1 => "device plugin allocations, as kubelets 1.11 to 1.19 wrote them",
            Self::DevicePluginV2 => "device plugin allocations, as kubelets since 1.20 write them",
            Self::DraFlat1_27 => "DRA claims, as kubelets of 1.27 wrote them",
            Self::DraFlat1_28 => "DRA claims, as kubelets 1.28 and 1.29 wrote them",
            Self::DraFlat1_30 => "DRA claims, as kubelets of 1.30 wrote them",
            Self::DraEnvelopeV1 => "DRA claims, as kubelets since 1.31 write them",
            Self::DraHealth => "health of DRA devices, as kubelets since 1.34 write it",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Not the name of a format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown format {0:?}")]
pub struct UnknownFormat(pub String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| UnknownFormat(name.to_owned()))
    }
}
