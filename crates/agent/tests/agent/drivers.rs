//! DRA drivers on real sockets: registration, calls and connections.

use std::time::Duration;

use devlet_agent::agent::Agent;
use devlet_agent::dra::client::DriverClient;
use devlet_agent::dra::services;
use devlet_agent::grpc::call::{CallDeadline, CallError};
use devlet_agent::limits::Limits;
use devlet_agent::metrics::Metrics;
use devlet_core::dra::claims::{AllocatedClaim, AllocatedDevice, AllocationResult, ClaimKey, PreparedDevice};
use devlet_core::dra::health::{DeviceHealth, PoolDevice};
use devlet_core::{ClaimRequest, ClaimUid, Moment, Node, PodMetadata, PodName, PodRequest, Source};
use tokio::time::Instant;

use crate::driver::{DRIVER, Driver, Event, PATIENCE, is_connected, node, until, until_driver};

fn claim(name: &str) -> (ClaimUid, ClaimKey) {
    let key = ClaimKey {
        namespace: "default".into(),
        name: name.into(),
    };
    (format!("uid-{name}").into(), key)
}

/// Returns a client for the services that a driver lists.
async fn client(driver: &Driver) -> DriverClient {
    let dialed = devlet_uds::connect(driver.endpoint_socket(), Instant::now() + PATIENCE)
        .await
        .unwrap();
    let listed: Vec<String> = driver.listed.iter().map(|each| (*each).to_owned()).collect();
    let rpcs = Metrics::default().driver(&DRIVER.into());
    DriverClient::new(
        &dialed,
        &services::choose(&listed).unwrap(),
        rpcs,
        &Limits::default(),
    )
}

const PATIENT: CallDeadline = CallDeadline {
    own: PATIENCE,
    caller: None,
};

// TestPluginRegistration, TestRegistrationHandler/{current-service, two-services}
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_is_found_registered_told_and_connected() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let mut process = Driver::new(root.path()).start();
    assert_eq!(process.told().await, Ok(()));

    let view = until_driver(&agent, is_connected).await;
    let [plugin] = &view.plugins[..] else {
        panic!("{view:?}")
    };
    assert!(plugin.serving);
    let endpoint = root.path().join("plugins/dra.sock");
    assert_eq!(plugin.endpoint, endpoint.display().to_string());
    assert_eq!(plugin.service, "v1.DRAPlugin");
    assert_eq!(
        plugin.service_reason,
        "the newest of v1.DRAPlugin, v1beta1.DRAPlugin"
    );
    assert_eq!(plugin.health_service, None);
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_was_there_first_is_found_at_the_start() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("plugins_registry/deep")).unwrap();
    let driver = Driver {
        registry: "deep/gpu.sock".into(),
        endpoint: None,
        ..Driver::new(root.path())
    };
    let mut process = driver.start();
    let agent = node(root.path()).await;
    assert_eq!(process.told().await, Ok(()));
    let view = until_driver(&agent, is_connected).await;
    let endpoint = root.path().join("plugins_registry/deep/gpu.sock");
    assert_eq!(view.plugins[0].endpoint, endpoint.display().to_string());
    agent.stop().await.unwrap();
}

