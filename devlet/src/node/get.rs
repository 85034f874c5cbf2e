//! `devlet get`

use clap::ValueEnum;
use devlet_client::{Status, Streaming, v1};
use serde::Serialize;

use super::claims::{Claim, Driver, RefusedDriver, each_once};
use super::shown::{Device, Plugin, Pod, Resource, or_dash};
use super::{ConnectArg, time};
use crate::Outcome;
use crate::output::{self, Output, OutputArg, table};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What to list
    #[arg(value_name = "resources|devices|plugins|pods|drivers|claims")]
    kind: Kind,
    /// Only devices of this resource
    #[arg(long, value_name = "NAME")]
    resource: Option<String>,
    /// Print everything again after each change, until interrupted
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    connect: ConnectArg,
    #[command(flatten)]
    output: OutputArg,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// What plugins offer
    #[value(alias = "resource")]
    Resources,
    /// Each device, and who holds it
    #[value(alias = "device")]
    Devices,
    /// Device plugins that are connected
    #[value(alias = "plugin")]
    Plugins,
    /// Pods that were admitted
    #[value(alias = "pod")]
    Pods,
    /// DRA drivers, and what is spoken with them
    #[value(alias = "driver")]
    Drivers,
    /// ResourceClaims of pods, and how far their drivers are
    #[value(alias = "claim", alias = "resourceclaim", alias = "resourceclaims")]
    Claims,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    if args.resource.is_some() && args.kind != Kind::Devices {
        anyhow::bail!("--resource is for devices: devlet get devices --resource NAME");
    }
    let client = args.connect.connect().await?;
    let show = Show {
        output: args.output.output,
        watch: args.watch,
    };
    match args.kind {
        Kind::Resources => {
            let request = v1::ListResourcesRequest {};
            show.run::<_, Resources>(client.list_resources(request), client.watch_resources(request))
                .await
        }
        Kind::Devices => {
            let request = v1::ListDevicesRequest {
                resource: args.resource.unwrap_or_default(),
            };
            show.run::<_, Devices>(
                client.list_devices(request.clone()),
                client.watch_devices(request),
            )
            .await
        }
        Kind::Plugins => {
            let request = v1::ListPluginsRequest {};
            show.run::<_, Plugins>(client.list_plugins(request), client.watch_plugins(request))
                .await
        }
        Kind::Pods => {
            let request = v1::ListPodsRequest::default();
            show.run::<_, Pods>(client.list_pods(request.clone()), client.watch_pods(request))
                .await
        }
        Kind::Drivers => {
            let request = v1::ListDriversRequest::default();
            let list = client.list_drivers(request.clone());
            show.run::<_, Drivers>(list, client.watch_drivers(request)).await
        }
        Kind::Claims => {
            let request = v1::ListClaimsRequest::default();
            let list = client.list_claims(request.clone());
            show.run::<_, Claims>(list, client.watch_claims(request)).await
        }
    }
}

struct Show {
    output: Output,
    watch: bool,
}

/// Something that is listed.
trait Listing: Serialize {
    fn table(&self, wide: bool) -> String;
}

impl Show {
    async fn run<M, L: Listing + From<M>>(
        &self,
        list: impl Future<Output = Result<M, Status>>,
        watch: impl Future<Output = Result<Streaming<M>, Status>>,
    ) -> anyhow::Result<Outcome> {
        let wide = self.output == Output::Wide;
        if !self.watch {
            output::print(self.output, &L::from(list.await?), |listing| listing.table(wide))?;
            return Ok(Outcome::Fine);
        }
        let mut updates = watch.await?;
        let mut first = true;
        while let Some(update) = updates.message().await? {
            output::out(&text_of_update(self.output, &L::from(update), first)?)?;
            first = false;
        }
        output::warn("devlet has stopped");
        Ok(Outcome::Fine)
    }
}

/// One of many: programs must see where it ends, people where it begins.
fn text_of_update<L: Listing>(output: Output, listing: &L, first: bool) -> anyhow::Result<String> {
    let separator = if first { "" } else { "\n" };
    Ok(match output {
        Output::Json => serde_json::to_string(listing)? + "\n",
        Output::Yaml => format!("---\n{}\n", serde_saphyr::to_string(listing)?.trim_end()),
        Output::Table | Output::Wide => {
            format!("{separator}{}", listing.table(output == Output::Wide))
        }
    })
}

macro_rules! listings {
    ($($list:ident { $field:ident: $item:ident } from $message:ident;)*) => {$(
        /// What `-o json` prints. The keys are an interface.
        #[derive(Debug, Serialize)]
        struct $list {
            revision: u64,
            $field: Vec<$item>,
        }

        impl From<v1::$message> for $list {
            fn from(list: v1::$message) -> Self {
                let $field = list.$field.into_iter().map($item::from).collect();
                Self { revision: list.revision, $field }
            }
        }
    )*};
}

