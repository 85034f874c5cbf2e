//! `/metrics` is well-formed OpenMetrics text, and matches `docs/metrics.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

use devlet_testkit::{Device, DeviceHealth, Door, DriverScript, Fault, Options, PATIENCE, Plugin, Script};

use crate::common::{Daemon, POLL_INTERVAL, http_get, root};

/// A family of series.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    samples: Vec<Sample>,
}

#[derive(Debug, Clone)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Family {
    /// Returns the labels of all series, without the bounds of buckets.
    fn labels(&self) -> BTreeSet<String> {
        let names = self.samples.iter().flat_map(|sample| sample.labels.keys());
        names.filter(|name| *name != "le").cloned().collect()
    }
}

/// Parses OpenMetrics text. Panics if it is not well-formed.
fn parse(text: &str) -> BTreeMap<String, Family> {
    let text = text.strip_suffix("# EOF\n").unwrap();
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut helped = BTreeSet::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(!help.is_empty(), "{line}");
            assert!(helped.insert(name.to_owned()), "{name} has two HELP lines");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(helped.contains(name), "{name} comes without HELP before its TYPE");
            let family = Family {
                kind: kind.to_owned(),
                samples: Vec::new(),
            };
            assert!(
                families.insert(name.to_owned(), family).is_none(),
                "{name} has two TYPE lines"
            );
            current = name.to_owned();
        } else {
            let sample = sample(line);
            let family = families.get_mut(&current).unwrap();
            let suffixes: &[&str] = match family.kind.as_str() {
                "counter" => &["_total"],
                "gauge" => &[""],
                "histogram" => &["_bucket", "_sum", "_count"],
                other => panic!("{current} is a {other}"),
            };
            let suffix = sample.name.strip_prefix(&current);
            assert!(
                suffix.is_some_and(|suffix| suffixes.contains(&suffix)),
                "{line} is below {current}"
            );
            family.samples.push(sample);
        }
    }
    for (name, family) in &families {
        assert!(!family.samples.is_empty(), "{name} is without series");
        check(name, family);
    }
    families
}

fn sample(line: &str) -> Sample {
    let name_end = line.find(['{', ' ']).unwrap();
    let (name, mut rest) = line.split_at(name_end);
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"").unwrap();
            let mut value = String::new();
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next().unwrap() {
                    (_, '\\') => value.push(match chars.next().unwrap().1 {
                        'n' => '\n',
                        escaped @ ('\\' | '"') => escaped,
                        other => panic!("\\{other} in {line}"),
                    }),
                    (place, '"') => break place,
                    (_, char) => value.push(char),
                }
            };
            let twice = labels.insert(label.trim_start_matches(',').to_owned(), value);
            assert!(twice.is_none(), "{line}");
            rest = &after[end + 1..];
        }
        rest = &rest[1..];
    }
    let plain = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    assert!(plain(name) && labels.keys().all(|label| plain(label)), "{line}");
    let value = rest.strip_prefix(' ').unwrap().replace("+Inf", "inf");
    Sample {
        name: name.to_owned(),
        labels,
        value: value.parse().unwrap(),
    }
}

