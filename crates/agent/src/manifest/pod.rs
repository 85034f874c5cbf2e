//! Converts a Pod object into a request.

use std::collections::{BTreeMap, BTreeSet};

use devlet_core::{
    ClaimReference, ContainerKind, ContainerName, ContainerRequest, PodMetadata, PodName, PodRequest, PodUid,
    ResourceName, Source,
};

use super::fingerprint::Fingerprint;
use super::names::{check_label, check_name, check_pod_label, check_uid, full_name};
use super::object::{ContainerClaim, ExtendedClaimStatus, Object, PodClaim, Resources, Scalar, Spec, Status};
use super::quantity::quantity;
use super::resolve::{ClaimOrigin, PodResourceClaim, UnresolvedPod};
use super::{InvalidManifest, derived_uid};
use crate::resource_name;

/// Domain of extended resources that stand for a DeviceClass.
const DEVICE_CLASSES: &str = "deviceclass.resource.kubernetes.io/";

pub(super) fn unresolved(
    object: Object,
    source: Source,
    foreign: &[String],
) -> Result<UnresolvedPod, InvalidManifest> {
    let metadata = object.metadata.ok_or(InvalidManifest::Missing("metadata"))?;
    let (namespace, name) = full_name(&metadata)?;
    let name = PodName { namespace, name };
    let mut spec = object.spec.ok_or(InvalidManifest::Missing("spec"))?;
    check_pod_level(&spec, foreign)?;
    let mut status = object.status.unwrap_or_default();
    let extended = status.extended_resource_claim_status.take();
    let extended = extended.map(Extended::new).transpose()?;
    let group = spec
        .scheduling_group
        .take()
        .and_then(|group| group.pod_group_name);
    let claims = claims(spec.resource_claims.as_deref().unwrap_or_default(), &status)?;
    let names: BTreeSet<&str> = claims.iter().map(|claim| claim.name.as_str()).collect();
    let (containers, fingerprint) = containers(spec, &names, extended.as_ref(), foreign)?;
    let uid = match metadata.uid.filter(|uid| !uid.is_empty()) {
        Some(uid) => {
            check_uid(&uid)?;
            PodUid::from(uid)
        }
        None => derived_uid(&name),
    };
    let labels = metadata.labels.unwrap_or_default();
    for (key, value) in &labels {
        check_pod_label(key, value)?;
    }
    let request = PodRequest {
        uid,
        name,
        source,
        fingerprint,
        metadata: PodMetadata {
            labels,
            admitted_at: None,
        },
        containers,
        claims: Vec::new(),
    };
    Ok(UnresolvedPod {
        request,
        claims,
        extended: extended.map(|extended| extended.claim),
        group: group.filter(|group| !group.is_empty()),
    })
}

fn check_pod_level(spec: &Spec, foreign: &[String]) -> Result<(), InvalidManifest> {
    let Some(resources) = &spec.resources else {
        return Ok(());
    };
    if resources.claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        return Err(InvalidManifest::PodLevelClaims);
    }
    // Resources of the kubelet itself are allowed here: CPU, memory and huge pages.
    match resources
        .names()
        .find(|name| resource_name::is_ours(name, foreign))
    {
        None => Ok(()),
        Some(resource) => Err(InvalidManifest::PodLevel {
            resource: resource.to_owned(),
        }),
    }
}

/// The claim behind extended resources, and its requests by container and resource.
struct Extended {
    claim: String,
    requests: BTreeMap<(String, String), Vec<String>>,
}

impl Extended {
    fn new(status: ExtendedClaimStatus) -> Result<Self, InvalidManifest> {
        let claim = status.resource_claim_name.unwrap_or_default();
        check_name("status.extendedResourceClaimStatus.resourceClaimName", &claim)?;
        let mut requests: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for mapping in status.request_mappings.unwrap_or_default() {
            let request = mapping.request_name.unwrap_or_default();
            let field = "status.extendedResourceClaimStatus.requestMappings.requestName";
            check_label(field, &request)?;
            let container = mapping.container_name.unwrap_or_default();
            let resource = mapping.resource_name.unwrap_or_default();
            requests.entry((container, resource)).or_default().push(request);
        }
        Ok(Self { claim, requests })
    }

