//! Whether a plugin's answer is one: what it prepared must be what was allocated.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::dra::claims::{AllocatedDevice, ClaimKey, PreparedDevice};
use crate::id::{ClaimUid, DriverName};

/// Why what a plugin answered does not count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAnswer {
    /// It answers for a claim that it was not asked about: nothing of the answer counts.
    #[error("driver {driver} answered for claim UID {uid:?}, which it was not asked about")]
    UnknownClaim {
        /// The driver.
        driver: DriverName,
        /// The claim.
        uid: ClaimUid,
    },
    /// It says nothing about a claim.
    #[error("driver {driver} did not answer for ResourceClaim {claim}")]
    Missing {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
    },
    /// The claim has no such request.
    #[error(
        "driver {driver} prepared a device of ResourceClaim {claim} for request {request:?}, which the claim has not"
    )]
    UnknownRequest {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// What it calls the request.
        request: String,
    },
    /// The claim has no such device.
    #[error(
        "driver {driver} prepared device {device:?} of pool {pool:?}, which is not allocated to ResourceClaim {claim}"
    )]
    NotAllocated {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// The pool.
        pool: String,
        /// The device.
        device: String,
    },
    /// The claim has another share of the device.
    #[error(
        "driver {driver} prepared share {share:?} of device {device:?}, which is not allocated to ResourceClaim {claim}"
    )]
    OtherShare {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// The device.
        device: String,
        /// The share.
        share: String,
    },
    /// The claim has the request and the device, but not the one for the other.
    #[error(
        "driver {driver} prepared device {device:?} for request {request:?} of ResourceClaim {claim}, for which it is not allocated"
    )]
    OtherRequest {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// The device.
        device: String,
        /// What it calls the request.
        request: String,
    },
    /// A device comes more often than it is allocated.
    #[error(
        "driver {driver} prepared device {device:?} of pool {pool:?} more often than it is allocated to ResourceClaim {claim}"
    )]
    DeviceTwice {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// The pool.
        pool: String,
        /// The device.
        device: String,
    },
    /// A runtime could not use the name.
    #[error(
        "driver {driver} named the CDI device {id:?} for ResourceClaim {claim}, which is not of the form vendor/class=device"
    )]
    CdiSyntax {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// The name.
        id: String,
    },
    /// One device has the same name twice. That several devices share one is fine.
    #[error(
        "driver {driver} named the CDI device {id:?} twice for device {device:?} of ResourceClaim {claim}"
    )]
    CdiTwice {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// The device.
        device: String,
        /// The name.
        id: String,
    },
}

impl InvalidAnswer {
    /// The claim that the answer is about, if the driver was called for it.
    pub fn claim(&self) -> Option<&ClaimKey> {
        match self {
            Self::UnknownClaim { .. } => None,
            Self::Missing { claim, .. }
            | Self::UnknownRequest { claim, .. }
            | Self::NotAllocated { claim, .. }
            | Self::OtherShare { claim, .. }
            | Self::OtherRequest { claim, .. }
            | Self::DeviceTwice { claim, .. }
            | Self::CdiSyntax { claim, .. }
            | Self::CdiTwice { claim, .. } => Some(claim),
        }
    }
}

