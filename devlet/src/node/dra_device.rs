//! A device of a DRA driver in `get devices` and `describe device`. The JSON keys are an interface.

use devlet_client::v1;
use serde::Serialize;

use super::claims::ClaimId;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DraDevice {
    pub(super) pool: String,
    pub(super) device: String,
    pub(super) health_message: Option<String>,
    pub(super) claims: Vec<DeviceClaim>,
}

/// A claim that has the device.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DeviceClaim {
    #[serde(flatten)]
    pub(super) id: ClaimId,
    pub(super) phase: &'static str,
    #[serde(rename = "shareID")]
    pub(super) share_id: Option<String>,
    pub(super) admin_access: bool,
    pub(super) prepared: bool,
}

impl From<v1::DraDevice> for DraDevice {
    fn from(device: v1::DraDevice) -> Self {
        Self {
            pool: device.pool,
            device: device.device,
            health_message: Some(device.health_message).filter(|message| !message.is_empty()),
            claims: device.claims.into_iter().map(DeviceClaim::from).collect(),
        }
    }
}

impl From<v1::DeviceClaim> for DeviceClaim {
    fn from(claim: v1::DeviceClaim) -> Self {
        Self {
            phase: phase(claim.phase()),
            id: claim.claim.unwrap_or_default().into(),
            share_id: claim.share_id,
            admin_access: claim.admin_access,
            prepared: claim.prepared,
        }
    }
}

pub(super) fn phase(phase: v1::ClaimPhase) -> &'static str {
    match phase {
        v1::ClaimPhase::Unspecified => "unknown",
        v1::ClaimPhase::Preparing => "preparing",
        v1::ClaimPhase::Prepared => "prepared",
        v1::ClaimPhase::Unpreparing => "unpreparing",
        v1::ClaimPhase::Abandoned => "abandoned",
    }
}

pub(super) fn health(health: v1::DeviceHealth) -> &'static str {
    match health {
        v1::DeviceHealth::Unknown => "unknown",
        v1::DeviceHealth::Healthy => "healthy",
        v1::DeviceHealth::Unhealthy => "unhealthy",
    }
}

impl DeviceClaim {
    /// Returns the claim and its phase; `not prepared` if its driver omitted the device.
    pub(super) fn text(&self) -> String {
        let state = match (self.phase, self.prepared) {
            ("prepared", false) => "not prepared",
            (phase, _) => phase,
        };
        let share = self.share_id.as_ref();
        let share = share.map_or_else(String::new, |share| format!(", share {share}"));
        let admin = if self.admin_access { ", admin access" } else { "" };
        format!("{} ({state}{share}{admin})", self.id.short())
    }
}

impl DraDevice {
    /// Returns the claims that have the device; empty if there is none.
    pub(super) fn claims_text(&self) -> String {
        let claims: Vec<String> = self.claims.iter().map(DeviceClaim::text).collect();
        claims.join(", ")
    }
}
