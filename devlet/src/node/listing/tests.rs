use super::*;
use crate::node::samples;
use crate::table::Screen;

fn text<L: Listing>(list: &L, wide: bool) -> String {
    let screen = Screen {
        width: None,
        cut: false,
        colour: false,
    };
    list.table(wide).render(screen) + &list.notes()
}

fn pods() -> Pods {
    Pods::from(v1::PodList {
        revision: 7,
        pods: vec![samples::pod()],
    })
}

#[test]
fn pods_are_one_line_each_and_wide_shows_the_ids() {
    let lines: Vec<String> = text(&pods(), false).lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(
        lines[1].split_whitespace().collect::<Vec<_>>(),
        ["default", "job1", "gpu=1", "gpu", "api", "-", "7s"]
    );
    for expected in ["acme.com/gpu=1", "gpu-0", "u-1", "app=train"] {
        assert!(text(&pods(), true).contains(expected), "{expected}");
    }
}

#[test]
fn a_name_with_a_slash_never_matches_the_uid_of_a_pod() {
    let mut pod = samples::pod();
    pod.id = Some(v1::PodId {
        uid: "a/b".to_owned(),
        ..v1::PodId::default()
    });
    let pod = Pod::from(pod);
    for name in ["a/b", "/", ""] {
        assert!(!pod.is_called(name), "{name}");
    }
    assert!(pod.is_called("uid:a/b"));
}

#[test]
fn drivers_that_are_refused_are_listed_with_the_reason() {
    let drivers = Drivers::from(v1::DriverList {
        revision: 1,
        drivers: Vec::new(),
        refused: vec![samples::refused()],
    });
    let text = text(&drivers, false);
    assert!(text.contains("user 7 may not serve gpu.acme.com: ask"), "{text}");
    assert!(text.contains("/registry/gpu.sock"), "{text}");
    let json = serde_json::to_value(&drivers).unwrap();
    let refused = serde_json::json!([{
        "name": "gpu.acme.com", "socket": "/registry/gpu.sock", "hint": "ask", "attempts": 3,
        "reason": "user 7 may not serve gpu.acme.com", "refusedAt": "1970-01-01T00:00:00Z",
    }]);
    assert_eq!(json["refused"], refused);
}

#[test]
fn a_claim_that_a_pod_names_twice_is_listed_once() {
    let mut pod = samples::pod();
    pod.claims.push(pod.claims[0].clone());
    pod.claims[1].name = "again".into();
    let pods = Pods::from(v1::PodList {
        revision: 7,
        pods: vec![pod],
    });
    let table = text(&pods, false);
    let line = table.lines().nth(1).unwrap();
    assert!(line.contains(" gpu ") && !line.contains("gpu, gpu"), "{line}");
}

#[test]
fn a_resource_without_a_plugin_names_the_last_one() {
    let last = v1::LastPlugin {
        endpoint: "/run/gpu.sock".into(),
        gone_since_ms: 0,
        gone_for_ms: 172_800_000,
    };
    let resource = v1::Resource {
        name: "acme.com/gpu".into(),
        capacity: 2,
        state: v1::ResourceState::Gone.into(),
        last_plugin: Some(last),
        ..Default::default()
    };
    let resources = Resources::from(v1::ResourceList {
        revision: 1,
        resources: vec![resource],
    });
    assert!(text(&resources, false).contains("gone"));
    assert!(text(&resources, true).contains("/run/gpu.sock, gone for 2d"));
    let json = serde_json::to_value(&resources).unwrap();
    assert_eq!(
        json["resources"][0]["lastPlugin"]["goneSince"],
        "1970-01-01T00:00:00Z"
    );
    assert_eq!(json["resources"][0]["state"], "gone");
}