listings! {
    Resources { resources: Resource } from ResourceList;
    Devices { devices: Device } from DeviceList;
    Plugins { plugins: Plugin } from PluginList;
    Pods { pods: Pod } from PodList;
    Claims { claims: Claim } from ClaimList;
}

/// What `-o json` prints. The keys are an interface.
#[derive(Debug, Serialize)]
struct Drivers {
    revision: u64,
    drivers: Vec<Driver>,
    /// Plugins that are not taken in.
    refused: Vec<RefusedDriver>,
}

impl From<v1::DriverList> for Drivers {
    fn from(list: v1::DriverList) -> Self {
        Self {
            revision: list.revision,
            drivers: list.drivers.into_iter().map(Driver::from).collect(),
            refused: list.refused.into_iter().map(RefusedDriver::from).collect(),
        }
    }
}

impl Drivers {
    /// Below the others, if there are any.
    fn refused_text(&self) -> String {
        if self.refused.is_empty() {
            return String::new();
        }
        let row = |each: &RefusedDriver| {
            let reason = match &each.hint {
                Some(hint) => format!("{}: {hint}", each.reason),
                None => each.reason.clone(),
            };
            [
                or_dash(each.name.clone()),
                each.socket.clone(),
                each.attempts.to_string(),
                reason,
            ]
        };
        let header = ["REFUSED", "SOCKET", "ATTEMPTS", "REASON"];
        format!("\n{}", table(header, self.refused.iter().map(row)))
    }
}

impl Listing for Resources {
    fn table(&self, wide: bool) -> String {
        let numbers = |each: &Resource| {
            [each.capacity, each.allocatable, each.held, each.free].map(|number| number.to_string())
        };
        if wide {
            let header = [
                "NAME",
                "CAPACITY",
                "ALLOCATABLE",
                "HELD",
                "FREE",
                "STATE",
                "PLUGINS",
                "LAST PLUGIN",
            ];
            let row = |each: &Resource| {
                let [capacity, allocatable, held, free] = numbers(each);
                let (state, plugins) = (each.state_text().to_owned(), or_dash(each.plugins.join(", ")));
                [
                    each.name.clone(),
                    capacity,
                    allocatable,
                    held,
                    free,
                    state,
                    plugins,
                    or_dash(each.last_text()),
                ]
            };
            table(header, self.resources.iter().map(row))
        } else {
            let row = |each: &Resource| {
                let [capacity, allocatable, held, free] = numbers(each);
                [
                    each.name.clone(),
                    capacity,
                    allocatable,
                    held,
                    free,
                    each.state_text().to_owned(),
                ]
            };
            let header = ["NAME", "CAPACITY", "ALLOCATABLE", "HELD", "FREE", "STATE"];
            table(header, self.resources.iter().map(row))
        }
    }
}

impl Listing for Devices {
    fn table(&self, wide: bool) -> String {
        let short = |each: &Device| {
            let health = each.health_text().to_owned();
            [
                each.resource.clone(),
                each.id.clone(),
                health,
                each.numa_text(),
                each.holders_text(),
            ]
        };
        if !wide {
            return table(
                ["RESOURCE", "ID", "HEALTH", "NUMA", "HELD BY"],
                self.devices.iter().map(short),
            );
        }
        let row = |each: &Device| {
            let [resource, id, health, numa, holders] = short(each);
            let uids: Vec<&str> = each.holders.iter().map(|holder| holder.uid.as_str()).collect();
            [resource, id, health, numa, holders, or_dash(uids.join(", "))]
        };
        table(
            ["RESOURCE", "ID", "HEALTH", "NUMA", "HELD BY", "POD UID"],
            self.devices.iter().map(row),
        )
    }
}

impl Listing for Plugins {
    fn table(&self, wide: bool) -> String {
        let short = |each: &Plugin| {
            let devices = each
                .devices
                .map_or_else(|| "-".to_owned(), |number| number.to_string());
            let (state, age) = (each.state_text().to_owned(), time::age(each.connected_at_ms));
            [each.resource.clone(), each.endpoint.clone(), devices, state, age]
        };
        if !wide {
            let header = ["RESOURCE", "ENDPOINT", "DEVICES", "STATE", "CONNECTED"];
            return table(header, self.plugins.iter().map(short));
        }
        let row = |each: &Plugin| {
            let [resource, endpoint, devices, state, age] = short(each);
            let (uid, options) = (each.uid.to_string(), each.options_text());
            [
                resource,
                endpoint,
                devices,
                state,
                age,
                uid,
                options,
                each.connection.clone(),
            ]
        };
        let header = [
            "RESOURCE",
            "ENDPOINT",
            "DEVICES",
            "STATE",
            "CONNECTED",
            "UID",
            "OPTIONS",
            "CONNECTION",
        ];
        table(header, self.plugins.iter().map(row))
    }
}

