//! Commands about claims and drivers, with the sample driver and drivers of the test kit.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use devlet_testkit::{DeviceHealth, DriverScript, Fault, Plugin, PreparedDevice};
use serde_json::{Value, json};

use crate::common::{Daemon, root, stderr, stdout, until};

const DRIVER: &str = "gpu.acme.com";

/// Returns the manifest of a pod with one claim. Its sidecar uses one request of the claim.
fn pod(name: &str) -> String {
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}, uid: uid-{name}}}
spec:
  resourceClaims: [{{name: mine, resourceClaimName: gpu}}]
  initContainers: [{{name: proxy, restartPolicy: Always, resources: {{claims: [{{name: mine, request: small}}]}}}}]
  containers: [{{name: main, resources: {{claims: [{{name: mine}}]}}}}, {{name: log}}]
"
    )
}

/// Returns the manifest of a claim with two requests that is reserved for these pods.
fn claim(pods: &[&str]) -> String {
    let pods = pods
        .iter()
        .map(|name| format!("{{resource: pods, name: {name}, uid: uid-{name}}}"));
    format!(
        "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: gpu, uid: claim-1}}
spec: {{devices: {{requests: [{{name: big}}, {{name: small}}]}}}}
status:
  reservedFor: [{}]
  allocation: {{devices: {{results: [
    {{request: big, driver: {DRIVER}, pool: node, device: gpu-0}},
    {{request: small, driver: {DRIVER}, pool: node, device: gpu-1}}]}}}}
",
        pods.collect::<Vec<_>>().join(", ")
    )
}

fn device(request: &str, device: &str) -> PreparedDevice {
    PreparedDevice {
        requests: vec![request.into()],
        ..PreparedDevice::new("node", device, &format!("acme.com/gpu={device}"))
    }
}

fn script(root: &Path) -> DriverScript {
    DriverScript {
        devices: vec![device("big", "gpu-0"), device("small", "gpu-1")],
        ..DriverScript::new(root, DRIVER)
    }
}

/// Starts two drivers, each with one of the devices.
fn two_drivers(daemon: &Daemon) -> [Plugin; 2] {
    let devices = [
        (DRIVER, device("big", "gpu-0")),
        ("nic.acme.com", device("small", "gpu-1")),
    ];
    let drivers = devices.map(|(name, device)| {
        Plugin::registered_driver(&DriverScript {
            devices: vec![device],
            ..DriverScript::new(&daemon.root, name)
        })
    });
    daemon.until("drivers", |list| {
        let drivers = list["drivers"].as_array().unwrap();
        drivers.len() == 2 && drivers.iter().all(|each| each["plugins"][0]["serving"] == true)
    });
    drivers
}

/// Returns the manifest of a claim with one device of each of them.
fn claim_of_two_drivers() -> String {
    let small = "small, driver: ";
    claim(&["job"]).replace(&format!("{small}{DRIVER}"), &format!("{small}nic.acme.com"))
}

/// Waits until the driver can be called.
fn until_serving(daemon: &Daemon) {
    daemon.until("drivers", |list| {
        let plugins = list["drivers"][0]["plugins"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        plugins.iter().any(|plugin| plugin["serving"] == true)
    });
}

fn text(daemon: &Daemon, args: &[&str]) -> String {
    let output = daemon.run(args);
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    stdout(&output)
}

/// Writes manifests below the root, and admits the pod in them.
fn admit(daemon: &Daemon, texts: &[&str], more: &[&str]) -> std::process::Output {
    let mut args = vec!["admit".to_owned()];
    for (place, text) in texts.iter().enumerate() {
        let path = daemon.root.join(format!("{place}.yaml"));
        fs::write(&path, text).unwrap();
        args.extend(["-f".to_owned(), path.to_str().unwrap().to_owned()]);
    }
    args.extend(more.iter().map(|each| (*each).to_owned()));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    daemon.run(&args)
}

fn admitted(daemon: &Daemon, texts: &[&str]) -> Value {
    let output = admit(daemon, texts, &["-o", "json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_sample_driver_prepares_claims_and_leaves_nothing_behind() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--sample"]);
    let sample = root.path().join("sample");
    for part in [
        "gadget.sample.devlet.dev",
        "sample/pod.yaml -f ",
        "options job2 main --format oci --cdi-dir ",
    ] {
        assert!(daemon.banner.contains(part), "{part}: {}", daemon.banner);
    }
    let path = |name: &str| sample.join(name).to_str().unwrap().to_owned();
    let (pod, claim, cdi) = (path("pod.yaml"), path("claim.yaml"), path("cdi"));

    let admitted = daemon.json(&["admit", "-f", &claim, "-f", &pod]);

    let names = json!([
        "sample.devlet.dev/gadget=gadget-0",
        "sample.devlet.dev/gadget=gadget-1"
    ]);
    assert_eq!(admitted["containers"][0]["cdiDevices"], names);
    assert_eq!(
        admitted["containers"][1]["cdiDevices"],
        json!([names[0]]),
        "only what it names"
    );
    let driver = &admitted["claims"][0]["drivers"][0];
    assert_eq!(driver["name"], "gadget.sample.devlet.dev");
    assert_eq!(driver["devices"][1]["requests"], json!(["red"]));
    let args = ["options", "job2", "main", "--format", "oci", "--cdi-dir", &cdi];
    let oci: Value = serde_json::from_str(&text(&daemon, &args)).unwrap();
    assert_eq!(
        oci["process"]["env"],
        json!(["SAMPLE_GADGET_0=1", "SAMPLE_GADGET_1=1"])
    );
    assert_eq!(oci["linux"]["devices"][0]["path"], "/dev/gadget-0");
    // The sample driver reports the health of its devices.
    daemon.until("claims", |list| {
        list["claims"][0]["drivers"][0]["devices"][0]["health"] == "healthy"
    });
    assert!(text(&daemon, &["remove", "job2"]).starts_with("removed default/job2 ("));
    daemon.until("claims", |list| list["claims"] == json!([]));
    // The driver refuses a device that it does not have.
    let other = fs::read_to_string(&claim)
        .unwrap()
        .replace("gadget-1", "gadget-7");
    let refused = admit(
        &daemon,
        &[&fs::read_to_string(&pod).unwrap(), &other],
        &["--wait", "500ms"],
    );
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("there is no device sample/gadget-7; the pool sample has gadget-0"),
        "{}",
        stderr(&refused)
    );

    assert_eq!(daemon.stop(), Some(0));
    assert!(!sample.exists(), "manifests and the CDI spec stay behind");
    assert!(!root.path().join("plugins/gadget.sample.devlet.dev").exists());
    let registry = fs::read_dir(root.path().join("plugins_registry")).unwrap();
    assert_eq!(registry.count(), 0, "a socket stays behind");
}

