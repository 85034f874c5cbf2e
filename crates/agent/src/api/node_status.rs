//! The status of the node: version, counts, and all problems.

use std::time::Duration;

use devlet_client::v1;

use super::convert::{self, number};
use super::service::DevletService;
use super::{convert_claims, convert_cluster, file_notes, kubelet_pods, problems};

impl DevletService {
    pub(super) async fn node_status(&self) -> v1::StatusResponse {
        let store = self.agent.store();
        let health = store.health();
        let mirror = store.mirror_failure();
        let id_file = store.id_failure();
        let set_aside = store.quarantined();
        let unreachable = self.agent.unreachable().await;
        let resources = self.resources();
        let is_gone = |resource: &&v1::Resource| resource.state() == v1::ResourceState::Gone;
        let now = self.now();
        let shielded = super::shield::problems(&self.agent);
        let uptime_ms = convert::age(self.started, now);
        let cluster = self.agent.cluster();
        let kubernetes = cluster.read(|state| convert_cluster::status(state, now));
        let of_cluster = cluster.read(|state| problems::of_cluster(state, now));
        self.read(|node| {
            let mut problems = problems::current(node, now, health.as_ref().err(), mirror.as_deref());
            problems.extend(shielded.clone());
            problems.extend(problems::of_id_files(id_file.as_deref()));
            problems.extend(problems::of_sockets(&unreachable));
            problems.extend(problems::of_registry(&self.agent.registry_summary()));
            problems.extend(of_cluster);
            let ready = !problems.iter().any(|problem| problem.blocking);
            problems.extend(file_notes::since_start(&set_aside));
            problems.extend(self.start_problems.iter().cloned());
            let counts = convert_claims::counts(node);
            v1::StatusResponse {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                root_dir: self.agent.config().root.display().to_string(),
                pid: i64::from(std::process::id()),
                uptime_ms,
                // By the current wall clock.
                started_at_ms: (self.wall_clock)().0.saturating_sub(uptime_ms),
                revision: node.changes(),
                ready,
                pods: number(node.pods().count() + kubelet_pods::count(node)),
                pods_before_reboot: number(node.pods().filter(|pod| pod.before_reboot).count()),
                plugins: number(node.plugins().len()),
                resources: number(resources.len()),
                resources_without_plugin: number(resources.iter().filter(is_gone).count()),
                problems,
                drivers: counts.drivers,
                drivers_without_plugin: counts.drivers_without_plugin,
                claims: counts.claims,
                claims_waiting: counts.claims_waiting,
                wait_ms: milliseconds(self.agent.config().wait),
                kubernetes,
            }
        })
    }
}

pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
