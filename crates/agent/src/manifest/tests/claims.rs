//! Pods with claims.

use super::*;

mod objects;

/// A pod with a claim of its own, a generated one, and one that was left out on purpose.
const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: train, namespace: team-a, uid: pod-1}
spec:
  resourceClaims:
  - {name: gpu, resourceClaimName: big}
  - {name: nic, resourceClaimTemplateName: nics}
  - {name: fpga, resourceClaimTemplateName: fpgas}
  initContainers:
  - {name: fetch, resources: {claims: [{name: nic}]}}
  - {name: proxy, restartPolicy: Always, resources: {claims: [{name: gpu, request: small}, {name: nic}]}}
  containers:
  - name: main
    resources:
      claims: [{name: gpu, request: large}, {name: gpu, request: small}, {name: gpu, request: large}, {name: fpga}]
  - {name: log}
status:
  resourceClaimStatuses:
  - {name: nic, resourceClaimName: train-nic-x7}
  - {name: fpga}
";

const GPU: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: big, namespace: team-a, uid: claim-1, annotations: {a: b}}
spec: {devices: {requests: [{name: large, exactly: {deviceClassName: gpu}}, {name: small, firstAvailable: []}]}}
status:
  reservedFor: [{resource: pods, name: other, uid: pod-9}, {resource: pods, name: train, uid: pod-1}]
  allocation:
    devices:
      results:
      - {request: large, driver: gpu.acme.com, pool: node-1, device: gpu-0, adminAccess: true}
      - {request: small/half, driver: gpu.acme.com, pool: node-1, device: gpu-1, shareID: 6f1d5c0e-8a7b-4b0f-9d53-2b7c41e690a4,
         skipNodeOperations: ['*']}
      - {request: large, driver: net.acme.com, pool: a/b.c, device: nic-0, skipNodeOperations: [NodeUnprepareResources]}
      config: [{source: FromClaim, opaque: {driver: gpu.acme.com, parameters: {deep: [1, 2]}}}]
";

const NIC: &str = "
kind: ResourceClaim
metadata:
  name: train-nic-x7
  namespace: team-a
  ownerReferences:
  - {apiVersion: apps/v1, kind: ReplicaSet, name: r, uid: pod-1x}
  - {apiVersion: v1, kind: Pod, name: train, uid: pod-1, controller: true}
status: {reservedFor: [{resource: pods, name: train, uid: pod-1}], allocation: {devices: {results: []}}}
";

fn resolved(texts: &[&str]) -> Result<PodRequest, InvalidManifest> {
    let Manifests { pod, claims } = read(texts.iter().copied(), Source::Api, &[])?;
    Ok(pod.resolve_with(|key| claims.find(key))?)
}

fn said(texts: &[&str]) -> String {
    resolved(texts).unwrap_err().to_string()
}

/// A container, and the claims and requests that it names.
type Uses<'a> = (&'a str, Vec<(&'a str, Option<&'a str>)>);

fn uses(pod: &PodRequest) -> Vec<Uses<'_>> {
    let containers = pod.containers.iter();
    containers
        .map(|container| {
            let claims = container.claims.iter();
            let claims = claims.map(|each| (each.claim.as_str(), each.request.as_deref()));
            (container.name.as_str(), claims.collect())
        })
        .collect()
}

#[test]
fn a_pod_gets_its_claims_named_and_generated_in_any_order_of_documents() {
    let pod = resolved(&[POD, GPU, NIC]).unwrap();
    let claims: Vec<_> = pod
        .claims
        .iter()
        .map(|each| {
            (
                each.name.as_str(),
                each.claim.key.to_string(),
                each.claim.uid.as_str(),
            )
        })
        .collect();
    assert_eq!(claims[0], ("gpu", "team-a/big".to_owned(), "claim-1"));
    assert_eq!((claims[1].0, &*claims[1].1), ("nic", "team-a/train-nic-x7"));
    assert_eq!(claims.len(), 2);
    assert_eq!(
        uses(&pod),
        [
            ("fetch", vec![("nic", None)]),
            ("proxy", vec![("gpu", Some("small")), ("nic", None)]),
            ("main", vec![("gpu", Some("large")), ("gpu", Some("small"))]),
            ("log", vec![]),
        ]
    );
    let together = format!("{NIC}\n---\n{GPU}\n---\n{POD}");
    for texts in [&[NIC, GPU, POD][..], &[GPU, POD, NIC], &[&together]] {
        assert_eq!(resolved(texts).as_ref(), Ok(&pod));
    }
    assert_eq!(parse(&together, Source::Api, &[]), Ok(pod));
}

