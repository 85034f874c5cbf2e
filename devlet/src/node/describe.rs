//! `devlet describe`

use clap::ValueEnum;
use devlet_client::{Client, v1};
use serde::Serialize;

use super::claims::{Claim, ClaimDriver, Driver, RefusedDriver, Wait, each_once};
use super::shown::{Device, Plugin, Pod, PodContainer, PodId, Resource, or_dash};
use super::{ConnectArg, time};
use crate::Outcome;
use crate::output::{self, Output, OutputArg, shown, table};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What it is
    #[arg(value_name = "pod|resource|device|driver|claim")]
    kind: Kind,
    /// What it is called
    name: String,
    #[command(flatten)]
    connect: ConnectArg,
    #[command(flatten)]
    output: OutputArg,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A pod, by name, namespace/name or UID
    #[value(alias = "pods")]
    Pod,
    /// A resource, acme.com/gpu
    #[value(alias = "resources")]
    Resource,
    /// A device, by id or RESOURCE/ID
    #[value(alias = "devices")]
    Device,
    /// A DRA driver, gpu.acme.com
    #[value(alias = "drivers")]
    Driver,
    /// A ResourceClaim, by name, namespace/name or UID
    #[value(alias = "claims", alias = "resourceclaim", alias = "resourceclaims")]
    Claim,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    let client = args.connect.connect().await?;
    let output = args.output.output;
    match args.kind {
        Kind::Pod => pod(&client, args.name, output).await,
        Kind::Resource => resource(&client, args.name, output).await,
        Kind::Device => device(&client, &args.name, output).await,
        Kind::Driver => driver(&client, args.name, output).await,
        Kind::Claim => claim(&client, args.name, output).await,
    }
}

fn no_such(what: &str, name: &str) -> Outcome {
    output::warn(&format!("error: no such {what}: {name}"));
    output::warn(&format!("hint: devlet get {what}s shows what there is"));
    Outcome::Bad
}

async fn pod(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
    let listed = client
        .list_pods(v1::ListPodsRequest { pod: name.clone() })
        .await?;
    let Some(pod) = listed.pods.into_iter().next() else {
        return Ok(no_such("pod", &name));
    };
    output::print(output, &Pod::from(pod), pod_text)?;
    Ok(Outcome::Fine)
}

fn pod_text(pod: &Pod) -> String {
    let boot = if pod.before_reboot {
        ", before the machine last booted"
    } else {
        ""
    };
    let source = match pod.source {
        "api" => "a caller of devlet's API; held until it is removed",
        "embedder" => "the program that devlet is part of",
        "imported" => "a kubelet's file",
        other => other,
    };
    let mut text = format!(
        "Name:       {}\nNamespace:  {}\nUID:        {}\nFrom:       {source}{boot}\n",
        shown(&or_dash(pod.id.name.clone())),
        shown(&or_dash(pod.id.namespace.clone())),
        shown(&pod.id.uid),
    );
    if !pod.claims.is_empty() {
        let claims = pod.claims.iter().map(|claim| {
            let (name, id) = (or_dash(claim.pod_claim.clone()), &claim.id);
            [
                name,
                id.name.clone(),
                claim.phase.to_owned(),
                claim.drivers.clone(),
                id.uid.clone(),
            ]
        });
        let header = ["CLAIM", "RESOURCECLAIM", "PHASE", "DRIVERS", "UID"];
        text.push_str(&format!("\n{}", table(header, claims)));
        for claim in each_once(&pod.claims) {
            text.push_str(&waits_text(&claim.waits));
        }
    }
    for container in &pod.containers {
        let kind = container
            .kind
            .map(|kind| format!(" ({kind})"))
            .unwrap_or_default();
        text.push_str(&format!("\nContainer {}{kind}\n", shown(&container.name)));
        text.push_str(&devices_text(container));
        let lines = container.options.lines();
        if !lines.is_empty() {
            text.push_str(&format!("\n{}", indented(&table(["OPTION", "VALUE"], lines))));
        }
        for conflict in &container.conflicts {
            text.push_str(&format!(
                "  conflict: {} {}: {} was followed, {} was not\n",
                conflict.what,
                shown(&conflict.key),
                shown(&conflict.kept),
                shown(&conflict.dropped)
            ));
        }
    }
    text
}

