//! Disagreements between the answers of plugins for one container. A runtime applies their specs in any order, and the last
//! one wins. A kubelet without devlet applies them in any order, too, and logs it.

use std::collections::BTreeMap;

use devlet_core::Allocation;
use devlet_core::device_plugin::run_options::{self, Conflict, ConflictKind};
use devlet_core::shield::{Lease, LeaseHolder};

/// Returns the conflicts between leases of each container.
pub(crate) fn find<'a>(
    leases: impl Iterator<Item = (&'a LeaseHolder, &'a Lease)>,
) -> Vec<(LeaseHolder, Conflict)> {
    let mut by_holder: BTreeMap<&LeaseHolder, Vec<Allocation>> = BTreeMap::new();
    for (holder, lease) in leases {
        by_holder
            .entry(holder)
            .or_default()
            .extend(allocation(holder, lease));
    }
    let several = by_holder.into_iter().filter(|(_, answers)| answers.len() > 1);
    let conflicts = several.flat_map(|(holder, answers)| {
        let (_, conflicts) = run_options::merge(&answers);
        conflicts.into_iter().map(|conflict| (holder.clone(), conflict))
    });
    // Annotations are dropped in any case.
    conflicts
        .filter(|(_, conflict)| conflict.kind != ConflictKind::Annotation)
        .collect()
}

fn allocation(holder: &LeaseHolder, lease: &Lease) -> Option<Allocation> {
    Some(Allocation {
        container: holder.container.clone(),
        kind: None,
        resource: lease.resource.clone(),
        devices: Vec::new(),
        nodes: Vec::new(),
        answer: lease.answer.clone()?,
        pre_start_required: lease.pre_start_required,
    })
}

#[cfg(test)]
mod tests {
    use devlet_kubelet_api::device_plugin::v1beta1::{ContainerAllocateResponse, Mount};
    use prost::Message as _;

    use super::*;
    use crate::lease::checkpoint::Held;

    fn lease(container: &str, resource: &str, env: &str, path: &str) -> (LeaseHolder, Lease) {
        let holder = LeaseHolder {
            pod: "p".into(),
            container: container.into(),
        };
        let answer = ContainerAllocateResponse {
            envs: [("VISIBLE".to_owned(), env.to_owned())].into(),
            mounts: vec![Mount {
                container_path: "/data".into(),
                host_path: path.into(),
                read_only: true,
            }],
            annotations: [("note".to_owned(), env.to_owned())].into(),
            ..ContainerAllocateResponse::default()
        };
        let held = Held {
            holder: holder.clone(),
            resource: resource.into(),
            devices: ["d".into()].into(),
            lease: None,
            answer: answer.encode_to_vec(),
        };
        (holder, held.to_lease(devlet_core::Moment(0)))
    }

    #[test]
    fn answers_for_one_container_that_differ_are_conflicts() {
        let leases = [
            lease("c", "acme.com/gpu", "0", "/a"),
            lease("c", "acme.com/nic", "1", "/a"),
            lease("d", "acme.com/gpu", "2", "/b"),
        ];

        let found = find(leases.iter().map(|(holder, lease)| (holder, lease)));

        let [(holder, conflict)] = <[_; 1]>::try_from(found).unwrap();
        assert_eq!(
            (holder.container.as_str(), conflict.key.as_str()),
            ("c", "VISIBLE")
        );
    }
}