impl Listing for Pods {
    fn table(&self, wide: bool) -> String {
        let short = |each: &Pod| {
            let devices: Vec<String> = each
                .devices()
                .iter()
                .map(|(resource, ids)| format!("{resource}={}", ids.len()))
                .collect();
            let claims = each_once(&each.claims).into_iter();
            let claims: Vec<&str> = claims.map(|claim| claim.id.name.as_str()).collect();
            let id = &each.id;
            let (namespace, name) = (or_dash(id.namespace.clone()), or_dash(id.name.clone()));
            [
                namespace,
                name,
                id.uid.clone(),
                each.source.to_owned(),
                or_dash(devices.join(", ")),
                or_dash(claims.join(", ")),
            ]
        };
        if !wide {
            return table(
                ["NAMESPACE", "NAME", "UID", "SOURCE", "DEVICES", "CLAIMS"],
                self.pods.iter().map(short),
            );
        }
        let row = |each: &Pod| {
            let [namespace, name, uid, source, devices, claims] = short(each);
            let ids: Vec<&str> = each.devices().into_values().flatten().collect();
            let admitted = if each.before_reboot {
                "before the last boot"
            } else {
                "since the last boot"
            };
            [
                namespace,
                name,
                uid,
                source,
                devices,
                claims,
                or_dash(ids.join(",")),
                admitted.to_owned(),
            ]
        };
        let header = [
            "NAMESPACE",
            "NAME",
            "UID",
            "SOURCE",
            "DEVICES",
            "CLAIMS",
            "IDS",
            "ADMITTED",
        ];
        table(header, self.pods.iter().map(row))
    }
}

impl Listing for Drivers {
    fn table(&self, wide: bool) -> String {
        let short = |each: &Driver| {
            let (plugins, claims) = (each.plugins.len().to_string(), each.claims.to_string());
            [
                each.name.clone(),
                each.state_text(),
                each.service_text(),
                plugins,
                claims,
                each.waits.len().to_string(),
            ]
        };
        let header = ["NAME", "STATE", "SERVICE", "PLUGINS", "CLAIMS", "WAITING"];
        if !wide {
            return table(header, self.drivers.iter().map(short)) + &self.refused_text();
        }
        let row = |each: &Driver| {
            let [name, state, service, plugins, claims, waiting] = short(each);
            let endpoints: Vec<&str> = each
                .plugins
                .iter()
                .map(|plugin| plugin.endpoint.as_str())
                .collect();
            let (health, endpoints) = (each.health_text(), or_dash(endpoints.join(", ")));
            [name, state, service, plugins, claims, waiting, health, endpoints]
        };
        let [name, state, service, plugins, claims, waiting] = header;
        let header = [
            name,
            state,
            service,
            plugins,
            claims,
            waiting,
            "HEALTH",
            "ENDPOINTS",
        ];
        table(header, self.drivers.iter().map(row)) + &self.refused_text()
    }
}