#[test]
fn drivers_and_claims_are_one_line_each_and_wide_has_more() {
    let drivers = Drivers::from(v1::DriverList {
        refused: Vec::new(),
        revision: 1,
        drivers: vec![samples::driver()],
    });
    let cells = |text: &str| -> Vec<String> {
        let line = text.lines().nth(1).unwrap_or_default();
        line.split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(
        cells(&text(&drivers, false))[..5],
        ["gpu.acme.com", "serving", "v1.DRAPlugin", "3", "1"]
    );
    assert!(text(&drivers, true).contains("/run/old.sock, /run/new.sock"));
    let claims = Claims::from(v1::ClaimList {
        revision: 1,
        claims: vec![samples::claim()],
    });
    let short = text(&claims, false);
    assert!(short.contains("default/job1"), "{short}");
    assert!(short.contains("nic.acme.com (noDriver)"), "{short}");
    let wide = text(&claims, true);
    assert!(wide.contains("gpu.acme.com, nic.acme.com"), "{wide}");
    assert!(wide.contains("c-1") && wide.contains("gpu-0"), "{wide}");
}

#[test]
fn devices_and_plugins_have_their_state_in_table_and_json() {
    let device = |id: &str, listed, healthy| v1::Device {
        id: id.into(),
        listed,
        healthy,
        ..Default::default()
    };
    let devices = vec![
        device("a", true, true),
        device("b", true, false),
        device("c", false, false),
    ];
    let devices = Devices::from(v1::DeviceList { revision: 1, devices });
    let rows = text(&devices, false);
    let json = serde_json::to_value(&devices).unwrap();
    for (place, expected) in ["healthy", "unhealthy", "notListed"].into_iter().enumerate() {
        assert!(rows.contains(expected), "{rows}");
        assert_eq!(json["devices"][place]["health"], expected);
    }
    let plugin = |devices, in_force| v1::Plugin {
        devices,
        in_force,
        ..Default::default()
    };
    let mut rejected = plugin(None, false);
    rejected.rejection = Some(v1::PluginRejection {
        reason: "broken".into(),
        ..Default::default()
    });
    let plugins = vec![
        plugin(Some(2), true),
        plugin(Some(1), false),
        plugin(None, false),
        rejected,
    ];
    let plugins = Plugins::from(v1::PluginList { revision: 1, plugins });
    let rows = text(&plugins, true);
    let json = serde_json::to_value(&plugins).unwrap();
    let states = ["serving", "standby", "notListed", "rejected"];
    for (place, expected) in states.into_iter().enumerate() {
        assert!(rows.contains(expected), "{rows}");
        assert_eq!(json["plugins"][place]["state"], expected);
    }
    assert!(rows.contains("broken"), "{rows}");
    assert_eq!(json["plugins"][3]["rejection"]["reason"], "broken");
}

#[test]
fn pods_of_an_api_server_are_listed_with_what_they_wait_for() {
    let pods = Pods::from(v1::PodList {
        revision: 1,
        pods: vec![samples::waiting_pod()],
    });
    let table = text(&pods, false);
    let row = table.lines().nth(1).unwrap();
    let cells: Vec<&str> = row
        .split("  ")
        .map(str::trim)
        .filter(|cell| !cell.is_empty())
        .collect();
    let reason = "no device plugin offers acme.com/gpu";
    assert_eq!(cells, ["team-a", "job2", "-", "-", "kubernetes", reason, "9s"]);
    let json = serde_json::to_value(&pods).unwrap();
    assert_eq!(
        json["pods"][0]["waiting"],
        serde_json::json!({"reason": reason, "since": "2023-11-14T22:13:20Z"})
    );
    let admitted = serde_json::to_value(self::pods()).unwrap();
    assert_eq!(admitted["pods"][0]["waiting"], serde_json::Value::Null);
}

#[test]
fn slices_are_one_line_each_and_have_the_documented_keys() {
    let mut kept = samples::slice();
    (kept.has_stale_owner, kept.wiped_at_ms, kept.wiped_in_ms) = (false, None, 0);
    let slices = Slices::from(v1::SliceList {
        revision: 4,
        slices: vec![samples::slice(), kept],
    });
    let table = text(&slices, false);
    let rows: Vec<Vec<&str>> = table
        .lines()
        .skip(1)
        .map(|row| row.split_whitespace().collect())
        .collect();
    let name = "node-1-gpu-x7k2p";
    assert_eq!(
        rows[0],
        [
            name,
            "gpu.acme.com",
            "node-1",
            "3",
            "8",
            "stale",
            "2023-11-14T22:13:57Z",
            "7s"
        ]
    );
    assert_eq!(
        rows[1],
        [name, "gpu.acme.com", "node-1", "3", "8", "current", "-", "7s"]
    );
    assert!(text(&slices, true).contains("2023-11-14T22:13:20Z"));
    let expected = serde_json::json!({
        "name": name, "driver": "gpu.acme.com", "pool": "node-1", "generation": 3, "devices": 8,
        "createdAt": "2023-11-14T22:13:20Z", "staleOwner": true, "wipedAt": "2023-11-14T22:13:57Z",
    });
    assert_eq!(serde_json::to_value(&slices).unwrap()["slices"][0], expected);
}
