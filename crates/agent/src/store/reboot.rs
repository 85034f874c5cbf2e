//! Changes to pods, claims and leases after a reboot of the machine.

use std::collections::BTreeMap;

use devlet_core::Source;

use super::open::Startup;
use super::open_report::Reboot;
use super::persisted_state::PersistedState;
use super::row::Row;
use crate::config::OnReboot;

impl Startup<'_> {
    /// Marks or releases pods if the machine has been rebooted. Returns the rows to write.
    pub(super) fn reboot(&mut self, persisted: &mut PersistedState) -> Vec<Row> {
        let now = &self.options.boot_id;
        let before = persisted.metadata.boot_id.replace(now.clone());
        let Some(previous) = before.filter(|before| before != now) else {
            return Vec::new();
        };
        let release = |source| self.options.on_reboot == OnReboot::Release && source == Source::Api;
        let mut reboot = Reboot {
            previous,
            kept: Vec::new(),
            released: Vec::new(),
        };
        let mut rows = vec![Row::BootId(now.clone())];
        let mut unheld = BTreeMap::new();
        persisted.pods.retain(|uid, pod| {
            let released = release(pod.source);
            if released {
                reboot.released.push(uid.clone());
                let holder = (uid.clone(), pod.name.clone());
                unheld.extend(pod.claim_uids().into_iter().map(|claim| (claim, holder.clone())));
                rows.push(Row::Pod(uid.clone(), None));
            } else {
                reboot.kept.push(uid.clone());
                pod.before_reboot = true;
                rows.push(Row::pod(pod));
            }
            !released
        });
        for pod in persisted.pods.values() {
            pod.claim_uids()
                .iter()
                .for_each(|claim| drop(unheld.remove(claim)));
        }
        for (uid, claim) in &mut persisted.claims {
            let last = unheld.remove(uid).filter(|(pod, _)| claim.pod != *pod);
            let is_left = last.is_some();
            if let Some((pod, name)) = last {
                claim.pod = pod;
                claim.pod_name = name;
            }
            if claim.rebooted() || is_left {
                rows.push(Row::claim(claim));
            }
        }
        for lease in persisted.leases.values_mut() {
            if lease.rebooted() {
                rows.push(Row::lease(lease));
            }
        }
        self.report.reboot = Some(reboot);
        rows
    }
}
