//! Converts a ResourceClaim object.

use devlet_core::dra::claims::{AllocatedDevice, AllocationResult, ClaimKey};
use devlet_core::{ClaimUid, DriverName};

use super::claim_source::{Consumer, Controller, ResourceClaim};
use super::names::{self, MAX_LABEL, MAX_NAME, check_label, check_uid, full_name, is_dns_name};
use super::object::{self, Metadata, Object, OwnerReference};
use super::{InvalidManifest, derived};

pub(super) fn resource_claim(object: Object) -> Result<ResourceClaim, InvalidManifest> {
    let metadata = object.metadata.as_ref();
    let metadata = metadata.ok_or(InvalidManifest::Missing("metadata"))?;
    let (namespace, name) = full_name(metadata)?;
    let key = ClaimKey { namespace, name };
    parts(&key, object).map_err(|problem| InvalidManifest::OfClaim {
        claim: key,
        problem: Box::new(problem),
    })
}

fn parts(key: &ClaimKey, object: Object) -> Result<ResourceClaim, InvalidManifest> {
    let spec = object.spec.and_then(|spec| spec.devices);
    let requests = spec.and_then(|devices| devices.requests).unwrap_or_default();
    let requests = requests.into_iter().map(|request| {
        let name = request.name.unwrap_or_default();
        check_label("spec.devices.requests.name", &name)?;
        Ok::<_, InvalidManifest>(name)
    });
    let status = object.status.unwrap_or_default();
    let results = status.allocation.map(|allocation| {
        let devices = allocation.devices.and_then(|devices| devices.results);
        let results = devices.unwrap_or_default().into_iter();
        results.map(result).collect::<Result<Vec<_>, _>>()
    });
    let consumer = |consumer: object::Consumer| Consumer {
        api_group: consumer.api_group.unwrap_or_default(),
        resource: consumer.resource.unwrap_or_default(),
        name: consumer.name.unwrap_or_default(),
        uid: consumer.uid.unwrap_or_default(),
    };
    let reserved_for = status.reserved_for.unwrap_or_default();
    Ok(ResourceClaim {
        key: key.clone(),
        uid: uid(key, object.metadata.as_ref())?,
        controller: object.metadata.and_then(controller),
        requests: requests.collect::<Result<_, _>>()?,
        reserved_for: reserved_for.into_iter().map(consumer).collect(),
        allocation: results.transpose()?,
    })
}

fn uid(key: &ClaimKey, metadata: Option<&Metadata>) -> Result<ClaimUid, InvalidManifest> {
    let uid = metadata
        .and_then(|metadata| metadata.uid.as_deref())
        .unwrap_or_default();
    if uid.is_empty() {
        return Ok(ClaimUid::from(derived(&format!("resourceclaims/{key}"))));
    }
    check_uid(uid)?;
    Ok(ClaimUid::from(uid))
}

fn controller(metadata: Metadata) -> Option<Controller> {
    let owners = metadata.owner_references.unwrap_or_default();
    let owner = owners
        .into_iter()
        .find(|owner: &OwnerReference| owner.controller == Some(true))?;
    Some(Controller {
        api_version: owner.api_version.unwrap_or_default(),
        kind: owner.kind.unwrap_or_default(),
        name: owner.name.unwrap_or_default(),
        uid: owner.uid.unwrap_or_default(),
    })
}

fn result(result: object::AllocatedDevice) -> Result<AllocationResult, InvalidManifest> {
    let checked = |field: &str, value: Option<String>, rule: &'static str, is_valid: fn(&str) -> bool| {
        let value = value.unwrap_or_default();
        if is_valid(&value) {
            return Ok(value);
        }
        Err(InvalidManifest::Name {
            field: format!("status.allocation.devices.results.{field}"),
            value,
            rule,
        })
    };
    let request = checked("request", result.request, "the name of a request", is_request)?;
    let driver = checked(
        "driver",
        result.driver,
        "the name of a driver, such as gpu.acme.com",
        is_driver,
    )?;
    let pool = checked("pool", result.pool, "the name of a pool of devices", is_pool)?;
    let device = checked("device", result.device, "the name of a device", is_label)?;
    let share = result.share_id.filter(|share| !share.is_empty());
    let share = share
        .map(|share| checked("shareID", Some(share), "a UID", is_word))
        .transpose()?;
    let skip = result.skip_node_operations.unwrap_or_default().into_iter();
    let skip = skip.map(|each| {
        checked(
            "skipNodeOperations",
            Some(each),
            "the name of an operation",
            is_word,
        )
    });
    Ok(AllocationResult {
        driver: DriverName::from(driver),
        device: AllocatedDevice {
            request,
            pool,
            device,
            share,
            admin_access: result.admin_access.unwrap_or_default(),
        },
        skip: skip.collect::<Result<_, _>>()?,
    })
}

fn is_label(text: &str) -> bool {
    text.len() <= MAX_LABEL && names::is_label(text)
}

/// Returns `true` for a request, or an alternative `request/alternative` of one.
fn is_request(text: &str) -> bool {
    match text.split_once('/') {
        None => is_label(text),
        Some((request, alternative)) => is_label(request) && is_label(alternative),
    }
}

/// Returns `true` for a driver name, in upper or lower case as for storage drivers.
fn is_driver(text: &str) -> bool {
    text.len() <= MAX_LABEL && is_dns_name(&text.to_ascii_lowercase())
}

fn is_pool(text: &str) -> bool {
    text.len() <= MAX_NAME && text.split('/').all(is_dns_name)
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_LABEL && text.bytes().all(|byte| byte.is_ascii_graphic())
}