/// What a container holds of plugins, and uses of claims.
fn devices_text(container: &PodContainer) -> String {
    let mut text = String::new();
    if !container.devices.is_empty() || container.claim_devices.is_empty() {
        let devices = container.devices.iter().map(|held| {
            let pre_start = if held.pre_start_required { "yes" } else { "no" };
            let nodes: Vec<String> = held.numa_nodes.keys().map(ToString::to_string).collect();
            [
                held.resource.clone(),
                held.ids.join(","),
                or_dash(nodes.join(",")),
                pre_start.to_owned(),
            ]
        });
        text.push_str(&indented(&table(
            ["RESOURCE", "DEVICES", "NUMA", "PRE-START"],
            devices,
        )));
    }
    if !container.claim_devices.is_empty() {
        let separator = if text.is_empty() { "" } else { "\n" };
        let devices = container.claim_devices.iter().map(|used| {
            let claim = match &used.request {
                Some(request) => format!("{}/{request}", used.pod_claim),
                None => used.pod_claim.clone(),
            };
            let device = &used.device;
            [
                or_dash(claim),
                used.driver.clone(),
                format!("{}/{}", device.pool, device.device),
                device.health_text(),
            ]
        });
        let devices = table(["CLAIM", "DRIVER", "DEVICE", "HEALTH"], devices);
        text.push_str(&format!("{separator}{}", indented(&devices)));
    }
    text
}

/// What is waited for, line by line.
fn waits_text(waits: &[Wait]) -> String {
    let line = |wait: &Wait| {
        let retry = wait.retry_at.as_ref();
        let retry = retry.map_or_else(String::new, |at| format!(", called again at {at}"));
        let text = format!("Waiting for:  {}{retry}\n", output::line(&wait.text));
        match wait
            .failure
            .as_ref()
            .filter(|failure| !wait.text.contains(*failure))
        {
            Some(failure) => format!("{text}Last failure: {}\n", output::line(failure)),
            None => text,
        }
    };
    waits.iter().map(line).collect()
}

async fn claim(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
    let request = v1::ListClaimsRequest { claim: name.clone() };
    let listed = client.list_claims(request).await?.claims;
    // An older one of the same name may be there too, as long as it was not unprepared.
    let claims: Vec<Claim> = listed.into_iter().map(Claim::from).collect();
    match &claims[..] {
        [] => return Ok(no_such("claim", &name)),
        [claim] => output::print(output, claim, claim_text)?,
        several => output::print(output, &several, |claims| {
            let texts: Vec<String> = claims.iter().map(claim_text).collect();
            texts.join("\n")
        })?,
    }
    Ok(Outcome::Fine)
}

fn claim_text(claim: &Claim) -> String {
    let phase = match claim.phase {
        "preparing" => "preparing: not every driver has prepared it",
        "unpreparing" => "unpreparing: no pod wants it any longer",
        "abandoned" => "abandoned: no pod wants it any longer, and an operator gave up on the driver",
        phase => phase,
    };
    let mut text = format!(
        "Name:         {}\nNamespace:    {}\nUID:          {}\nPhase:        {phase}\n",
        shown(&claim.id.name),
        shown(&claim.id.namespace),
        shown(&claim.id.uid),
    );
    match &claim.last_pod {
        Some(pod) => text.push_str(&format!("Last pod:     {}\n", shown(&pod.short()))),
        None => text.push_str(&format!("Pods:         {}\n", shown(&claim.pods_text()))),
    }
    text.push_str(&waits_text(&claim.waits));
    if claim.phase == "unpreparing" {
        for wait in claim.waits.iter().filter(|wait| wait.reason == "noDriver") {
            let claim = claim.id.short();
            let (claim, driver) = (shown(&claim), shown(&wait.driver));
            text.push_str(&format!(
                "To do without: devlet remove --claim {claim} --abandon-driver {driver}\n"
            ));
        }
    }
    if claim.phase == "abandoned" {
        let claim = claim.id.short();
        text.push_str(&format!(
            "If its driver never comes back: devlet forget --claim {}\n",
            shown(&claim)
        ));
    }
    for driver in &claim.drivers {
        text.push_str(&claim_driver_text(driver));
    }
    text
}

