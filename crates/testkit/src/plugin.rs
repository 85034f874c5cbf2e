//! The plugin process: its state, its commands, and its registration.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::calls::{Calls, apply_fault};
use crate::commands::Commands;
use crate::events::{Event, emit};
use crate::lists::{Lists, pause, two_numbers};
use crate::script::{Answer, Api, Device, Door, Fault, Script};
use crate::serve::serve;
use crate::sockets::Sockets;

/// Shared state of a plugin.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) script: Script,
    pub(crate) calls: Calls,
    answer: Mutex<Answer>,
    pub(crate) devices: Lists<Device>,
}

impl State {
    fn changing_answer(&self) -> MutexGuard<'_, Answer> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn answer(&self) -> Answer {
        self.changing_answer().clone()
    }

    /// Runs at the start of every call: reports the call, and fails it according to its fault. Returns faults that only
    /// change the answer.
    pub(crate) async fn called(&self, method: &str, ids: &[String]) -> Result<Option<Fault>, Status> {
        let fault = self.calls.fault(method);
        if let Some(Fault::DropDevice(device)) = &fault {
            self.devices
                .now
                .send_modify(|devices| devices.retain(|each| each.id != *device));
        }
        let (method, ids) = (method.to_owned(), ids.to_vec());
        emit(&Event::Called { method, ids });
        match apply_fault(fault).await? {
            Some(Fault::Wait | Fault::DropDevice(_)) => {
                self.calls.wait().await?;
                Ok(None)
            }
            other => Ok(other),
        }
    }
}

/// Runs a device plugin until the end of the commands.
pub(crate) async fn run(script: Script) {
    let state = Arc::new(State {
        calls: Calls::new(script.faults.clone()),
        answer: Mutex::new(script.answer.clone()),
        devices: Lists::new(script.all_devices()),
        script,
    });
    let mut sockets = Sockets::default();
    if state.script.door != Door::Later {
        register_by_script(&state, &mut sockets).await;
    }
    let mut commands = Commands::new();
    while let Some(line) = commands.next().await {
        let result = execute(&line, &state, &mut sockets).await;
        commands.end(line, result);
    }
}

async fn execute(line: &str, state: &Arc<State>, sockets: &mut Sockets) -> Result<(), String> {
    let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
    let json = |error: serde_json::Error| error.to_string();
    match command {
        "register" => register_by_script(state, sockets).await,
        "list" => {
            let devices: Vec<Device> = serde_json::from_str(rest).map_err(json)?;
            state.devices.now.send_replace(devices);
        }
        "health" => {
            let (id, health) = rest.split_once(' ').ok_or("health DEVICE STATE")?;
            let mut known = false;
            state.devices.now.send_modify(|devices| {
                for device in devices.iter_mut().filter(|device| device.id == id) {
                    health.clone_into(&mut device.health);
                    known = true;
                }
            });
            known.then_some(()).ok_or("no such device")?;
        }
        "fault" => state.calls.change(rest)?,
        "offer" => {
            let script = Script {
                resource: rest.to_owned(),
                ..state.script.clone()
            };
            let plugins = script.root.join("device-plugins");
            let name = script.socket_name();
            serve(state, sockets, plugins.join(&name));
            emit(&outcome(register(&plugins, &script, &name).await));
        }
        "answer" => *state.changing_answer() = serde_json::from_str(rest).map_err(json)?,
        "proceed" => state.calls.proceed(),
        "flood" => state.devices.flood(rest)?,
        "registrations" => {
            let (count, per_second) = two_numbers(rest).ok_or("registrations COUNT PER_SECOND")?;
            emit(&register_often(&state.script, count, per_second).await);
        }
        "end-stream" => state.devices.end_streams(),
        _ => return Err("no such command".into()),
    }
    Ok(())
}

/// Maximum time for an answer to `Register`. tonic's channel can lose a request if the server closes the connection at the
/// moment at which the request is queued.
const REGISTER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

