use alloc::string::ToString;
use alloc::vec;

use super::*;

fn allocated() -> Vec<AllocatedDevice> {
    let device = |request: &str, device: &str, share: Option<&str>| AllocatedDevice {
        request: request.into(),
        pool: "pool".into(),
        device: device.into(),
        share: share.map(Into::into),
        admin_access: false,
    };
    vec![
        device("one", "a", None),
        device("two/half", "b", Some("s1")),
        device("three", "c", Some("s2")),
        device("three", "c", Some("s3")),
        device("four", "e", None),
        device("five", "e", None),
    ]
}

fn prepared(requests: &[&str], device: &str, cdi_devices: &[&str]) -> PreparedDevice {
    PreparedDevice {
        requests: requests.iter().map(ToString::to_string).collect(),
        pool: "pool".into(),
        device: device.into(),
        share: None,
        cdi_devices: cdi_devices.iter().map(ToString::to_string).collect(),
    }
}

fn outcome(devices: Vec<PreparedDevice>) -> Result<Vec<PreparedDevice>, String> {
    let claim = ClaimKey {
        namespace: "ns".into(),
        name: "claim".into(),
    };
    let is_cdi_name = |name: &str| name.starts_with("v/c=");
    check(&"d".into(), &claim, Some(&allocated()), devices, is_cdi_name).map_err(|error| error.to_string())
}

#[test]
fn allocated_devices_are_accepted() {
    for devices in [
        vec![],
        vec![prepared(&[], "a", &[])],
        vec![
            prepared(&["one"], "a", &["v/c=a", "v/c=all"]),
            prepared(&["three"], "c", &["v/c=all"]),
        ],
        vec![prepared(&["two"], "b", &[])],
        vec![prepared(&["two", "two/half"], "b", &[])],
        // Shares that the service cannot name.
        vec![prepared(&["three"], "c", &[]), prepared(&["three"], "c", &[])],
        vec![prepared(&["four", "five"], "e", &[])],
        vec![prepared(&["four"], "e", &[]), prepared(&["five"], "e", &[])],
    ] {
        assert!(outcome(devices.clone()).is_ok(), "{devices:?}");
    }
}

#[test]
fn devices_that_are_not_allocated_are_refused_with_the_driver_and_the_claim_named() {
    let mut other_pool = prepared(&[], "a", &[]);
    other_pool.pool = "other".into();
    let mut other_share = prepared(&[], "b", &[]);
    other_share.share = Some("s2".into());
    let mut no_share = prepared(&[], "a", &[]);
    no_share.share = Some("s1".into());
    let cases = [
        (
            prepared(&["six"], "a", &[]),
            "prepared a device of ResourceClaim ns/claim for request \"six\", which the claim does not have",
        ),
        (
            prepared(&["two/other"], "b", &[]),
            "prepared a device of ResourceClaim ns/claim for request \"two/other\", which the claim does not have",
        ),
        (
            prepared(&["one", "two"], "a", &[]),
            "prepared device \"a\" for request \"two\" of ResourceClaim ns/claim, for which it is not allocated",
        ),
        (
            prepared(&[], "x", &[]),
            "prepared device \"x\" of pool \"pool\", which is not allocated to ResourceClaim ns/claim",
        ),
        (
            prepared(&[], "", &[]),
            "prepared device \"\" of pool \"pool\", which is not allocated to ResourceClaim ns/claim",
        ),
        (
            other_pool,
            "prepared device \"a\" of pool \"other\", which is not allocated to ResourceClaim ns/claim",
        ),
        (
            other_share,
            "prepared share \"s2\" of device \"b\", which is not allocated to ResourceClaim ns/claim",
        ),
        (
            no_share,
            "prepared share \"s1\" of device \"a\", which is not allocated to ResourceClaim ns/claim",
        ),
        (
            prepared(&[], "a", &["v/c=a", "gpu0"]),
            "named the CDI device \"gpu0\" for ResourceClaim ns/claim, which is not of the form vendor/class=device",
        ),
        (
            prepared(&[], "a", &["v/c=a", "v/c=a"]),
            "named the CDI device \"v/c=a\" twice for device \"a\" of ResourceClaim ns/claim",
        ),
    ];
    for (device, text) in cases {
        assert_eq!(outcome(vec![device]), Err(alloc::format!("driver d {text}")));
    }
}

#[test]
fn a_device_that_comes_more_often_than_it_is_allocated_is_refused() {
    let shared = |share: &str| PreparedDevice {
        share: Some(share.into()),
        ..prepared(&["three"], "c", &[])
    };
    assert!(outcome(vec![shared("s2"), shared("s3")]).is_ok());
    for (devices, device) in [
        (vec![prepared(&["one"], "a", &[]), prepared(&[], "a", &[])], "a"),
        (
            vec![prepared(&["two"], "b", &[]), prepared(&["two/half"], "b", &[])],
            "b",
        ),
        (vec![shared("s2"), shared("s3"), shared("s2")], "c"),
        (vec![prepared(&[], "c", &[]); 3], "c"),
        (vec![prepared(&[], "e", &[]); 3], "e"),
    ] {
        assert_eq!(
            outcome(devices),
            Err(alloc::format!(
                "driver d prepared device \"{device}\" of pool \"pool\" more often than it is allocated to ResourceClaim ns/claim"
            ))
        );
    }
}

#[test]
fn a_share_that_the_service_cannot_name_is_filled_in_where_only_one_is_possible() {
    let devices = outcome(vec![
        prepared(&[], "a", &[]),
        prepared(&[], "b", &[]),
        prepared(&[], "c", &[]),
    ]);
    let shares: Vec<Option<&str>> = devices
        .as_ref()
        .unwrap()
        .iter()
        .map(|each| each.share.as_deref())
        .collect();
    assert_eq!(shares, [None, Some("s1"), None]);
}
