//! Database records of claims; see [`super::record`] for the rules.

use std::collections::BTreeMap;

use devlet_core::dra::claims::{
    AllocatedDevice, Claim, ClaimKey, Preparation, PreparationState, PreparedDevice,
};
use devlet_core::{ClaimUid, ClaimUse, DriverName, PodClaim, PodName};
use prost::Message as _;

use super::record::InvalidRecord;

/// A claim; its UID is the key. The records of pods contain which pods hold it.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ClaimRecord {
    #[prost(string, tag = "1")]
    pub(crate) namespace: String,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
    /// UID of the pod for which it was prepared, or that held it last.
    #[prost(string, tag = "3")]
    pub(crate) pod: String,
    #[prost(message, repeated, tag = "4")]
    pub(crate) preparations: Vec<PreparationRecord>,
    /// Namespace of that pod; empty if unknown.
    #[prost(string, tag = "5")]
    pub(crate) pod_namespace: String,
    #[prost(string, tag = "6")]
    pub(crate) pod_name: String,
}

/// The preparation of a claim by a driver.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PreparationRecord {
    #[prost(string, tag = "1")]
    pub(crate) driver: String,
    #[prost(enumeration = "StateRecord", tag = "2")]
    pub(crate) state: i32,
    /// None if unknown.
    #[prost(message, optional, tag = "3")]
    pub(crate) allocated: Option<AllocatedRecord>,
    #[prost(string, repeated, tag = "4")]
    pub(crate) skip: Vec<String>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) devices: Vec<PreparedRecord>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum StateRecord {
    Unspecified = 0,
    Pending = 1,
    Prepared = 2,
    Unprepared = 3,
    Abandoned = 4,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AllocatedRecord {
    #[prost(message, repeated, tag = "1")]
    pub(crate) devices: Vec<AllocatedDeviceRecord>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AllocatedDeviceRecord {
    #[prost(string, tag = "1")]
    pub(crate) request: String,
    #[prost(string, tag = "2")]
    pub(crate) pool: String,
    #[prost(string, tag = "3")]
    pub(crate) device: String,
    #[prost(string, optional, tag = "4")]
    pub(crate) share: Option<String>,
    #[prost(bool, tag = "5")]
    pub(crate) admin_access: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PreparedRecord {
    #[prost(string, repeated, tag = "1")]
    pub(crate) requests: Vec<String>,
    #[prost(string, tag = "2")]
    pub(crate) pool: String,
    #[prost(string, tag = "3")]
    pub(crate) device: String,
    #[prost(string, optional, tag = "4")]
    pub(crate) share: Option<String>,
    #[prost(string, repeated, tag = "5")]
    pub(crate) cdi_devices: Vec<String>,
}

/// A claim that a pod holds.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PodClaimRecord {
    /// Name of the claim in the pod's spec.
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) claim_namespace: String,
    #[prost(string, tag = "3")]
    pub(crate) claim_name: String,
    #[prost(string, tag = "4")]
    pub(crate) uid: String,
}

/// A claim that a container of a pod uses.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ClaimUseRecord {
    #[prost(string, tag = "1")]
    pub(crate) container: String,
    #[prost(string, tag = "2")]
    pub(crate) claim: String,
    #[prost(string, optional, tag = "3")]
    pub(crate) request: Option<String>,
}

impl ClaimRecord {
    pub(crate) fn decode_from(bytes: &[u8]) -> Result<Self, InvalidRecord> {
        Ok(Self::decode(bytes)?)
    }

    pub(crate) fn into_claim(self, uid: &str) -> Result<Claim, InvalidRecord> {
        let mut preparations = BTreeMap::new();
        for record in self.preparations {
            let (driver, preparation) = record.into_preparation()?;
            preparations.insert(driver, preparation);
        }
        Ok(Claim {
            key: ClaimKey {
                namespace: self.namespace,
                name: self.name,
            },
            uid: uid.into(),
            pod: self.pod.into(),
            pod_name: PodName {
                namespace: self.pod_namespace,
                name: self.pod_name,
            },
            preparations,
        })
    }
}