#[test]
fn an_error_about_a_claim_has_the_place_of_the_claim_or_of_its_name_in_the_pod() {
    let bare = "\n---\nkind: ResourceClaim\nmetadata: {name: big, namespace: team-a}\n";
    let foreign = NIC.replace("controller: true", "controller: false");
    let unreserved = NIC.replace("{resource: pods, name: train, uid: pod-1}", "");
    let unknown = POD.replace("{name: gpu, request: large}", "{name: gpu, request: larger}");
    let not_created = POD.replace(
        "- {name: nic, resourceClaimName",
        "- {name: other, resourceClaimName",
    );
    let claims = format!("{NIC}{bare}");
    let both = format!("{unreserved}{bare}");
    for (pod, claims, places) in [
        (
            POD,
            &*claims,
            vec!["claims.yaml:12:1: pod train (pod-1) is not allowed"],
        ),
        (POD, NIC, vec!["pod.yaml:7:36: fetch ResourceClaim big"]),
        (
            POD,
            &format!("{GPU}---{foreign}"),
            vec!["claims.yaml:22:5: ResourceClaim team-a/train-nic-x7 was not"],
        ),
        (
            POD,
            &both,
            vec!["claims.yaml:12:1: pod train", "; claims.yaml:9:23: pod train"],
        ),
        (
            &unknown,
            &format!("{GPU}---{NIC}"),
            vec!["pod.yaml:16:37: container main: ResourceClaim big does not have a request"],
        ),
        (
            &not_created,
            GPU,
            vec!["pod.yaml:8:5: pod \"team-a/train\": ResourceClaim not created"],
        ),
    ] {
        let pod = Text {
            name: "pod.yaml",
            text: pod,
        };
        let claims = Text {
            name: "claims.yaml",
            text: claims,
        };
        let said = request([pod, claims], Source::Api, &[]).unwrap_err().to_string();
        assert!(said.starts_with(places[0]), "{said}");
        assert!(places.iter().all(|place| said.contains(place)), "{said}");
    }
    let alone = parse(&format!("{POD}---{NIC}"), Source::Api, &[])
        .unwrap_err()
        .to_string();
    assert!(
        alone.starts_with("line 7, column 36: fetch ResourceClaim big"),
        "{alone}"
    );
}

#[test]
fn what_is_allocated_is_grouped_by_driver() {
    let pod = resolved(&[POD, GPU, NIC]).unwrap();
    let drivers = &pod.claims[0].claim.drivers;
    let [gpu, net] = ["gpu.acme.com", "net.acme.com"].map(|driver| &drivers[driver]);
    let devices: Vec<_> = gpu
        .devices
        .iter()
        .map(|each| {
            (
                &*each.request,
                &*each.pool,
                &*each.device,
                each.share.is_some(),
                each.admin_access,
            )
        })
        .collect();
    assert_eq!(
        devices,
        [
            ("large", "node-1", "gpu-0", false, true),
            ("small/half", "node-1", "gpu-1", true, false)
        ]
    );
    assert!(gpu.skip.is_empty(), "one of its devices needs everything");
    assert_eq!(net.devices[0].pool, "a/b.c");
    assert_eq!(net.skip.iter().collect::<Vec<_>>(), ["NodeUnprepareResources"]);
    assert!(pod.claims[1].claim.drivers.is_empty(), "allocated, to nothing");
}

#[test]
fn a_claim_may_have_two_names_in_a_pod() {
    let pod = POD.replace(
        "{name: nic, resourceClaimTemplateName: nics}",
        "{name: nic, resourceClaimName: big}",
    );
    let pod = resolved(&[&pod, GPU]).unwrap();
    let claims: Vec<_> = pod
        .claims
        .iter()
        .map(|each| (&*each.name, each.claim.uid.as_str()))
        .collect();
    assert_eq!(claims, [("gpu", "claim-1"), ("nic", "claim-1")]);
    assert_eq!(pod.claims[0].claim, pod.claims[1].claim);
}

#[test]
fn a_claim_that_is_not_given_is_asked_for_with_the_way_to_get_it() {
    assert_eq!(
        said(&[POD, NIC]),
        "fetch ResourceClaim big: team-a/big is not among the manifests (which have team-a/train-nic-x7); add it with its \
         status, as in `devlet admit -f pod.yaml -f claim.yaml`, where claim.yaml is what `kubectl get resourceclaims -n \
         team-a big -o yaml` says"
    );
    assert!(said(&[POD]).contains("is not among the manifests; add it"));
    assert!(said(&[POD, &GPU.replace("namespace: team-a, ", "")]).contains("(which have default/big)"));
}

