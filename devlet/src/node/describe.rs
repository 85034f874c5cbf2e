//! `devlet describe`

use devlet_client::{Client, v1};
use serde::Serialize;

use super::claims::{Claim, ClaimDriver, Driver, RefusedDriver, Wait, each_once};
use super::kind::{self, Kind, Target, TargetParser};
use super::listing::Item as _;
use super::select::{Filter, NamespaceArg, near};
use super::shown::{Device, Plugin, Pod, PodContainer, PodId, Resource, or_dash};
use super::{ConnectArg, complete, time};
use crate::Outcome;
use crate::output::{self, Output, OutputArg, indented_table, shown, table};
use crate::table::{Cell, Screen, hanging};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Kind of the object; KIND/NAME includes its name
    #[arg(value_name = "pod|resource|device|plugin|driver|claim", value_parser = TargetParser)]
    #[arg(add = complete::kinds())]
    kind: Target,
    /// Name of the object; several of one kind may be given
    #[arg(value_name = "NAME", value_parser = kind::name, add = complete::names())]
    names: Vec<String>,
    #[command(flatten)]
    namespace: NamespaceArg,
    #[command(flatten)]
    connect: ConnectArg,
    #[command(flatten)]
    output: OutputArg,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    let (kind, names) = args.kind.names(args.names)?;
    if names.is_empty() {
        anyhow::bail!("name the {0}: devlet describe {0} NAME", kind.one());
    }
    args.namespace.of(kind)?;
    let client = args.connect.connect().await?;
    let mut outcome = Outcome::Fine;
    for (place, name) in names.iter().enumerate() {
        let output = args.output.output.clone();
        if place > 0 && matches!(output, Output::Table | Output::Wide) {
            output::out("\n")?;
        }
        if place > 0 && output == Output::Yaml {
            output::out("---\n")?;
        }
        let name = args.namespace.qualified(name);
        let one = match kind {
            Kind::Pods => pod(&client, name, output).await?,
            Kind::Resources => resource(&client, name, output).await?,
            Kind::Devices => device(&client, &name, output).await?,
            Kind::Plugins => plugin(&client, &name, output).await?,
            Kind::Drivers => driver(&client, name, output).await?,
            Kind::Claims => claim(&client, name, output).await?,
        };
        if one == Outcome::Bad {
            outcome = one;
        }
    }
    Ok(outcome)
}

/// Returns a line `LABEL TEXT`, wrapped between words on a terminal.
fn field(label: &str, text: &str) -> String {
    hanging(label, text, Screen::stdout())
}

fn no_such(kind: Kind, name: &str, known: impl Iterator<Item = String>) -> Outcome {
    let problem = super::select::NoMatch::Unknown {
        name: name.to_owned(),
        near: near(name, known),
    };
    output::warn(&format!("error: {}", problem.text(kind)));
    Outcome::Bad
}

async fn pod(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
    let listed = client
        .list_pods(v1::ListPodsRequest { pod: name.clone() })
        .await?;
    let Some(pod) = listed.pods.into_iter().next() else {
        return Ok(no_such(Kind::Pods, &name, std::iter::empty()));
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
        "Name:       {}\nNamespace:  {}\nUID:        {}\n{}",
        shown(&or_dash(pod.id.name.clone())),
        shown(&or_dash(pod.id.namespace.clone())),
        shown(&pod.id.uid),
        field("From:       ", &format!("{source}{boot}")),
    );
    for (place, (key, value)) in pod.labels.iter().enumerate() {
        let title = if place == 0 { "Labels:" } else { "" };
        text.push_str(&format!(
            "{title:<12}{}\n",
            output::line(&format!("{key}={value}"))
        ));
    }
    if let Some(admitted_at) = &pod.admitted_at {
        text.push_str(&format!("Admitted:   {admitted_at} ({} ago)\n", pod.age_text()));
    }
    if !pod.claims.is_empty() {
        let claims = pod.claims.iter().map(|claim| {
            let (name, id) = (or_dash(claim.pod_claim.clone()), &claim.id);
            [
                name,
                id.name.clone(),
                claim.phase.to_owned(),
                claim.drivers.clone(),
            ]
        });
        let header = ["CLAIM", "RESOURCECLAIM", "PHASE", "DRIVERS"];
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
            text.push_str(&format!("\n{}", indented_table(["OPTION", "VALUE"], lines)));
        }
        for conflict in &container.conflicts {
            let (what, key) = (&conflict.what, &conflict.key);
            let (kept, dropped) = (&conflict.kept, &conflict.dropped);
            let conflict = format!("{what} {key}: {kept} was followed, {dropped} was not");
            text.push_str(&field("  conflict: ", &conflict));
        }
    }
    text
}

