//! `devlet describe driver`: a DRA driver, its plugins and its claims.

use devlet_client::{Client, v1};
use serde::Serialize;

use super::{field, no_such, waits_text};
use crate::Outcome;
use crate::node::claims::Claim;
use crate::node::drivers::{Driver, RefusedDriver};
use crate::node::kind::Kind;
use crate::node::time;
use crate::output::{self, Output, escape_control, or_dash, table};
use crate::table::Cell;

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

pub(super) async fn run(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
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
            escape_control(&driver.name),
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
                escape_control(&plugin.endpoint),
                plugin.state_text(),
                field(
                    "  Service:     ",
                    &format!("{}, {}", plugin.service, plugin.service_reason)
                ),
                escape_control(health),
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
                escape_control(&refused.socket),
                field("  Reason:      ", &refused.reason),
                time::age(refused.age_ms),
                refused.attempts,
            ));
        }
        if !driver.slices.is_empty() {
            text.push_str(&slices_text(driver));
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

/// Returns the slices, and the time of their deletion, which is the same for all of them.
fn slices_text(driver: &Driver) -> String {
    let rows = driver.slices.iter().map(|slice| {
        [
            Cell::new(slice.name.as_str()),
            Cell::new(slice.pool.as_str()),
            Cell::new(slice.generation.to_string()),
            Cell::new(slice.devices.to_string()),
            slice.owner_cell(),
            Cell::new(slice.age_text()),
        ]
    });
    let header = ["SLICE", "POOL", "GENERATION", "DEVICES", "OWNER", "AGE"];
    let mut text = format!("\n{}", table(header, rows));
    if driver.slices.iter().any(|slice| slice.stale_owner) {
        let stale = "their owner is an earlier Node object: the driver must restart";
        text.push_str(&field("Stale slices:  ", stale));
    }
    if let Some(slice) = driver.slices.iter().find(|slice| slice.wiped_at.is_some()) {
        let at = slice.wiped_at.as_deref().unwrap_or_default();
        let wipe = format!("at {at} (in {}), unless a plugin connects", slice.wipe_text());
        text.push_str(&field("Slices wiped:  ", &wipe.replace("(in now)", "(now)")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::samples;

    #[test]
    fn a_driver_is_described_with_the_service_that_was_chosen_and_why() {
        let shown = DriverShown {
            driver: samples::driver().into(),
            refused: vec![samples::refused().into()],
            resource_claims: vec![samples::claim().into()],
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
            "Stale slices:  their owner is an earlier Node object: the driver must restart\n",
            "Slices wiped:  at 2023-11-14T22:13:57Z (in 30s), unless a plugin connects\n",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert_eq!(
            serde_json::to_value(&shown).unwrap()["resourceClaims"][0]["uid"],
            "c-1"
        );
    }
}