/// Checks that each series occurs once, that counters are not negative, and that histograms add up.
fn check(name: &str, family: &Family) {
    let mut series = BTreeSet::new();
    for Sample { name, labels, value } in &family.samples {
        assert!(
            series.insert((name.clone(), labels.clone())),
            "{name} {labels:?} twice"
        );
        assert!(
            family.kind == "gauge" || *value >= 0.0,
            "{name} {labels:?} {value}"
        );
    }
    if family.kind != "histogram" {
        return;
    }
    let mut buckets: BTreeMap<BTreeMap<String, String>, Vec<(f64, f64)>> = BTreeMap::new();
    let mut counts = BTreeMap::new();
    for Sample {
        name: sample,
        labels,
        value,
    } in &family.samples
    {
        let mut labels = labels.clone();
        if let Some(bound) = labels.remove("le") {
            let bound = bound.replace("+Inf", "inf").parse().unwrap();
            buckets.entry(labels).or_default().push((bound, *value));
        } else if sample.ends_with("_count") {
            counts.insert(labels, *value);
        }
    }
    assert!(buckets.keys().eq(counts.keys()), "{name}");
    for (labels, buckets) in &buckets {
        let sorted = buckets
            .windows(2)
            .all(|two| two[0].0 < two[1].0 && two[0].1 <= two[1].1);
        assert!(sorted, "{name} {labels:?} {buckets:?}");
        assert_eq!(
            buckets.last(),
            Some(&(f64::INFINITY, counts[labels])),
            "{name} {labels:?}"
        );
    }
}

/// Returns name, kind and labels of each metric in the tables.
fn documented() -> BTreeMap<String, (String, BTreeSet<String>)> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = std::fs::read_to_string(repository.join("docs/metrics.md")).unwrap();
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind @ ("counter" | "gauge" | "histogram"), labels, what] = cells[..] else {
            continue;
        };
        assert!(!what.is_empty(), "{line}");
        let labels = labels.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        let known = found.insert(name.trim_matches('`').to_owned(), (kind.to_owned(), labels));
        assert!(known.is_none(), "{name} is documented twice");
    }
    found
}

/// Returns name, kind and labels of each printed metric.
fn printed(families: &BTreeMap<String, Family>) -> BTreeMap<String, (String, BTreeSet<String>)> {
    let entry = |(name, family): (&String, &Family)| {
        let suffix = if family.kind == "counter" { "_total" } else { "" };
        (format!("{name}{suffix}"), (family.kind.clone(), family.labels()))
    };
    families.iter().map(entry).collect()
}

/// Returns the values in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Each documented counter starts at zero, so that alerts see its first step.
#[test]
fn counters_exist_and_are_zero_before_the_first_event() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let families = scrape(&address(&daemon));
    let series = |name: &str| -> BTreeSet<String> {
        let samples = families[name.trim_end_matches("_total")].samples.iter();
        let named = samples.filter(|sample| sample.name == name);
        named
            .inspect(|sample| assert_eq!(sample.value, 0.0, "{name} {:?}", sample.labels))
            .map(|sample| {
                let labels = &sample.labels;
                match labels.get("limit") {
                    Some(limit) => limit.clone(),
                    None => format!("{} {}", labels["outcome"], labels["reason"]),
                }
            })
            .collect()
    };
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let read = |name: &str| std::fs::read_to_string(repository.join(name)).unwrap();

    let configuration = read("docs/configuration.md");
    let table = configuration.split("| key | default |").nth(1).unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let limits: BTreeSet<String> = rows
        .filter_map(|row| quoted(row).next())
        // tonic rejects such requests before devlet can count them.
        .filter(|limit| *limit != "requestBytes")
        .map(str::to_owned)
        .collect();
    assert_eq!(series("devlet_limit_hits_total"), limits);

    let metrics = read("docs/metrics.md");
    let table = metrics.split("| `outcome` | `reason` |").nth(1).unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let mut ends = BTreeSet::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        let outcome = quoted(cells[0]).next().unwrap();
        let mut reasons: Vec<&str> = quoted(cells[1]).collect();
        if reasons.is_empty() {
            reasons.push("");
        }
        ends.extend(reasons.iter().map(|reason| format!("{outcome} {reason}")));
    }
    assert_eq!(series("devlet_admissions_total"), ends);

    let is_about = |line: &&str| line.starts_with("| `devlet_plugin_registrations_total`");
    let row = metrics.lines().find(is_about).unwrap();
    let reasons = row.split("Reasons:").nth(1).unwrap();
    let mut ends: BTreeSet<String> = quoted(reasons)
        .map(|reason| format!("refused {reason}"))
        .collect();
    ends.insert("registered ".into());
    assert_eq!(series("devlet_plugin_registrations_total"), ends);
}

