//! Pods with claims.

use super::*;

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
            vec!["pod.yaml:16:37: container main: ResourceClaim big has no request"],
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
fn the_same_claim_twice_in_a_pod_is_two_names_for_it() {
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
fn every_version_of_a_claim_and_lists_of_kubectl_are_read() {
    let pod = resolved(&[POD, GPU, NIC]).unwrap();
    for version in ["v1beta2", "v1beta1"] {
        let older = GPU.replace("resource.k8s.io/v1", &format!("resource.k8s.io/{version}"));
        assert_eq!(resolved(&[POD, &older, NIC]).as_ref(), Ok(&pod), "{version}");
    }
    let alpha = said(&[
        POD,
        &GPU.replace("resource.k8s.io/v1", "resource.k8s.io/v1alpha3"),
        NIC,
    ]);
    assert_eq!(
        alpha,
        "manifest 2, line 3, column 7: expected a v1 Pod or a resource.k8s.io/v1, v1beta2 or v1beta1 ResourceClaim, found \
         resource.k8s.io/v1alpha3 ResourceClaim"
    );
    let item = |text: &str| text.trim().replace('\n', "\n  ");
    let list = format!(
        "apiVersion: v1\nkind: List\nitems:\n- {}\n- {}\n- {}\n",
        item(NIC),
        item(POD),
        item(GPU)
    );
    assert_eq!(resolved(&[&list]), Ok(pod));
    let json = r#"{"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": []}"#;
    assert_eq!(said(&[json]), "the manifest is empty");
}

#[test]
fn a_claim_without_a_uid_has_one_that_is_derived_from_its_name() {
    let pod = resolved(&[POD, GPU, NIC]).unwrap();
    // Fixed for ever: claims on disk have such UIDs.
    assert_eq!(
        pod.claims[1].claim.uid.as_str(),
        "df97848a-8422-5d55-99de-ec8ccd3378fd"
    );
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
fn all_that_claims_lack_is_reported_at_once_and_a_name_is_enough() {
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
        "container proxy: ResourceClaim big has no request \"tiny\"; it has large, small"
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

#[test]
fn the_fingerprint_knows_claims_of_the_spec_and_nothing_of_any_status() {
    let print = |texts: &[&str]| resolved(texts).unwrap().fingerprint;
    let one = print(&[POD, GPU, NIC]);
    // Fixed for ever: pods on disk have it.
    assert_eq!(one, 0xc62d_7803_ebd1_02eb);
    let renamed = [POD.replace("x7", "y8"), NIC.replace("x7", "y8")];
    let elsewhere = GPU.replace("gpu-0", "gpu-7").replace("claim-1", "claim-2");
    let with_fpga = POD.replace(
        "{name: fpga}\n",
        "{name: fpga, resourceClaimName: train-nic-x7}\n",
    );
    for same in [
        &[&*renamed[0], GPU, &*renamed[1]][..],
        &[POD, &elsewhere, NIC],
        &[&with_fpga, GPU, NIC],
    ] {
        assert_eq!(print(same), one);
    }
    let other_name = [
        POD.replace("resourceClaimName: big", "resourceClaimName: big2"),
        GPU.replace("name: big", "name: big2"),
    ];
    let other_template = POD.replace("Name: nics", "Name: nicer");
    let other_request = POD.replace("[{name: gpu, request: large}, ", "[");
    let other_container = POD.replace("{name: log}", "{name: log, resources: {claims: [{name: gpu}]}}");
    for other in [
        &[&*other_name[0], &*other_name[1], NIC][..],
        &[&other_template, GPU, NIC],
        &[&other_request, GPU, NIC],
        &[&other_container, GPU, NIC],
    ] {
        assert_ne!(print(other), one);
    }
}

#[test]
fn claims_are_held_to_the_rules_of_the_api() {
    let pod = |text: &str, instead: &str| POD.replace(text, instead);
    let gpu = |text: &str, instead: &str| {
        assert!(GPU.contains(text));
        GPU.replace(text, instead)
    };
    let level = pod("spec:\n", "spec:\n  resources: {claims: [{name: gpu}]}\n");
    let both = pod(
        "resourceClaimName: big",
        "resourceClaimName: big, resourceClaimTemplateName: t",
    );
    let twice = pod("{name: nic, resourceClaimT", "{name: gpu, resourceClaimT");
    let unknown = pod("[{name: nic}]", "[{name: nik}]");
    for (text, expected) in [
        (&level, "spec.resources: the pod names claims;"),
        (&both, "spec.resourceClaims: gpu has both"),
        (&twice, "spec.resourceClaims: two claims are called gpu"),
        (
            &unknown,
            "container fetch: the claim nik is not in spec.resourceClaims",
        ),
        (
            &pod("name: gpu, resourceClaimName", "name: G, resourceClaimName"),
            "spec.resourceClaims.name: \"G\" is not",
        ),
        (
            &pod("resourceClaimName: big", "resourceClaimName: B/g"),
            "spec.resourceClaims.resourceClaimName: \"B/g\"",
        ),
    ] {
        let said = said(&[text, GPU, NIC]);
        assert!(said.contains(expected), "{said}");
    }
    for (claim, expected) in [
        (
            gpu("device: gpu-0", "device: \"gpu\\e[31m\""),
            "results.device: \"gpu\\u{1b}[31m\" is not the name of a device",
        ),
        (gpu("device: gpu-0, ", ""), "results.device: \"\""),
        (
            gpu("pool: node-1, device: gpu-0", "pool: //, device: gpu-0"),
            "results.pool: \"//\"",
        ),
        (
            gpu("driver: net.acme.com", "driver: net_acme"),
            "results.driver: \"net_acme\"",
        ),
        (
            gpu("request: small/half", "request: a/b/c"),
            "results.request: \"a/b/c\"",
        ),
        (gpu("'*'", "'* *'"), "results.skipNodeOperations: \"* *\""),
        (gpu("uid: claim-1", "uid: cl aim"), "metadata.uid: \"cl aim\""),
        (
            gpu("name: large, exactly", "name: LARGE, exactly"),
            "spec.devices.requests.name: \"LARGE\"",
        ),
    ] {
        let said = said(&[POD, &claim, NIC]);
        assert!(said.starts_with("manifest 2, line "), "{said}");
        assert!(said.contains(": ResourceClaim team-a/big: "), "{said}");
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn one_pod_and_each_claim_once() {
    assert_eq!(
        said(&[GPU, NIC]),
        "there is no Pod, only ResourceClaims; add the pod that is to be admitted"
    );
    assert_eq!(
        said(&[POD, GPU, GPU]),
        "manifest 3, line 4, column 18: ResourceClaim team-a/big is there twice; leave one of them out"
    );
    assert!(
        said(&[POD, GPU, POD])
            .contains("manifest 3, line 2, column 1: there are several Pods, team-a/train and team-a/train")
    );
    assert_eq!(said(&[POD, " "]), "manifest 2: the manifest is empty");
    let template = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: nics}\nspec: {spec: {}}";
    assert!(said(&[template]).ends_with("give the ResourceClaim that was created from the template"));
    let slice =
        "apiVersion: resource.k8s.io/v1\nkind: ResourceSlice\nspec: {driver: d, devices: [{name: a}]}";
    assert_eq!(
        said(&[slice]),
        "line 2, column 7: expected a v1 Pod or ResourceClaim, found resource.k8s.io/v1 ResourceSlice"
    );
}

#[test]
fn a_hostile_claim_costs_no_more_than_its_bytes_and_errors_stay_short() {
    let deep = format!("kind: ResourceClaim\nspec: {}", "[".repeat(100_000));
    let lists = format!(
        "{{\"kind\": \"List\", \"items\": [{}",
        "{\"kind\": \"List\", \"items\": [".repeat(50_000)
    );
    let mut bomb = String::from("kind: ResourceClaim\na0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..30 {
        let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{aliases}]\n"));
    }
    let long = "x".repeat(500_000);
    let long_kind = format!("kind: {long}");
    let long_name = format!("kind: ResourceClaim\nmetadata: {{name: {long}}}");
    let long_status = format!("kind: ResourceClaim\nmetadata: {{name: a}}\nstatus: {long}");
    let long_request = GPU.replace("request: small/half", &format!("request: {long}"));
    for text in [
        &deep,
        &lists,
        &bomb,
        &long_kind,
        &long_name,
        &long_status,
        &long_request,
    ] {
        let said = said(&[POD, text]);
        assert!(said.starts_with("manifest 2, line "), "{said}");
        assert!(said.len() < 1000, "{} bytes: {}", said.len(), &said[..200]);
    }
}