fn claim_driver_text(driver: &ClaimDriver) -> String {
    let mut text = format!("\nDriver {} ({})\n", shown(&driver.name), driver.state);
    if !driver.skip_node_operations.is_empty() {
        let skipped = driver.skip_node_operations.join(", ");
        text.push_str(&format!("  not needed: {}\n", shown(&skipped)));
    }
    if !driver.allocated.is_empty() {
        let allocated = driver.allocated.iter().map(|device| {
            let admin = if device.admin_access { "yes" } else { "no" };
            [
                format!("{}/{}", device.pool, device.device),
                device.request.clone(),
                or_dash(device.share_id.clone().unwrap_or_default()),
                admin.to_owned(),
            ]
        });
        let header = ["ALLOCATED", "REQUEST", "SHARE", "ADMIN"];
        text.push_str(&indented(&table(header, allocated)));
    }
    if !driver.devices.is_empty() {
        let separator = if driver.allocated.is_empty() { "" } else { "\n" };
        let prepared = driver.devices.iter().map(|device| {
            let requests = if device.requests.is_empty() {
                "all".to_owned()
            } else {
                device.requests.join(",")
            };
            [
                or_dash(format!("{}/{}", device.pool, device.device)),
                requests,
                or_dash(device.cdi_devices.join(",")),
                device.health_text(),
            ]
        });
        // After a reboot, until it is prepared again.
        let prepared_text = match driver.state {
            "pending" => "PREPARED BEFORE",
            _ => "PREPARED",
        };
        let header = [prepared_text, "REQUESTS", "CDI DEVICES", "HEALTH"];
        text.push_str(&format!("{separator}{}", indented(&table(header, prepared))));
    }
    text
}

/// What `-o json` prints. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DriverShown {
    #[serde(flatten)]
    driver: Driver,
    /// Its plugins that are not taken in.
    refused: Vec<RefusedDriver>,
    /// The claims that have devices of it.
    resource_claims: Vec<Claim>,
}

async fn driver(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
    let request = v1::ListDriversRequest { driver: name.clone() };
    let list = client.list_drivers(request).await?;
    let driver = match list.drivers.into_iter().next() {
        Some(driver) => driver,
        // All of its plugins were refused.
        None if !list.refused.is_empty() => v1::Driver {
            name: name.clone(),
            ..v1::Driver::default()
        },
        None => return Ok(no_such("driver", &name)),
    };
    let claims = client.list_claims(v1::ListClaimsRequest::default()).await?.claims;
    let has_it = |claim: &v1::Claim| claim.drivers.iter().any(|driver| driver.name == name);
    let claims = claims.into_iter().filter(has_it);
    let shown = DriverShown {
        driver: driver.into(),
        refused: list.refused.into_iter().map(RefusedDriver::from).collect(),
        resource_claims: claims.map(Claim::from).collect(),
    };
    output::print(output, &shown, DriverShown::table)?;
    Ok(Outcome::Fine)
}