    fn maps(&self, container: &str, resource: &str) -> bool {
        let key = (container.to_owned(), resource.to_owned());
        self.requests.contains_key(&key)
    }

    /// Returns the parts of the claim that a container uses: those behind resources that it requests.
    fn uses(&self, container: &str, resources: &Resources) -> Vec<ClaimReference> {
        let is_asked_for = |value: &Scalar| quantity(&value.0) != Ok(0);
        let is_asked_for = |resource: &str| {
            let can_be_backed = resource.starts_with(DEVICE_CLASSES) || resource_name::is_ours(resource, &[]);
            let mut quantities = resources.quantities();
            can_be_backed && quantities.any(|(name, value)| name == resource && is_asked_for(value))
        };
        let mapped = self.requests.iter();
        let mapped = mapped.filter(|((of, resource), _)| of == container && is_asked_for(resource));
        let reference = |request: &String| ClaimReference {
            claim: String::new(),
            request: Some(request.clone()),
        };
        mapped
            .flat_map(|(_, requests)| requests.iter().map(reference))
            .collect()
    }
}

/// Returns the pod's claims with their origins.
fn claims(claims: &[PodClaim], status: &Status) -> Result<Vec<PodResourceClaim>, InvalidManifest> {
    let mut names = BTreeSet::new();
    let mut known = Vec::new();
    for claim in claims {
        let name = claim.name.clone().unwrap_or_default();
        check_label("spec.resourceClaims.name", &name)?;
        if !names.insert(name.clone()) {
            return Err(InvalidManifest::DuplicatePodClaim(name));
        }
        let origin = match (&claim.resource_claim_name, &claim.resource_claim_template_name) {
            (Some(_), Some(_)) => return Err(InvalidManifest::TwoOrigins { claim: name }),
            (Some(object), None) => {
                check_name("spec.resourceClaims.resourceClaimName", object)?;
                ClaimOrigin::Named(object.clone())
            }
            (None, Some(_)) => generated(&name, status)?,
            (None, None) => ClaimOrigin::Unsupported,
        };
        known.push(PodResourceClaim { name, origin });
    }
    Ok(known)
}

/// Returns the claim that was created from a template.
fn generated(name: &str, status: &Status) -> Result<ClaimOrigin, InvalidManifest> {
    let mut statuses = status.resource_claim_statuses.iter().flatten();
    let Some(status) = statuses.find(|each| each.name.as_deref() == Some(name)) else {
        return Ok(ClaimOrigin::NotCreated);
    };
    let Some(object) = &status.resource_claim_name else {
        return Ok(ClaimOrigin::Omitted);
    };
    check_name("status.resourceClaimStatuses.resourceClaimName", object)?;
    Ok(ClaimOrigin::Generated(object.clone()))
}

/// Returns the requests of the containers, and the fingerprint of the spec.
fn containers(
    spec: Spec,
    claims: &BTreeSet<&str>,
    extended: Option<&Extended>,
    foreign: &[String],
) -> Result<(Vec<ContainerRequest>, u64), InvalidManifest> {
    let app = spec.containers.unwrap_or_default();
    if app.is_empty() {
        return Err(InvalidManifest::Missing("spec.containers"));
    }
    let mut requests = Vec::new();
    let mut fingerprint = Fingerprint::default();
    let mut names = BTreeSet::new();
    let init = spec
        .init_containers
        .unwrap_or_default()
        .into_iter()
        .map(|container| {
            let kind = match container.restart_policy.as_deref() {
                Some("Always") => ContainerKind::Sidecar,
                _ => ContainerKind::Init,
            };
            (kind, container)
        });
    for (kind, container) in init.chain(app.into_iter().map(|container| (ContainerKind::App, container))) {
        let field = match kind {
            ContainerKind::App => "spec.containers",
            ContainerKind::Init | ContainerKind::Sidecar => "spec.initContainers",
        };
        let name = container.name.unwrap_or_default();
        check_label(&format!("{field}.name"), &name)?;
        if !names.insert(name.clone()) {
            return Err(InvalidManifest::DuplicateContainer(name));
        }
        let resources = container.resources.unwrap_or_default();
        fingerprint.add_container(kind, &name, &resources);
        let mut uses = named(&name, resources.claims.as_deref().unwrap_or_default(), claims)?;
        uses.extend(
            extended
                .iter()
                .flat_map(|extended| extended.uses(&name, &resources)),
        );
        let is_mapped = |resource: &str| extended.is_some_and(|extended| extended.maps(&name, resource));
        let wants = wants(&name, resources, foreign, is_mapped)?;
        requests.push(ContainerRequest {
            name: ContainerName::from(name),
            kind,
            wants,
            claims: uses,
        });
    }
    fingerprint.add_claims(&spec.resource_claims);
    Ok((requests, fingerprint.finish()))
}