fn address(daemon: &Daemon) -> String {
    let after = daemon.banner.split("http://").nth(1).unwrap();
    after.split('/').next().unwrap().to_owned()
}

fn scrape(address: &str) -> BTreeMap<String, Family> {
    let answer = http_get(address, "/metrics");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(
        head.contains("application/openmetrics-text; version=1.0.0"),
        "{head}"
    );
    parse(body)
}

/// Scrapes until an event has been counted: lists show it a moment before metrics do.
fn scrape_until(
    address: &str,
    wanted: impl Fn(&BTreeMap<String, Family>) -> bool,
) -> BTreeMap<String, Family> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let families = scrape(address);
        if wanted(&families) {
            return families;
        }
        assert!(Instant::now() < deadline, "{families:?}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the value of the only series with these labels.
fn value(families: &BTreeMap<String, Family>, name: &str, labels: &[(&str, &str)]) -> f64 {
    let family = name.trim_end_matches("_total").trim_end_matches("_count");
    let samples = families.get(family).map_or(&[][..], |family| &family.samples[..]);
    let fits = |sample: &&Sample| {
        sample.name == name
            && labels
                .iter()
                .all(|(label, value)| sample.labels.get(*label).map(String::as_str) == Some(*value))
    };
    let found: Vec<&Sample> = samples.iter().filter(fits).collect();
    assert_eq!(found.len(), 1, "{name} {labels:?}: {samples:?}");
    found[0].value
}

#[test]
fn what_is_printed_is_documented_and_the_other_way_round() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = address(&daemon);
    let mut script = Script::new(
        root.path(),
        "acme.com/gpu",
        ["a", "b", "c"].map(Device::new).to_vec(),
    );
    script.options = Options {
        pre_start: true,
        preferred: true,
    };
    let mut plugin = Plugin::registered(&script);
    daemon.until_capacity("acme.com/gpu", 3);
    let mut found = Script::new(root.path(), "acme.com/found", vec![Device::new("a")]);
    found.door = Door::Registry;
    let _found = Plugin::registered(&found);
    daemon.until_capacity("acme.com/found", 1);
    let leaving = Script::new(root.path(), "acme.com/leaving", vec![Device::new("a")]);
    let leaving = Plugin::registered(&leaving);
    daemon.until_capacity("acme.com/leaving", 1);

    daemon.admit("first", "acme.com/gpu=1");
    assert!(daemon.run(&["options", "first"]).status.success());
    daemon.refused(&["admit", "--name", "second", "--limit", "acme.com/gpu=9"]);
    daemon.refused(&[
        "admit",
        "--name",
        "third",
        "--limit",
        "acme.com/nothing=1",
        "--wait",
        "0s",
    ]);
    let refuse = Fault::Refuse {
        code: 7,
        message: "no".into(),
    };
    plugin.fault("Allocate", Some(&refuse));
    daemon.refused(&["admit", "--name", "fourth", "--limit", "acme.com/gpu=1"]);
    let mut wrong = Script::new(root.path(), "not a resource", Vec::new());
    wrong.socket = "wrong.sock".into();
    Plugin::start(&wrong).refused();
    leaving.exit();
    daemon.until_gone("acme.com/leaving");
    let driver = DriverScript::new(root.path(), "gpu.acme.com");
    let driver = driver.with_health(vec![DeviceHealth::healthy("pool", "a")]);
    let _driver = Plugin::registered_driver(&driver);
    // devlet asks such drivers for their services.
    let old = DriverScript::new(root.path(), "old.acme.com").with_services(&["1.0.0"]);
    let none = DriverScript {
        serves: Some(Vec::new()),
        ..DriverScript::new(root.path(), "none.acme.com").with_services(&["1.0.0"])
    };
    Plugin::driver(&none).refused();
    Plugin::registered_driver(&old).exit();

    let wanted = [
        "devlet_plugin_disconnects",
        "devlet_plugin_lists",
        "devlet_driver_disconnects",
        "devlet_driver_health_messages",
    ];
    let families = scrape_until(&address, |families| {
        let has = |name: &&str| {
            families
                .get(*name)
                .is_some_and(|family| !family.samples.is_empty())
        };
        wanted.iter().all(has)
    });
    let (printed, documented) = (printed(&families), documented());
    for (name, about) in &printed {
        assert_eq!(
            documented.get(name),
            Some(about),
            "{name} is printed, docs/metrics.md says otherwise"
        );
    }
    let missing: Vec<_> = documented
        .keys()
        .filter(|name| !printed.contains_key(*name))
        // Only printed with an API server: a test of the agent compares them.
        .filter(|name| !name.starts_with("devlet_kubernetes_") && !name.starts_with("devlet_shield_"))
        .collect();
    assert!(missing.is_empty(), "documented and not printed: {missing:?}");

    // devlet may have asked more than once.
    let refused = [("driver_name", "none.acme.com"), ("code", "Unimplemented")];
    assert!(value(&families, "devlet_driver_rpc_errors_total", &refused) >= 1.0);
    let gpu = ("resource_name", "acme.com/gpu");
    let gone = ("resource_name", "acme.com/leaving");
    let socket = root.path().join("plugins_registry/acme.com_found.sock");
    let socket = ("socket_path", socket.to_str().unwrap());
    for (name, labels, wanted) in [
        ("kubelet_device_plugin_registration_total", &[gpu][..], 1.0),
        ("kubelet_device_plugin_alloc_duration_seconds_count", &[gpu], 2.0),
        ("kubelet_admission_rejections_total", &[], 3.0),
        (
            "plugin_manager_total_plugins",
            &[socket, ("state", "desired_state_of_world")],
            1.0,
        ),
        ("devlet_resource_capacity", &[gpu], 3.0),
        ("devlet_resource_held", &[gpu], 1.0),
        ("devlet_resource_free", &[gpu], 2.0),
        ("devlet_plugin_up", &[gpu], 1.0),
        ("devlet_plugin_up", &[gone], 0.0),
        ("devlet_plugins_connected", &[gone], 0.0),
        ("devlet_plugin_disconnects_total", &[gone], 1.0),
        ("devlet_plugin_lists_total", &[gpu, ("changed", "true")], 1.0),
        ("devlet_driver_up", &[("driver_name", "gpu.acme.com")], 1.0),
        ("devlet_driver_up", &[("driver_name", "old.acme.com")], 0.0),
        ("dra_resource_claims_in_use", &[("driver_name", "<any>")], 0.0),
        (
            "dra_grpc_operations_duration_seconds_count",
            &[
                ("driver_name", "old.acme.com"),
                ("method_name", "/v1alpha3.Node/NodeUnprepareResources"),
                ("grpc_status_code", "OK"),
            ],
            1.0,
        ),
        (
            "devlet_plugin_registrations_total",
            &[("outcome", "registered")],
            5.0,
        ),
        (
            "devlet_plugin_registrations_total",
            &[("outcome", "refused"), ("reason", "invalid")],
            1.0,
        ),
        (
            "devlet_plugin_rpc_duration_seconds_count",
            &[gpu, ("method", "PreStartContainer")],
            1.0,
        ),
        (
            "devlet_plugin_rpc_errors_total",
            &[gpu, ("method", "Allocate"), ("code", "PermissionDenied")],
            1.0,
        ),
        ("devlet_admissions_total", &[("outcome", "admitted")], 1.0),
        ("devlet_admissions_total", &[("reason", "insufficient")], 1.0),
        (
            "devlet_admissions_total",
            &[("outcome", "timed_out"), ("reason", "not_served")],
            1.0,
        ),
        ("devlet_admissions_total", &[("reason", "plugin_refused")], 1.0),
        (
            "devlet_admissions_waiting",
            &[("resource_name", "acme.com/nothing")],
            0.0,
        ),
        (
            "devlet_admission_duration_seconds_count",
            &[("outcome", "admitted")],
            1.0,
        ),
        ("devlet_store_healthy", &[], 1.0),
        ("devlet_pods", &[], 1.0),
    ] {
        assert_eq!(value(&families, name, labels), wanted, "{name} {labels:?}");
    }
    assert!(value(&families, "devlet_store_database_bytes", &[]) > 0.0);
    assert!(value(&families, "devlet_tasks", &[]) > 1.0);
    assert!(value(&families, "process_open_fds", &[]) > 5.0);
}