#[test]
fn the_sample_driver_never_outlives_a_daemon_that_is_killed() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--sample"]);
    assert!(root.path().join("sample/cdi").exists());
    daemon.kill();
    let sample = root.path().join("sample");
    until("the driver's end", || (!sample.exists()).then_some(()));
}

#[test]
fn drivers_claims_and_the_health_of_devices_are_shown() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let sick = DeviceHealth::unhealthy("node", "gpu-1", "too hot\u{1b}[31m");
    let _driver = Plugin::registered_driver(
        &script(root.path()).with_health(vec![DeviceHealth::healthy("node", "gpu-0"), sick]),
    );
    until_serving(&daemon);
    let pod = admitted(&daemon, &[&pod("job"), &claim(&["job"])]);

    let cdi: Vec<&Value> = pod["containers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|each| &each["cdiDevices"])
        .collect();
    let [big, small] = ["acme.com/gpu=gpu-0", "acme.com/gpu=gpu-1"];
    assert_eq!(cdi, [&json!([small]), &json!([big, small]), &json!([])]);
    let annotations = json!({"cdi.k8s.io/gpu.acme.com_claim-1": format!("{big},{small}")});
    assert_eq!(pod["containers"][1]["annotations"], annotations);
    let expected = json!([{
        "name": "gpu", "namespace": "default", "uid": "claim-1",
        "drivers": [{"name": DRIVER, "devices": [
            {"requests": ["big"], "pool": "node", "device": "gpu-0", "shareID": null, "cdiDevices": [big]},
            {"requests": ["small"], "pool": "node", "device": "gpu-1", "shareID": null, "cdiDevices": [small]},
        ]}],
    }]);
    assert_eq!(pod["claims"], expected);
    let options: Value = serde_json::from_str(&text(&daemon, &["options", "job", "main"])).unwrap();
    assert_eq!(options["claims"], expected);
    assert_eq!(options["containers"][0]["cdiDevices"], json!([big, small]));

    daemon.until("pods", |list| {
        list["pods"][0]["containers"][1]["claimDevices"][1]["health"] == "unhealthy"
    });
    let described = daemon.json(&["describe", "pod", "job"]);
    assert_eq!(described["claims"][0]["podClaim"], "mine");
    let sidecar = &described["containers"][0]["claimDevices"];
    assert_eq!(
        (&sidecar[0]["request"], &sidecar[0]["device"]),
        (&json!("small"), &json!("gpu-1"))
    );
    let driver = daemon.json(&["describe", "driver", DRIVER]);
    assert_eq!(driver["plugins"][0]["serving"], true);
    assert_eq!(driver["plugins"][0]["service"], "v1.DRAPlugin");
    let reason = driver["plugins"][0]["serviceReason"].as_str().unwrap();
    assert!(reason.starts_with("the newest of v1.DRAPlugin, "), "{reason}");
    assert_eq!(driver["resourceClaims"][0]["phase"], "prepared");
    let status = daemon.json(&["status"]);
    assert_eq!((&status["drivers"], &status["claims"]), (&json!(1), &json!(1)));
    for (args, expected) in [
        (&["get", "drivers"][..], "v1.DRAPlugin"),
        (&["get", "drivers", "-o", "wide"], "v1.DRAResourceHealth"),
        (&["get", "claims"], "default/job"),
        (&["get", "claims", "-o", "wide"], "gpu-0,gpu-1"),
        (&["get", "claims", "-o", "yaml"], "phase: prepared"),
        (&["get", "pods"], "gpu"),
        (&["describe", "pod", "job"], "unhealthy: too hot\\u{1b}[31m"),
        (
            &["describe", "claim", "claim-1"],
            "node/gpu-1  small     acme.com/gpu=gpu-1",
        ),
        (&["describe", "driver", DRIVER], "the newest of"),
    ] {
        let text = text(&daemon, args);
        assert!(text.contains(expected), "{args:?}: {text}");
    }
    for args in [["describe", "claim", "none"], ["describe", "driver", "none"]] {
        let refused = daemon.refused(&args);
        assert!(
            refused.starts_with("error: no such ") && refused.contains("none"),
            "{refused}"
        );
    }
}

