//! The lists of `devlet get`: the columns and the JSON of each kind. The keys are an interface.

use std::collections::BTreeMap;

use devlet_client::v1;
use serde::Serialize;

use super::claims::{Claim, each_once};
use super::drivers::{Driver, RefusedDriver};
use super::inventory::{Device, Plugin, Resource};
use super::kind::Kind;
use super::pods::Pod;
use super::slices::Slice;
use super::time;
use crate::output::{or_dash, table};
use crate::table::{Cell, Table};

/// An object in a list.
pub(super) trait Item: Serialize {
    const KIND: Kind;
    /// Column titles; the second slice is for `-o wide`.
    const COLUMNS: (&'static [&'static str], &'static [&'static str]);

    /// Returns an empty object with all keys.
    fn blank() -> Self;

    /// Returns the name that commands accept and `-o name` prints.
    fn name(&self) -> String;

    /// Returns a key that is unique among objects of the same name.
    fn key(&self) -> String {
        self.name()
    }

    /// Returns `true` if `name` is one of the object's names.
    fn is_called(&self, name: &str) -> bool {
        self.name() == name
    }

    fn namespace(&self) -> Option<&str> {
        None
    }

    fn labels(&self) -> Option<&BTreeMap<String, String>> {
        None
    }

    /// Returns the resource of the object, for kinds that devlet does not filter by resource.
    fn resource(&self) -> Option<&str> {
        None
    }

    fn row(&self) -> Vec<Cell>;

    /// Returns the cells of the additional columns of `-o wide`.
    fn wide_row(&self) -> Vec<Cell>;
}

/// A list of objects.
pub(super) trait Listing: Serialize {
    type Item: Item;

    fn items(&self) -> &[Self::Item];

    fn items_mut(&mut self) -> &mut Vec<Self::Item>;

    /// Returns the text below the table.
    fn notes(&self) -> String {
        String::new()
    }

    fn table(&self, wide: bool) -> Table {
        let mut table = Table::new(columns::<Self::Item>(wide));
        for item in self.items() {
            table.push(cells(item, wide));
        }
        table
    }
}

pub(super) fn columns<I: Item>(wide: bool) -> impl Iterator<Item = &'static str> {
    let more = if wide { I::COLUMNS.1 } else { &[] };
    I::COLUMNS.0.iter().chain(more).copied()
}

pub(super) fn cells<I: Item>(item: &I, wide: bool) -> Vec<Cell> {
    let mut row = item.row();
    match wide {
        true => row.extend(item.wide_row()),
        false => row = row.into_iter().map(Cell::shortened).collect(),
    }
    row
}

/// Returns the last part of a path, or of a name with a domain.
pub(super) fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

macro_rules! listings {
    ($($list:ident { $field:ident: $item:ident $(, $more:ident: $each:ident)? } from $message:ident;)*) => {$(
        /// Output of `-o json`.
        #[derive(Debug, Serialize)]
        pub(super) struct $list {
            revision: u64,
            $field: Vec<$item>,
            $($more: Vec<$each>,)?
        }

        impl From<v1::$message> for $list {
            fn from(list: v1::$message) -> Self {
                Self {
                    revision: list.revision,
                    $field: list.$field.into_iter().map($item::from).collect(),
                    $($more: list.$more.into_iter().map($each::from).collect(),)?
                }
            }
        }
    )*};
}