#[test]
fn state_that_cannot_be_read_is_told_until_an_operator_decides() {
    let root = root();
    std::fs::create_dir(root.path().join("device-plugins")).unwrap();
    let file = root.path().join("device-plugins/kubelet_internal_checkpoint");
    std::fs::write(&file, "{ broken").unwrap();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = address(&daemon);
    let families = scrape(&address);
    assert_eq!(value(&families, "devlet_state_files_set_aside", &[]), 1.0);
    assert_eq!(value(&families, "devlet_state_blocked", &[]), 1.0);

    daemon.refused(&["admit", "--name", "job", "--limit", "acme.com/gpu=1"]);
    let families = scrape(&address);
    assert_eq!(
        value(&families, "devlet_admissions_total", &[("reason", "blocked")]),
        1.0
    );

    let kept = std::fs::read_dir(root.path().join("device-plugins")).unwrap();
    let kept = kept.map(|entry| entry.unwrap().path()).find(|path| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("kubelet_internal_checkpoint.")
    });
    let forgotten = daemon.run(&["forget", kept.unwrap().to_str().unwrap()]);
    assert!(
        forgotten.status.success(),
        "{}",
        crate::common::stderr(&forgotten)
    );
    let families = scrape(&address);
    assert_eq!(value(&families, "devlet_state_blocked", &[]), 0.0);
    assert_eq!(value(&families, "devlet_state_files_set_aside", &[]), 1.0);
}

