//! The plugin process: its state, its commands, and how it registers.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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
    /// Lists that every stream is to send, whether or not anything has changed.
    pub(crate) flood: watch::Sender<Flood>,
    proceed: Semaphore,
}

/// So many lists, so many a second; 0 is as many as are taken.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Flood {
    pub(crate) lists: u32,
    pub(crate) per_second: u32,
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
            Some(fault) => Ok(Some(fault)),
        }
    }

    /// The fault of a call that is answered with bytes of its own making; such a call is told.
    pub(crate) fn wire_fault(&self, method: &str) -> Option<Fault> {
        let is_of_the_wire = |fault: &Fault| {
            matches!(
                fault,
                Fault::Half | Fault::Drip { .. } | Fault::Raw(_) | Fault::Endless(_)
            )
        };
        let fault = self.changing().faults.get(method).cloned().filter(is_of_the_wire);
        if fault.is_some() {
            let (method, ids) = (method.to_owned(), Vec::new());
            tell(&Event::Called { method, ids });
        }
        fault
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
        devices: watch::Sender::new(script.all_devices()),
        streams: watch::Sender::new(0),
        flood: watch::Sender::new(Flood::default()),
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
        "offer" => {
            let script = Script {
                resource: rest.to_owned(),
                ..state.script.clone()
            };
            let plugins = script.root.join("device-plugins");
            let name = script.socket_name();
            sockets.serve(state, plugins.join(&name));
            tell(&outcome(register(&plugins, &script, &name).await));
        }
        "answer" => state.changing().answer = serde_json::from_str(rest).map_err(json)?,
        "proceed" => state.proceed.add_permits(1),
        "flood" => {
            let (lists, per_second) = two_numbers(rest).ok_or("flood LISTS PER_SECOND")?;
            state.flood.send_replace(Flood { lists, per_second });
        }
        "registrations" => {
            let (count, per_second) = two_numbers(rest).ok_or("registrations COUNT PER_SECOND")?;
            tell(&register_often(&state.script, count, per_second).await);
        }
        "end-stream" => state.streams.send_modify(|number| *number += 1),
        _ => return Err("no such command".into()),
    }
    Ok(())
}

fn two_numbers(text: &str) -> Option<(u32, u32)> {
    let (one, other) = text.split_once(' ')?;
    Some((one.parse().ok()?, other.parse().ok()?))
}

/// The pause between things that happen so often; none for 0.
pub(crate) fn pause(per_second: u32) -> Option<tokio::time::Interval> {
    let period = Duration::from_secs(1).checked_div(per_second)?;
    Some(tokio::time::interval(period))
}

/// Registers again and again, each time on a connection of its own and without waiting for the last.
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
    let (mut taken_in, mut refused, mut messages) = (0, 0, BTreeSet::new());
    for ended in tasks.join_all().await {
        match ended {
            Ok(()) => taken_in += 1,
            Err(status) => {
                refused += 1;
                messages.insert(with_causes(&status));
            }
        }
    }
    Event::Registrations {
        taken_in,
        refused,
        messages,
    }
}

/// What a library says of an error, and what it says of the causes.
fn with_causes(status: &Status) -> String {
    let causes = std::iter::successors(status.source(), |error| (*error).source());
    causes.fold(status.message().to_owned(), |text, cause| {
        format!("{text}: {cause}")
    })
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
