//! Validation of `NodePrepareResources` answers: prepared devices must be allocated devices.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::dra::claims::{AllocatedDevice, ClaimKey, PreparedDevice};
use crate::id::{ClaimUid, DriverName};

/// Reasons why an answer is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAnswer {
    /// The answer has a claim that the call did not have. The whole answer is rejected.
    #[error("driver {driver} answered for claim UID {uid:?}, which it was not asked about")]
    UnknownClaim {
        /// The driver.
        driver: DriverName,
        /// The claim.
        uid: ClaimUid,
    },
    /// The answer lacks a claim.
    #[error("driver {driver} did not answer for ResourceClaim {claim}")]
    Missing {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
    },
    /// The claim does not have this request.
    #[error(
        "driver {driver} prepared a device of ResourceClaim {claim} for request {request:?}, which the claim does not have"
    )]
    UnknownRequest {
        /// The driver.
        driver: DriverName,
        /// The claim.
        claim: ClaimKey,
        /// The request that the driver named.
        request: String,
    },
    /// The device is not allocated to the claim.
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
    /// Another share of the device is allocated to the claim.
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
    /// The device is allocated to another request of the claim.
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
        /// The request that the driver named.
        request: String,
    },
    /// A device appears more often than it is allocated.
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
    /// The name is not a qualified CDI device name.
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
    /// One device has the same CDI name twice. Several devices may share a name.
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
    /// Returns the claim, unless the driver was not called for it.
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

/// Returns the name of a request without its subrequest.
pub(crate) fn base(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

/// Returns `true` if the device is allocated for this request. A plugin may omit the subrequest.
fn is_for(each: &AllocatedDevice, request: &str) -> bool {
    each.request == request || base(&each.request) == request
}

/// Checks one driver's devices of one claim. If the plugin does not name a share, because its API version lacks the field,
/// the share is set if only one is possible.
///
/// A device that is allocated for several requests may appear once with all of their names, or once for each.
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
        // The allocation of an imported claim is unknown.
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

/// Checks the requests of a prepared device. `times` counts the occurrences of each device.
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