#[test]
fn the_alerts_use_existing_metrics() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let rules = std::fs::read_to_string(repository.join("packaging/prometheus/rules.yaml")).unwrap();
    let documented = documented();
    let expressions: Vec<&str> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("expr: "))
        .collect();
    assert!(expressions.len() > 5, "{rules}");
    for expression in expressions {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let names: Vec<&str> = words
            .filter(|word| word.starts_with("devlet_") || word.starts_with("process_"))
            .collect();
        assert!(!names.is_empty(), "{expression}");
        for name in names {
            let base = name.trim_end_matches("_bucket");
            assert!(documented.contains_key(base), "{name} in {expression}");
        }
    }
}

/// Returns the manifests of a pod and its claim of a device of `gpu.acme.com`.
const POD_WITH_CLAIM: &str = "
{apiVersion: v1, kind: Pod, metadata: {name: job, uid: job}, spec: {resourceClaims: [{name: mine, resourceClaimName: gpu}],
  containers: [{name: main, resources: {claims: [{name: mine}]}}]}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: gpu, uid: claim-1},
  spec: {devices: {requests: [{name: one}]}}, status: {reservedFor: [{resource: pods, name: job, uid: job}],
  allocation: {devices: {results: [{request: one, driver: gpu.acme.com, pool: pool, device: gpu}]}}}}
";

/// Returns the number of claims in each state: waiting, preparing, prepared, unpreparing, abandoned.
fn claims(families: &BTreeMap<String, Family>) -> [f64; 5] {
    ["waiting", "preparing", "prepared", "unpreparing", "abandoned"]
        .map(|state| value(families, "devlet_claims", &[("state", state)]))
}