/// The name of a request without that of its subrequest.
pub(crate) fn base(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

/// Whether a plugin's name for a request means the one that a device is allocated for: a plugin may leave out the
/// subrequest.
fn is_for(each: &AllocatedDevice, request: &str) -> bool {
    each.request == request || base(&each.request) == request
}

/// Checks one driver's devices of one claim. A share that the plugin does not name, because it speaks a service
/// that cannot, is filled in where only one is possible.
///
/// A device that is allocated for several requests may come once with all of their names, or once for each.
pub(crate) fn check(
    driver: &DriverName,
    claim: &ClaimKey,
    allocated: Option<&[AllocatedDevice]>,
    mut devices: Vec<PreparedDevice>,
    is_cdi_name: fn(&str) -> bool,
) -> Result<Vec<PreparedDevice>, InvalidAnswer> {
    let named = || (driver.clone(), claim.clone());
    let mut times: BTreeMap<(String, String, Option<String>), usize> = BTreeMap::new();
    for prepared in &mut devices {
        // An imported claim whose allocation nobody has told us.
        if let Some(allocated) = allocated {
            let is_known = |name: &String| allocated.iter().any(|each| is_for(each, name));
            if let Some(request) = prepared.requests.iter().find(|name| !is_known(name)) {
                let (driver, claim) = named();
                let request = request.clone();
                return Err(InvalidAnswer::UnknownRequest {
                    driver,
                    claim,
                    request,
                });
            }
            check_device(driver, claim, allocated, prepared)?;
            check_requests(driver, claim, allocated, prepared, &mut times)?;
        }
        let mut seen = BTreeSet::new();
        for id in &prepared.cdi_devices {
            if !is_cdi_name(id) {
                let (driver, claim) = named();
                let id = id.clone();
                return Err(InvalidAnswer::CdiSyntax { driver, claim, id });
            }
            if !seen.insert(id) {
                let (driver, claim) = named();
                return Err(InvalidAnswer::CdiTwice {
                    driver,
                    claim,
                    device: prepared.device.clone(),
                    id: id.clone(),
                });
            }
        }
    }
    Ok(devices)
}

fn check_device(
    driver: &DriverName,
    claim: &ClaimKey,
    allocated: &[AllocatedDevice],
    prepared: &mut PreparedDevice,
) -> Result<(), InvalidAnswer> {
    let (driver, claim) = (driver.clone(), claim.clone());
    let is_it = |each: &&AllocatedDevice| each.pool == prepared.pool && each.device == prepared.device;
    let shares: BTreeSet<Option<&String>> = allocated
        .iter()
        .filter(is_it)
        .map(|each| each.share.as_ref())
        .collect();
    if shares.is_empty() {
        return Err(InvalidAnswer::NotAllocated {
            driver,
            claim,
            pool: prepared.pool.clone(),
            device: prepared.device.clone(),
        });
    }
    match &prepared.share {
        Some(share) if !shares.contains(&Some(share)) => Err(InvalidAnswer::OtherShare {
            driver,
            claim,
            device: prepared.device.clone(),
            share: share.clone(),
        }),
        Some(_) => Ok(()),
        None => {
            if let [only] = shares.into_iter().collect::<Vec<_>>()[..] {
                prepared.share = only.cloned();
            }
            Ok(())
        }
    }
}

/// Checks what a device that is allocated was prepared for. `times` is how often each device has come.
fn check_requests(
    driver: &DriverName,
    claim: &ClaimKey,
    allocated: &[AllocatedDevice],
    prepared: &PreparedDevice,
    times: &mut BTreeMap<(String, String, Option<String>), usize>,
) -> Result<(), InvalidAnswer> {
    let (pool, device) = (prepared.pool.clone(), prepared.device.clone());
    let is_it = |each: &&AllocatedDevice| {
        each.pool == pool
            && each.device == device
            && (prepared.share.is_none() || each.share == prepared.share)
    };
    let places: Vec<&AllocatedDevice> = allocated.iter().filter(is_it).collect();
    let is_other = |name: &&String| !places.iter().any(|each| is_for(each, name));
    let other = prepared.requests.iter().find(is_other).cloned();
    let count = times
        .entry((pool.clone(), device.clone(), prepared.share.clone()))
        .or_default();
    *count += 1;
    let is_too_often = *count > places.len();
    let (driver, claim) = (driver.clone(), claim.clone());
    if let Some(request) = other {
        return Err(InvalidAnswer::OtherRequest {
            driver,
            claim,
            device,
            request,
        });
    }
    if is_too_often {
        return Err(InvalidAnswer::DeviceTwice {
            driver,
            claim,
            pool,
            device,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