#[test]
fn a_driver_that_is_gone_for_good_is_named_and_can_be_given_up_on() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let driver = Plugin::registered_driver(&script(root.path()));
    until_serving(&daemon);
    let texts = [pod("job"), claim(&["job"])];
    admitted(&daemon, &[&texts[0], &texts[1]]);
    driver.kill();

    let waits = daemon.refused(&["remove", "job", "--wait", "300ms"]);
    assert!(
        waits.contains("pod default/job (uid-job) is removed, but its claims still hold their devices until drivers have unprepared them: "),
        "{waits}"
    );
    assert!(waits.contains("ResourceClaim default/gpu: "), "{waits}");
    let hint = "hint: if this driver is gone permanently, remove the pod without waiting: devlet remove job --abandon-driver gpu.acme.com";
    assert!(waits.contains(hint), "{waits}");
    let listed = daemon.json(&["get", "claims"]);
    assert_eq!(listed["claims"][0]["phase"], "unpreparing");
    assert_eq!(listed["claims"][0]["waits"][0]["driver"], DRIVER);
    assert_eq!(listed["claims"][0]["lastPod"]["uid"], "uid-job");
    assert_eq!(listed["claims"][0]["lastPod"]["name"], "job");
    // The pod is still known by its name, also after a restart of the daemon.
    daemon.kill();
    let daemon = Daemon::on(root.path());
    for name in ["job", "default/job", "uid-job", "uid:uid-job"] {
        let again = daemon.refused(&["remove", name, "--wait", "100ms"]);
        let hint = format!(
            "hint: if this driver is gone permanently, remove the pod without waiting: devlet remove {name} --abandon-driver gpu.acme.com"
        );
        assert!(again.contains(&hint), "{again}");
    }
    assert_eq!(
        daemon.refused(&["remove", "other/job"]),
        "error: no such pod: other/job\nhint: with --ignore-not-found, a pod or claim that does not exist is not an error\n"
    );
    let typo = daemon.refused(&["remove", "job", "--abandon-driver", "gpu.acme.org"]);
    assert!(
        typo.contains(
            "pod default/job (uid-job) does not have a claim with devices of driver gpu.acme.org, only of gpu.acme.com"
        ),
        "{typo}"
    );

    let removed = daemon.run(&["remove", "job", "--abandon-driver", DRIVER]);
    assert!(removed.status.success(), "{}", stderr(&removed));
    assert!(stderr(&removed).contains("abandoned claim default/gpu (claim-1)"));

    let is_abandoned = |daemon: &Daemon| {
        assert_eq!(daemon.json(&["get", "claims"])["claims"][0]["phase"], "abandoned");
        let status = daemon.json(&["status"]);
        assert_eq!(status["ready"], true);
        let problem = status["problems"][0]["what"].as_str().unwrap();
        assert!(
            problem.contains("ResourceClaim default/gpu (UID claim-1) was abandoned"),
            "{problem}"
        );
    };
    is_abandoned(&daemon);
    daemon.kill();
    let daemon = Daemon::on(root.path());
    is_abandoned(&daemon);
    // If the driver comes back, it is called after all.
    let mut driver = Plugin::registered_driver(&script(root.path()));
    let (_, claims) = driver.asked("NodeUnprepareResources");
    assert_eq!(claims[0].uid, "claim-1");
    daemon.until("claims", |list| list["claims"] == json!([]));
    let again = admitted(&daemon, &[&texts[0], &texts[1]]);
    assert_eq!(again["claims"][0]["uid"], "claim-1", "it can be used again");
}

#[test]
fn a_claim_that_was_abandoned_at_a_driver_can_be_allocated_without_it() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let driver = Plugin::registered_driver(&script(root.path()));
    until_serving(&daemon);
    let texts = [pod("job"), claim(&["job"])];
    admitted(&daemon, &[&texts[0], &texts[1]]);
    driver.kill();
    let removed = daemon.run(&["remove", "job", "--abandon-driver", DRIVER]);
    assert!(removed.status.success(), "{}", stderr(&removed));
    let refused = admit(&daemon, &[&texts[0], &texts[1]], &["--wait", "100ms"]);
    assert!(
        stderr(&refused).contains("use a ResourceClaim that is allocated without it"),
        "{}",
        stderr(&refused)
    );

    let elsewhere = texts[1].replace(DRIVER, "nic.acme.com");
    let elsewhere = elsewhere.replace("device: gpu-0", "device: gpu-0, skipNodeOperations: ['*']");
    let elsewhere = elsewhere.replace("device: gpu-1", "device: gpu-1, skipNodeOperations: ['*']");
    let answer = admitted(&daemon, &[&texts[0], &elsewhere]);

    assert_eq!(answer["claims"][0]["drivers"][0]["name"], "nic.acme.com");
    let used = &daemon.json(&["get", "claims"])["claims"][0];
    assert_eq!(
        (&used["uid"], &used["phase"]),
        (&json!("claim-1"), &json!("prepared"))
    );
    assert_eq!(used["drivers"][0]["name"], DRIVER);
    assert_eq!(used["drivers"][0]["state"], "abandoned");
    let problem = daemon.json(&["status"])["problems"][0]["what"].to_string();
    assert!(problem.contains("was abandoned: gpu.acme.com"), "{problem}");
    // The driver is back: the pod no longer needs it, and it is called all the same.
    let mut driver = Plugin::registered_driver(&script(root.path()));
    let (_, claims) = driver.asked("NodeUnprepareResources");
    assert_eq!(claims[0].uid, "claim-1");
    daemon.until("claims", |list| {
        list["claims"][0]["drivers"].as_array().unwrap().len() == 1
    });
    assert_eq!(daemon.json(&["get", "claims"])["claims"][0]["phase"], "prepared");
}

#[test]
fn an_admission_says_what_its_claims_wait_for() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let texts = [pod("job"), claim(&["job"])];
    let missing = admit(&daemon, &[&texts[0], &texts[1]], &["--wait", "300ms"]);
    assert_eq!(missing.status.code(), Some(1));
    let said = stderr(&missing);
    assert!(
        said.contains("waiting for a plugin of DRA driver gpu.acme.com, for ResourceClaim default/gpu"),
        "{said}"
    );
    assert!(
        said.contains("DRA driver gpu.acme.com is not registered"),
        "{said}"
    );

    let broken = Fault::FailClaims {
        names: Vec::new(),
        message: "the fan is loud".into(),
    };
    let script = script(root.path()).with_fault("NodePrepareResources", broken);
    let mut driver = Plugin::registered_driver(&script);
    until_serving(&daemon);
    let failing = admit(&daemon, &[&texts[0], &texts[1]], &["--wait", "500ms"]);
    assert_eq!(failing.status.code(), Some(1));
    assert!(
        stderr(&failing).contains("the fan is loud"),
        "{}",
        stderr(&failing)
    );
    driver.fault("NodePrepareResources", None);
    let pod = admitted(&daemon, &[&texts[0], &texts[1]]);
    assert_eq!(pod["claims"][0]["uid"], "claim-1");
}

