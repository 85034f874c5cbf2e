use devlet_core::shield::{Lease, LeasePhase};

use super::*;

fn lease(name: &str, devices: &[&str]) -> Lease {
    Lease {
        name: name.into(),
        resource: "acme.com/gpu".into(),
        devices: devices.iter().map(|id| DeviceId::from(*id)).collect(),
        answer: None,
        pre_start_required: false,
        granted_at: Moment(0),
        is_direct: false,
        containers: BTreeMap::new(),
    }
}

#[test]
fn a_lease_is_known_while_the_checkpoint_names_it_and_a_container_has_its_devices() {
    let lease = lease("a", &["g0", "g1"]);
    let view = LeaseView {
        lease: &lease,
        phase: LeasePhase::Granted,
        holder: None,
    };
    let holder = LeaseHolder {
        pod: "p".into(),
        container: "c".into(),
    };
    let named = BTreeMap::from([(LeaseName::from("a"), holder)]);
    let listed = |ids: &[&str]| {
        let ids = ids.iter().map(|id| DeviceId::from(*id)).collect();
        Some(Listed::from([(ResourceName::from("acme.com/gpu"), ids)]))
    };
    let late = Moment(MIN_AGE_MS);
    for (holders, listed, now, unknown) in [
        (&named, listed(&["g0", "g1", "g2"]), late, false),
        // The kubelet does not list pod resources.
        (&named, None, late, false),
        (&named, listed(&["g0"]), late, true),
        (&named, Some(Listed::new()), late, true),
        (&BTreeMap::new(), listed(&["g0", "g1"]), late, true),
        // The checkpoint is written after the call.
        (&BTreeMap::new(), None, Moment(MIN_AGE_MS - 1), false),
    ] {
        assert_eq!(
            is_unknown(&view, holders, listed.as_ref(), now),
            unknown,
            "{listed:?}"
        );
    }
}
