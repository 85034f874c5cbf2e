//! `devlet describe claim`: a claim, and the devices and progress of its drivers.

use devlet_client::{Client, v1};

use super::{field, no_such, waits_text};
use crate::Outcome;
use crate::node::claims::{Claim, ClaimDriver};
use crate::node::kind::Kind;
use crate::output::{self, Output, escape_control, indented_table, or_dash};
use crate::table::Cell;

pub(super) async fn run(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
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
        escape_control(&claim.id.name),
        escape_control(&claim.id.namespace),
        escape_control(&claim.id.uid),
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
    let mut text = format!("\nDriver {} ({})\n", escape_control(&driver.name), driver.state);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::samples;

    #[test]
    fn a_claim_is_described_driver_by_driver() {
        let text = claim_text(&Claim::from(samples::claim()));
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
        let mut claim = samples::claim();
        claim.drivers[0].state = v1::PreparationState::Pending.into();
        let text = claim_text(&Claim::from(claim));
        assert!(text.contains("  PREPARED BEFORE  REQUESTS"), "{text}");
    }
}
