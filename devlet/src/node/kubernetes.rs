//! The API server and the reconcilers in `devlet status`. The keys are an interface.

use devlet_client::v1;
use serde::Serialize;

use super::time;
use crate::output::{escape_control, or_dash, table};
use crate::table::{Cell, Tone};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Kubernetes {
    mode: String,
    server: String,
    node: String,
    /// `None` while unknown.
    identity: Option<String>,
    pods_waiting: u64,
    slices: u64,
    reconcilers: Vec<Reconciler>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Reconciler {
    name: String,
    last_success: Option<String>,
    #[serde(skip)]
    last_success_age_ms: u64,
    /// Kept after a later success.
    last_error: Option<ReconcilerError>,
    /// Time of the first error since the last success.
    failing_since: Option<String>,
    #[serde(skip)]
    failing_for_ms: u64,
}

#[derive(Debug, Serialize)]
struct ReconcilerError {
    at: String,
    message: String,
    #[serde(skip)]
    age_ms: u64,
}

impl From<v1::KubernetesStatus> for Kubernetes {
    fn from(status: v1::KubernetesStatus) -> Self {
        Self {
            mode: status.mode,
            server: status.server,
            node: status.node,
            identity: Some(status.identity).filter(|identity| !identity.is_empty()),
            pods_waiting: status.pods_waiting,
            slices: status.slices,
            reconcilers: status.reconcilers.into_iter().map(Reconciler::from).collect(),
        }
    }
}

impl From<v1::Reconciler> for Reconciler {
    fn from(reconciler: v1::Reconciler) -> Self {
        let error = |error: v1::ReconcilerError| ReconcilerError {
            at: time::moment(error.at_ms),
            message: error.message,
            age_ms: error.age_ms,
        };
        Self {
            name: reconciler.name,
            last_success: time::known_moment(reconciler.last_success_ms),
            last_success_age_ms: reconciler.last_success_age_ms,
            last_error: reconciler.last_error.map(error),
            failing_since: time::known_moment(reconciler.failing_since_ms),
            failing_for_ms: reconciler.failing_for_ms,
        }
    }
}

impl Kubernetes {
    pub(super) fn text(&self) -> String {
        let identity = or_dash(self.identity.clone().unwrap_or_default());
        let mut text = format!(
            "API server: {} (mode {}, node {})\nIdentity:   {}\nSlices:     {}\nWaiting:    {}\n",
            escape_control(&self.server),
            escape_control(&self.mode),
            escape_control(&self.node),
            escape_control(&identity),
            self.slices,
            match self.pods_waiting {
                1 => "1 pod".to_owned(),
                pods => format!("{pods} pods"),
            },
        );
        let header = ["RECONCILER", "STATE", "LAST SUCCESS", "LAST ERROR"];
        let rows = self.reconcilers.iter().map(Reconciler::row);
        text.push_str(&format!("\n{}", table(header, rows)));
        text
    }
}

impl Reconciler {
    fn row(&self) -> [Cell; 4] {
        let ago = |age_ms| format!("{} ago", time::age(age_ms));
        let success = self.last_success.as_ref().map(|_| ago(self.last_success_age_ms));
        let error = self.last_error.as_ref();
        let error = error.map(|error| format!("{}: {}", ago(error.age_ms), error.message));
        let state = match (&self.failing_since, &self.last_success) {
            (Some(_), _) => {
                let state = format!("failing for {}", time::age(self.failing_for_ms));
                Cell::new(state).tone(Tone::Bad)
            }
            (None, Some(_)) => Cell::new("working"),
            (None, None) => Cell::new("starting").tone(Tone::Waiting),
        };
        [
            Cell::new(self.name.as_str()),
            state,
            Cell::new(success.unwrap_or_else(|| "never".to_owned())),
            Cell::new(or_dash(error.unwrap_or_default())),
        ]
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status() -> Kubernetes {
        let error = v1::ReconcilerError {
            message: "pods is forbidden".into(),
            at_ms: 1_700_000_000_000,
            age_ms: 3_000,
        };
        let failing = v1::Reconciler {
            name: "pods".into(),
            last_error: Some(error),
            failing_since_ms: 1_699_999_000_000,
            failing_for_ms: 1_003_000,
            ..Default::default()
        };
        let working = v1::Reconciler {
            name: "node".into(),
            last_success_ms: 1_700_000_000_000,
            last_success_age_ms: 5_000,
            ..Default::default()
        };
        Kubernetes::from(v1::KubernetesStatus {
            mode: "agent".into(),
            server: "https://10.0.0.1:6443/".into(),
            node: "worker-1".into(),
            identity: "system:node:worker-1".into(),
            reconcilers: vec![working, failing],
            pods_waiting: 2,
            slices: 1,
        })
    }

    #[test]
    fn each_reconciler_is_shown_with_its_last_success_and_error() {
        let text = status().text();
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| {
                line.split("  ")
                    .map(str::trim)
                    .filter(|cell| !cell.is_empty())
                    .collect()
            })
            .collect();
        assert!(rows.contains(&vec!["node", "working", "5s ago", "-"]), "{text}");
        assert!(
            rows.contains(&vec![
                "pods",
                "failing for 16m",
                "never",
                "3s ago: pods is forbidden"
            ]),
            "{text}"
        );
        assert!(
            text.starts_with(
                "API server: https://10.0.0.1:6443/ (mode agent, node worker-1)\nIdentity:   system:node:worker-1\n"
            ),
            "{text}"
        );
        assert!(text.contains("Waiting:    2 pods\n"), "{text}");
    }

    #[test]
    fn the_status_has_exactly_the_documented_keys() {
        let expected = json!({
            "mode": "agent", "server": "https://10.0.0.1:6443/", "node": "worker-1",
            "identity": "system:node:worker-1", "podsWaiting": 2, "slices": 1,
            "reconcilers": [
                {"name": "node", "lastSuccess": "2023-11-14T22:13:20Z", "lastError": null, "failingSince": null},
                {
                    "name": "pods", "lastSuccess": null, "failingSince": "2023-11-14T21:56:40Z",
                    "lastError": {"at": "2023-11-14T22:13:20Z", "message": "pods is forbidden"},
                },
            ],
        });
        assert_eq!(serde_json::to_value(status()).unwrap(), expected);
    }
}
