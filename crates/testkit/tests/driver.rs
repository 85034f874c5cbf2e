//! Tests of a driver process with a minimal kubelet.

// Clippy does not treat helpers as tests.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use devlet_kubelet_api::dra::{v1, v1alpha3, v1beta1};
use devlet_kubelet_api::dra_health;
use devlet_kubelet_api::plugin_registration::registration_client::RegistrationClient;
use devlet_kubelet_api::plugin_registration::{InfoRequest, RegistrationStatus};
use devlet_testkit::{
    Claim, DeviceHealth, DriverEndpoint, DriverScript, Event, Fault, Plugin, PreparedDevice,
};
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::net::UnixStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

devlet_testkit::plugin_process!();

const DRIVER: &str = "gpu.acme.com";

fn root() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("plugins_registry")).unwrap();
    root
}

async fn dial(path: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(connector).await.unwrap()
}

fn until_serving(driver: &mut Plugin, socket: &Path) {
    driver.until(&Event::Serving {
        socket: socket.display().to_string(),
    });
}

/// Starts a driver, and connects to it.
async fn started(script: &DriverScript) -> (Plugin, Channel) {
    let mut driver = Plugin::driver(script);
    until_serving(&mut driver, &script.registration_socket());
    (driver, dial(script.endpoint_socket()).await)
}

fn prepare(names: &[&str]) -> v1::NodePrepareResourcesRequest {
    let claim = |name: &&str| v1::Claim {
        namespace: "default".into(),
        uid: format!("uid-{name}"),
        name: (*name).into(),
    };
    v1::NodePrepareResourcesRequest {
        claims: names.iter().map(claim).collect(),
    }
}

fn unprepare(names: &[&str]) -> v1::NodeUnprepareResourcesRequest {
    v1::NodeUnprepareResourcesRequest {
        claims: prepare(names).claims,
    }
}

