//! The checksum of V1 and V2: FNV-1a over the printed Go struct.

use super::{Checkpoint, Devices, Entry};
use crate::go_print::{Fnv1a32, Print};

/// Which struct is printed. The two differ in the type of an entry's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V1,
    V2,
}

impl Checkpoint {
    pub(super) fn checksum(&self, version: Version) -> u64 {
        Fnv1a32::of(|out| self.print(version, out))
    }

    pub(super) fn print(&self, version: Version, out: &mut impl Print) {
        out.text("(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)");
        out.list(self.entries.as_deref(), |out, entry| entry.print(version, out));
        out.text(" RegisteredDevices:(map[string][]string)");
        out.map(
            self.registered.as_ref().map(|resources| resources.iter()),
            |out, resource, ids| {
                out.text(resource);
                out.text(":");
                out.strings(ids.as_deref());
            },
        );
        out.text("}");
    }
}

impl Entry {
    fn print(&self, version: Version, out: &mut impl Print) {
        out.text("{PodUID:(string)");
        out.text(&self.pod_uid);
        out.text(" ContainerName:(string)");
        out.text(&self.container);
        out.text(" ResourceName:(string)");
        out.text(&self.resource);
        out.text(match version {
            Version::V1 => " DeviceIDs:([]string)",
            Version::V2 => " DeviceIDs:(checkpoint.DevicesPerNUMA)",
        });
        match &self.devices {
            Devices::Flat(ids) => out.strings(ids.as_deref()),
            Devices::PerNuma(nodes) => {
                out.map(nodes.as_ref().map(|nodes| nodes.iter()), |out, node, ids| {
                    out.number(node);
                    out.text(":");
                    out.strings(ids.as_deref());
                });
            }
        }
        out.text(" AllocResp:([]uint8)");
        out.bytes(self.alloc_resp.as_deref());
        out.text("}");
    }
}
