use proptest::prelude::*;

use super::*;

fn map<'t>(entries: impl IntoIterator<Item = (&'t str, &'t str)>) -> BTreeMap<String, String> {
    entries
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

#[test]
fn a_key_joins_plugin_and_device_and_replaces_slashes() {
    for (plugin, device_id, name) in [
        ("vendor.class", "device", "vendor.class_device"),
        (
            "v-e.n_d.or.cl-as_s",
            "d_e-v-i-c_e",
            "v-e.n_d.or.cl-as_s_d_e-v-i-c_e",
        ),
        (
            "v-e.n_d.or.cl-as_s",
            "d-e/v/i/c-e",
            "v-e.n_d.or.cl-as_s_d-e_v_i_c-e",
        ),
        ("a", "/b", "a__b"),
        ("0", "0", "0_0"),
    ] {
        assert_eq!(key(plugin, device_id), Ok(format!("cdi.k8s.io/{name}")));
        assert_eq!(hashed_key(plugin, device_id), key(plugin, device_id));
    }
}

#[test]
fn a_key_that_breaks_a_rule_is_refused_in_both_forms() {
    for (plugin, device_id) in [
        ("", "device"),
        ("plugin", ""),
        ("_vendor.class", "device"),
        ("vendor.class", "device_"),
        ("vendor.class", "device/"),
        ("ven.dor-cl+ass", "device"),
        ("vendor/class", "device"),
        ("vendor.class", "dev+ice"),
        ("vendor.class", "gerät"),
    ] {
        assert!(key(plugin, device_id).is_err(), "{plugin} {device_id}");
        assert!(hashed_key(plugin, device_id).is_err(), "{plugin} {device_id}");
    }
}

#[test]
fn a_claim_uid_leaves_26_characters_for_the_driver() {
    let uid = "01234567-89ab-cdef-0123-456789abcdef";
    let fits = "a".repeat(26);
    assert_eq!(key(&fits, uid), Ok(format!("cdi.k8s.io/{fits}_{uid}")));
    let long = "a".repeat(27);
    assert_eq!(
        key(&long, uid),
        Err(InvalidKey::TooLong {
            name: format!("{long}_{uid}")
        })
    );
}

#[test]
fn hashed_keys_fit_differ_and_stay_the_same() {
    let uid = "01234567-89ab-cdef-0123-456789abcdef";
    let one = hashed_key("gpu.resources.accelerators.vendor.example.com", uid).unwrap();
    assert_eq!(
        one,
        "cdi.k8s.io/gpu.resources.accelerators.ven_b04a350e295c1c8e3e0a21a04bac83d0"
    );
    let other_uid = hashed_key(
        "gpu.resources.accelerators.vendor.example.com",
        &uid.replace('f', "e"),
    )
    .unwrap();
    let other_driver = hashed_key("gpu.resources.accelerators.vendor.example.org", uid).unwrap();
    assert!(one != other_uid && one != other_driver && other_uid != other_driver);

    let mut annotations = BTreeMap::new();
    insert(&mut annotations, one, ["v.com/c=d"]).unwrap();
}

#[test]
fn the_readable_part_of_a_hashed_key_does_not_end_in_a_separator() {
    let plugin = format!("{}..--{}", "a".repeat(28), "b".repeat(40));
    let hashed = hashed_key(&plugin, "id").unwrap();
    assert!(
        hashed.starts_with(&format!("cdi.k8s.io/{}_", "a".repeat(28))),
        "{hashed}"
    );
    assert!(
        !hashed.contains('.') || hashed.matches('.').count() == 2,
        "{hashed}"
    );
}