// TestRegistrationHandler/{no-services, version}
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_with_which_nothing_can_be_spoken_is_told_so_in_the_kubelets_words() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let start = |listed: &[&'static str]| {
        Driver {
            registry: format!("{}.sock", listed.len()),
            listed: listed.to_vec(),
            has: vec!["v1.DRAPlugin", "v1.DRAResourceHealth"],
            ..Driver::new(root.path())
        }
        .start()
    };
    let endpoint = root.path().join("plugins/dra.sock");
    let prefix = format!(
        "invalid supported gRPC versions of DRA driver plugin gpu.acme.com at endpoint {}: ",
        endpoint.display()
    );
    assert_eq!(
        start(&[]).told().await.unwrap_err(),
        format!(
            "RegisterPlugin error -- plugin validation failed with err: {prefix}empty list of supported gRPC services \
             (aka supported versions)"
        )
    );
    // It lists neither, and does not serve the default one.
    assert_eq!(
        start(&["v1.DRAResourceHealth", "1.0.0"])
            .told()
            .await
            .unwrap_err(),
        format!(
            "RegisterPlugin error -- plugin registration failed with err: {prefix}none of services supported by the \
             plugin ([\"v1.DRAResourceHealth\" \"1.0.0\"]) are supported by the kubelet ([\"v1.DRAPlugin\" \
             \"v1beta1.DRAPlugin\" \"v1alpha3.Node\"])"
        )
    );
    assert!(agent.store().read(Node::drivers).is_empty());
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_of_1_31_is_spoken_with_in_its_alpha_service() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let mut process = Driver {
        listed: vec!["1.0.0"],
        has: vec!["v1alpha3.Node"],
        ..Driver::new(root.path())
    }
    .start();
    assert_eq!(process.told().await, Ok(()));
    let view = until_driver(&agent, is_connected).await;
    assert_eq!(view.plugins[0].service, "v1alpha3.Node");
    assert_eq!(
        view.plugins[0].service_reason,
        "because the driver lists only 1.0.0"
    );
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_with_a_bad_name_is_told_so() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let mut process = Driver {
        name: String::new(),
        ..Driver::new(root.path())
    }
    .start();
    assert_eq!(
        process.told().await.unwrap_err(),
        "RegisterPlugin error -- plugin validation failed with err: DRA driver name is empty"
    );
    agent.stop().await.unwrap();
}

// TestConnectionHandling
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_does_not_listen_yet_is_registered_and_connected_when_it_does() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let driver = Driver::new(root.path());
    let mut process = driver.start_without_endpoint();
    process.register();
    assert_eq!(process.told().await, Ok(()));
    let view = until_driver(&agent, |_| true).await;
    assert!(!view.plugins[0].connected && view.unusable_since.is_some());

    process.serve(&driver.endpoint_socket());
    let view = until_driver(&agent, is_connected).await;
    assert_eq!(view.unusable_since, None);
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_is_noticed_without_a_call_and_made_again() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let driver = Driver::new(root.path());
    // Two processes: one registers, the other serves.
    let mut registrar = driver.start_without_endpoint();
    let server = driver.start_unregistered();
    registrar.register();
    let before = until_driver(&agent, is_connected).await;

    drop(server);
    until_driver(&agent, |driver| !is_connected(driver)).await;
    std::fs::remove_file(driver.endpoint_socket()).unwrap();
    let _server = driver.start_unregistered();
    let after = until_driver(&agent, is_connected).await;
    assert_eq!(after.plugins[0].connection, before.plugins[0].connection);
    assert_eq!(after.plugins[0].registered_at, before.plugins[0].registered_at);
    agent.stop().await.unwrap();
}

// TestDelete, Test_Run_Positive_RegisterThenUnregister
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_is_registered_until_its_socket_goes() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let driver = Driver::new(root.path());
    let process = driver.start();
    until_driver(&agent, is_connected).await;
    // The endpoint and the process stay.
    std::fs::remove_file(driver.registry_socket()).unwrap();
    let view = until_driver(&agent, |driver| driver.plugins.is_empty()).await;
    assert_eq!(
        view.last.unwrap().endpoint,
        driver.endpoint_socket().display().to_string()
    );
    assert!(view.unusable_since.is_some());
    drop(process);
    agent.stop().await.unwrap();
}

// TestPluginReRegistration, Test_Run_Positive_ReRegister
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_restarts_is_another_plugin_and_needs_no_pause() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let driver = Driver::new(root.path());
    let mut last = None;
    for killed in [true, false, true, false, true] {
        let process = driver.start();
        let view = until_driver(&agent, |driver| {
            is_connected(driver) && Some(driver.plugins[0].connection) != last
        })
        .await;
        assert_eq!(view.plugins.len(), 1);
        last = Some(view.plugins[0].connection);
        match killed {
            true => drop(process),
            false => process.exit(),
        }
    }
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_that_is_made_anew_is_tried_at_once() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let bad = Driver {
        listed: Vec::new(),
        ..Driver::new(root.path())
    };
    let mut process = bad.start();
    // The pause after the fourth failure is 4 s.
    for _ in 0..4 {
        process.told().await.unwrap_err();
    }
    let fixed = Instant::now();
    drop(process);
    let mut process = Driver::new(root.path()).start();
    process.told().await.unwrap();
    assert!(fixed.elapsed() < Duration::from_secs(3), "{:?}", fixed.elapsed());
    agent.stop().await.unwrap();
}

