//! ResourceClaim objects: versions, UIDs, names and limits.

use super::*;

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
fn the_fingerprint_includes_claims_of_the_spec_and_no_status() {
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
fn a_second_pod_and_duplicate_claims_are_rejected() {
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