/// Returns the devices of a container: those of plugins, then those of claims.
fn devices_text(container: &PodContainer) -> String {
    let mut text = String::new();
    if container.devices.is_empty() && container.claim_devices.is_empty() {
        return "  No devices.\n".to_owned();
    }
    if !container.devices.is_empty() {
        let devices = container.devices.iter().map(|held| {
            let pre_start = if held.pre_start_required { "yes" } else { "no" };
            // -1 stands for devices without a NUMA node.
            let nodes = held.numa_nodes.keys().filter(|node| **node >= 0);
            let nodes: Vec<String> = nodes.map(ToString::to_string).collect();
            [
                held.resource.clone(),
                held.ids.join(","),
                or_dash(nodes.join(",")),
                pre_start.to_owned(),
            ]
        });
        text.push_str(&indented_table(
            ["RESOURCE", "DEVICES", "NUMA", "PRE-START"],
            devices,
        ));
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
                Cell::new(or_dash(claim)),
                used.driver.clone().into(),
                format!("{}/{}", device.pool, device.device).into(),
                Cell::new(device.health_text()).tone(device.tone()),
            ]
        });
        let devices = indented_table(["CLAIM", "DRIVER", "DEVICE", "HEALTH"], devices);
        text.push_str(&format!("{separator}{devices}"));
    }
    text
}

/// Returns the operations that a pod or claim waits for, line by line.
fn waits_text(waits: &[Wait]) -> String {
    let line = |wait: &Wait| {
        let retry = wait.retry_at.as_ref();
        let retry = retry.map_or_else(String::new, |at| format!(", called again at {at}"));
        let text = field("Waiting for:  ", &format!("{}{retry}", wait.text));
        match wait
            .failure
            .as_ref()
            .filter(|failure| !wait.text.contains(*failure))
        {
            Some(failure) => text + &field("Last failure: ", failure),
            None => text,
        }
    };
    waits.iter().map(line).collect()
}