impl From<&Claim> for ClaimRecord {
    fn from(claim: &Claim) -> Self {
        Self {
            namespace: claim.key.namespace.clone(),
            name: claim.key.name.clone(),
            pod: claim.pod.as_str().into(),
            pod_namespace: claim.pod_name.namespace.clone(),
            pod_name: claim.pod_name.name.clone(),
            preparations: claim.preparations.iter().map(PreparationRecord::from).collect(),
        }
    }
}

impl PreparationRecord {
    fn into_preparation(self) -> Result<(DriverName, Preparation), InvalidRecord> {
        let state = match StateRecord::try_from(self.state) {
            Ok(StateRecord::Pending) => PreparationState::Pending,
            Ok(StateRecord::Prepared) => PreparationState::Prepared,
            Ok(StateRecord::Unprepared) => PreparationState::Unprepared,
            Ok(StateRecord::Abandoned) => PreparationState::Abandoned,
            _ => return Err(InvalidRecord::State(self.state)),
        };
        let allocated = |record: AllocatedRecord| {
            let devices = record.devices.into_iter();
            devices.map(AllocatedDeviceRecord::into_device).collect()
        };
        let preparation = Preparation {
            allocated: self.allocated.map(allocated),
            skip: self.skip.into_iter().collect(),
            state,
            devices: self
                .devices
                .into_iter()
                .map(PreparedRecord::into_device)
                .collect(),
        };
        Ok((self.driver.into(), preparation))
    }
}

impl From<(&DriverName, &Preparation)> for PreparationRecord {
    fn from((driver, preparation): (&DriverName, &Preparation)) -> Self {
        let state = match preparation.state {
            PreparationState::Pending => StateRecord::Pending,
            PreparationState::Prepared => StateRecord::Prepared,
            PreparationState::Unprepared => StateRecord::Unprepared,
            PreparationState::Abandoned => StateRecord::Abandoned,
        };
        let allocated = preparation.allocated.as_ref();
        Self {
            driver: driver.as_str().into(),
            state: state.into(),
            allocated: allocated.map(|devices| AllocatedRecord {
                devices: devices.iter().map(AllocatedDeviceRecord::from).collect(),
            }),
            skip: preparation.skip.iter().cloned().collect(),
            devices: preparation.devices.iter().map(PreparedRecord::from).collect(),
        }
    }
}

impl AllocatedDeviceRecord {
    fn into_device(self) -> AllocatedDevice {
        AllocatedDevice {
            request: self.request,
            pool: self.pool,
            device: self.device,
            share: self.share,
            admin_access: self.admin_access,
        }
    }
}

impl From<&AllocatedDevice> for AllocatedDeviceRecord {
    fn from(device: &AllocatedDevice) -> Self {
        Self {
            request: device.request.clone(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share: device.share.clone(),
            admin_access: device.admin_access,
        }
    }
}

impl PreparedRecord {
    fn into_device(self) -> PreparedDevice {
        PreparedDevice {
            requests: self.requests,
            pool: self.pool,
            device: self.device,
            share: self.share,
            cdi_devices: self.cdi_devices,
        }
    }
}

impl From<&PreparedDevice> for PreparedRecord {
    fn from(device: &PreparedDevice) -> Self {
        Self {
            requests: device.requests.clone(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share: device.share.clone(),
            cdi_devices: device.cdi_devices.clone(),
        }
    }
}

impl PodClaimRecord {
    pub(crate) fn into_claim(self) -> PodClaim {
        PodClaim {
            name: self.name,
            key: ClaimKey {
                namespace: self.claim_namespace,
                name: self.claim_name,
            },
            uid: self.uid.into(),
        }
    }
}

impl From<&PodClaim> for PodClaimRecord {
    fn from(claim: &PodClaim) -> Self {
        Self {
            name: claim.name.clone(),
            claim_namespace: claim.key.namespace.clone(),
            claim_name: claim.key.name.clone(),
            uid: claim.uid.as_str().into(),
        }
    }
}

impl From<&ClaimUse> for ClaimUseRecord {
    fn from(usage: &ClaimUse) -> Self {
        Self {
            container: usage.container.as_str().into(),
            claim: usage.claim.clone(),
            request: usage.request.clone(),
        }
    }
}

/// Returns the key and the record of a claim.
pub(crate) fn encode_claim(claim: &Claim) -> (ClaimUid, Vec<u8>) {
    (claim.uid.clone(), ClaimRecord::from(claim).encode_to_vec())
}
