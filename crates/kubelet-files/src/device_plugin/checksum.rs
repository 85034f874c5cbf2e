//! The checksum of V1 and V2: FNV-1a over the printed Go struct.

use super::{Checkpoint, Devices, Entry};
use crate::go_print::{Fnv1a32, Label, Print};

static POD_UID: Label = Label::new("{PodUID:(string)");
static CONTAINER: Label = Label::new(" ContainerName:(string)");
static RESOURCE: Label = Label::new(" ResourceName:(string)");
static DEVICES: Label = Label::new(" DeviceIDs:([]string)");
static DEVICES_PER_NUMA: Label = Label::new(" DeviceIDs:(checkpoint.DevicesPerNUMA)");
static ANSWER: Label = Label::new(" AllocResp:([]uint8)");

/// The Go struct that is printed. The two differ in the type of an entry's devices.
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
        out.label(&POD_UID);
        out.text(&self.pod_uid);
        out.label(&CONTAINER);
        out.text(&self.container);
        out.label(&RESOURCE);
        out.text(&self.resource);
        out.label(match version {
            Version::V1 => &DEVICES,
            Version::V2 => &DEVICES_PER_NUMA,
        });
        match &self.devices {
            Devices::Flat(ids) if version == Version::V1 => out.strings(ids.as_deref()),
            // As `Devices::into_per_numa` returns them.
            Devices::Flat(ids) => {
                out.text("map[0:");
                out.strings(ids.as_deref());
                out.text("]");
            }
            Devices::PerNuma(nodes) => {
                out.map(nodes.as_ref().map(|nodes| nodes.iter()), |out, node, ids| {
                    out.number(*node);
                    out.text(":");
                    out.strings(ids.as_deref());
                });
            }
        }
        out.label(&ANSWER);
        out.bytes(self.alloc_resp.as_deref());
        out.text("}");
    }
}