#[test]
fn claims_are_counted_by_state_and_containers_with_unhealthy_devices_by_driver() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = address(&daemon);
    assert_eq!(claims(&scrape(&address)), [0.0; 5], "all of them are there");
    let script = DriverScript::new(root.path(), "gpu.acme.com")
        .with_health(vec![DeviceHealth::unhealthy("pool", "gpu", "hot")]);
    let driver = Plugin::registered_driver(&script);
    let manifest = root.path().join("pod.yaml");
    std::fs::write(&manifest, POD_WITH_CLAIM).unwrap();
    let admitted = daemon.run(&["admit", "-f", manifest.to_str().unwrap()]);
    assert!(admitted.status.success(), "{admitted:?}");
    let ill = |families: &BTreeMap<String, Family>| {
        let gpu = [("driver_name", "gpu.acme.com")];
        value(families, "devlet_driver_containers_with_unhealthy_devices", &gpu)
    };
    daemon.until("pods", |list| {
        list["pods"][0]["containers"][0]["claimDevices"][0]["health"] == "unhealthy"
    });
    let families = scrape(&address);
    assert_eq!(claims(&families), [0.0, 0.0, 1.0, 0.0, 0.0]);
    assert_eq!(ill(&families), 1.0);

    driver.kill();
    daemon.until("drivers", |list| {
        list["drivers"][0]["plugins"][0]["connected"] == false
    });
    assert!(!daemon.run(&["remove", "job", "--wait", "100ms"]).status.success());
    let families = scrape(&address);
    assert_eq!(claims(&families), [0.0, 0.0, 0.0, 1.0, 0.0]);
    assert_eq!(ill(&families), 0.0, "no container uses it");
    let abandoned = daemon.run(&["remove", "job", "--abandon-driver", "gpu.acme.com"]);
    assert!(abandoned.status.success(), "{abandoned:?}");
    assert_eq!(claims(&scrape(&address)), [0.0, 0.0, 0.0, 0.0, 1.0]);
}

#[test]
fn claims_are_counted_under_the_kubelets_names() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--http", "127.0.0.1:0"]);
    let address = address(&daemon);
    let _driver = Plugin::registered_driver(&DriverScript::new(root.path(), "gpu.acme.com"));
    let manifest = root.path().join("pod.yaml");
    std::fs::write(&manifest, POD_WITH_CLAIM).unwrap();
    let admitted = daemon.run(&["admit", "-f", manifest.to_str().unwrap()]);
    assert!(admitted.status.success(), "{admitted:?}");

    let gpu = ("driver_name", "gpu.acme.com");
    let in_use = |families: &BTreeMap<String, Family>| {
        [gpu, ("driver_name", "<any>")].map(|label| value(families, "dra_resource_claims_in_use", &[label]))
    };
    let families = scrape(&address);
    assert_eq!(in_use(&families), [1.0, 1.0]);
    let operation = |families: &BTreeMap<String, Family>, name: &str| {
        let labels = [("operation_name", name), ("is_error", "false")];
        value(families, "dra_operations_duration_seconds_count", &labels)
    };
    assert_eq!(operation(&families, "PrepareResources"), 1.0);
    let method = |name: &str| format!("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{name}");
    let calls = |families: &BTreeMap<String, Family>, name: &str| {
        let labels = [gpu, ("method_name", &method(name)), ("grpc_status_code", "OK")];
        value(families, "dra_grpc_operations_duration_seconds_count", &labels)
    };
    assert_eq!(calls(&families, "NodePrepareResources"), 1.0);

    assert!(daemon.run(&["remove", "job"]).status.success());
    let families = scrape(&address);
    let labels = [("driver_name", "<any>")];
    assert_eq!(value(&families, "dra_resource_claims_in_use", &labels), 0.0);
    assert_eq!(operation(&families, "UnprepareResources"), 1.0);
    assert_eq!(calls(&families, "NodeUnprepareResources"), 1.0);
}
