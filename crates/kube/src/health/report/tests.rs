use devlet_core::device_plugin::inventory::{Offer, PluginOptions};
use devlet_core::device_plugin::list::{Device, DeviceList};
use devlet_core::device_plugin::run_options::{Answer, RunOptions};
use devlet_core::dra::claims::{Claim, ClaimKey, Preparation, PreparationState, PreparedDevice};
use devlet_core::dra::drivers::DriverOffer;
use devlet_core::dra::health::{HealthReport, PoolDevice};
use devlet_core::{
    ClaimUid, ClaimUse, ConnectionId, DriverName, Pod, PodClaim, PodMetadata, PodName, ProcessId, Source,
};

use super::*;

const NOW: Moment = Moment(1_000_000);
const DRIVER: &str = "gpu.acme.com";

/// A pod whose init container and container `main` hold devices 0 and 1 of a plugin. `main` also uses a claim and an
/// extended resource that a driver serves.
fn node() -> (Node, ConnectionId, ConnectionId) {
    let mut node = Node::default();
    let process = || ProcessId { uid: 0, pid: None };
    let offer = Offer {
        resource: "acme.com/nic".into(),
        endpoint: "a.sock".into(),
        process: process(),
        may_share: false,
        options: PluginOptions::default(),
    };
    let (plugin, _) = node.plugin_connected(offer, NOW).unwrap();
    let offer = DriverOffer {
        driver: DRIVER.into(),
        endpoint: "dra.sock".into(),
        process: process(),
        may_share: false,
        service: String::new(),
        service_reason: String::new(),
        health_service: None,
    };
    let (driver, _) = node.driver_registered(offer, NOW).unwrap();
    let allocation = |container: &str| Allocation {
        container: container.into(),
        kind: None,
        resource: "acme.com/nic".into(),
        devices: vec!["0".into(), "1".into()],
        nodes: Vec::new(),
        answer: Answer::new(Vec::new(), RunOptions::default()),
        pre_start_required: false,
    };
    let claim = |name: &str, uid: &str| PodClaim {
        name: name.to_owned(),
        key: ClaimKey {
            namespace: "default".to_owned(),
            name: format!("p-{name}"),
        },
        uid: uid.into(),
    };
    let claim_use = |claim: &str, request: Option<&str>| ClaimUse {
        container: "main".into(),
        claim: claim.to_owned(),
        request: request.map(str::to_owned),
    };
    let claims = vec![claim("gpus", "c1"), claim("", "c2")];
    for (each, requests) in claims
        .iter()
        .zip([["big", "small"], ["container-0-request-0", "other"]])
    {
        node.put_claim(prepared(each, requests));
    }
    let pod = Pod {
        uid: "u".into(),
        name: PodName {
            namespace: "default".to_owned(),
            name: "p".to_owned(),
        },
        source: Source::Api,
        fingerprint: 0,
        metadata: PodMetadata::default(),
        before_reboot: false,
        containers: vec!["init".into(), "main".into()],
        allocations: vec![allocation("init"), allocation("main")],
        claims,
        claim_uses: vec![
            claim_use("gpus", None),
            claim_use("gpus", Some("small")),
            claim_use("", Some("container-0-request-0")),
        ],
    };
    node.put(pod).unwrap();
    (node, plugin, driver)
}

/// A claim with one device for each request.
fn prepared(claim: &PodClaim, requests: [&str; 2]) -> Claim {
    let device = |(number, request): (usize, &str)| PreparedDevice {
        requests: vec![request.to_owned()],
        pool: "n".to_owned(),
        device: format!("{}-{number}", claim.uid),
        share: None,
        cdi_devices: match number {
            0 => Vec::new(),
            _ => vec![
                format!("acme.com/gpu={}-{number}", claim.uid),
                "acme.com/gpu=all".to_owned(),
            ],
        },
    };
    let preparation = Preparation {
        allocated: None,
        skip: BTreeSet::new(),
        state: PreparationState::Prepared,
        devices: requests.into_iter().enumerate().map(device).collect(),
    };
    Claim {
        key: claim.key.clone(),
        uid: ClaimUid::clone(&claim.uid),
        pod: "u".into(),
        pod_name: PodName::default(),
        preparations: BTreeMap::from([(DriverName::from(DRIVER), preparation)]),
    }
}

fn list(node: &mut Node, plugin: ConnectionId, healthy: &[bool]) {
    let device = |(id, healthy): (usize, &bool)| Device {
        id: id.to_string().into(),
        healthy: *healthy,
        nodes: Vec::new(),
    };
    let devices = healthy.iter().enumerate().map(device).collect();
    node.devices_listed(plugin, DeviceList::new(devices).0);
}

fn object(status: &Value) -> PodStatus {
    serde_json::from_value(json!({ "metadata": { "resourceVersion": "1" }, "status": status })).unwrap()
}

fn mapped(mut status: Value) -> PodStatus {
    let mapping = json!({
        "containerName": "main", "resourceName": "acme.com/gpu", "requestName": "container-0-request-0",
    });
    status["extendedResourceClaimStatus"] = json!({ "requestMappings": [mapping] });
    object(&status)
}

fn health(node: &Node, object: &PodStatus) -> PodHealth {
    PodHealth::of(node, &"u".into(), object, NOW)
}

fn device(id: &str, health: &str) -> Value {
    json!({ "resourceID": id, "health": health })
}