// TestAddSameName, TestRegistrationHandler/replace, TestPluginRegistrationSameName
#[tokio::test(flavor = "multi_thread")]
async fn of_several_plugins_of_a_driver_the_newest_that_is_connected_serves() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let instance = |name: &str| Driver {
        registry: format!("gpu-{name}.sock"),
        endpoint: Some(format!("dra-{name}.sock")),
        ..Driver::new(root.path())
    };
    let serving = |wanted: &'static str, plugins: usize| {
        let agent = agent.clone();
        async move {
            until_driver(&agent, |driver| {
                let mut serving = driver.plugins.iter().filter(|plugin| plugin.serving);
                driver.plugins.len() == plugins
                    && serving.next().is_some_and(|each| each.endpoint.ends_with(wanted))
            })
            .await
        }
    };
    let old = instance("old").start();
    serving("dra-old.sock", 1).await;
    let new = instance("new").start();
    serving("dra-new.sock", 2).await;
    new.exit();
    serving("dra-old.sock", 1).await;
    let new = instance("new").start();
    serving("dra-new.sock", 2).await;
    old.exit();
    serving("dra-new.sock", 1).await;
    drop(new);
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_registers_the_endpoint_of_another_replaces_it() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let driver = Driver::new(root.path());
    let _first = driver.start();
    let before = until_driver(&agent, is_connected).await;
    let second = Driver {
        registry: "again.sock".into(),
        ..driver.clone()
    };
    let mut again = second.start_without_endpoint();
    again.register();
    again.told().await.unwrap();
    let old = before.plugins[0].connection;
    let after = until_driver(&agent, |driver| {
        is_connected(driver) && driver.plugins[0].connection != old
    })
    .await;
    assert_eq!(after.plugins.len(), 1);
    // The socket of the first plugin does not keep the second one registered.
    std::fs::remove_file(driver.registry_socket()).unwrap();
    std::fs::remove_file(second.registry_socket()).unwrap();
    until_driver(&agent, |driver| driver.plugins.is_empty()).await;
    agent.stop().await.unwrap();
}

// TestGRPCMethods/{v1, v1beta1}
#[tokio::test(flavor = "multi_thread")]
async fn each_service_is_called_by_its_own_name_and_shares_are_kept_where_it_has_them() {
    let root = tempfile::tempdir().unwrap();
    for (listed, service, share) in [
        ("v1.DRAPlugin", "v1.DRAPlugin", Some("share")),
        ("v1beta1.DRAPlugin", "v1beta1.DRAPlugin", None),
        ("1.0.0", "v1alpha3.Node", None),
    ] {
        let driver = Driver {
            endpoint: Some(format!("{service}.sock")),
            listed: vec![listed],
            has: vec![service],
            ..Driver::new(root.path())
        };
        let mut process = driver.start_unregistered();
        let client = client(&driver).await;
        let claims = [claim("one"), claim("two"), claim("bad"), claim("forgotten")];
        let prepared = client.prepare(&claims, PATIENT).await.unwrap();
        let device = |name: &str| PreparedDevice {
            requests: Vec::new(),
            pool: "pool".into(),
            device: name.into(),
            share: share.map(str::to_owned),
            cdi_devices: vec![format!("acme.com/gpu={name}")],
        };
        let wanted = [
            ("uid-bad", Err("no such device".to_owned())),
            ("uid-one", Ok(vec![device("one")])),
            ("uid-two", Ok(vec![device("two")])),
        ];
        let wanted = wanted.map(|(uid, outcome)| (ClaimUid::from(uid), outcome));
        assert_eq!(prepared, wanted.into(), "{service}");
        let unprepared = client.unprepare(&claims[1..3], PATIENT).await.unwrap();
        let wanted = [("uid-bad", Err("busy".to_owned())), ("uid-two", Ok(()))];
        let wanted = wanted.map(|(uid, outcome)| (ClaimUid::from(uid), outcome));
        assert_eq!(unprepared, wanted.into());

        let called = |method, uids: &[&str]| {
            let uids: Vec<String> = uids.iter().map(|uid| format!("uid-{uid}")).collect();
            (service, method, uids)
        };
        for wanted in [
            called("NodePrepareResources", &["one", "two", "bad", "forgotten"]),
            called("NodeUnprepareResources", &["two", "bad"]),
        ] {
            match process.event().await {
                Event::Called {
                    service,
                    method,
                    claims,
                    ..
                } => assert_eq!((service, method, claims), wanted),
                other => panic!("{other:?}"),
            }
        }
    }
}

