//! The fields of Pods, ResourceClaims and Lists that are about devices.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de;

use super::InvalidManifest;

/// An object of a supported kind, with the fields of all of them.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Object {
    api_version: Option<String>,
    kind: Option<String>,
    pub(super) metadata: Option<Metadata>,
    pub(super) spec: Option<Spec>,
    pub(super) status: Option<Status>,
    pub(super) items: Option<Vec<Option<Object>>>,
}

/// The type of an object.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Head {
    api_version: Option<String>,
    kind: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Pod,
    ResourceClaim,
    List,
}

impl Object {
    pub(super) fn kind(&self) -> Result<Kind, InvalidManifest> {
        kind(self.api_version.as_deref(), self.kind.as_deref())
    }
}

impl Head {
    pub(super) fn kind(&self) -> Result<Kind, InvalidManifest> {
        kind(self.api_version.as_deref(), self.kind.as_deref())
    }
}

fn kind(api_version: Option<&str>, kind: Option<&str>) -> Result<Kind, InvalidManifest> {
    let kind = kind.unwrap_or("Pod");
    let usual = match kind {
        "ResourceClaim" => "resource.k8s.io/v1",
        _ => "v1",
    };
    let api_version = api_version.unwrap_or(usual);
    match (api_version, kind) {
        ("v1", "Pod") => Ok(Kind::Pod),
        ("v1", "List") => Ok(Kind::List),
        ("resource.k8s.io/v1" | "resource.k8s.io/v1beta2" | "resource.k8s.io/v1beta1", "ResourceClaim") => {
            Ok(Kind::ResourceClaim)
        }
        _ => Err(InvalidManifest::NotAPod {
            api_version: api_version.to_owned(),
            kind: kind.to_owned(),
        }),
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) name: Option<String>,
    pub(super) namespace: Option<String>,
    pub(super) uid: Option<String>,
    pub(super) labels: Option<BTreeMap<String, String>>,
    pub(super) owner_references: Option<Vec<OwnerReference>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OwnerReference {
    pub(super) api_version: Option<String>,
    pub(super) kind: Option<String>,
    pub(super) name: Option<String>,
    pub(super) uid: Option<String>,
    pub(super) controller: Option<bool>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Spec {
    // Of a Pod.
    pub(super) init_containers: Option<Vec<Container>>,
    pub(super) containers: Option<Vec<Container>>,
    pub(super) resources: Option<Resources>,
    pub(super) resource_claims: Option<Vec<PodClaim>>,
    pub(super) scheduling_group: Option<SchedulingGroup>,
    // Of a ResourceClaim.
    pub(super) devices: Option<DeviceClaim>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    pub(super) name: Option<String>,
    pub(super) restart_policy: Option<String>,
    pub(super) resources: Option<Resources>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct Resources {
    pub(super) limits: Option<BTreeMap<String, Scalar>>,
    pub(super) requests: Option<BTreeMap<String, Scalar>>,
    pub(super) claims: Option<Vec<ContainerClaim>>,
}

impl Resources {
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.quantities().map(|(name, _)| name)
    }

    /// Returns the limits, then the requests.
    pub(super) fn quantities(&self) -> impl Iterator<Item = (&str, &Scalar)> {
        let all = self.limits.iter().chain(&self.requests).flatten();
        all.map(|(name, value)| (name.as_str(), value))
    }
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct ContainerClaim {
    pub(super) name: Option<String>,
    pub(super) request: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodClaim {
    pub(super) name: Option<String>,
    pub(super) resource_claim_name: Option<String>,
    pub(super) resource_claim_template_name: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SchedulingGroup {
    pub(super) pod_group_name: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct DeviceClaim {
    pub(super) requests: Option<Vec<DeviceRequest>>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct DeviceRequest {
    pub(super) name: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Status {
    // Of a Pod.
    pub(super) resource_claim_statuses: Option<Vec<ClaimStatus>>,
    pub(super) extended_resource_claim_status: Option<ExtendedClaimStatus>,
    // Of a ResourceClaim.
    pub(super) allocation: Option<Allocation>,
    pub(super) reserved_for: Option<Vec<Consumer>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ClaimStatus {
    pub(super) name: Option<String>,
    pub(super) resource_claim_name: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ExtendedClaimStatus {
    pub(super) resource_claim_name: Option<String>,
    pub(super) request_mappings: Option<Vec<RequestMapping>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RequestMapping {
    pub(super) container_name: Option<String>,
    pub(super) resource_name: Option<String>,
    pub(super) request_name: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Allocation {
    pub(super) devices: Option<AllocatedDevices>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct AllocatedDevices {
    pub(super) results: Option<Vec<AllocatedDevice>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AllocatedDevice {
    pub(super) request: Option<String>,
    pub(super) driver: Option<String>,
    pub(super) pool: Option<String>,
    pub(super) device: Option<String>,
    pub(super) admin_access: Option<bool>,
    #[serde(rename = "shareID")]
    pub(super) share_id: Option<String>,
    pub(super) skip_node_operations: Option<Vec<String>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Consumer {
    pub(super) api_group: Option<String>,
    pub(super) resource: Option<String>,
    pub(super) name: Option<String>,
    pub(super) uid: Option<String>,
}

/// A number or a text, as text.
#[derive(Debug, Clone)]
pub(super) struct Scalar(pub(super) String);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Scalar;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity")
            }

            fn visit_str<E>(self, text: &str) -> Result<Scalar, E> {
                Ok(Scalar(text.to_owned()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}