#[test]
fn all_containers_with_a_status_get_the_health_of_their_devices_sorted() {
    let (mut node, plugin, driver) = node();
    list(&mut node, plugin, &[true, false]);
    let report = HealthReport {
        device: PoolDevice {
            pool: "n".to_owned(),
            device: "c1-1".to_owned(),
        },
        health: DeviceHealth::Unhealthy,
        message: "ECC errors".to_owned(),
        lease_ms: 0,
    };
    node.health_reported(driver, vec![report], NOW);
    let statuses = json!({
        "initContainerStatuses": [{ "name": "init" }],
        "containerStatuses": [{ "name": "sidecar" }, { "name": "main" }],
    });
    let object = mapped(statuses);
    let health = health(&node, &object);

    let nics =
        json!({ "name": "acme.com/nic", "resources": [device("0", "Healthy"), device("1", "Unhealthy")] });
    let small = json!({ "resourceID": "acme.com/gpu=c1-1", "health": "Unhealthy", "message": "ECC errors" });
    let main = json!([
        { "name": "acme.com/gpu", "resources": [device("gpu.acme.com/n/c2-0", "Unknown")] },
        nics,
        { "name": "claim:gpus", "resources": [small, device("gpu.acme.com/n/c1-0", "Unknown")] },
        { "name": "claim:gpus/small", "resources": [small] },
    ]);
    let patch = health.patch(&"u".into(), &object).unwrap();
    let expected = json!([
        { "op": "test", "path": "/metadata/uid", "value": "u" },
        { "op": "test", "path": "/status/initContainerStatuses/0/name", "value": "init" },
        { "op": "add", "path": "/status/initContainerStatuses/0/allocatedResourcesStatus", "value": [nics] },
        { "op": "test", "path": "/status/containerStatuses/1/name", "value": "main" },
        { "op": "add", "path": "/status/containerStatuses/1/allocatedResourcesStatus", "value": main },
    ]);
    assert_eq!(patch, expected);
    assert_eq!(
        health.unhealthy,
        ["acme.com/nic", DRIVER].map(str::to_owned).into()
    );

    // Written, it is complete. A change of the node agent brings it back.
    let written = json!({
        "initContainerStatuses": [{ "name": "init", "allocatedResourcesStatus": [nics] }],
        "containerStatuses": [{ "name": "main", "allocatedResourcesStatus": main }],
    });
    assert_eq!(health.patch(&"u".into(), &mapped(written)), None);
}

#[test]
fn nothing_is_written_before_the_containers_have_a_status() {
    let (mut node, plugin, _) = node();
    list(&mut node, plugin, &[true, true]);
    let object = object(&json!({ "phase": "Pending" }));
    assert_eq!(health(&node, &object).patch(&"u".into(), &object), None);
}

#[test]
fn devices_without_a_plugin_are_unknown_and_unlisted_ones_unhealthy() {
    let (mut node, plugin, _) = node();
    let object = object(&json!({ "containerStatuses": [{ "name": "main" }] }));
    let nics = |node: &Node| {
        let resources = health(node, &object).resources("main");
        let nics = resources.into_iter().find(|each| each.name == "acme.com/nic");
        let devices = nics.unwrap().resources.into_iter();
        devices.map(|each| each.health).collect::<Vec<_>>()
    };
    assert_eq!(nics(&node), ["Unknown", "Unknown"]);
    list(&mut node, plugin, &[true]);
    assert_eq!(nics(&node), ["Healthy", "Unhealthy"]);
    node.connection_lost(plugin, NOW);
    assert_eq!(nics(&node), ["Unknown", "Unknown"]);
    assert!(health(&node, &object).unhealthy.is_empty());
}

#[test]
fn of_devices_with_the_same_id_the_worse_health_counts() {
    let mut health = PodHealth::default();
    for each in [
        DeviceHealth::Healthy,
        DeviceHealth::Unhealthy,
        DeviceHealth::Unknown,
    ] {
        let device = status("acme.com/gpu=all".to_owned(), each, String::new());
        health.add(&"main".into(), DRIVER, "claim:gpus".to_owned(), device);
    }
    let devices: Vec<_> = health.resources("main").remove(0).resources;
    assert_eq!(json!(devices), json!([device("acme.com/gpu=all", "Unhealthy")]));
}

#[test]
fn beside_a_kubelet_a_condition_names_the_devices_and_keeps_its_time_while_its_status_stays() {
    let (mut node, plugin, _) = node();
    let patch = |node: &Node, known: Value| {
        let object = object(&json!({ "conditions": known }));
        let mut health = health(node, &object);
        // Without the devices of the driver, whose health is unknown.
        for resources in health.containers.values_mut() {
            resources.retain(|name, _| name == "acme.com/nic");
        }
        health.condition_patch(&"u".into(), &object, "now")
    };
    list(&mut node, plugin, &[true, true]);
    let healthy = json!({
        "type": "devlet.dev/DevicesHealthy", "status": "True", "reason": "DevicesHealthy", "message": "",
    });
    let mut written = healthy.clone();
    written["lastTransitionTime"] = json!("now");
    let expected = json!({ "metadata": { "uid": "u" }, "status": { "conditions": [written] } });
    assert_eq!(patch(&node, json!([])), Some(expected));
    assert_eq!(patch(&node, json!([{ "type": "Ready" }, healthy])), None);

    list(&mut node, plugin, &[true, false]);
    let unhealthy = json!({
        "type": "devlet.dev/DevicesHealthy",
        "status": "False",
        "reason": "DevicesUnhealthy",
        "message": "container init: acme.com/nic 1 is unhealthy; container main: acme.com/nic 1 is unhealthy",
    });
    let mut earlier = unhealthy.clone();
    earlier["message"] = json!("another device");
    let expected = json!({ "metadata": { "uid": "u" }, "status": { "conditions": [unhealthy] } });
    assert_eq!(patch(&node, json!([earlier])), Some(expected));
}
