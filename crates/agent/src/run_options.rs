//! What the runtime must add to a container, with the CDI devices of claims as annotations too.
//!
//! Container runtimes take the names of CDI devices from a list of their own, `cdi_devices`. Older ones know them only
//! as annotations `cdi.k8s.io/...`, one for each claim and driver. Those that know both take each device once.

use std::collections::{BTreeMap, BTreeSet};

use devlet_cdi::annotations;
use devlet_core::device_plugin::run_options::{Conflict, RunOptions};
use devlet_core::{Moment, Node, PodUid};

/// What the runtime must add to a container that a pod may have.
pub fn of_container(node: &Node, pod: &PodUid, container: &str) -> (RunOptions, Vec<Conflict>) {
    let (mut options, conflicts) = node.run_options(pod, container);
    // Each name once, where it is used first.
    let mut seen = BTreeSet::new();
    let mut named: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for device in node.claimed_devices(pod, container, Moment::default()) {
        let key = (device.driver.to_string(), device.uid.to_string());
        let names = device.device.cdi_devices.into_iter();
        let names: Vec<String> = names.filter(|name| seen.insert(name.clone())).collect();
        named.entry(key).or_default().extend(names);
    }
    for ((driver, claim), names) in named {
        // Drivers' names and UIDs make good keys; whatever does not is still among the CDI devices.
        if let Ok(key) = annotations::hashed_key(&driver, &claim) {
            options.annotations.remove(&key);
            let _ = annotations::insert(&mut options.annotations, key, names);
        }
    }
    (options, conflicts)
}