// TestGRPCMethods/mismatch
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_has_not_what_it_lists_is_named_with_what_it_says() {
    let root = tempfile::tempdir().unwrap();
    let driver = Driver {
        has: vec!["v1beta1.DRAPlugin"],
        ..Driver::new(root.path())
    };
    let _process = driver.start_unregistered();
    let error = client(&driver)
        .await
        .prepare(&[claim("one")], PATIENT)
        .await
        .unwrap_err();
    assert!(
        error.to_string().starts_with("NodePrepareResources: ")
            && error.to_string().ends_with("(Unimplemented)"),
        "{error}"
    );
}

// TestGRPCWithTimeoutEnforced
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_is_told_of_its_deadline_and_held_to_it() {
    let root = tempfile::tempdir().unwrap();
    let driver = Driver {
        hangs: true,
        ..Driver::new(root.path())
    };
    let mut process = driver.start_unregistered();
    let client = client(&driver).await;
    let call_deadline = CallDeadline {
        own: Duration::from_millis(300),
        caller: None,
    };
    let error = client.prepare(&[claim("one")], call_deadline).await.unwrap_err();
    assert!(matches!(error, CallError::TimedOut { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "NodePrepareResources was not answered within 0.3 s"
    );
    let Event::Called {
        deadline: Some(deadline),
        ..
    } = process.event().await
    else {
        panic!("no deadline")
    };
    let (number, unit) = deadline.split_at(deadline.len() - 1);
    let scale = match unit {
        "n" => 1,
        "u" => 1_000,
        _ => 1_000_000,
    };
    let left = Duration::from_nanos(number.parse::<u64>().unwrap() * scale);
    assert!(
        left <= Duration::from_millis(300) && left > Duration::from_millis(200),
        "{left:?}"
    );
    let error = client
        .unprepare(&[claim("one")], call_deadline)
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "NodeUnprepareResources was not answered within 0.3 s"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_dies_under_a_call_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let driver = Driver {
        hangs: true,
        ..Driver::new(root.path())
    };
    let mut process = driver.start_unregistered();
    let client = client(&driver).await;
    let claims = [claim("one")];
    let dies = async {
        process.event().await;
        drop(process);
    };
    let (ended, ()) = tokio::join!(client.unprepare(&claims, PATIENT), dies);
    assert_eq!(
        ended.unwrap_err().to_string(),
        "NodeUnprepareResources: the plugin went away"
    );
}

fn health(node: &Node, device: &str) -> (DeviceHealth, String) {
    let place = PoolDevice {
        pool: "pool".into(),
        device: device.into(),
    };
    // At time zero no report has expired.
    let (health, message) = node.device_health(&DRIVER.into(), &place, Moment::default());
    (health, message.to_owned())
}

/// Waits until a device is as wanted.
async fn until_health(agent: &Agent, device: &str, wanted: DeviceHealth) {
    until(agent, |node| (health(node, device).0 == wanted).then_some(())).await;
}

fn reporting(root: &std::path::Path, service: &'static str) -> Driver {
    Driver {
        listed: vec!["v1.DRAPlugin", service],
        has: vec!["v1.DRAPlugin", service],
        reports: Some(vec![("a".into(), 1, 0), ("b".into(), 2, 0)]),
        ..Driver::new(root)
    }
}

// TestPlugin_WatchResources, TestPlugin_WatchResources_V1Alpha1, TestGRPCConnIsReused/health_api_reuses_connection
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_says_how_its_devices_are_on_the_connection_that_it_has() {
    for service in ["v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"] {
        let root = tempfile::tempdir().unwrap();
        let agent = node(root.path()).await;
        let driver = Driver {
            registry: "gpu.sock".into(),
            endpoint: None,
            ..reporting(root.path(), service)
        };
        let process = driver.start();
        until_health(&agent, "b", DeviceHealth::Unhealthy).await;
        assert_eq!(
            agent.store().read(|node| health(node, "a")),
            (DeviceHealth::Healthy, "because".to_owned())
        );
        assert_eq!(
            agent.store().read(|node| health(node, "c")).0,
            DeviceHealth::Unknown
        );
        let view = until_driver(&agent, is_connected).await;
        assert_eq!(view.plugins[0].health_service.as_deref(), Some(service));
        // One connection for the handshake, and one for all calls.
        assert_eq!(process.connections(), 2);

        process.report(Some(vec![("b".into(), 1, 0)]));
        until_health(&agent, "b", DeviceHealth::Healthy).await;
        assert_eq!(
            agent.store().read(|node| health(node, "a")).0,
            DeviceHealth::Healthy,
            "it was left out, not taken back"
        );
        agent.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_of_health_that_end_are_asked_for_again_and_hold_meanwhile() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let mut process = reporting(root.path(), "v1.DRAResourceHealth").start();
    until_health(&agent, "a", DeviceHealth::Healthy).await;
    let watched = async |process: &mut crate::driver::Process| {
        while !matches!(process.event().await, Event::Watched { .. }) {}
    };
    watched(&mut process).await;
    process.report(None);
    watched(&mut process).await;
    assert_eq!(
        agent.store().read(|node| health(node, "a")).0,
        DeviceHealth::Healthy
    );
    // devlet asks again: the stream ended at once.
    watched(&mut process).await;
    process.report(Some(vec![("a".into(), 2, 0)]));
    until_health(&agent, "a", DeviceHealth::Unhealthy).await;
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_lists_health_and_has_none_is_as_good_as_any() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let driver = Driver {
        listed: vec!["v1.DRAPlugin", "v1.DRAResourceHealth"],
        ..Driver::new(root.path())
    };
    let mut process = driver.start();
    process.told().await.unwrap();
    let view = until_driver(&agent, is_connected).await;
    assert_eq!(
        view.plugins[0].health_service.as_deref(),
        Some("v1.DRAResourceHealth")
    );
    agent.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_takes_no_more_calls_is_let_go_though_its_reports_go_on() {
    let root = tempfile::tempdir().unwrap();
    let agent = node(root.path()).await;
    let mut process = reporting(root.path(), "v1.DRAResourceHealth").start();
    process.told().await.unwrap();
    until_health(&agent, "a", DeviceHealth::Healthy).await;
    process.shut_down();
    // Only a call reveals it.
    let pod = pod_with_claim();
    let refused = agent.admit(&pod, Instant::now() + Duration::from_secs(5), |_| {});
    refused.await.unwrap_err();
    until_driver(&agent, |driver| !is_connected(driver)).await;
    agent.stop().await.unwrap();
}

/// Returns a request of a pod with a claim of a device of the driver.
fn pod_with_claim() -> PodRequest {
    let claim = AllocatedClaim::new(
        claim("one").1,
        "uid-one".into(),
        [AllocationResult {
            driver: DRIVER.into(),
            device: AllocatedDevice {
                request: "one".into(),
                pool: "pool".into(),
                device: "one".into(),
                share: None,
                admin_access: false,
            },
            skip: Vec::new(),
        }],
    );
    PodRequest {
        uid: "pod".into(),
        name: PodName {
            namespace: "default".into(),
            name: "pod".into(),
        },
        source: Source::Embedder,
        fingerprint: 1,
        metadata: PodMetadata::default(),
        containers: Vec::new(),
        claims: vec![ClaimRequest {
            name: "mine".into(),
            claim,
        }],
    }
}
