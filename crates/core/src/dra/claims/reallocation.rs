//! Differences between a held claim and the version that another pod requests.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::device_holders::named_pod;
use super::{AllocatedClaim, Claim, ClaimKey};
use crate::id::PodUid;
use crate::pod::PodName;

/// The difference between a held claim and the version that another pod requests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reallocation {
    /// The held devices that are known.
    pub held: Vec<String>,
    /// The devices of the requested version.
    pub wanted: Vec<String>,
    /// The pods that hold the claim; names may be empty.
    pub pods: Vec<(PodUid, PodName)>,
}

impl Reallocation {
    pub(super) fn new(held: &Claim, wanted: &AllocatedClaim) -> Self {
        let used = held.preparations.iter().filter(|(_, each)| !each.is_abandoned());
        let held = used.flat_map(|(driver, preparation)| {
            let allocated = preparation.allocated.iter().flatten();
            let allocated = allocated.map(move |each| format!("{}/{} of {driver}", each.pool, each.device));
            let prepared = preparation
                .devices
                .iter()
                .filter(|_| preparation.allocated.is_none());
            let prepared = prepared.filter(|each| !each.device.is_empty());
            allocated.chain(prepared.map(move |each| format!("{}/{} of {driver}", each.pool, each.device)))
        });
        let wanted = wanted.drivers.iter().flat_map(|(driver, allocated)| {
            let devices = allocated.devices.iter();
            devices.map(move |each| format!("{}/{} of {driver}", each.pool, each.device))
        });
        Self {
            held: held.collect(),
            wanted: wanted.collect(),
            pods: Vec::new(),
        }
    }

    /// Returns the error text.
    pub(crate) fn text(&self, claim: &ClaimKey) -> String {
        let Self { held, wanted, pods } = self;
        if pods.is_empty() {
            return format!("ResourceClaim {claim} appears twice with different allocations; use only one");
        }
        let differs = match held != wanted {
            true => format!("had {} then, and has {} now", list(held), list(wanted)),
            false => "has the same devices, but other settings".into(),
        };
        let named: Vec<String> = pods.iter().map(named_pod).collect();
        let arguments = pods
            .iter()
            .map(|(uid, PodName { namespace, name })| match name.is_empty() {
                true => format!(" {uid}"),
                false => format!(" {namespace}/{name}"),
            });
        format!(
            "the allocation of ResourceClaim {claim} has changed since pods were admitted with it: it {differs}; pods that hold \
             it: {}; remove them first: devlet remove{}",
            named.join(", "),
            arguments.collect::<String>()
        )
    }
}

fn list(devices: &[String]) -> String {
    match devices.is_empty() {
        true => "no devices".into(),
        false => devices.join(", "),
    }
}