#[test]
fn manifests_come_in_one_file_or_several_or_from_standard_input() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let _driver = Plugin::registered_driver(&script(root.path()));
    until_serving(&daemon);
    let (pod, claim) = (pod("job"), claim(&["job", "other"]));
    let together = format!("{claim}---\n{pod}");
    let first = admitted(&daemon, &[&pod, &claim]);
    assert_eq!(admitted(&daemon, &[&claim, &pod]), first);
    assert_eq!(admitted(&daemon, &[&together]), first);
    let mut command = daemon.command(&["admit", "-f", "-", "-o", "json"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(together.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), first);
    // A second pod shares the claim without a call.
    let other = pod.replace("job", "other");
    let second = admitted(&daemon, &[&other, &claim]);
    assert_eq!(second["claims"], first["claims"]);
    text(&daemon, &["remove", "job"]);
    let claims = daemon.json(&["get", "claims"]);
    assert_eq!(claims["claims"][0]["pods"][0]["name"], "other");
    assert_eq!(claims["claims"][0]["phase"], "prepared");

    let missing = admit(&daemon, &[&pod], &[]);
    assert_eq!(missing.status.code(), Some(1));
    let said = stderr(&missing);
    assert!(
        said.contains("default/gpu is not among the manifests; add it with its status"),
        "{said}"
    );
    let twice = admit(&daemon, &[&pod, &claim, &claim], &[]);
    assert!(stderr(&twice).contains(": ResourceClaim default/gpu is there twice"));
}

#[test]
fn a_claim_that_a_pod_names_twice_is_asked_for_once_and_its_devices_come_once() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let common = |request: &str, name: &str| {
        let mut device = device(request, name);
        device.cdi.push("acme.com/gpu=common".into());
        device
    };
    let mut driver = Plugin::registered_driver(&DriverScript {
        devices: vec![common("big", "gpu-0"), common("small", "gpu-1")],
        ..DriverScript::new(root.path(), DRIVER)
    });
    until_serving(&daemon);
    let twice = pod("job").replace(
        "[{name: mine, resourceClaimName: gpu}]",
        "[{name: mine, resourceClaimName: gpu}, {name: again, resourceClaimName: gpu}]",
    );
    let twice = twice.replace(
        "claims: [{name: mine}]",
        "claims: [{name: again, request: small}, {name: mine}]",
    );

    let admitted = admitted(&daemon, &[&twice, &claim(&["job"])]);

    let (_, asked) = driver.asked("NodePrepareResources");
    assert_eq!(asked.len(), 1);
    assert_eq!(admitted["claims"].as_array().unwrap().len(), 1);
    let names = ["gpu-1", "common", "gpu-0"].map(|name| format!("acme.com/gpu={name}"));
    assert_eq!(admitted["containers"][1]["cdiDevices"], json!(names));
    assert_eq!(
        admitted["containers"][1]["annotations"]["cdi.k8s.io/gpu.acme.com_claim-1"],
        names.join(",")
    );
    text(&daemon, &["remove", "job"]);
    let (_, asked) = driver.asked("NodeUnprepareResources");
    assert_eq!(asked.len(), 1);
}

#[test]
fn a_refused_driver_is_shown_with_the_reason_until_it_registers_or_is_gone() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let mut driver = Plugin::driver(&DriverScript {
        serves: Some(vec!["v1.DRAResourceHealth".into()]),
        ..script(root.path()).with_services(&["v9.DRAPlugin"])
    });
    let told = driver.refused();
    assert!(
        told.contains("none of services supported by the plugin"),
        "{told}"
    );
    let list = daemon.json(&["get", "drivers"]);
    assert_eq!(list["drivers"], json!([]));
    let refused = &list["refused"][0];
    assert_eq!(refused["name"], DRIVER);
    let reason = refused["reason"].as_str().unwrap();
    assert!(
        told.ends_with(reason) && reason.contains("v9.DRAPlugin"),
        "{reason}"
    );
    assert!(refused["hint"].as_str().unwrap().contains("1.31 or later"));
    let listed = text(&daemon, &["get", "drivers"]);
    assert!(listed.contains("REFUSED") && listed.contains(DRIVER), "{listed}");
    let described = text(&daemon, &["describe", "driver", DRIVER]);
    for expected in [
        "State:        neverRegistered",
        "Refused plugin /",
        "What to do:  use a release",
    ] {
        assert!(described.contains(expected), "{described}");
    }
    assert_eq!(
        daemon.json(&["describe", "driver", DRIVER])["refused"][0]["name"],
        DRIVER
    );
    let status = daemon.json(&["status"]);
    assert_eq!(
        (&status["ready"], &status["problems"][0]["what"]),
        (
            &json!(true),
            &json!(format!(
                "1 plugin of a DRA driver is there and not registered: {DRIVER}"
            ))
        )
    );
    let shown = text(&daemon, &["status"]);
    assert!(shown.contains("devlet get drivers"), "{shown}");
    driver.exit();
    daemon.until("drivers", |list| list["refused"] == json!([]));
    assert_eq!(daemon.json(&["status"])["problems"], json!([]));
    let _driver = Plugin::registered_driver(&script(root.path()));
    until_serving(&daemon);
    assert_eq!(daemon.json(&["get", "drivers"])["refused"], json!([]));
}

/// Drivers of 1.28 to 1.30 answer with names of CDI devices, later ones with devices.
fn answer_of_1_28(claim: &str, cdi: &str) -> Vec<u8> {
    let field = |number: u8, bytes: &[u8]| {
        let mut field = vec![number << 3 | 2, u8::try_from(bytes.len()).unwrap()];
        field.extend(bytes);
        field
    };
    let devices = field(1, cdi.as_bytes());
    let entry = [field(1, claim.as_bytes()), field(2, &devices)].concat();
    field(1, &entry)
}

#[test]
fn a_driver_of_1_28_is_registered_and_what_it_prepares_is_refused_by_name() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let raw = answer_of_1_28("claim-1", "acme.com/gpu=gpu-0");
    let script = script(root.path()).with_services(&["1.0.0"]);
    let mut driver = Plugin::registered_driver(&script.with_fault("NodePrepareResources", Fault::Raw(raw)));
    until_serving(&daemon);
    let plugin = &daemon.json(&["get", "drivers"])["drivers"][0]["plugins"][0];
    assert_eq!(plugin["service"], "v1alpha3.Node");
    assert_eq!(plugin["serviceReason"], "because the driver lists only 1.0.0");

    let refused = admit(&daemon, &[&pod("job"), &claim(&["job"])], &["--wait", "1s"]);

    assert_eq!(refused.status.code(), Some(1));
    let said = stderr(&refused);
    assert!(
        said.contains("driver gpu.acme.com") && said.contains("the answer is damaged"),
        "{said}"
    );
    // The claim is unprepared through that service. The first call tested if the service exists.
    let asked = [(); 2].map(|()| driver.asked("NodeUnprepareResources").1);
    assert_eq!((asked[0].len(), &*asked[1][0].uid), (0, "claim-1"));
    daemon.until("claims", |list| list["claims"] == json!([]));
}