impl DriverShown {
    fn table(&self) -> String {
        let driver = &self.driver;
        let mut text = format!(
            "Name:         {}\nState:        {}\n",
            shown(&driver.name),
            driver.state_text()
        );
        if let Some(last) = driver.last_plugin.as_ref().filter(|_| driver.plugins.is_empty()) {
            let gone = time::age(last.gone_since_ms);
            text.push_str(&format!(
                "Last plugin:  {}, gone for {gone}\n",
                shown(&last.endpoint)
            ));
        }
        text.push_str(&waits_text(&driver.waits));
        for plugin in &driver.plugins {
            let health = plugin.health_service.as_deref().unwrap_or("not reported");
            text.push_str(&format!(
                "\nPlugin {} ({})\n  Service:     {}, {}\n  Health:      {}\n  Registered:  {} ago\n  User:        {}\n",
                shown(&plugin.endpoint),
                plugin.state_text(),
                shown(&plugin.service),
                shown(&plugin.service_reason),
                shown(health),
                time::age(plugin.registered_at_ms),
                plugin.uid,
            ));
        }
        for refused in &self.refused {
            let again = "  It is asked again from time to time, and at once when its socket is made anew.\n";
            let hint = refused.hint.as_ref();
            let hint = hint.map_or_else(String::new, |hint| format!("  What to do:  {}\n", shown(hint)));
            text.push_str(&format!(
                "\nRefused plugin {}\n  Reason:      {}\n{hint}  Refused:     {} ago, attempt {}\n{again}",
                shown(&refused.socket),
                shown(&refused.reason),
                time::age(refused.refused_at_ms),
                refused.attempts,
            ));
        }
        if !self.resource_claims.is_empty() {
            let claims = self.resource_claims.iter().flat_map(|claim| {
                let ours = claim.drivers.iter().filter(|each| each.name == driver.name);
                ours.map(|each| {
                    let devices = each
                        .devices
                        .iter()
                        .map(|device| format!("{}/{} ({})", device.pool, device.device, device.health));
                    let devices: Vec<String> = devices.collect();
                    let state = each.state.to_owned();
                    [
                        claim.id.short(),
                        state,
                        claim.pods_text(),
                        or_dash(devices.join(", ")),
                    ]
                })
            });
            let header = ["CLAIM", "STATE", "PODS", "DEVICES"];
            text.push_str(&format!("\n{}", table(header, claims)));
        }
        text
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// What `-o json` prints. The keys are an interface.
#[derive(Debug, Serialize)]
struct ResourceShown {
    #[serde(flatten)]
    resource: Resource,
    connections: Vec<Plugin>,
    devices: Vec<Device>,
}

async fn resource(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
    let resources = client
        .list_resources(v1::ListResourcesRequest {})
        .await?
        .resources;
    let Some(resource) = resources.into_iter().find(|resource| resource.name == name) else {
        return Ok(no_such("resource", &name));
    };
    let plugins = client.list_plugins(v1::ListPluginsRequest {}).await?.plugins;
    let devices = client
        .list_devices(v1::ListDevicesRequest {
            resource: name.clone(),
        })
        .await?
        .devices;
    let shown = ResourceShown {
        resource: resource.into(),
        connections: plugins
            .into_iter()
            .filter(|each| each.resource == name)
            .map(Plugin::from)
            .collect(),
        devices: devices.into_iter().map(Device::from).collect(),
    };
    output::print(output, &shown, ResourceShown::table)?;
    Ok(Outcome::Fine)
}

impl ResourceShown {
    fn table(&self) -> String {
        let resource = &self.resource;
        let mut text = format!(
            "Name:         {}\nState:        {}\nCapacity:     {}\nAllocatable:  {}\nHeld:         {}\nFree:         {}\n",
            shown(&resource.name),
            resource.state_text(),
            resource.capacity,
            resource.allocatable,
            resource.held,
            resource.free,
        );
        if resource.last_plugin.is_some() {
            text.push_str(&format!("Last plugin:  {}\n", shown(&resource.last_text())));
        }
        if !self.connections.is_empty() {
            let plugins = self.connections.iter().map(|plugin| {
                let devices = plugin
                    .devices
                    .map_or_else(|| "-".to_owned(), |number| number.to_string());
                let (state, age) = (plugin.state_text().to_owned(), time::age(plugin.connected_at_ms));
                [
                    plugin.endpoint.clone(),
                    devices,
                    state,
                    age,
                    plugin.uid.to_string(),
                    plugin.options_text(),
                ]
            });
            let header = ["PLUGIN", "DEVICES", "STATE", "CONNECTED", "UID", "OPTIONS"];
            text.push_str(&format!("\n{}", table(header, plugins)));
        }
        if !self.devices.is_empty() {
            let devices = self.devices.iter().map(|device| {
                let health = device.health_text().to_owned();
                [
                    device.id.clone(),
                    health,
                    device.numa_text(),
                    device.holders_text(),
                ]
            });
            text.push_str(&format!(
                "\n{}",
                table(["DEVICE", "HEALTH", "NUMA", "HELD BY"], devices)
            ));
        }
        text
    }
}

/// What `-o json` prints. The keys are an interface.
#[derive(Debug, Serialize)]
struct DeviceShown {
    #[serde(flatten)]
    device: Device,
    containers: Vec<Holder>,
}

/// A container that has the device.
#[derive(Debug, Serialize)]
struct Holder {
    pod: PodId,
    container: String,
}

async fn device(client: &Client, name: &str, output: Output) -> anyhow::Result<Outcome> {
    let devices = client
        .list_devices(v1::ListDevicesRequest::default())
        .await?
        .devices;
    let mut named = named(devices, name);
    let device = match (named.pop(), named.len()) {
        (Some(device), 0) => Device::from(device),
        (None, _) => return Ok(no_such("device", name)),
        (Some(last), _) => {
            named.push(last);
            let names: Vec<String> = named
                .iter()
                .map(|each| format!("{}/{}", each.resource, each.id))
                .collect();
            output::warn(&format!(
                "error: {name} may be {}: name one of them",
                names.join(" or ")
            ));
            return Ok(Outcome::Bad);
        }
    };
    let mut containers = Vec::new();
    for holder in &device.holders {
        let pods = client
            .list_pods(v1::ListPodsRequest {
                pod: holder.uid.clone(),
            })
            .await;
        // A pod that was removed in the meantime holds nothing.
        for pod in pods.map(|list| list.pods).unwrap_or_default() {
            for container in pod.containers {
                let has = |held: &v1::HeldDevices| {
                    held.resource == device.resource && held.ids.contains(&device.id)
                };
                if container.devices.iter().any(has) {
                    containers.push(Holder {
                        pod: holder.clone(),
                        container: container.name,
                    });
                }
            }
        }
    }
    output::print(output, &DeviceShown { device, containers }, DeviceShown::table)?;
    Ok(Outcome::Fine)
}

/// Ids are unique within a resource only.
fn named(devices: Vec<v1::Device>, name: &str) -> Vec<v1::Device> {
    let in_full = |device: &v1::Device| {
        let rest = name.strip_prefix(&device.resource);
        rest.and_then(|rest| rest.strip_prefix(['/', '='])) == Some(device.id.as_str())
    };
    devices
        .into_iter()
        .filter(|device| device.id == name || in_full(device))
        .collect()
}

impl DeviceShown {
    fn table(&self) -> String {
        let device = &self.device;
        let mut text = format!(
            "Resource:    {}\nId:          {}\nHealth:      {}\nNUMA nodes:  {}\n",
            shown(&device.resource),
            shown(&device.id),
            device.health_text(),
            device.numa_text(),
        );
        if device.holders.is_empty() {
            text.push_str("Held by:     nobody\n");
        }
        for holder in &device.holders {
            let containers: Vec<&str> = self
                .containers
                .iter()
                .filter(|each| each.pod.uid == holder.uid)
                .map(|each| each.container.as_str())
                .collect();
            let containers = if containers.is_empty() {
                String::new()
            } else {
                format!(", in {}", containers.join(" and "))
            };
            text.push_str(&format!(
                "Held by:     {}{}\n",
                shown(&holder.short()),
                shown(&containers)
            ));
        }
        if device.holders.len() > 1 {
            text.push_str("Note:        it is not given to anybody until all of them are gone\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::claims::samples as claims;
    use crate::node::shown::samples;

    #[test]
    fn a_device_is_found_by_its_id_or_in_full() {
        let device = |resource: &str, id: &str| v1::Device {
            resource: resource.into(),
            id: id.into(),
            ..Default::default()
        };
        let devices = vec![
            device("acme.com/gpu", "0"),
            device("acme.com/nic", "0"),
            device("acme.com/nic", "1/2"),
        ];
        let found = |name: &str| named(devices.clone(), name).len();
        assert_eq!(found("0"), 2);
        assert_eq!(found("acme.com/gpu/0"), 1);
        assert_eq!(found("acme.com/gpu=0"), 1);
        assert_eq!(found("acme.com/nic/1/2"), 1);
        assert_eq!(found("1/2"), 1);
        assert_eq!(found("acme.com/gpu0"), 0);
    }

    #[test]
    fn a_claim_is_described_driver_by_driver() {
        let text = claim_text(&Claim::from(claims::claim()));
        for expected in [
            "Phase:        preparing: not every driver has prepared it\n",
            "Pods:         default/job1\n",
            "Last failure: it broke\n",
            "Driver gpu.acme.com (prepared)\n  not needed: NodeUnprepareResources\n",
            "big/first",
            "acme.com/gpu=gpu-0",
            "unhealthy: too hot",
            "Driver nic.acme.com (pending)\n",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }

    #[test]
    fn what_was_prepared_before_a_reboot_is_not_called_prepared() {
        let mut claim = claims::claim();
        claim.drivers[0].state = v1::PreparationState::Pending.into();
        let text = claim_text(&Claim::from(claim));
        assert!(text.contains("  PREPARED BEFORE  REQUESTS"), "{text}");
    }

    #[test]
    fn a_driver_is_described_with_the_service_that_was_chosen_and_why() {
        let shown = DriverShown {
            driver: claims::driver().into(),
            refused: vec![claims::refused().into()],
            resource_claims: vec![claims::claim().into()],
        };
        let text = shown.table();
        for expected in [
            "State:        serving\n",
            "Plugin /run/old.sock (not connected)\n",
            "Plugin /run/new.sock (serving)\n",
            "Service:     v1.DRAPlugin, the newest of [\"v1beta1.DRAPlugin\" \"v1.DRAPlugin\"]\n",
            "Health:      v1.DRAResourceHealth\n",
            "Refused plugin /registry/gpu.sock\n  Reason:      user 7 may not serve gpu.acme.com\n  What to do:  ask\n",
            "default/gpu",
            "node-1/gpu-0 (unhealthy)",
            "Waiting for:  ",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert_eq!(
            serde_json::to_value(&shown).unwrap()["resourceClaims"][0]["uid"],
            "c-1"
        );
    }

    #[test]
    fn a_pod_is_described_container_by_container() {
        let text = pod_text(&Pod::from(samples::pod()));
        for expected in [
            "Name:       job1\n",
            "Container main (app)\n",
            "/dev/null as /dev/gpu (rw)",
            "/opt/acme on /usr/acme (read-only)",
            "GPU=gpu-0",
            "acme.com/slot=3",
            "acme.com/gpu=gpu-0",
            "mine/big",
            "node-1/gpu-0",
            "unhealthy: too hot",
            "Waiting for:  ResourceClaim default/gpu: DRA driver nic.acme.com is not connected\n",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }
}