#[test]
fn a_claim_that_the_pod_may_not_use_is_refused_in_the_kubelets_words() {
    let waiting = POD.replace("- {name: nic, resourceClaimName: train-nic-x7}", "");
    let unset = POD.replace(", resourceClaimName: big", "");
    let other = NIC.replace("uid: pod-1, controller: true", "uid: pod-2, controller: true");
    let ownerless = NIC.replace(", controller: true", "");
    let unreserved = GPU.replace("name: train, uid: pod-1", "name: train, uid: pod-2");
    let unallocated = format!("{}\n", GPU.split("  allocation:").next().unwrap());
    let not_owner =
        "ResourceClaim team-a/train-nic-x7 was not created for Pod team-a/train (Pod is not owner); ";
    for (texts, expected) in [
        (
            &[&*waiting, GPU, NIC][..],
            "pod \"team-a/train\": ResourceClaim not created yet; status.resourceClaimStatuses must say which claim was \
             created for \"nic\"",
        ),
        (
            &[&unset, GPU, NIC],
            "pod \"team-a/train\", spec.resourceClaim \"gpu\": none of the supported fields are set; set \
             resourceClaimName or resourceClaimTemplateName",
        ),
        (&[POD, GPU, &other], not_owner),
        (&[POD, GPU, &ownerless], not_owner),
        (
            &[POD, &unreserved, NIC],
            "pod train (pod-1) is not allowed to use ResourceClaim big (claim-1); ",
        ),
        (&[POD, &unallocated, NIC], "ResourceClaim big: not allocated; "),
    ] {
        let said = said(texts);
        assert!(said.starts_with(expected), "{said}");
    }
}

#[test]
fn all_problems_of_claims_are_reported_at_once() {
    let bare = GPU.split("status:").next().unwrap().to_owned();
    let said_of_one = said(&[POD, &bare, NIC]);
    assert_eq!(
        said_of_one,
        "pod train (pod-1) is not allowed to use ResourceClaim big (claim-1), which is not allocated; add {resource: pods, \
         name: train} to status.reservedFor of the claim, and add the devices that it has to status.allocation"
    );
    let other_uid = GPU.replace("name: train, uid: pod-1", "name: train, uid: pod-2");
    assert!(
        said(&[POD, &other_uid, NIC])
            .ends_with("status.reservedFor of the claim has pod train with UID pod-2: change that to pod-1")
    );
    let unallocated = NIC.replace(", allocation: {devices: {results: []}}", "");
    let said_of_both = said(&[POD, &bare, &unallocated]);
    assert!(said_of_both.starts_with(&said_of_one), "{said_of_both}");
    assert!(
        said_of_both.contains("; ResourceClaim train-nic-x7: not allocated; "),
        "{said_of_both}"
    );
}

#[test]
fn a_reservation_without_a_uid_counts_by_name() {
    let by_hand = GPU.replace("name: train, uid: pod-1", "name: train");
    assert!(resolved(&[POD, &by_hand, NIC]).is_ok());
    for other in [
        "name: train2",
        "name: train, apiGroup: apps",
        "name: train, resource: jobs",
    ] {
        let other = GPU.replace("resource: pods, name: train, uid: pod-1", other);
        assert!(
            said(&[POD, &other, NIC]).contains("is not allowed to use"),
            "{other}"
        );
    }
}

