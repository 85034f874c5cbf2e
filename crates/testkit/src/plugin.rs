//! The plugin process: its state, its commands, and how it registers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, watch};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::events::{Event, tell};
use crate::script::{Answer, Api, Device, Door, Fault, Faults, Script};
use crate::serve;

/// What the parts of a plugin share.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) script: Script,
    changing: Mutex<Changing>,
    pub(crate) devices: watch::Sender<Vec<Device>>,
    /// Grows when the streams are to end.
    pub(crate) streams: watch::Sender<u64>,
    proceed: Semaphore,
}

#[derive(Debug)]
struct Changing {
    faults: Faults,
    answer: Answer,
}

impl State {
    fn changing(&self) -> MutexGuard<'_, Changing> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn answer(&self) -> Answer {
        self.changing().answer.clone()
    }

    /// Every call begins here: it is told, and goes wrong if it should. Faults that only change the answer are
    /// returned.
    pub(crate) async fn called(&self, method: &str, ids: &[String]) -> Result<Option<Fault>, Status> {
        let fault = self.changing().faults.get(method).cloned();
        if let Some(Fault::DropDevice(device)) = &fault {
            self.devices
                .send_modify(|devices| devices.retain(|each| each.id != *device));
        }
        let (method, ids) = (method.to_owned(), ids.to_vec());
        tell(&Event::Called { method, ids });
        match fault {
            None => Ok(None),
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::Die) => std::process::abort(),
            Some(Fault::Refuse { code, message }) => Err(Status::new(Code::from(code), message)),
            Some(Fault::Wait | Fault::DropDevice(_)) => {
                match self.proceed.acquire().await {
                    Ok(permit) => permit.forget(),
                    Err(_) => return Err(Status::internal("nothing will proceed any longer")),
                }
                Ok(None)
            }
            Some(fault @ (Fault::NoContainers | Fault::TooManyContainers)) => Ok(Some(fault)),
        }
    }
}

/// Is a plugin until told to end.
pub fn run(script: Script) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime starts");
    runtime.block_on(live(script));
    runtime.shutdown_background();
}

async fn live(script: Script) {
    let state = Arc::new(State {
        changing: Mutex::new(Changing {
            faults: script.faults.clone(),
            answer: script.answer.clone(),
        }),
        devices: watch::Sender::new(script.devices.clone()),
        streams: watch::Sender::new(0),
        proceed: Semaphore::new(0),
        script,
    });
    let mut sockets = Sockets::default();
    if state.script.door != Door::Later {
        get_in(&state, &mut sockets).await;
    }
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if line == "exit" {
            break;
        }
        match obey(&line, &state, &mut sockets).await {
            Ok(()) => tell(&Event::Done { command: line }),
            Err(reason) => tell(&Event::Refused {
                command: line,
                reason,
            }),
        }
    }
}

/// Sockets that are removed at the end, unless the process is killed.
#[derive(Debug, Default)]
struct Sockets(Vec<PathBuf>);

impl Drop for Sockets {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Sockets {
    fn serve(&mut self, state: &Arc<State>, path: PathBuf) {
        serve::serve(Arc::clone(state), &path);
        tell(&Event::Serving {
            socket: path.display().to_string(),
        });
        self.0.push(path);
    }
}

async fn obey(line: &str, state: &Arc<State>, sockets: &mut Sockets) -> Result<(), String> {
    let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
    let json = |error: serde_json::Error| error.to_string();
    match command {
        "register" => get_in(state, sockets).await,
        "list" => {
            let devices: Vec<Device> = serde_json::from_str(rest).map_err(json)?;
            state.devices.send_replace(devices);
        }
        "health" => {
            let (id, health) = rest.split_once(' ').ok_or("health DEVICE STATE")?;
            let mut known = false;
            state.devices.send_modify(|devices| {
                for device in devices.iter_mut().filter(|device| device.id == id) {
                    health.clone_into(&mut device.health);
                    known = true;
                }
            });
            known.then_some(()).ok_or("no such device")?;
        }
        "fault" => {
            let (call, fault) = rest.split_once(' ').ok_or("fault CALL JSON")?;
            let fault: Option<Fault> = serde_json::from_str(fault).map_err(json)?;
            let faults = &mut state.changing().faults;
            match fault {
                Some(fault) => faults.insert(call.to_owned(), fault),
                None => faults.remove(call),
            };
        }
        "answer" => state.changing().answer = serde_json::from_str(rest).map_err(json)?,
        "proceed" => state.proceed.add_permits(1),
        "end-stream" => state.streams.send_modify(|number| *number += 1),
        _ => return Err("no such command".into()),
    }
    Ok(())
}

async fn get_in(state: &Arc<State>, sockets: &mut Sockets) {
    let script = &state.script;
    let (plugins, name) = (script.root.join("device-plugins"), script.socket_name());
    let endpoint = plugins.join(&name);
    match (script.door, script.api) {
        (Door::Claim, _) => tell(&outcome(register(&plugins, script, &name).await)),
        (Door::Registry, _) => sockets.serve(state, script.root.join("plugins_registry").join(&name)),
        (Door::RegistryWithEndpoint, _) => {
            sockets.serve(state, endpoint);
            sockets.serve(state, script.root.join("plugins_registry").join(&name));
        }
        (Door::Kubelet | Door::Later, Api::V1beta1) => {
            if !(sockets.0.contains(&endpoint) && endpoint.exists()) {
                sockets.serve(state, endpoint);
            }
            tell(&outcome(register(&plugins, script, &name).await));
        }
        (Door::Kubelet | Door::Later, Api::V1alpha2) => {
            let registered = register(&plugins, script, &name).await;
            if !(sockets.0.contains(&endpoint) && endpoint.exists()) {
                sockets.serve(state, endpoint);
            }
            tell(&outcome(registered));
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

async fn register(directory: &Path, script: &Script, endpoint: &str) -> Result<(), Status> {
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

async fn dial(path: PathBuf) -> Result<Channel, tonic::transport::Error> {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
}