#[test]
fn inserted_annotations_are_parsed_back() {
    let mut annotations = map([("other.io/x", "not for us")]);
    let requests = [
        ("vendor1.class", "device1", vec!["vendor1.com/class=device1"]),
        (
            "vendor1.class",
            "device2",
            vec!["vendor2.com/class=device1", "vendor2.com/class=device2"],
        ),
        (
            "vendor3.class2",
            "device",
            vec![
                "vendor3.com/class2=1",
                "vendor3.com/class2=2",
                "vendor3.com/class2=3",
            ],
        ),
    ];
    for (plugin, device_id, devices) in &requests {
        insert(&mut annotations, key(plugin, device_id).unwrap(), devices).unwrap();
    }

    assert_eq!(
        annotations["cdi.k8s.io/vendor1.class_device2"],
        "vendor2.com/class=device1,vendor2.com/class=device2"
    );
    let parsed = parse(&annotations).unwrap();
    let parsed: Vec<Vec<_>> = parsed
        .iter()
        .map(|request| request.devices.iter().map(QualifiedName::as_str).collect())
        .collect();
    let expected: Vec<Vec<_>> = requests.into_iter().map(|(_, _, devices)| devices).collect();
    assert_eq!(parsed, expected);
}

#[test]
fn a_refused_insertion_leaves_the_annotations_untouched() {
    let before = map([("cdi.k8s.io/v_used", "v.com/c=old"), ("a", "b")]);
    let ours = || key("v", "new").unwrap();
    let cases: [(String, Vec<&str>); 8] = [
        (key("v", "used").unwrap(), vec!["v.com/c=d"]),
        (ours(), vec![]),
        (ours(), vec!["v.com/c=d", "v.com/d"]),
        (ours(), vec!["v.com/c=d", "/dev/null"]),
        (ours(), vec!["v.com/c=d", ""]),
        ("v_new".to_owned(), vec!["v.com/c=d"]),
        ("cdi.k8s.io/".to_owned(), vec!["v.com/c=d"]),
        (format!("cdi.k8s.io/{}", "a".repeat(64)), vec!["v.com/c=d"]),
    ];
    for (key, devices) in cases {
        let mut annotations = before.clone();
        assert!(
            insert(&mut annotations, key.clone(), &devices).is_err(),
            "{key} {devices:?}"
        );
        assert_eq!(annotations, before);
    }
}

#[test]
fn a_used_key_is_named() {
    let mut annotations = map([("cdi.k8s.io/v_used", "v.com/c=old")]);
    let refused = insert(&mut annotations, key("v", "used").unwrap(), ["v.com/c=d"]);
    assert_eq!(
        refused,
        Err(InsertError::KeyUsed {
            key: "cdi.k8s.io/v_used".to_owned()
        })
    );
}

#[test]
fn parsing_ignores_other_annotations_and_refuses_bad_values() {
    assert_eq!(
        parse(map([
            ("cdi.k8s.io", "x"),
            ("CDI.k8s.io/a", "x"),
            ("x", "v.com/c=d")
        ])),
        Ok(vec![])
    );
    for value in [
        "",
        ",",
        "v.com/c=d,",
        "vendor3.com=device3",
        "/dev/null",
        "v.com/c=d, v.com/c=e",
        "foobar",
    ] {
        let refused = parse(map([("cdi.k8s.io/a", "v.com/c=d"), ("cdi.k8s.io/b", value)])).unwrap_err();
        assert_eq!(refused.key, "cdi.k8s.io/b", "{value:?}");
    }
}

proptest! {
    #[test]
    fn any_request_survives_the_round_trip(
        plugin in "[a-z0-9]([a-z0-9._-]{0,60}[a-z0-9])?",
        device_id in "[a-z0-9]([a-z0-9._/-]{0,60}[a-z0-9])?",
        devices in proptest::collection::vec("[a-z]([a-z0-9.-]{0,9}[a-z])?/[a-z]{1,9}=[a-z0-9]{1,9}", 1..5),
    ) {
        let key = hashed_key(&plugin, &device_id).unwrap();
        prop_assert!(key.len() <= PREFIX.len() + MAX_KEY_NAME);
        let mut annotations = BTreeMap::new();
        insert(&mut annotations, key.clone(), &devices).unwrap();
        let devices = devices.iter().map(|device| device.parse().unwrap()).collect();
        prop_assert_eq!(parse(&annotations), Ok(vec![Request { key, devices }]));
    }
}