#[test]
fn an_admission_says_since_when_a_driver_is_not_connected() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let driver = Plugin::registered_driver(&script(root.path()));
    until_serving(&daemon);
    driver.kill();
    daemon.until("drivers", |list| {
        list["drivers"][0]["plugins"][0]["connected"] == false
    });
    let since = daemon.json(&["get", "drivers"])["drivers"][0]["unusableSince"].clone();
    let refused = admit(&daemon, &[&pod("job"), &claim(&["job"])], &["--wait", "100ms"]);
    let said = stderr(&refused);
    let expected = format!(", not connected since {}", since.as_str().unwrap());
    assert!(said.contains(&expected), "{expected}: {said}");
}

#[test]
fn a_sample_that_is_killed_is_started_again() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--sample"]);
    let first = daemon.json(&["get", "drivers"])["drivers"][0]["plugins"][0]["connection"].clone();
    let is_it = |arguments: &[u8]| {
        let mut arguments = arguments.split(|byte| *byte == 0);
        arguments.any(|each| each == b"sample-driver")
            && arguments.any(|each| each == root.path().as_os_str().as_encoded_bytes())
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let found = processes.filter_map(|process| {
        let arguments = fs::read(process.path().join("cmdline")).ok()?;
        is_it(&arguments).then(|| process.file_name().to_str().unwrap().to_owned())
    });
    let found: Vec<String> = found.collect();
    let [pid] = &found[..] else { panic!("{found:?}") };
    let killed = std::process::Command::new("kill").args(["-9", pid]).status();
    assert!(killed.unwrap().success());
    daemon.until("drivers", |list| {
        let plugins = list["drivers"][0]["plugins"].as_array().unwrap();
        plugins
            .iter()
            .any(|plugin| plugin["serving"] == true && plugin["connection"] != first)
    });
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_claim_of_a_kubelets_file_without_a_pod_can_be_given_up_on() {
    use devlet_kubelet_files::dra;
    let root = root();
    let driver = dra::Driver {
        devices: None,
        skip_node_operations: None,
    };
    let left = dra::Claim {
        uid: "claim-left".into(),
        name: "left".into(),
        namespace: "default".into(),
        pods: None,
        drivers: Some(
            [DRIVER, "nic.acme.com"]
                .map(|name| (name.to_owned(), driver.clone()))
                .into(),
        ),
    };
    let file = dra::envelope::write(Some(&[left]));
    fs::write(root.path().join("dra_manager_state"), file).unwrap();
    let daemon = Daemon::on(root.path());
    assert_eq!(
        daemon.json(&["get", "claims"])["claims"][0]["phase"],
        "unpreparing"
    );
    let hint = format!("To do without: devlet remove --claim default/left --abandon-driver {DRIVER}\n");
    assert!(text(&daemon, &["describe", "claim", "left"]).contains(&hint));

    let usage = daemon.run(&["remove", "--claim", "left"]);
    assert_eq!(usage.status.code(), Some(2), "{}", stderr(&usage));
    let typo = daemon.refused(&["remove", "--claim", "left", "--abandon-driver", "gpu.acme.org"]);
    assert!(
        typo.contains(
            "ResourceClaim default/left does not have devices of driver gpu.acme.org, only of gpu.acme.com, nic.acme.com"
        ),
        "{typo}"
    );
    let unknown = daemon.refused(&["remove", "--claim", "right", "--abandon-driver", DRIVER]);
    assert!(unknown.contains("no such claim on this node: right"), "{unknown}");
    let removed = daemon.run(&["remove", "--claim", "left", "--abandon-driver", DRIVER]);
    assert!(removed.status.success(), "{}", stderr(&removed));
    assert!(stdout(&removed).contains("abandoned claim default/left (claim-left)"));
    assert!(
        stderr(&removed).contains("still waiting for: ResourceClaim default/left: DRA driver nic.acme.com")
    );
    text(
        &daemon,
        &["remove", "--claim", "left", "--abandon-driver", "nic.acme.com"],
    );
    // devlet has recorded it.
    daemon.kill();
    let daemon = Daemon::on(root.path());
    assert_eq!(daemon.json(&["get", "claims"])["claims"][0]["phase"], "abandoned");
    assert_eq!(daemon.json(&["get", "claims"])["claims"][0]["waits"], json!([]));
}

#[test]
fn a_missing_pod_or_claim_is_not_an_error_with_ignore_not_found() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let driver = Plugin::registered_driver(&script(root.path()));
    until_serving(&daemon);
    admitted(&daemon, &[&pod("job"), &claim(&["job"])]);
    driver.kill();
    daemon.refused(&["remove", "job", "--wait", "100ms", "--ignore-not-found"]);
    // It is unprepared in the background.
    let _driver = Plugin::registered_driver(&script(root.path()));
    daemon.until("claims", |list| list["claims"] == json!([]));

    let hint = "hint: with --ignore-not-found, a pod or claim that does not exist is not an error\n";
    for (args, what) in [
        (&["remove", "job"][..], "no such pod: job"),
        (
            &["remove", "--claim", "gpu", "--abandon-driver", DRIVER],
            "no such claim on this node: gpu",
        ),
    ] {
        assert_eq!(daemon.refused(args), format!("error: {what}\n{hint}"));
        let ignored = text(&daemon, &[args, &["--ignore-not-found"]].concat());
        assert_eq!(ignored, format!("nothing to remove: {what}\n"));
    }
    // Other errors stay errors.
    let empty = daemon.run(&["remove", "", "--ignore-not-found"]);
    assert_eq!(empty.status.code(), Some(2), "{}", stderr(&empty));
}

