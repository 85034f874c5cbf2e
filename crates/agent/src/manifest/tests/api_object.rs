//! Objects as an API server sends them.

use serde_json::json;

use super::*;

/// A pod with fields that devlet does not know, in the canonical form of the API server.
fn pod() -> serde_json::Value {
    json!({
        "metadata": {
            "name": "job", "namespace": "team-a", "uid": "pod-1", "resourceVersion": "7", "labels": null,
            "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
        },
        "spec": {
            "nodeName": "node1", "priority": 0, "tolerations": [{"operator": "Exists"}],
            "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nics"}],
            "containers": [{
                "name": "main", "image": "x", "imagePullPolicy": "Always",
                "resources": {
                    "limits": {"acme.com/gpu": "11k", "cpu": "1500m", "acme.com/backed": "1"},
                    "requests": {"acme.com/gpu": "11k", "cpu": "100m", "acme.com/backed": "1"},
                    "claims": [{"name": "nic"}],
                },
            }],
            "ephemeralContainers": [{"name": "debug", "image": "y"}],
        },
        "status": {
            "phase": "Pending", "conditions": [],
            "resourceClaimStatuses": [{"name": "nic", "resourceClaimName": "job-nic-abc"}],
            "extendedResourceClaimStatus": {
                "resourceClaimName": "job-extended-resources-xyz",
                "requestMappings": [
                    {"containerName": "main", "resourceName": "acme.com/backed", "requestName": "container-0-request-0"}
                ],
            },
        },
    })
}

#[test]
fn a_pod_of_an_api_server_becomes_a_request() {
    let object: PodObject = serde_json::from_value(pod()).unwrap();
    let unresolved = object.into_unresolved(Source::Embedder, &[]).unwrap();
    let request = &unresolved.request;
    assert_eq!(
        (request.uid.as_str(), request.source),
        ("pod-1", Source::Embedder)
    );
    let wants: Vec<_> = request.containers[0]
        .wants
        .iter()
        .map(|(name, count)| (name.as_str(), *count))
        .collect();
    assert_eq!(wants, [("acme.com/gpu", 11_000)]);
    assert_eq!(unresolved.extended.as_deref(), Some("job-extended-resources-xyz"));
    assert_eq!(
        unresolved.claims[0].origin,
        ClaimOrigin::Generated("job-nic-abc".to_owned())
    );
    assert!(unresolved.needs_anything() && unresolved.has_claims());
    let retained = |name: &str| {
        let mut pod = unresolved.clone();
        pod.retain_devices(|resource| resource.as_str() == name);
        assert!(!pod.has_claims());
        pod.needs_anything()
    };
    assert!(retained("acme.com/gpu"));
    assert!(!retained("acme.com/nic"));
}

#[test]
fn a_pod_without_devices_needs_nothing() {
    let mut plain = pod();
    plain["spec"]["containers"][0]["resources"] = json!({"limits": {"cpu": "1", "example.org/seat": "1"}});
    plain["spec"]["resourceClaims"] = json!([]);
    plain["status"] = json!({});
    let object: PodObject = serde_json::from_value(plain).unwrap();
    let foreign = ["example.org/*".to_owned()];
    let needs = |foreign: &[String]| {
        let unresolved = object.clone().into_unresolved(Source::Embedder, foreign);
        unresolved.unwrap().needs_anything()
    };
    assert!(!needs(&foreign));
    assert!(needs(&[]));
}

#[test]
fn a_claim_of_an_api_server_has_its_allocation() {
    let object = json!({
        "metadata": {"name": "job-nic-abc", "namespace": "team-a", "uid": "claim-1", "finalizers": ["x"]},
        "spec": {"devices": {"requests": [{"name": "nic", "exactly": {"deviceClassName": "nic", "count": 1}}]}},
        "status": {
            "allocation": {
                "devices": {"results": [{"request": "nic", "driver": "nic.acme.com", "pool": "node1", "device": "nic-0"}]},
                "nodeSelector": {"nodeSelectorTerms": []}, "allocationTimestamp": "2026-01-01T00:00:00Z",
            },
            "reservedFor": [{"resource": "pods", "name": "job", "uid": "pod-1"}],
            "devices": [{"driver": "nic.acme.com", "pool": "node1", "device": "nic-0", "data": {"any": 1}}],
        },
    });
    let object: ClaimObject = serde_json::from_value(object).unwrap();
    let claim = ResourceClaim::try_from(object).unwrap();
    assert_eq!(claim.uid.as_str(), "claim-1");
    let devices = claim.allocation.unwrap();
    assert_eq!(devices[0].device.device, "nic-0");
}
