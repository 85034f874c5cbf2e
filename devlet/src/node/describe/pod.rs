//! `devlet describe pod`: a pod, its claims and its containers.

use devlet_client::{Client, v1};

use super::{field, no_such, waits_text};
use crate::Outcome;
use crate::node::claims::each_once;
use crate::node::kind::Kind;
use crate::node::pods::{Pod, PodContainer};
use crate::output::{self, Output, escape_control, indented_table, or_dash, table};
use crate::table::Cell;

pub(super) async fn run(client: &Client, name: String, output: Output) -> anyhow::Result<Outcome> {
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
        "kubernetes" => "the API server; held until it is deleted there",
        "kubelet" => "the kubelet; held until it has removed the pod",
        other => other,
    };
    let mut text = format!(
        "Name:       {}\nNamespace:  {}\nUID:        {}\n{}",
        escape_control(&or_dash(pod.id.name.clone())),
        escape_control(&or_dash(pod.id.namespace.clone())),
        escape_control(&pod.id.uid),
        field("From:       ", &format!("{source}{boot}")),
    );
    for (place, (key, value)) in pod.labels.iter().enumerate() {
        let title = if place == 0 { "Labels:" } else { "" };
        text.push_str(&format!(
            "{title:<12}{}\n",
            output::line(&format!("{key}={value}"))
        ));
    }
    if let Some(waiting) = &pod.waiting {
        text.push_str(&format!(
            "State:      {}\n{}",
            pod.tone().paint(&format!("waiting for {}", pod.age_text())),
            field("Reason:     ", &waiting.reason)
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
        text.push_str(&format!(
            "\nContainer {}{kind}\n",
            escape_control(&container.name)
        ));
        text.push_str(&devices_text(container));
        let lines = container.options.lines();
        if !lines.is_empty() {
            text.push_str(&format!("\n{}", indented_table(["OPTION", "VALUE"], lines)));
        }
        for conflict in &container.conflicts {
            let (what, key) = (&conflict.what, &conflict.key);
            let (kept, dropped) = (&conflict.kept, &conflict.dropped);
            let conflict = format!("{what} {key}: {kept} is used, {dropped} is not");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::samples;

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
    fn a_pod_that_waits_is_described_with_the_reason() {
        let text = pod_text(&Pod::from(samples::waiting_pod()));
        for expected in [
            "From:       the API server; held until it is deleted there\n",
            "State:      waiting for 9s\n",
            "Reason:     no device plugin offers acme.com/gpu\n",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
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