/// Returns the claims that a container names, without duplicates.
fn named(
    container: &str,
    named: &[ContainerClaim],
    claims: &BTreeSet<&str>,
) -> Result<Vec<ClaimReference>, InvalidManifest> {
    let mut references: Vec<ClaimReference> = Vec::new();
    for each in named {
        let claim = each.name.clone().unwrap_or_default();
        check_label("resources.claims.name", &claim)?;
        if !claims.contains(claim.as_str()) {
            let container = container.to_owned();
            return Err(InvalidManifest::UnknownPodClaim { container, claim });
        }
        let request = each.request.clone().filter(|request| !request.is_empty());
        if let Some(request) = &request {
            check_label("resources.claims.request", request)?;
        }
        let reference = ClaimReference { claim, request };
        if !references.contains(&reference) {
            references.push(reference);
        }
    }
    Ok(references)
}

/// Returns the devices that a container requests, by resource.
fn wants(
    container: &str,
    resources: Resources,
    foreign: &[String],
    is_mapped: impl Fn(&str) -> bool,
) -> Result<BTreeMap<ResourceName, usize>, InvalidManifest> {
    // Resources behind a claim are not for device plugins.
    let is_ours = |resource: &str| resource_name::is_ours(resource, foreign) && !is_mapped(resource);
    if let Some(resource) = resources
        .names()
        .find(|name| !resource_name::is_known(name, foreign))
    {
        return Err(InvalidManifest::Unqualified {
            container: container.to_owned(),
            resource: resource.to_owned(),
        });
    }
    let limits = resources.limits.unwrap_or_default();
    let mut wants = BTreeMap::new();
    for (resource, value) in limits.iter().filter(|(resource, _)| is_ours(resource)) {
        let Ok(name) = ResourceName::parse(resource) else {
            return Err(InvalidManifest::Resource {
                container: container.to_owned(),
                resource: resource.clone(),
            });
        };
        let count = count(container, resource, value)?;
        // A quantity of zero is not a request.
        if count > 0 {
            wants.insert(name, count);
        }
    }
    let requests = resources.requests.unwrap_or_default();
    for (resource, requested) in requests.iter().filter(|(resource, _)| is_ours(resource)) {
        check_request(container, resource, requested, limits.get(resource))?;
    }
    Ok(wants)
}

/// Checks that the request for a resource equals its limit.
fn check_request(
    container: &str,
    resource: &str,
    requested: &Scalar,
    limited: Option<&Scalar>,
) -> Result<(), InvalidManifest> {
    let Some(limited) = limited else {
        return Err(InvalidManifest::RequestsOnly {
            container: container.to_owned(),
            resource: resource.to_owned(),
        });
    };
    if count(container, resource, requested)? == count(container, resource, limited)? {
        return Ok(());
    }
    Err(InvalidManifest::RequestsDiffer {
        container: container.to_owned(),
        resource: resource.to_owned(),
        requested: requested.0.clone(),
        limited: limited.0.clone(),
    })
}

fn count(container: &str, resource: &str, value: &Scalar) -> Result<usize, InvalidManifest> {
    quantity(&value.0).map_err(|problem| InvalidManifest::Quantity {
        container: container.to_owned(),
        resource: resource.to_owned(),
        value: value.0.clone(),
        problem,
    })
}