/// Registers repeatedly, each time on a new connection and without waiting for the previous one.
async fn register_often(script: &Script, count: u32, per_second: u32) -> Event {
    let directory = script.root.join("device-plugins");
    let mut pause = pause(per_second);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..count {
        if let Some(pause) = &mut pause {
            pause.tick().await;
        }
        let (directory, script) = (directory.clone(), script.clone());
        tasks.spawn(async move { register(&directory, &script, &script.socket_name()).await });
    }
    let (mut accepted, mut refused, mut messages) = (0, 0, BTreeSet::new());
    for ended in tasks.join_all().await {
        match ended {
            Ok(()) => accepted += 1,
            Err(status) => {
                refused += 1;
                messages.insert(with_causes(&status));
            }
        }
    }
    Event::Registrations {
        accepted,
        refused,
        messages,
    }
}

/// Formats an error and its causes.
fn with_causes(status: &Status) -> String {
    let causes = std::iter::successors(status.source(), |error| (*error).source());
    causes.fold(status.message().to_owned(), |text, cause| {
        format!("{text}: {cause}")
    })
}

async fn register_by_script(state: &Arc<State>, sockets: &mut Sockets) {
    let script = &state.script;
    let (plugins, name) = (script.root.join("device-plugins"), script.socket_name());
    let endpoint = plugins.join(&name);
    match (script.door, script.api) {
        (Door::Claim, _) => emit(&outcome(register(&plugins, script, &name).await)),
        (Door::Registry, _) => serve(state, sockets, script.root.join("plugins_registry").join(&name)),
        (Door::RegistryWithEndpoint, _) => {
            serve(state, sockets, endpoint);
            serve(state, sockets, script.root.join("plugins_registry").join(&name));
        }
        (Door::Kubelet | Door::Later, Api::V1beta1) => {
            if !(sockets.has(&endpoint) && endpoint.exists()) {
                serve(state, sockets, endpoint);
            }
            emit(&outcome(register(&plugins, script, &name).await));
        }
        (Door::Kubelet | Door::Later, Api::V1alpha2) => {
            let registered = register(&plugins, script, &name).await;
            if !(sockets.has(&endpoint) && endpoint.exists()) {
                serve(state, sockets, endpoint);
            }
            emit(&outcome(registered));
        }
    }
}

fn outcome(registered: Result<(), Status>) -> Event {
    match registered {
        Ok(()) => Event::Registered,
        Err(status) => Event::RegisterFailed {
            code: status.code() as i32,
            message: status.message().to_owned(),
        },
    }
}

/// Registers, and fails if the kubelet does not answer in time.
async fn register(directory: &Path, script: &Script, endpoint: &str) -> Result<(), Status> {
    let registering = register_once(directory, script, endpoint);
    let registered = tokio::time::timeout(REGISTER_TIMEOUT, registering).await;
    registered.unwrap_or_else(|_| Err(Status::deadline_exceeded("Register was not answered in time")))
}

async fn register_once(directory: &Path, script: &Script, endpoint: &str) -> Result<(), Status> {
    let channel = dial(directory.join(v1beta1::KUBELET_SOCKET))
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    match script.api {
        Api::V1beta1 => {
            let mut client = v1beta1::registration_client::RegistrationClient::new(channel);
            let options = v1beta1::DevicePluginOptions {
                pre_start_required: script.options.pre_start,
                get_preferred_allocation_available: script.options.preferred,
            };
            let request = v1beta1::RegisterRequest {
                version: v1beta1::VERSION.into(),
                endpoint: endpoint.into(),
                resource_name: script.resource.clone(),
                options: Some(options),
            };
            client.register(request).await?;
        }
        Api::V1alpha2 => {
            let mut client = v1alpha2::registration_client::RegistrationClient::new(channel);
            let request = v1alpha2::RegisterRequest {
                version: v1alpha2::VERSION.into(),
                endpoint: endpoint.into(),
                resource_name: script.resource.clone(),
            };
            client.register(request).await?;
        }
    }
    Ok(())
}

pub(crate) async fn dial(path: PathBuf) -> Result<Channel, tonic::transport::Error> {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
}