#[test]
fn a_removal_that_waits_shows_since_when_a_driver_is_away_and_the_record() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let drivers = two_drivers(&daemon);
    admitted(&daemon, &[&pod("job"), &claim_of_two_drivers()]);
    drivers.into_iter().for_each(Plugin::kill);
    let list = daemon.until("drivers", |list| {
        let drivers = list["drivers"].as_array().unwrap();
        drivers.iter().all(|each| each["unusableSince"].is_string())
    });

    let refused = daemon.refused(&["remove", "job", "--wait", "100ms", "--abandon-driver", DRIVER]);

    let since = list["drivers"][1]["unusableSince"].as_str().unwrap();
    let expected =
        format!("ResourceClaim default/gpu: DRA driver nic.acme.com is not connected since {since}");
    assert!(refused.contains(&expected), "{expected}: {refused}");
    let expected = format!(
        "ResourceClaim default/gpu (UID claim-1) is abandoned at driver {DRIVER}, which is on record"
    );
    assert!(refused.contains(&expected), "{refused}");
    daemon.kill();
    let daemon = Daemon::on(root.path());
    let claims = daemon.json(&["get", "claims"]);
    let states = [0, 1].map(|place| &claims["claims"][0]["drivers"][place]["state"]);
    assert_eq!(states, [&json!("abandoned"), &json!("prepared")]);
    // A second removal gets the same answer, and the pod is still known by its name.
    let again = daemon.refused(&["remove", "job", "--wait", "100ms", "--abandon-driver", DRIVER]);
    assert!(again.contains(&expected), "{again}");
    let removed = text(
        &daemon,
        &["remove", "uid-job", "--abandon-driver", "nic.acme.com"],
    );
    assert_eq!(removed, "removed default/job (uid-job)\n");
}

#[test]
fn a_driver_that_has_unprepared_a_claim_is_not_shown_as_abandoned() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let drivers = two_drivers(&daemon);
    admitted(&daemon, &[&pod("job"), &claim_of_two_drivers()]);
    let [_gpu, nic] = drivers;
    nic.kill();
    daemon.refused(&["remove", "job", "--wait", "1s"]);
    daemon.until("claims", |list| {
        list["claims"][0]["drivers"][0]["state"] == "unprepared"
    });

    let said = text(&daemon, &["remove", "--claim", "gpu", "--abandon-driver", DRIVER]);

    assert_eq!(
        said,
        format!("nothing to abandon at driver {DRIVER}: it has completed claim default/gpu (claim-1)\n")
    );
    assert_eq!(
        daemon.json(&["get", "claims"])["claims"][0]["phase"],
        "unpreparing"
    );
    let args = ["remove", "--claim", "gpu", "--abandon-driver", "nic.acme.com"];
    let said = text(&daemon, &args);
    assert!(
        said.starts_with("abandoned claim default/gpu (claim-1)"),
        "{said}"
    );
    assert_eq!(daemon.json(&["get", "claims"])["claims"][0]["phase"], "abandoned");
}

#[test]
fn a_claim_whose_driver_never_comes_back_can_be_forgotten() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let driver = Plugin::registered_driver(&script(root.path()));
    until_serving(&daemon);
    admitted(&daemon, &[&pod("job"), &claim(&["job"])]);
    let held = daemon.refused(&["forget", "--claim", "gpu"]);
    assert!(
        held.contains("is in use; remove the pods first: uid-job"),
        "{held}"
    );
    driver.kill();
    daemon.refused(&["remove", "job", "--wait", "100ms"]);
    let waits = daemon.refused(&["forget", "--claim", "gpu"]);
    assert!(
        waits.contains("abandon first the drivers that are gone for good: gpu.acme.com"),
        "{waits}"
    );
    text(&daemon, &["remove", "job", "--abandon-driver", DRIVER]);
    let hint = "devlet forget --claim default/gpu\n";
    for args in [&["status"][..], &["describe", "claim", "gpu"]] {
        let shown = text(&daemon, args);
        assert!(shown.contains(hint), "{shown}");
    }

    let said = text(&daemon, &["forget", "--claim", "gpu"]);

    assert!(
        said.starts_with("forgotten: claim default/gpu (claim-1)"),
        "{said}"
    );
    let is_gone = |daemon: &Daemon| {
        assert_eq!(daemon.json(&["get", "claims"])["claims"], json!([]));
        assert_eq!(daemon.json(&["status"])["problems"], json!([]));
    };
    is_gone(&daemon);
    daemon.kill();
    let daemon = Daemon::on(root.path());
    is_gone(&daemon);
    let again = daemon.refused(&["forget", "--claim", "gpu"]);
    assert_eq!(again, "error: no such claim on this node: gpu\n");
    let both = daemon.run(&["forget", "--claim", "gpu", "file"]);
    assert_eq!(both.status.code(), Some(2));
    // The claim can be prepared again, also by the driver.
    let mut driver = Plugin::registered_driver(&script(root.path()));
    until_serving(&daemon);
    admitted(&daemon, &[&pod("job"), &claim(&["job"])]);
    let (_, asked) = driver.asked("NodePrepareResources");
    assert_eq!(asked[0].uid, "claim-1");
}

#[test]
fn a_claim_that_a_pod_holds_is_not_given_up_on() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let _driver = Plugin::registered_driver(&script(root.path()));
    until_serving(&daemon);
    admitted(&daemon, &[&pod("job"), &claim(&["job"])]);
    let refused = daemon.refused(&["remove", "--claim", "gpu", "--abandon-driver", DRIVER]);
    assert!(
        refused.contains("is not to be unprepared as long as pods want it; remove them: default/job"),
        "{refused}"
    );
    assert_eq!(daemon.json(&["get", "claims"])["claims"][0]["phase"], "prepared");
}

