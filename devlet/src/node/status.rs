//! `devlet status`: the state of a running devlet, and its problems.

use devlet_client::{shield_v1, v1};
use serde::Serialize;

use super::kubernetes::Kubernetes;
use super::{ConnectArg, time};
use crate::Outcome;
use crate::output::{self, Output, escape_control};
use crate::table::{Screen, Tone, labelled};

pub(super) async fn run(connect: &ConnectArg, output: Output) -> anyhow::Result<Outcome> {
    let client = connect.connect().await?;
    let status = client.status(v1::StatusRequest {}).await?;
    let ready = status.ready;
    let mut shown = Shown::from(status);
    shown.shield = client.shield().await?.map(Shield::from);
    output::print(output, &shown, Shown::table)?;
    Ok(if ready { Outcome::Fine } else { Outcome::Bad })
}

/// Output of `-o json`. The keys are an interface.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    version: String,
    root_dir: String,
    pid: i64,
    started_at: String,
    #[serde(skip)]
    uptime_ms: u64,
    revision: u64,
    ready: bool,
    pods: u64,
    pods_before_reboot: u64,
    plugins: u64,
    resources: u64,
    resources_without_plugin: u64,
    drivers: u64,
    drivers_without_plugin: u64,
    claims: u64,
    claims_waiting: u64,
    kubernetes: Option<Kubernetes>,
    /// Only beside a kubelet.
    #[serde(skip_serializing_if = "Option::is_none")]
    shield: Option<Shield>,
    problems: Vec<Problem>,
}

/// The kubelet and the container runtime beside devlet.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shield {
    kubelet_dir: String,
    /// `None` if no kubelet runs.
    kubelet_pid: Option<i64>,
    /// Empty while unknown.
    kubelet_version: String,
    /// Name and version; empty while unknown.
    runtime: String,
    /// `on`, `off` or `unknown`.
    cdi: &'static str,
    leases: usize,
}

impl From<shield_v1::StateResponse> for Shield {
    fn from(state: shield_v1::StateResponse) -> Self {
        Self {
            kubelet_pid: state.kubelet_running.then_some(state.kubelet_pid),
            cdi: match state.fitness() {
                shield_v1::RuntimeFitness::Ready => "on",
                shield_v1::RuntimeFitness::Unfit => "off",
                shield_v1::RuntimeFitness::Unknown => "unknown",
            },
            leases: state.leases.len(),
            kubelet_dir: state.kubelet_dir,
            kubelet_version: state.kubelet_version,
            runtime: state.runtime,
        }
    }
}

#[derive(Debug, Serialize)]
struct Problem {
    what: String,
    hint: String,
    blocking: bool,
}

impl From<v1::StatusResponse> for Shown {
    fn from(status: v1::StatusResponse) -> Self {
        let problem = |problem: v1::Problem| Problem {
            what: problem.what,
            hint: problem.hint,
            blocking: problem.blocking,
        };
        Self {
            version: status.version,
            root_dir: status.root_dir,
            pid: status.pid,
            started_at: time::moment(status.started_at_ms),
            uptime_ms: status.uptime_ms,
            revision: status.revision,
            ready: status.ready,
            pods: status.pods,
            pods_before_reboot: status.pods_before_reboot,
            plugins: status.plugins,
            resources: status.resources,
            resources_without_plugin: status.resources_without_plugin,
            drivers: status.drivers,
            drivers_without_plugin: status.drivers_without_plugin,
            claims: status.claims,
            claims_waiting: status.claims_waiting,
            kubernetes: status.kubernetes.map(Kubernetes::from),
            shield: None,
            problems: status.problems.into_iter().map(problem).collect(),
        }
    }
}

impl Shown {
    fn table(&self) -> String {
        let ready = if self.ready {
            "ready: pods can be admitted".to_owned()
        } else {
            Tone::Bad.paint("not ready: pods are not admitted")
        };
        let and = |number: u64, what: &str| {
            if number == 0 {
                String::new()
            } else {
                format!(" ({number} {what})")
            }
        };
        let mut text = format!(
            "devlet {}, pid {}, running for {}\nRoot:       {}\nState:      {ready}\nResources:  {}{}\nPlugins:    {}\n\
             Drivers:    {}{}\nPods:       {}{}\nClaims:     {}{}\n",
            escape_control(&self.version),
            self.pid,
            time::age(self.uptime_ms),
            escape_control(&self.root_dir),
            self.resources,
            and(self.resources_without_plugin, "without a plugin"),
            self.plugins,
            self.drivers,
            and(self.drivers_without_plugin, "without a plugin"),
            self.pods,
            and(self.pods_before_reboot, "from before the last boot"),
            self.claims,
            and(self.claims_waiting, "waiting for a driver"),
        );
        if let Some(kubernetes) = &self.kubernetes {
            text.push_str(&kubernetes.text());
        }
        if let Some(shield) = &self.shield {
            let or_unknown = |text: &str| match text {
                "" => "unknown".to_owned(),
                text => escape_control(text).into_owned(),
            };
            let kubelet = match shield.kubelet_pid {
                Some(pid) => format!("{}, pid {pid}", or_unknown(&shield.kubelet_version)),
                None => "not running".to_owned(),
            };
            text.push_str(&format!(
                "Kubelet:    {kubelet}\nRuntime:    {}, CDI {}\nLeases:     {}\n",
                or_unknown(&shield.runtime),
                shield.cdi,
                shield.leases
            ));
        }
        let screen = Screen::stdout();
        for problem in &self.problems {
            let tone = if problem.blocking {
                Tone::Bad
            } else {
                Tone::Waiting
            };
            text.push('\n');
            text.push_str(&labelled("Problem:", &problem.what, tone, screen));
            if !problem.hint.is_empty() {
                text.push_str(&labelled("", &problem.hint, Tone::Plain, screen));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_are_shown_with_their_hints() {
        let problem = v1::Problem {
            what: "the disk is full".into(),
            hint: "make room".into(),
            blocking: true,
        };
        let status = v1::StatusResponse {
            version: "0.1.0".into(),
            root_dir: "/var/lib/kubelet".into(),
            pods: 3,
            pods_before_reboot: 1,
            claims: 2,
            claims_waiting: 1,
            problems: vec![problem],
            ..Default::default()
        };
        let text = Shown::from(status.clone()).table();
        assert!(!text.contains("Kubelet:"), "{text}");
        let mut shown = Shown::from(status);
        shown.shield = Some(Shield::from(shield_v1::StateResponse {
            kubelet_running: true,
            kubelet_pid: 7,
            kubelet_version: "v1.37.1".into(),
            runtime: "containerd v2.1.9".into(),
            fitness: shield_v1::RuntimeFitness::Ready.into(),
            ..Default::default()
        }));
        let text = shown.table();
        assert!(
            text.contains("Kubelet:    v1.37.1, pid 7\nRuntime:    containerd v2.1.9, CDI on\n"),
            "{text}"
        );
        assert!(text.contains("State:      not ready"), "{text}");
        assert!(
            text.contains("Pods:       3 (1 from before the last boot)\n"),
            "{text}"
        );
        assert!(
            text.contains("Claims:     2 (1 waiting for a driver)\n"),
            "{text}"
        );
        assert!(
            text.ends_with("\nProblem:    the disk is full\n            make room\n"),
            "{text}"
        );
    }
}
