//! Writes V2, byte for byte as a kubelet does.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::checksum::Version;
use super::{Checkpoint, Devices, Entry};
use crate::go_json::write;

/// Returns the file that a kubelet would write for these entries in this order.
///
/// Devices without topology are put on NUMA node 0 (see [`Devices::into_per_numa`]).
pub fn write(checkpoint: &Checkpoint) -> String {
    let mut out = String::from("{\"Data\":{\"PodDeviceEntries\":");
    write::list(&mut out, checkpoint.entries.as_deref(), write_entry);
    out.push_str(",\"RegisteredDevices\":");
    let registered = checkpoint.registered.as_ref().map(|resources| resources.iter());
    write::object(&mut out, registered, |out, ids| {
        write::strings(out, ids.as_deref());
    });
    out.push_str("},\"Checksum\":");
    out.push_str(&checkpoint.checksum(Version::V2).to_string());
    out.push('}');
    out
}

fn write_entry(out: &mut String, entry: &Entry) {
    out.push_str("{\"PodUID\":");
    write::string(out, &entry.pod_uid);
    out.push_str(",\"ContainerName\":");
    write::string(out, &entry.container);
    out.push_str(",\"ResourceName\":");
    write::string(out, &entry.resource);
    out.push_str(",\"DeviceIDs\":");
    match &entry.devices {
        Devices::PerNuma(nodes) if nodes.as_ref().is_none_or(|nodes| nodes.len() < 2) => {
            let nodes = nodes
                .as_ref()
                .map(|nodes| nodes.iter().map(|(node, ids)| (node.to_string(), ids)));
            write::object(out, nodes, |out, ids| write::strings(out, ids.as_deref()));
        }
        Devices::PerNuma(nodes) => {
            // Go sorts integer keys by their text: -1, 0, 1, 10, 2.
            let by_text = nodes.as_ref().map(|nodes| {
                nodes
                    .iter()
                    .map(|(node, ids)| (node.to_string(), ids))
                    .collect::<BTreeMap<_, _>>()
                    .into_iter()
            });
            write::object(out, by_text, |out, ids| write::strings(out, ids.as_deref()));
        }
        Devices::Flat(ids) => {
            out.push_str("{\"0\":");
            write::strings(out, ids.as_deref());
            out.push('}');
        }
    }
    out.push_str(",\"AllocResp\":");
    match &entry.alloc_resp {
        None => out.push_str("null"),
        Some(bytes) => {
            out.push('"');
            STANDARD.encode_string(bytes, out);
            out.push('"');
        }
    }
    out.push('}');
}