#[test]
fn extended_resources_that_a_claim_backs_come_from_its_driver_and_others_from_plugins() {
    let root = root();
    let daemon = Daemon::with(root.path(), &["--sample"]);
    let _driver = Plugin::registered_driver(&DriverScript {
        devices: vec![device("container-0-request-0", "gpu-0")],
        ..DriverScript::new(root.path(), DRIVER)
    });
    daemon.until("drivers", |list| {
        list["drivers"][1]["plugins"][0]["serving"] == true
    });
    let pod = "
metadata: {name: job, uid: uid-job}
spec:
  containers:
  - {name: main, resources: {limits: {acme.com/gpu: 1, sample.devlet.dev/widget: 1}}}
status:
  extendedResourceClaimStatus:
    resourceClaimName: gpu
    requestMappings:
    - {containerName: main, resourceName: acme.com/gpu, requestName: container-0-request-0}
";
    let claim = claim(&["job"]).replace("name: big", "name: container-0-request-0");
    let claim = claim.replace("request: big", "request: container-0-request-0");

    let admitted = admitted(&daemon, &[pod, &claim]);

    let main = &admitted["containers"][0];
    assert_eq!(main["devices"][0]["resource"], "sample.devlet.dev/widget");
    assert_eq!(main["devices"].as_array().unwrap().len(), 1);
    assert_eq!(main["cdiDevices"], json!(["acme.com/gpu=gpu-0"]));
    text(&daemon, &["remove", "job"]);
    daemon.until("claims", |list| list["claims"] == json!([]));
}

#[test]
fn claims_of_a_kubelet_are_imported_at_the_first_start_and_by_hand_and_written_back() {
    const POD: &str = "139cdb46-f989-4f17-9561-ca10cfb509a6";
    let root = root();
    let state = root.path().join("dra_manager_state");
    let testdata =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/kubelet-files/testdata/dra/envelope-v1");
    fs::copy(testdata.join("03-single-device.json"), &state).unwrap();
    let daemon = Daemon::on(root.path());
    let names = |daemon: &Daemon| {
        let list = daemon.json(&["get", "claims"]);
        let claims = list["claims"].as_array().unwrap().clone();
        assert!(claims.iter().all(|claim| claim["phase"] == "prepared"), "{list}");
        let names = claims
            .iter()
            .map(|claim| claim["name"].as_str().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    assert_eq!(names(&daemon), ["example"]);

    let file = testdata.join("06-two-claims.json");
    let imported = daemon.json(&["import", file.to_str().unwrap()]);

    assert_eq!(imported["changed"][0]["uid"], POD);
    assert_eq!(
        imported["notes"],
        json!(["1 claim is new"]),
        "the other one is known"
    );
    assert_eq!(names(&daemon), ["example", "example-2"]);
    // No driver runs: an operator gives up on it, and the kubelet's file still has the claim to unprepare.
    let refused = daemon.refused(&["remove", POD, "--wait", "100ms"]);
    assert!(
        refused.contains("DRA driver test-driver.cdi.k8s.io is not connected"),
        "{refused}"
    );
    let abandoned = text(
        &daemon,
        &["remove", POD, "--abandon-driver", "test-driver.cdi.k8s.io"],
    );
    assert!(!abandoned.is_empty());
    assert_eq!(daemon.stop(), Some(0));
    let shown = crate::common::devlet()
        .args(["checkpoint", "show", "-o", "json"])
        .arg(&state)
        .output()
        .unwrap();
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    let claims = shown["claims"].as_array().unwrap();
    assert_eq!(claims.len(), 2, "{shown}");
    assert!(
        claims.iter().all(|claim| claim["pods"] == json!([POD])),
        "{shown}"
    );
}

/// Returns the manifests of [`pod`] and [`claim`] with other names and the same devices.
fn second() -> [String; 2] {
    let claim = claim(&["job2"]).replace("name: gpu, uid: claim-1", "name: gpu2, uid: claim-2");
    let pod = pod("job2").replace("resourceClaimName: gpu", "resourceClaimName: gpu2");
    [pod, claim]
}

#[test]
fn a_device_is_given_to_one_claim_and_to_the_next_one_right_after_the_removal() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let _driver = Plugin::registered_driver(&script(&daemon.root));
    until_serving(&daemon);
    let [pod2, claim2] = second();
    let first = [&*pod("job"), &claim(&["job"])];
    let no_wait = ["--wait", "0s"];
    let output = admit(&daemon, &first, &no_wait);
    assert!(output.status.success(), "{}", stderr(&output));

    let output = admit(&daemon, &[&pod2, &claim2], &["--wait", "20s"]);
    assert_eq!(output.status.code(), Some(1));
    let refused = stderr(&output);
    for part in [
        "ResourceClaim default/gpu2 of pod default/job2 needs device node/gpu-0 of driver gpu.acme.com",
        "ResourceClaim default/gpu (UID claim-1) of pod default/job (uid-job) holds",
    ] {
        assert!(refused.contains(part), "{refused}");
    }

    for _ in 0..5 {
        text(&daemon, &["remove", "job"]);
        assert_eq!(daemon.json(&["get", "claims"])["claims"], json!([]));
        let output = admit(&daemon, &[&pod2, &claim2], &no_wait);
        assert!(output.status.success(), "{}", stderr(&output));
        text(&daemon, &["remove", "job2"]);
        let output = admit(&daemon, &first, &no_wait);
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

#[test]
fn devices_of_drivers_are_listed_with_their_claims_and_pods() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let _driver = Plugin::registered_driver(&script(&daemon.root));
    until_serving(&daemon);
    let none = daemon.run(&["get", "devices", "--resource", DRIVER]);
    assert!(none.status.success(), "{}", stderr(&none));
    assert_eq!(stderr(&none), "No devices.\n");
    let shown = admit(&daemon, &[&pod("job"), &claim(&["job"])], &[]);
    let shown = stdout(&shown);
    // The pod is without devices of plugins.
    assert!(shown.contains("CLAIM") && !shown.contains("RESOURCE"), "{shown}");
    let described = text(&daemon, &["describe", "pod", "job"]);
    assert!(!described.contains("PRE-START"), "{described}");

    let list = daemon.json(&["get", "devices"]);
    let device = &list["devices"][0];
    assert_eq!(device["resource"], DRIVER);
    assert_eq!(device["id"], "node/gpu-0");
    assert_eq!(device["health"], "unknown");
    assert_eq!(device["holders"][0]["name"], "job");
    let claim = &device["dra"]["claims"][0];
    assert_eq!(
        (&claim["name"], &claim["phase"]),
        (&json!("gpu"), &json!("prepared"))
    );
    assert_eq!(claim["prepared"], true);
    let wide = text(&daemon, &["get", "devices", "-o", "wide"]);
    assert!(wide.contains("default/gpu (prepared)"), "{wide}");
    let one = text(&daemon, &["describe", "device", "node/gpu-1"]);
    for part in [
        "Driver:",
        DRIVER,
        "default/gpu (prepared)",
        "default/job, in proxy and main",
    ] {
        assert!(one.contains(part), "{one}");
    }
    let of_driver = text(&daemon, &["get", "devices", "--resource", DRIVER]);
    assert!(of_driver.contains("node/gpu-1"), "{of_driver}");
}

#[test]
fn a_claim_that_its_driver_prepares_in_part_is_a_problem() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let _driver = Plugin::registered_driver(&DriverScript {
        devices: vec![device("big", "gpu-0")],
        ..script(&daemon.root)
    });
    until_serving(&daemon);
    admitted(&daemon, &[&pod("job"), &claim(&["job"])]);

    let status = daemon.json(&["status"]).to_string();
    let problem = "ResourceClaim default/gpu (UID claim-1) is prepared in part: driver gpu.acme.com did not prepare node/gpu-1";
    assert!(status.contains(problem), "{status}");
    let one = text(&daemon, &["describe", "claim", "gpu"]);
    assert!(
        one.contains("Problem:      driver gpu.acme.com did not prepare node/gpu-1"),
        "{one}"
    );
    let list = daemon.json(&["get", "devices"]);
    assert_eq!(list["devices"][1]["dra"]["claims"][0]["prepared"], false);
    let options = text(&daemon, &["describe", "pod", "job"]);
    assert!(!options.contains("gpu-1"), "{options}");
}

#[test]
fn a_connected_driver_has_time_to_unprepare_for_a_removal_that_does_not_wait() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let _driver = Plugin::registered_driver(&script(&daemon.root));
    until_serving(&daemon);
    for _ in 0..5 {
        admitted(&daemon, &[&pod("job"), &claim(&["job"])]);
        text(&daemon, &["remove", "job", "--wait", "0s"]);
        assert_eq!(daemon.json(&["get", "claims"])["claims"], json!([]));
    }
}