async fn claim(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
    let request = v1::ListClaimsRequest { claim: name.clone() };
    let listed = client.list_claims(request).await?.claims;
    // An older claim of the same name exists until it is unprepared.
    let claims: Vec<Claim> = listed.into_iter().map(Claim::from).collect();
    match &claims[..] {
        [] => return Ok(no_such(Kind::Claims, &name, std::iter::empty())),
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
        "unpreparing" => "unpreparing: no pod uses it any longer",
        "abandoned" => "abandoned: no pod uses it any longer, and an operator abandoned the driver",
        phase => phase,
    };
    let mut text = format!(
        "Name:         {}\nNamespace:    {}\nUID:          {}\n",
        shown(&claim.id.name),
        shown(&claim.id.namespace),
        shown(&claim.id.uid),
    );
    text.push_str(&field("Phase:        ", phase));
    text.push_str(&match &claim.last_pod {
        Some(pod) => field("Last pod:     ", &pod.short()),
        None => field("Pods:         ", &claim.pods_text()),
    });
    text.push_str(&waits_text(&claim.waits));
    for driver in &claim.drivers {
        for device in &driver.not_prepared {
            let device = format!("{}/{}", device.pool, device.device);
            let driver = &driver.name;
            let problem = format!("driver {driver} did not prepare {device}: containers run without it");
            text.push_str(&field("Problem:      ", &problem));
        }
    }
    if claim.phase == "unpreparing" {
        for wait in claim.waits.iter().filter(|wait| wait.reason == "noDriver") {
            let claim = claim.id.short();
            let driver = &wait.driver;
            let command = format!("devlet remove --claim {claim} --abandon-driver {driver}");
            text.push_str(&field("To do without: ", &command));
        }
    }
    if claim.phase == "abandoned" {
        let claim = claim.id.short();
        text.push_str(&field(
            "If its driver never comes back: ",
            &format!("devlet forget --claim {claim}"),
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
        text.push_str(&field("  not needed: ", &skipped));
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
        text.push_str(&indented_table(header, allocated));
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
                Cell::new(or_dash(format!("{}/{}", device.pool, device.device))),
                requests.into(),
                or_dash(device.cdi_devices.join(",")).into(),
                Cell::new(device.health_text()).tone(device.tone()),
            ]
        });
        // After a reboot, until the driver prepares the claim again.
        let prepared_text = match driver.state {
            "pending" => "PREPARED BEFORE",
            _ => "PREPARED",
        };
        let header = [prepared_text, "REQUESTS", "CDI DEVICES", "HEALTH"];
        text.push_str(&format!("{separator}{}", indented_table(header, prepared)));
    }
    text
}

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DriverShown {
    #[serde(flatten)]
    driver: Driver,
    /// Its refused plugins.
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
        None => return Ok(no_such(Kind::Drivers, &name, std::iter::empty())),
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
            driver.tone().paint(&driver.state_text())
        );
        if let Some(last) = driver.last_plugin.as_ref().filter(|_| driver.plugins.is_empty()) {
            let gone = time::age(last.gone_for_ms);
            let last = format!("{}, gone for {gone}", last.endpoint);
            text.push_str(&field("Last plugin:  ", &last));
        }
        text.push_str(&waits_text(&driver.waits));
        for plugin in &driver.plugins {
            let health = plugin.health_service.as_deref().unwrap_or("not reported");
            text.push_str(&format!(
                "\nPlugin {} ({})\n{}  Health:      {}\n  Registered:  {} ago\n  User:        {}\n",
                shown(&plugin.endpoint),
                plugin.state_text(),
                field(
                    "  Service:     ",
                    &format!("{}, {}", plugin.service, plugin.service_reason)
                ),
                shown(health),
                time::age(plugin.age_ms),
                plugin.uid,
            ));
        }
        for refused in &self.refused {
            let again = "devlet retries periodically, and immediately when the socket is created again.";
            let again = field("  ", again);
            let hint = refused.hint.as_ref();
            let hint = hint.map_or_else(String::new, |hint| field("  What to do:  ", hint));
            text.push_str(&format!(
                "\nRefused plugin {}\n{}{hint}  Refused:     {} ago, attempt {}\n{again}",
                shown(&refused.socket),
                field("  Reason:      ", &refused.reason),
                time::age(refused.age_ms),
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

async fn plugin(client: &Client, name: &str, output: Output) -> anyhow::Result<Outcome> {
    let plugins = client.list_plugins(v1::ListPluginsRequest {}).await?.plugins;
    let plugins: Vec<Plugin> = plugins.into_iter().map(Plugin::from).collect();
    let filter = Filter {
        names: vec![name.to_owned()],
        ..Filter::default()
    };
    if let Some(problem) = filter.problems(&plugins).first() {
        output::warn(&format!("error: {}", problem.text(Kind::Plugins)));
        return Ok(Outcome::Bad);
    }
    // A plugin that registers again may be listed twice for a moment.
    for plugin in plugins.iter().filter(|plugin| plugin.is_called(name)) {
        output::print(output.clone(), plugin, plugin_text)?;
    }
    Ok(Outcome::Fine)
}

fn plugin_text(plugin: &Plugin) -> String {
    let devices = plugin
        .devices
        .map_or_else(|| "-".to_owned(), |number| number.to_string());
    let mut text = format!(
        "Resource:    {}\nEndpoint:    {}\nState:       {}\nDevices:     {devices}\nOptions:     {}\n\
         User:        {}\n",
        shown(&plugin.resource),
        shown(&plugin.endpoint),
        plugin.tone().paint(plugin.state),
        plugin.options_text(),
        plugin.uid,
    );
    if let Some(rejection) = &plugin.rejection {
        text.push_str(&format!(
            "Rejected:    {} ({} ago, {} times)\n{}",
            rejection.rejected_at,
            plugin.age_text(),
            rejection.attempts,
            field("Reason:      ", &rejection.reason),
        ));
    }
    if let Some(connected_at) = &plugin.connected_at {
        text.push_str(&format!(
            "Connected:   {connected_at} ({} ago)\nConnection:  {}\n",
            plugin.age_text(),
            shown(&plugin.connection),
        ));
    }
    text
}

/// Output of `-o json`. The keys are an interface.
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
    let Some(resource) = resources.iter().find(|resource| resource.name == name) else {
        let known = resources.into_iter().map(|resource| resource.name);
        return Ok(no_such(Kind::Resources, &name, known));
    };
    let resource = resource.clone();
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
            .filter(|each| each.resource == name && each.rejection.is_none())
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
            resource.tone().paint(resource.state),
            resource.capacity,
            resource.allocatable,
            resource.held,
            resource.free,
        );
        if resource.last_plugin.is_some() {
            text.push_str(&field("Last plugin:  ", &resource.last_text()));
        }
        if !self.connections.is_empty() {
            let plugins = self.connections.iter().map(|plugin| {
                let devices = plugin
                    .devices
                    .map_or_else(|| "-".to_owned(), |number| number.to_string());
                [
                    Cell::new(plugin.state).tone(plugin.tone()),
                    devices.into(),
                    plugin.uid.to_string().into(),
                    plugin.options_text().into(),
                    time::age(plugin.age_ms).into(),
                    plugin.endpoint.as_str().into(),
                ]
            });
            let header = ["STATE", "DEVICES", "UID", "OPTIONS", "AGE", "PLUGIN"];
            text.push_str(&format!("\n{}", table(header, plugins)));
        }
        if !self.devices.is_empty() {
            let devices = self.devices.iter().map(|device| {
                [
                    Cell::new(device.id.as_str()),
                    Cell::new(device.health).tone(device.tone()),
                    device.numa_text().into(),
                    device.holders_text().into(),
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

/// Output of `-o json`. The keys are an interface.
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
    let devices: Vec<Device> = devices.into_iter().map(Device::from).collect();
    let filter = Filter {
        names: vec![name.to_owned()],
        ..Filter::default()
    };
    if let Some(problem) = filter.problems(&devices).first() {
        output::warn(&format!("error: {}", problem.text(Kind::Devices)));
        return Ok(Outcome::Bad);
    }
    let Some(device) = devices.into_iter().find(|device| device.is_called(name)) else {
        return Ok(no_such(Kind::Devices, name, std::iter::empty()));
    };
    let mut containers = Vec::new();
    for holder in &device.holders {
        let pods = client
            .list_pods(v1::ListPodsRequest {
                pod: holder.uid.clone(),
            })
            .await;
        // The pod may have been removed in the meantime.
        for pod in pods.map(|list| list.pods).unwrap_or_default() {
            for container in pod.containers {
                let has = |held: &v1::HeldDevices| {
                    held.resource == device.resource && held.ids.contains(&device.id)
                };
                let uses = |used: &v1::UsedDevice| {
                    let place = used.device.as_ref().map(|each| (&each.pool, &each.device));
                    let dra = device.dra.as_ref().map(|each| (&each.pool, &each.device));
                    dra.is_some() && used.driver == device.resource && place == dra
                };
                if container.devices.iter().any(has) || container.claim_devices.iter().any(uses) {
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

impl DeviceShown {
    fn table(&self) -> String {
        let device = &self.device;
        let (kind, message) = match &device.dra {
            Some(dra) => ("Driver:  ", dra.health_message.as_deref()),
            None => ("Resource:", None),
        };
        let message = message.map_or_else(String::new, |message| format!(" ({message})"));
        let health = field("Health:      ", &format!("{}{message}", device.health));
        let health = health.replacen(device.health, &device.tone().paint(device.health), 1);
        let mut text = format!(
            "{kind}    {}\nId:          {}\n{health}NUMA nodes:  {}\n",
            shown(&device.resource),
            shown(&device.id),
            device.numa_text(),
        );
        for claim in device.dra.iter().flat_map(|dra| &dra.claims) {
            text.push_str(&field("Claim:       ", &claim.text()));
        }
        if device.holders.is_empty() {
            text.push_str("Held by:     -\n");
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
            text.push_str(&field(
                "Held by:     ",
                &format!("{}{containers}", holder.short()),
            ));
        }
        if device.holders.len() > 1 && device.dra.is_none() {
            let note = "it is not allocated again until all of these pods are removed";
            text.push_str(&field("Note:        ", note));
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
    fn devices_prepared_before_a_reboot_have_their_own_title() {
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
            "Plugin /run/old.sock (notConnected)\n",
            "Plugin /run/new.sock (serving)\n",
            "Service:     v1.DRAPlugin, the newest of v1beta1.DRAPlugin, v1.DRAPlugin\n",
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
    fn devices_without_a_numa_node_show_none() {
        let mut pod = samples::pod();
        pod.containers[0].devices[0].numa[0].node = -1;
        let text = pod_text(&Pod::from(pod));
        let row = text.lines().find(|line| line.contains("acme.com/gpu  gpu-0"));
        let cells: Vec<&str> = row.unwrap_or_default().split_whitespace().collect();
        assert_eq!(cells, ["acme.com/gpu", "gpu-0", "-", "yes"], "{text}");
    }

    #[test]
    fn a_pod_is_described_container_by_container() {
        let text = pod_text(&Pod::from(samples::pod()));
        for expected in [
            "Name:       job1\n",
            "Container main (app)\n",
            "/dev/null -> /dev/gpu (rw)",
            "/opt/acme -> /usr/acme (ro)",
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