macro_rules! lists_of {
    ($($list:ident { $field:ident: $item:ident })*) => {$(
        impl Listing for $list {
            type Item = $item;

            fn items(&self) -> &[$item] {
                &self.$field
            }

            fn items_mut(&mut self) -> &mut Vec<$item> {
                &mut self.$field
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
    Slices { slices: Slice } from SliceList;
    Drivers { drivers: Driver, refused: RefusedDriver } from DriverList;
}

lists_of! {
    Resources { resources: Resource }
    Devices { devices: Device }
    Plugins { plugins: Plugin }
    Pods { pods: Pod }
    Claims { claims: Claim }
    Slices { slices: Slice }
}

impl Listing for Drivers {
    type Item = Driver;

    fn items(&self) -> &[Driver] {
        &self.drivers
    }

    fn items_mut(&mut self) -> &mut Vec<Driver> {
        &mut self.drivers
    }

    fn notes(&self) -> String {
        if self.refused.is_empty() {
            return String::new();
        }
        let header = ["REFUSED", "SOCKET", "ATTEMPTS", "AGE", "REASON"];
        let row = |each: &RefusedDriver| {
            [
                Cell::new(or_dash(each.name.clone())),
                each.socket.clone().into(),
                each.attempts.to_string().into(),
                Cell::passing(time::age(each.age_ms)),
                each.reason_text().into(),
            ]
        };
        format!("\n{}", table(header, self.refused.iter().map(row)))
    }
}

impl Item for Resource {
    const KIND: Kind = Kind::Resources;
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &["NAME", "CAPACITY", "ALLOCATABLE", "HELD", "FREE", "STATE"],
        &["PLUGINS", "LAST PLUGIN"],
    );

    fn blank() -> Self {
        v1::Resource::default().into()
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn row(&self) -> Vec<Cell> {
        let numbers = [self.capacity, self.allocatable, self.held, self.free];
        let numbers = numbers.map(|number| Cell::new(number.to_string()));
        let mut row = vec![Cell::new(self.name.as_str())];
        row.extend(numbers);
        row.push(Cell::new(self.state).tone(self.tone()));
        row
    }

    fn wide_row(&self) -> Vec<Cell> {
        vec![
            Cell::new(or_dash(self.plugins.join(", "))),
            Cell::passing(or_dash(self.last_text())),
        ]
    }
}

impl Item for Device {
    const KIND: Kind = Kind::Devices;
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &["RESOURCE", "ID", "HEALTH", "NUMA", "HELD BY"],
        &["CLAIM", "POD UID"],
    );

    fn blank() -> Self {
        let device = v1::Device {
            dra: Some(v1::DraDevice::default()),
            ..v1::Device::default()
        };
        device.into()
    }

    fn name(&self) -> String {
        format!("{}/{}", self.resource, self.id)
    }

    fn is_called(&self, name: &str) -> bool {
        let in_full = || {
            let rest = name.strip_prefix(&self.resource);
            rest.and_then(|rest| rest.strip_prefix(['/', '='])) == Some(self.id.as_str())
        };
        self.id == name || in_full()
    }

    fn row(&self) -> Vec<Cell> {
        vec![
            Cell::new(self.resource.as_str()),
            Cell::new(self.id.as_str()),
            Cell::new(self.health).tone(self.tone()),
            Cell::new(self.numa_text()),
            Cell::new(self.holders_text()),
        ]
    }

    fn wide_row(&self) -> Vec<Cell> {
        let uids: Vec<&str> = self.holders.iter().map(|holder| holder.uid.as_str()).collect();
        vec![Cell::new(self.claims_text()), Cell::new(or_dash(uids.join(", ")))]
    }
}

impl Item for Plugin {
    const KIND: Kind = Kind::Plugins;
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &["RESOURCE", "ENDPOINT", "DEVICES", "STATE", "AGE", "REASON"],
        &["UID", "OPTIONS", "CONNECTION"],
    );

    fn blank() -> Self {
        v1::Plugin::default().into()
    }

    fn name(&self) -> String {
        self.endpoint.clone()
    }

    fn key(&self) -> String {
        match &self.rejection {
            // A rejected plugin is not connected.
            Some(_) => format!("{} at {}", self.resource, self.endpoint),
            None => self.connection.clone(),
        }
    }

    fn is_called(&self, name: &str) -> bool {
        [self.endpoint.as_str(), file_name(&self.endpoint), &self.resource].contains(&name)
    }

    fn resource(&self) -> Option<&str> {
        Some(&self.resource)
    }

    fn row(&self) -> Vec<Cell> {
        let devices = self.devices.map(|number| number.to_string());
        vec![
            Cell::new(self.resource.as_str()),
            Cell::new(self.endpoint.as_str()).short(file_name(&self.endpoint)),
            Cell::new(devices.unwrap_or_else(|| "-".to_owned())),
            Cell::new(self.state).tone(self.tone()),
            Cell::passing(self.age_text()),
            Cell::new(self.reason_text()),
        ]
    }

    fn wide_row(&self) -> Vec<Cell> {
        vec![
            Cell::new(self.uid.to_string()),
            Cell::new(self.options_text()),
            Cell::new(or_dash(self.connection.clone())),
        ]
    }
}

impl Item for Pod {
    const KIND: Kind = Kind::Pods;
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &[
            "NAMESPACE",
            "NAME",
            "DEVICES",
            "CLAIMS",
            "SOURCE",
            "WAITING FOR",
            "AGE",
        ],
        &["UID", "IDS", "BEFORE REBOOT", "LABELS"],
    );

    fn blank() -> Self {
        v1::Pod::default().into()
    }

    fn name(&self) -> String {
        self.id.short()
    }

    fn key(&self) -> String {
        self.id.uid.clone()
    }

    fn is_called(&self, name: &str) -> bool {
        let id = &self.id;
        let by_name = !id.name.is_empty() && (id.name == name || id.short() == name);
        // A text with a slash is a name, as in devlet's API.
        let uid = name
            .strip_prefix("uid:")
            .or((!name.contains('/')).then_some(name));
        by_name || uid == Some(id.uid.as_str())
    }

    fn namespace(&self) -> Option<&str> {
        Some(&self.id.namespace)
    }

    fn labels(&self) -> Option<&BTreeMap<String, String>> {
        Some(&self.labels)
    }

    fn row(&self) -> Vec<Cell> {
        let devices = self.devices();
        let listed = |name: &dyn Fn(&str) -> String| {
            let each = devices
                .iter()
                .map(|(resource, ids)| format!("{}={}", name(resource), ids.len()));
            or_dash(each.collect::<Vec<String>>().join(", "))
        };
        // Omits the domain, unless two resources differ only in that.
        let short = |resource: &str| {
            let last = file_name(resource);
            match devices.keys().filter(|other| file_name(other) == last).count() {
                1 => last.to_owned(),
                _ => resource.to_owned(),
            }
        };
        let claims = each_once(&self.claims).into_iter();
        let claims: Vec<&str> = claims.map(|claim| claim.id.name.as_str()).collect();
        // An imported pod lacks a name: its UID identifies it.
        let name = if self.id.name.is_empty() {
            &self.id.uid
        } else {
            &self.id.name
        };
        vec![
            Cell::new(or_dash(self.id.namespace.clone())),
            Cell::new(name.as_str()),
            Cell::new(listed(&str::to_owned)).short(listed(&short)),
            Cell::new(or_dash(claims.join(", "))),
            Cell::new(self.source),
            Cell::new(self.waiting_text()).tone(self.tone()),
            Cell::passing(self.age_text()),
        ]
    }

    fn wide_row(&self) -> Vec<Cell> {
        let ids: Vec<&str> = self.devices().into_values().flatten().collect();
        let labels: Vec<String> = self
            .labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        vec![
            Cell::new(self.id.uid.as_str()),
            Cell::new(or_dash(ids.join(","))),
            Cell::new(if self.before_reboot { "yes" } else { "no" }),
            Cell::new(or_dash(labels.join(","))),
        ]
    }
}

impl Item for Driver {
    const KIND: Kind = Kind::Drivers;
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &["NAME", "STATE", "SERVICE", "CLAIMS", "WAITING", "AGE"],
        &["HEALTH", "SLICES", "ENDPOINTS"],
    );

    fn blank() -> Self {
        v1::Driver::default().into()
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn row(&self) -> Vec<Cell> {
        vec![
            Cell::new(self.name.as_str()),
            Cell::new(self.state).tone(self.tone()),
            Cell::new(self.service_text()),
            Cell::new(self.claims.to_string()),
            Cell::new(self.waits.len().to_string()),
            Cell::passing(self.age_text()),
        ]
    }

    fn wide_row(&self) -> Vec<Cell> {
        let endpoints: Vec<&str> = self
            .plugins
            .iter()
            .map(|plugin| plugin.endpoint.as_str())
            .collect();
        vec![
            Cell::new(self.health_text()),
            Cell::new(self.slices.len().to_string()),
            Cell::new(or_dash(endpoints.join(", "))),
        ]
    }
}

impl Item for Claim {
    const KIND: Kind = Kind::Claims;
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &["NAMESPACE", "NAME", "PHASE", "PODS", "WAITING FOR", "AGE"],
        &["DRIVERS", "DEVICES", "UID"],
    );

    fn blank() -> Self {
        v1::Claim::default().into()
    }

    fn name(&self) -> String {
        self.id.short()
    }

    fn key(&self) -> String {
        self.id.uid.clone()
    }

    fn is_called(&self, name: &str) -> bool {
        let id = &self.id;
        id.name == name || id.short() == name || name.strip_prefix("uid:").unwrap_or(name) == id.uid
    }

    fn namespace(&self) -> Option<&str> {
        Some(&self.id.namespace)
    }

    fn row(&self) -> Vec<Cell> {
        vec![
            Cell::new(self.id.namespace.as_str()),
            Cell::new(self.id.name.as_str()),
            Cell::new(self.phase).tone(self.tone()),
            Cell::new(self.pods_text()),
            Cell::new(self.waits_text()),
            Cell::passing(self.age_text()),
        ]
    }

    fn wide_row(&self) -> Vec<Cell> {
        vec![
            Cell::new(self.drivers_text()),
            Cell::new(self.devices_text()),
            Cell::new(self.id.uid.as_str()),
        ]
    }
}

#[cfg(test)]
mod tests;