#[test]
fn a_claim_that_its_driver_does_not_unprepare_is_a_problem() {
    let root = root();
    let daemon = Daemon::on(root.path());
    let fault = Fault::FailClaims {
        names: Vec::new(),
        message: "the device is busy".into(),
    };
    let script = DriverScript {
        devices: vec![device("big", "gpu-0")],
        ..script(&daemon.root)
    };
    let _driver = Plugin::registered_driver(&script.with_fault("NodeUnprepareResources", fault));
    until_serving(&daemon);
    admitted(&daemon, &[&pod("job"), &claim(&["job"])]);
    let refused = daemon.refused(&["remove", "job", "--wait", "0s"]);
    assert!(
        refused.contains("its claims still hold their devices"),
        "{refused}"
    );

    let status = daemon.json(&["status"]);
    let problems = status["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 1, "{status}");
    let problem = problems[0].to_string();
    for part in [
        "ResourceClaim default/gpu (UID claim-1) is not unprepared by driver gpu.acme.com, and holds its devices: the device \
         is busy",
        "devlet remove --claim default/gpu --abandon-driver gpu.acme.com",
    ] {
        assert!(problem.contains(part), "{status}");
    }
    let one = daemon.json(&["describe", "claim", "gpu"]);
    assert_eq!(one["drivers"][0]["notPrepared"], json!([]));
    daemon.until("claims", |list| {
        list["claims"][0]["waits"][0]["reason"] == "retrying"
    });
    let listed = text(&daemon, &["get", "claims"]);
    assert!(listed.contains("gpu.acme.com (retrying)"), "{listed}");

    text(
        &daemon,
        &["remove", "--claim", "default/gpu", "--abandon-driver", DRIVER],
    );
    let status = daemon.json(&["status"]).to_string();
    assert!(!status.contains("is not unprepared by"), "{status}");
}

#[test]
fn logs_name_claims_and_calls_that_failed_for_a_claim() {
    let root = root();
    let (daemon, log) = Daemon::logged(root.path(), &["--log-level", "debug"]);
    let fault = Fault::FailClaims {
        names: Vec::new(),
        message: "the device is busy".into(),
    };
    let script = script(&daemon.root).with_fault("NodeUnprepareResources", fault);
    let _driver = Plugin::registered_driver(&script);
    until_serving(&daemon);
    admitted(&daemon, &[&pod("job"), &claim(&["job"])]);
    daemon.refused(&["remove", "job", "--wait", "0s"]);
    text(&daemon, &["remove", "job", "--abandon-driver", DRIVER]);
    assert_eq!(daemon.stop(), Some(0));
    let lines = log.rest();
    let line = |part: &str| {
        let found = lines.iter().find(|line| line.contains(part));
        found.unwrap_or_else(|| panic!("no {part} in {lines:#?}"))
    };
    let admitted = line("pod admitted");
    assert!(
        admitted.contains("claims=default/gpu") && !admitted.contains("devices="),
        "{admitted}"
    );
    let failed = line("claim not unprepared");
    for part in [
        "claim=default/gpu",
        "driver=gpu.acme.com",
        "error=\"the device is busy\"",
    ] {
        assert!(failed.contains(part), "{failed}");
    }
    let abandoned = line("claim abandoned");
    assert!(
        abandoned.contains("claim=default/gpu uid=claim-1 driver=gpu.acme.com"),
        "{abandoned}"
    );
    let calls = |method: &str| -> Vec<&String> {
        let calls = lines
            .iter()
            .filter(|line| line.contains("call ended") && line.contains(method));
        calls.collect()
    };
    assert!(calls("NodePrepareResources")[0].contains("outcome=Ok"));
    let failed = calls("NodeUnprepareResources");
    assert!(
        failed
            .iter()
            .any(|call| call.contains("outcome=\"Failed\"") && call.contains("the device is busy")),
        "{failed:#?}"
    );
}
