//! The options that the runtime must add to a container, with CDI devices of claims also as annotations.
//!
//! Container runtimes read the names of CDI devices from the list `cdi_devices`. Older ones read them only from
//! annotations `cdi.k8s.io/...`, one for each claim and driver. Runtimes that read both add each device once.

use std::collections::{BTreeMap, BTreeSet};

use devlet_cdi::annotations;
use devlet_core::device_plugin::run_options::{Conflict, RunOptions};
use devlet_core::{Moment, Node, PodUid};

/// Returns the options for a container of a pod, and conflicts between device plugins.
pub fn of_container(node: &Node, pod: &PodUid, container: &str) -> (RunOptions, Vec<Conflict>) {
    let (mut options, conflicts) = node.run_options(pod, container);
    // Each name appears only at its first use.
    let mut seen = BTreeSet::new();
    let mut named: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for device in node.claimed_devices(pod, container, Moment::default()) {
        let key = (device.driver.to_string(), device.uid.to_string());
        let names = device.device.cdi_devices.into_iter();
        let names: Vec<String> = names.filter(|name| seen.insert(name.clone())).collect();
        named.entry(key).or_default().extend(names);
    }
    for ((driver, claim), names) in named {
        // Driver names and UIDs make valid keys. Devices without one are still in `cdi_devices`.
        if let Ok(key) = annotations::hashed_key(&driver, &claim) {
            options.annotations.remove(&key);
            let _ = annotations::insert(&mut options.annotations, key, names);
        }
    }
    (options, conflicts)
}