fn uids(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| format!("uid-{name}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_is_found_prepares_claims_and_exits() {
    let root = root();
    let script = DriverScript::new(root.path(), DRIVER);
    let mut driver = Plugin::driver(&script);
    until_serving(&mut driver, &script.registration_socket());

    let mut registration = RegistrationClient::new(dial(script.registration_socket()).await);
    let info = registration.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", DRIVER));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1beta1.DRAPlugin"]);
    let status = RegistrationStatus {
        plugin_registered: true,
        error: String::new(),
    };
    registration.notify_registration_status(status).await.unwrap();
    driver.until(&Event::Registered);

    let mut client = v1::dra_plugin_client::DraPluginClient::new(dial(info.endpoint.into()).await);
    for _ in 0..2 {
        let answer = client.node_prepare_resources(prepare(&["one"])).await.unwrap();
        let answer = answer.into_inner().claims.remove("uid-one").unwrap();
        assert_eq!(answer.error, "");
        assert_eq!(answer.devices[0].device_name, "one");
        assert_eq!(answer.devices[0].cdi_device_ids, ["gpu.acme.com/device=one"]);
    }
    let claim = Claim {
        namespace: "default".into(),
        name: "one".into(),
        uid: "uid-one".into(),
    };
    let call = driver.asked("NodePrepareResources");
    assert_eq!(call, ("v1.DRAPlugin".to_owned(), vec![claim.clone()]));
    assert_eq!(driver.called("NodePrepareResources"), ["uid-one"]);
    assert_eq!(driver.prepared_claims(), [claim]);
    let answer = client
        .node_unprepare_resources(unprepare(&["one", "other"]))
        .await;
    assert_eq!(answer.unwrap().into_inner().claims.len(), 2);
    driver.until_prepared(&BTreeSet::new());
    driver.exit();
    assert!(!script.registration_socket().exists() && !script.endpoint_socket().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_serves_only_the_services_it_reports() {
    let root = root();
    let script = DriverScript {
        endpoint: DriverEndpoint::Registration,
        ..DriverScript::new(root.path(), DRIVER).with_services(&["v1beta1.DRAPlugin"])
    };
    let (_beta, channel) = started(&script).await;
    let mut registration = RegistrationClient::new(channel.clone());
    let info = registration.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.endpoint, "");
    let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(channel.clone());
    let request = v1beta1::NodePrepareResourcesRequest::default();
    client.node_prepare_resources(request).await.unwrap();
    let mut newer = v1::dra_plugin_client::DraPluginClient::new(channel.clone());
    let missing = newer.node_prepare_resources(prepare(&[])).await.unwrap_err();
    assert_eq!(missing.code(), Code::Unimplemented);
    let mut health = dra_health::v1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let missing = health.node_watch_resources(dra_health::v1::NodeWatchResourcesRequest {});
    assert_eq!(missing.await.unwrap_err().code(), Code::Unimplemented);

    let script = DriverScript::new(root.path(), "old.acme.com").with_services(&["1.0.0"]);
    let (_old, channel) = started(&script).await;
    let mut client = v1alpha3::node_client::NodeClient::new(channel);
    let request = v1alpha3::NodeUnprepareResourcesRequest::default();
    client.node_unprepare_resources(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_fail_one_by_one() {
    let root = root();
    let (mut driver, channel) = started(&DriverScript::new(root.path(), DRIVER)).await;
    let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
    let both = || prepare(&["one", "two"]);

    driver.fault(
        "NodePrepareResources",
        Some(&Fault::FailClaims {
            names: vec!["two".into()],
            message: "no room".into(),
        }),
    );
    let answer = client.node_prepare_resources(both()).await.unwrap().into_inner();
    assert_eq!(answer.claims["uid-one"].error, "");
    assert_eq!(answer.claims["uid-two"].error, "no room");
    assert_eq!(driver.prepared(), uids(&["one"]));

    driver.fault("NodePrepareResources", Some(&Fault::LeaveOut(vec!["one".into()])));
    let answer = client.node_prepare_resources(both()).await.unwrap().into_inner();
    assert_eq!(answer.claims.into_keys().collect::<BTreeSet<_>>(), uids(&["two"]));

    driver.fault("NodePrepareResources", Some(&Fault::UnknownClaim));
    let answer = client.node_prepare_resources(both()).await.unwrap().into_inner();
    assert_eq!(answer.claims.len(), 3);

    driver.fault("NodePrepareResources", Some(&Fault::ManyDevices(1000)));
    let answer = client.node_prepare_resources(both()).await.unwrap().into_inner();
    assert_eq!(answer.claims["uid-one"].devices.len(), 1000);

    driver.fault("NodePrepareResources", None);
    let device = PreparedDevice {
        share: Some("{uid}".into()),
        ..PreparedDevice::new("other", "gpu0", "no name")
    };
    driver.prepares_for("one", &[device]);
    let answer = client.node_prepare_resources(both()).await.unwrap().into_inner();
    let device = &answer.claims["uid-one"].devices[0];
    assert_eq!(
        (device.pool_name.as_str(), device.share_id()),
        ("other", "uid-one")
    );
    assert_eq!(answer.claims["uid-two"].devices[0].pool_name, "pool");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_driver_has_executed_the_call() {
    let root = root();
    let script = DriverScript::new(root.path(), DRIVER).with_fault("NodePrepareResources", Fault::Wait);
    let (mut driver, channel) = started(&script).await;
    let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);

    let waits = tokio::spawn(async move { client.node_prepare_resources(prepare(&["one"])).await });
    assert_eq!(driver.waits("NodePrepareResources"), ["uid-one"]);
    assert_eq!(driver.prepared(), uids(&["one"]));
    assert!(!waits.is_finished());
    driver.command("proceed");
    assert_eq!(driver.answered("NodePrepareResources"), ["uid-one"]);
    assert_eq!(waits.await.unwrap().unwrap().into_inner().claims.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_sent_before_the_driver_crashes() {
    let root = root();
    let script =
        DriverScript::new(root.path(), DRIVER).with_fault("NodeUnprepareResources", Fault::DieAfterwards);
    let (driver, channel) = started(&script).await;
    let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);

    client.node_prepare_resources(prepare(&["one"])).await.unwrap();
    let answer = client
        .node_unprepare_resources(unprepare(&["one"]))
        .await
        .unwrap();
    assert_eq!(answer.into_inner().claims.len(), 1);
    driver.died();
    assert!(script.endpoint_socket().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_closed_and_reopened_while_the_sockets_stay() {
    let root = root();
    let script = DriverScript::new(root.path(), DRIVER);
    let (mut driver, channel) = started(&script).await;
    let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
    client.node_prepare_resources(prepare(&["one"])).await.unwrap();
    driver.fault("NodePrepareResources", Some(&Fault::Hang));
    let mut other = client.clone();
    let hangs = tokio::spawn(async move { other.node_prepare_resources(prepare(&["two"])).await });
    driver.called("NodePrepareResources");
    driver.called("NodePrepareResources");

    driver.command("hang-up");

    hangs.await.unwrap().unwrap_err();
    driver.fault("NodePrepareResources", None);
    let mut client = v1::dra_plugin_client::DraPluginClient::new(dial(script.endpoint_socket()).await);
    client.node_prepare_resources(prepare(&["three"])).await.unwrap();
    assert_eq!(driver.prepared(), uids(&["one", "three"]));
    driver.command("deregister");
    assert!(!script.registration_socket().exists() && script.endpoint_socket().exists());
    driver.command("register");
    assert!(script.registration_socket().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_reported_repeatedly() {
    let root = root();
    let healthy = DeviceHealth::healthy("pool", "gpu0");
    let script = DriverScript::new(root.path(), DRIVER).with_health(vec![healthy]);
    let (mut driver, channel) = started(&script).await;
    let mut client = dra_health::v1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let request = dra_health::v1::NodeWatchResourcesRequest {};
    let mut stream = client.node_watch_resources(request).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert_eq!(first.devices[0].health, 1);

    driver.report(&[DeviceHealth::unhealthy("pool", "gpu0", "too hot")]);
    let next = stream.message().await.unwrap().unwrap();
    assert_eq!(
        (next.devices[0].health, next.devices[0].message.as_str()),
        (2, "too hot")
    );
    driver.command("flood 10 0");
    for left in (0..10).rev() {
        let next = stream.message().await.unwrap().unwrap();
        assert_eq!(next.devices[0].health, 1 + left % 2);
    }
    driver.until(&Event::Flooded { lists: 10 });
    driver.command("end-stream");
    // The last report before the flood is sent again after it.
    stream.message().await.unwrap().unwrap();
    assert!(stream.message().await.unwrap().is_none());
    let (service, _) = driver.asked("NodeWatchResources");
    assert_eq!(service, "v1.DRAResourceHealth");
}
