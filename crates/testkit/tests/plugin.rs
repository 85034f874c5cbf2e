//! Tests of a plugin process with a minimal kubelet.

// Clippy does not treat helpers as tests.
#![allow(clippy::unwrap_used)]

use std::sync::mpsc;

use devlet_kubelet_api::device_plugin::v1beta1;
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use devlet_kubelet_api::device_plugin::v1beta1::registration_server::{Registration, RegistrationServer};
use devlet_testkit::{Answer, Device, Door, Event, Fault, Plugin, Script};
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

devlet_testkit::plugin_process!();

struct Kubelet(mpsc::Sender<v1beta1::RegisterRequest>);

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(
        &self,
        request: Request<v1beta1::RegisterRequest>,
    ) -> Result<Response<v1beta1::Empty>, Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(v1beta1::Empty {}))
    }
}

fn root() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for directory in ["device-plugins", "plugins_registry"] {
        std::fs::create_dir(root.path().join(directory)).unwrap();
    }
    root
}

async fn dial(path: std::path::PathBuf) -> Channel {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(connector).await.unwrap()
}

fn request(ids: &[&str]) -> v1beta1::AllocateRequest {
    let devices_ids = ids.iter().map(ToString::to_string).collect();
    v1beta1::AllocateRequest {
        container_requests: vec![v1beta1::ContainerAllocateRequest { devices_ids }],
    }
}

fn two_gpus(root: &TempDir) -> Script {
    Script::new(
        root.path(),
        "acme.com/gpu",
        vec![Device::on("gpu0", 0), Device::on("gpu1", 1)],
    )
}

/// Starts a plugin that does not register. Returns it and its socket.
fn waiting(script: Script) -> (Plugin, std::path::PathBuf) {
    let script = Script {
        door: Door::Registry,
        ..script
    };
    let socket = script.root.join("plugins_registry/acme.com_gpu.sock");
    let mut plugin = Plugin::start(&script);
    plugin.until(&Event::Serving {
        socket: socket.display().to_string(),
    });
    (plugin, socket)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_registers_lists_answers_and_exits() {
    let root = root();
    let (sender, registrations) = mpsc::channel();
    let listener = UnixListener::bind(root.path().join("device-plugins/kubelet.sock")).unwrap();
    let server = Server::builder().add_service(RegistrationServer::new(Kubelet(sender)));
    tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    let envs = [("GPUS".to_owned(), "{ids}".to_owned())].into();
    let answer = Answer {
        envs,
        unknown_field: Some("x".into()),
        ..Answer::default()
    };

    let mut plugin = Plugin::start(&Script {
        answer,
        ..two_gpus(&root)
    });

    plugin.until(&Event::Registered);
    let registration = registrations.recv().unwrap();
    assert_eq!(registration.resource_name, "acme.com/gpu");
    let socket = root.path().join("device-plugins").join(&registration.endpoint);
    let mut client = DevicePluginClient::new(dial(socket.clone()).await);
    let mut lists = client
        .list_and_watch(v1beta1::Empty {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(lists.message().await.unwrap().unwrap().devices.len(), 2);
    plugin.health("gpu1", "Unhealthy");
    assert_eq!(
        lists.message().await.unwrap().unwrap().devices[1].health,
        "Unhealthy"
    );
    let answer = client.allocate(request(&["gpu0"])).await.unwrap().into_inner();
    assert_eq!(answer.container_responses[0].envs["GPUS"], "gpu0");
    assert_eq!(plugin.called("Allocate"), ["gpu0"]);
    plugin.exit();
    assert!(!socket.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_fail_with_the_scripted_faults() {
    let root = root();
    let (mut plugin, socket) = waiting(two_gpus(&root));
    let mut client = DevicePluginClient::new(dial(socket).await);

    plugin.fault(
        "Allocate",
        Some(&Fault::Refuse {
            code: 9,
            message: "no".into(),
        }),
    );
    let refused = client.allocate(request(&["gpu0"])).await.unwrap_err();
    assert_eq!((refused.code() as i32, refused.message()), (9, "no"));

    plugin.fault("Allocate", Some(&Fault::NoContainers));
    let answer = client.allocate(request(&["gpu0"])).await.unwrap().into_inner();
    assert!(answer.container_responses.is_empty());
    plugin.called("Allocate");
    plugin.called("Allocate");

    plugin.fault("Allocate", Some(&Fault::Wait));
    let mut other = client.clone();
    let waits = tokio::spawn(async move { other.allocate(request(&["gpu1"])).await });
    assert_eq!(plugin.called("Allocate"), ["gpu1"]);
    assert!(!waits.is_finished());
    plugin.command("proceed");
    assert_eq!(
        waits
            .await
            .unwrap()
            .unwrap()
            .into_inner()
            .container_responses
            .len(),
        1
    );

    plugin.fault("Allocate", Some(&Fault::Die));
    client.allocate(request(&["gpu0"])).await.unwrap_err();
    plugin.died();
}
