//! The kubelet's record of who has which device: the names of leases are in the answers that it keeps.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use devlet_core::shield::{Lease, LeaseHolder};
use devlet_core::{DeviceId, LeaseName, Moment, ResourceName};
use devlet_kubelet_files::device_plugin::{self, Checkpoint, Entry, response};

use super::unqualified;
use crate::store;

/// Why the kubelet's record cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the kubelet's checkpoint {} cannot be used: {reason}", path.display())]
pub struct UnusableCheckpoint {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

/// The devices of one resource that a container has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The container.
    pub holder: LeaseHolder,
    /// The resource.
    pub resource: ResourceName,
    /// The devices.
    pub devices: BTreeSet<DeviceId>,
    /// The lease; `None` if the answer is a plugin's own.
    pub lease: Option<LeaseName>,
    /// The answer that the kubelet keeps.
    pub answer: Vec<u8>,
}

/// Reads the record. A kubelet without one has given no device.
pub fn read(path: &Path) -> Result<Vec<Held>, UnusableCheckpoint> {
    let checkpoint = load(path)?.map(|(checkpoint, _)| checkpoint).unwrap_or_default();
    Ok(checkpoint.entries.into_iter().flatten().map(held).collect())
}

/// Returns the resources of which the kubelet has healthy devices; none if its record is older than `since`.
pub fn healthy_since(path: &Path, since: SystemTime) -> Result<BTreeSet<ResourceName>, UnusableCheckpoint> {
    let current = load(path)?.filter(|(_, written)| *written >= since);
    let registered = current.and_then(|(checkpoint, _)| checkpoint.registered);
    let healthy = registered
        .into_iter()
        .flatten()
        .filter(|(_, devices)| devices.as_ref().is_some_and(|devices| !devices.is_empty()));
    Ok(healthy.map(|(resource, _)| resource.into()).collect())
}

/// Returns the record and the time at which it was written; `None` if there is none.
fn load(path: &Path) -> Result<Option<(Checkpoint, SystemTime)>, UnusableCheckpoint> {
    let unusable = |reason: String| UnusableCheckpoint {
        path: path.to_owned(),
        reason,
    };
    let open = || -> io::Result<(Vec<u8>, SystemTime)> {
        let mut file = File::open(path)?;
        let written = file.metadata()?.modified()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok((bytes, written))
    };
    let (bytes, written) = match open() {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unusable(error.to_string())),
    };
    let file = device_plugin::read(&bytes).map_err(|error| unusable(error.to_string()))?;
    let checkpoint = file.verified().map_err(|error| unusable(error.to_string()))?;
    Ok(Some((checkpoint, written)))
}

fn held(entry: Entry) -> Held {
    let devices: BTreeSet<DeviceId> = entry.devices.ids().into_iter().map(DeviceId::from).collect();
    // Also without an answer that can be read: the container has the devices.
    let answer = entry.alloc_resp.unwrap_or_default();
    let names = response::decode(&answer).map_or_else(|_| Vec::new(), |answer| answer.cdi_devices);
    Held {
        holder: LeaseHolder {
            pod: entry.pod_uid.into(),
            container: entry.container.into(),
        },
        resource: entry.resource.into(),
        devices,
        lease: names.iter().find_map(|device| unqualified(&device.name)),
        answer,
    }
}

impl Held {
    /// Returns the lease that the record describes. A container with a plugin's own answer has its devices without a
    /// lease of devlet; its lease is named after the container.
    pub fn to_lease(&self, now: Moment) -> Lease {
        let name = self.lease.clone();
        Lease {
            is_direct: name.is_none(),
            answer: match name {
                Some(_) => None,
                None => store::answer(self.answer.as_slice()).ok(),
            },
            name: name.unwrap_or_else(|| self.direct_name()),
            resource: self.resource.clone(),
            devices: self.devices.clone(),
            pre_start_required: false,
            granted_at: now,
            holder: Some(self.holder.clone()),
            is_witnessed: false,
            containers: Default::default(),
        }
    }

    /// Returns the name under which devlet keeps the lease.
    pub fn name(&self) -> LeaseName {
        self.lease.clone().unwrap_or_else(|| self.direct_name())
    }

    fn direct_name(&self) -> LeaseName {
        let LeaseHolder { pod, container } = &self.holder;
        format!("{pod}/{container}/{}", self.resource).into()
    }
}