impl Listing for Claims {
    fn table(&self, wide: bool) -> String {
        let short = |each: &Claim| {
            let (namespace, name) = (each.id.namespace.clone(), each.id.name.clone());
            let (drivers, pods) = (each.drivers_text(), each.pods_text());
            [
                namespace,
                name,
                each.phase.to_owned(),
                pods,
                drivers,
                each.waits_text(),
            ]
        };
        let header = ["NAMESPACE", "NAME", "PHASE", "PODS", "DRIVERS", "WAITING FOR"];
        if !wide {
            return table(header, self.claims.iter().map(short));
        }
        let row = |each: &Claim| {
            let [namespace, name, phase, pods, drivers, waits] = short(each);
            let (uid, devices) = (each.id.uid.clone(), each.devices_text());
            [namespace, name, phase, pods, drivers, waits, uid, devices]
        };
        let [namespace, name, phase, pods, drivers, waits] = header;
        let header = [namespace, name, phase, pods, drivers, waits, "UID", "DEVICES"];
        table(header, self.claims.iter().map(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::claims;
    use crate::node::shown::samples;

    fn pods() -> Pods {
        Pods::from(v1::PodList {
            revision: 7,
            pods: vec![samples::pod()],
        })
    }

    #[test]
    fn pods_are_one_line_each_and_wide_shows_the_ids() {
        let lines: Vec<String> = pods().table(false).lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(
            lines[1].split_whitespace().collect::<Vec<_>>(),
            ["default", "job1", "u-1", "api", "acme.com/gpu=1", "gpu"]
        );
        assert!(pods().table(true).contains("gpu-0"));
    }

    #[test]
    fn drivers_that_are_refused_are_listed_with_the_reason() {
        let drivers = Drivers::from(v1::DriverList {
            revision: 1,
            drivers: Vec::new(),
            refused: vec![claims::samples::refused()],
        });
        let text = drivers.table(false);
        assert!(text.contains("user 7 may not serve gpu.acme.com: ask"), "{text}");
        assert!(text.contains("/registry/gpu.sock"), "{text}");
        let json = serde_json::to_value(&drivers).unwrap();
        let refused = serde_json::json!([{
            "name": "gpu.acme.com", "socket": "/registry/gpu.sock", "hint": "ask", "attempts": 3,
            "reason": "user 7 may not serve gpu.acme.com", "refusedAt": "1970-01-01T00:00:00Z",
        }]);
        assert_eq!(json["refused"], refused);
    }

    #[test]
    fn a_claim_that_a_pod_names_twice_is_listed_once() {
        let mut pod = samples::pod();
        pod.claims.push(pod.claims[0].clone());
        pod.claims[1].name = "again".into();
        let pods = Pods::from(v1::PodList {
            revision: 7,
            pods: vec![pod],
        });
        let table = pods.table(false);
        let line = table.lines().nth(1).unwrap().trim_end();
        assert!(line.ends_with(" gpu") && !line.contains("gpu, gpu"), "{line}");
    }

    #[test]
    fn every_update_is_a_line_of_json_or_a_yaml_document() {
        let json = text_of_update(Output::Json, &pods(), false).unwrap();
        assert_eq!(json.lines().count(), 1);
        assert!(
            json.starts_with(r#"{"revision":7,"pods":[{"uid":"u-1""#),
            "{json}"
        );
        let yaml = text_of_update(Output::Yaml, &pods(), false).unwrap();
        assert!(yaml.starts_with("---\nrevision: 7\n"), "{yaml}");
        let second = text_of_update(Output::Table, &pods(), false).unwrap();
        assert!(second.starts_with("\nNAMESPACE"), "{second}");
    }

    #[test]
    fn a_resource_without_a_plugin_says_which_one_left() {
        let last = v1::LastPlugin {
            endpoint: "/run/gpu.sock".into(),
            gone_since_ms: 0,
        };
        let resource = v1::Resource {
            name: "acme.com/gpu".into(),
            capacity: 2,
            state: v1::ResourceState::Gone.into(),
            last_plugin: Some(last),
            ..Default::default()
        };
        let resources = Resources::from(v1::ResourceList {
            revision: 1,
            resources: vec![resource],
        });
        assert!(resources.table(false).contains("no plugin"));
        assert!(resources.table(true).contains("/run/gpu.sock, gone for "));
        let json = serde_json::to_value(&resources).unwrap();
        assert_eq!(
            json["resources"][0]["lastPlugin"]["goneSince"],
            "1970-01-01T00:00:00Z"
        );
        assert_eq!(json["resources"][0]["state"], "gone");
    }

    #[test]
    fn drivers_and_claims_are_one_line_each_and_wide_has_more() {
        let drivers = Drivers::from(v1::DriverList {
            refused: Vec::new(),
            revision: 1,
            drivers: vec![claims::samples::driver()],
        });
        let cells = |text: &str| -> Vec<String> {
            let line = text.lines().nth(1).unwrap_or_default();
            line.split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(
            cells(&drivers.table(false)),
            ["gpu.acme.com", "serving", "v1.DRAPlugin", "2", "3", "1"]
        );
        assert!(drivers.table(true).contains("/run/old.sock, /run/new.sock"));
        let claims = Claims::from(v1::ClaimList {
            revision: 1,
            claims: vec![claims::samples::claim()],
        });
        let short = claims.table(false);
        assert!(short.contains("default/job1"), "{short}");
        assert!(short.contains("gpu.acme.com, nic.acme.com"), "{short}");
        assert!(short.contains("nic.acme.com (not connected)"), "{short}");
        assert!(claims.table(true).contains("c-1") && claims.table(true).contains("gpu-0"));
    }

    #[test]
    fn devices_and_plugins_say_how_they_are() {
        let device = |id: &str, listed, healthy| v1::Device {
            id: id.into(),
            listed,
            healthy,
            ..Default::default()
        };
        let devices = vec![
            device("a", true, true),
            device("b", true, false),
            device("c", false, false),
        ];
        let text = Devices::from(v1::DeviceList { revision: 1, devices }).table(false);
        for expected in ["healthy", "unhealthy", "not listed"] {
            assert!(text.contains(expected), "{text}");
        }
        let plugin = |devices, in_force| v1::Plugin {
            devices,
            in_force,
            ..Default::default()
        };
        let plugins = vec![plugin(Some(2), true), plugin(Some(1), false), plugin(None, false)];
        let text = Plugins::from(v1::PluginList { revision: 1, plugins }).table(true);
        for expected in ["serving", "standby", "no list yet"] {
            assert!(text.contains(expected), "{text}");
        }
    }
}