#[test]
fn a_group_of_pods_may_own_a_claim_and_have_it_reserved() {
    let pod = POD.replace(
        "spec:\n  resourceClaims",
        "spec:\n  schedulingGroup: {podGroupName: team}\n  resourceClaims",
    );
    let owned = |owner: &str| NIC.replace("apiVersion: v1, kind: Pod, name: train, uid: pod-1", owner);
    let group = owned("apiVersion: scheduling.k8s.io/v1alpha1, kind: PodGroup, name: team, uid: g");
    let reserved = |consumer: &str| GPU.replace("resource: pods, name: train, uid: pod-1", consumer);
    let for_group = reserved("apiGroup: scheduling.k8s.io, resource: podgroups, name: team, uid: g");
    assert!(resolved(&[&pod, &for_group, &group]).is_ok());
    for other in [
        "apiVersion: scheduling.k8s.io/v1alpha1, kind: PodGroup, name: other, uid: g",
        "apiVersion: apps/v1, kind: PodGroup, name: team, uid: g",
        "apiVersion: scheduling.k8s.io/v1, kind: Workload, name: team, uid: g",
    ] {
        let said = said(&[&pod, GPU, &owned(other)]);
        assert!(
            said.contains("(neither Pod nor PodGroup team is the owner)"),
            "{said}"
        );
    }
    for other in [
        "apiGroup: scheduling.k8s.io, resource: podgroups, name: other, uid: g",
        "apiGroup: apps, resource: podgroups, name: team, uid: g",
    ] {
        let said = said(&[&pod, &reserved(other), &group]);
        assert!(said.contains("is not allowed to use ResourceClaim big"), "{said}");
    }
    assert!(
        said(&[POD, &for_group, NIC]).contains("is not allowed"),
        "the pod is in no group"
    );
}

#[test]
fn a_container_names_requests_that_there_are() {
    let said = |texts: &[&str]| said(texts);
    let missing = POD.replace("request: small}, {name: nic}", "request: tiny}, {name: nic}");
    assert_eq!(
        said(&[&missing, GPU, NIC]),
        "container proxy: ResourceClaim big does not have a request \"tiny\"; it has large, small"
    );
    // A request that only the allocation has is valid, too.
    let bare: String = GPU
        .lines()
        .filter(|line| !line.starts_with("spec:"))
        .map(|line| format!("{line}\n"))
        .collect();
    assert!(resolved(&[POD, &bare, NIC]).is_ok());
    let alternative = POD.replace(
        "request: small}, {name: nic}",
        "request: small/half}, {name: nic}",
    );
    assert!(said(&[&alternative, GPU, NIC]).contains("resources.claims.request: \"small/half\" is not"));
}

#[test]
fn extended_resources_that_a_claim_backs_are_not_asked_of_plugins() {
    let pod = "
metadata: {name: a, uid: pod-1}
spec:
  initContainers:
  - {name: init, resources: {limits: {acme.com/gpu: 1}}}
  containers:
  - name: main
    resources:
      limits: {acme.com/gpu: 2, acme.com/nic: 1, deviceclass.resource.kubernetes.io/fpga: 1, acme.com/none: 0}
      requests: {acme.com/gpu: 2, acme.com/seat: 1}
status:
  extendedResourceClaimStatus:
    resourceClaimName: a-extended-resources-1
    requestMappings:
    - {containerName: main, resourceName: acme.com/gpu, requestName: container-1-request-0}
    - {containerName: main, resourceName: deviceclass.resource.kubernetes.io/fpga, requestName: container-1-request-1}
    - {containerName: main, resourceName: acme.com/none, requestName: container-1-request-2}
    - {containerName: main, resourceName: acme.com/seat, requestName: container-1-request-3}
    - {containerName: main, resourceName: cpu, requestName: container-1-request-4}
    - {containerName: gone, resourceName: acme.com/gpu, requestName: container-1-request-5}
";
    let claim = "
kind: ResourceClaim
metadata: {name: a-extended-resources-1, annotations: {resource.kubernetes.io/extended-resource-claim: 'true'}}
spec: {devices: {requests: [{name: container-1-request-0}, {name: container-1-request-1}, {name: container-1-request-3}]}}
status: {reservedFor: [{resource: pods, name: a, uid: pod-1}], allocation: {devices: {results: [
  {request: container-1-request-0, driver: gpu.acme.com, pool: p, device: gpu-0}]}}}
";
    let request = resolved(&[pod, claim]).unwrap();
    assert_eq!(
        wants(&request.containers[0]),
        [("acme.com/gpu", 1)],
        "not mapped for this one"
    );
    assert_eq!(wants(&request.containers[1]), [("acme.com/nic", 1)]);
    let used = [
        "container-1-request-0",
        "container-1-request-3",
        "container-1-request-1",
    ];
    let used: Vec<_> = used.iter().map(|request| ("", Some(*request))).collect();
    assert_eq!(uses(&request), [("init", vec![]), ("main", used)]);
    assert_eq!((&*request.claims[0].name, request.claims.len()), ("", 1));

    let unreserved = claim.replace("uid: pod-1", "uid: pod-2");
    assert!(said(&[pod, &unreserved]).contains("is not allowed to use"));
    assert!(said(&[pod]).starts_with("fetch ResourceClaim a-extended-resources-1: "));
}
