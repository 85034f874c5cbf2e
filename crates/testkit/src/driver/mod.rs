//! The driver process: its state, its commands, and its registration.

mod connection;
mod script;
mod serve;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tonic::Status;

use crate::calls::{Calls, apply_fault};
use crate::commands::Commands;
use crate::events::{Claim, Event, emit};
use crate::lists::{Listed, Lists};
use crate::script::Fault;
use crate::sockets::Sockets;
use connection::{AfterAnswer, ConnectionHandle};
pub use script::{DeviceHealth, DriverEndpoint, DriverScript, PreparedDevice};

/// Shared state of a driver.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) script: DriverScript,
    pub(crate) calls: Calls,
    changing: Mutex<Changing>,
    pub(crate) health: Lists<DeviceHealth>,
    /// Incremented to close all connections.
    pub(crate) disconnects: watch::Sender<u64>,
}

#[derive(Debug)]
struct Changing {
    devices: Vec<PreparedDevice>,
    by_claim: BTreeMap<String, Vec<PreparedDevice>>,
    /// By UID.
    prepared: BTreeMap<String, Claim>,
}

/// The answer for one claim.
pub(crate) type Outcome<T> = Result<T, String>;

impl Driver {
    fn changing(&self) -> MutexGuard<'_, Changing> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares claims, or fails according to a fault. Returns the answers by UID.
    pub(crate) async fn prepare(
        &self,
        service: &str,
        claims: Vec<Claim>,
        connection: &ConnectionHandle,
    ) -> Result<BTreeMap<String, Outcome<Vec<PreparedDevice>>>, Status> {
        self.carry_out(
            service,
            "NodePrepareResources",
            claims,
            connection,
            |driver, claim, fault| {
                let mut state = driver.changing();
                state.prepared.insert(claim.uid.clone(), claim.clone());
                let devices = state.by_claim.get(&claim.name).unwrap_or(&state.devices);
                let named = devices
                    .iter()
                    .map(|device| device.of(claim, &driver.script.driver));
                let mut devices: Vec<PreparedDevice> = named.collect();
                match fault {
                    Some(Fault::ManyDevices(count)) => {
                        devices = devices.into_iter().cycle().take(*count).collect();
                    }
                    Some(Fault::LongName(bytes)) => {
                        let long = |device: &mut PreparedDevice| device.device = "x".repeat(*bytes);
                        devices.iter_mut().for_each(long);
                    }
                    _ => {}
                }
                devices
            },
        )
        .await
    }

    /// Unprepares claims. An unknown claim is not an error.
    pub(crate) async fn unprepare(
        &self,
        service: &str,
        claims: Vec<Claim>,
        connection: &ConnectionHandle,
    ) -> Result<BTreeMap<String, Outcome<()>>, Status> {
        self.carry_out(
            service,
            "NodeUnprepareResources",
            claims,
            connection,
            |driver, claim, _| {
                driver.changing().prepared.remove(&claim.uid);
            },
        )
        .await
    }

    /// Handles a call for claims: reports it, fails it according to its fault, executes it for each claim, and answers.
    async fn carry_out<T: Default>(
        &self,
        service: &str,
        method: &str,
        claims: Vec<Claim>,
        connection: &ConnectionHandle,
        each: impl Fn(&Self, &Claim, Option<&Fault>) -> T,
    ) -> Result<BTreeMap<String, Outcome<T>>, Status> {
        let fault = self.calls.fault(method);
        emit(&Event::Asked {
            service: service.to_owned(),
            method: method.to_owned(),
            claims: claims.clone(),
        });
        let fault = apply_fault(fault).await?;
        let mut answer = BTreeMap::new();
        for claim in &claims {
            let outcome = match &fault {
                Some(Fault::LeaveOut(names)) if names.contains(&claim.name) => continue,
                Some(Fault::FailClaims { names, message })
                    if names.is_empty() || names.contains(&claim.name) =>
                {
                    Err(message.clone())
                }
                fault => Ok(each(self, claim, fault.as_ref())),
            };
            answer.insert(claim.uid.clone(), outcome);
        }
        let ids = |answer: &BTreeMap<String, _>| answer.keys().cloned().collect();
        match fault {
            Some(Fault::Wait) => {
                emit(&Event::Waits {
                    method: method.to_owned(),
                    ids: ids(&answer),
                });
                self.calls.wait().await?;
            }
            Some(Fault::UnknownClaim) => {
                answer.insert("nobody-asked".to_owned(), Ok(T::default()));
            }
            Some(Fault::DieAfterwards) => connection.set_after_answer(AfterAnswer::Die),
            Some(Fault::KillCaller) => connection.set_after_answer(AfterAnswer::KillCaller),
            _ => {}
        }
        emit(&Event::Answered {
            method: method.to_owned(),
            ids: ids(&answer),
        });
        Ok(answer)
    }

    /// Handles any other call: reports it, and fails it according to its fault.
    pub(crate) async fn called(&self, service: &str, method: &str) -> Result<(), Status> {
        let fault = self.calls.fault(method);
        emit(&Event::Asked {
            service: service.to_owned(),
            method: method.to_owned(),
            claims: Vec::new(),
        });
        match apply_fault(fault).await? {
            Some(Fault::Wait) => self.calls.wait().await,
            _ => Ok(()),
        }
    }
}

impl PreparedDevice {
    fn of(&self, claim: &Claim, driver: &str) -> Self {
        let fill = |text: &String| {
            text.replace("{name}", &claim.name)
                .replace("{uid}", &claim.uid)
                .replace("{driver}", driver)
        };
        Self {
            requests: self.requests.iter().map(fill).collect(),
            pool: fill(&self.pool),
            device: fill(&self.device),
            cdi: self.cdi.iter().map(fill).collect(),
            share: self.share.as_ref().map(fill),
        }
    }
}

impl Listed for DeviceHealth {
    fn set_health(&mut self, healthy: bool) {
        self.health = if healthy { 1 } else { 2 };
    }
}

/// Runs a DRA driver until the end of the commands.
pub(crate) async fn run(script: DriverScript) {
    let driver = Arc::new(Driver {
        calls: Calls::new(script.faults.clone()),
        changing: Mutex::new(Changing {
            devices: script.devices.clone(),
            by_claim: script.claims.clone(),
            prepared: BTreeMap::new(),
        }),
        health: Lists::new(script.health.clone()),
        disconnects: watch::Sender::new(0),
        script,
    });
    let mut sockets = Sockets::default();
    if driver.script.endpoint == DriverEndpoint::Own {
        let directory = driver.script.directory();
        std::fs::create_dir_all(&directory)
            .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        serve::endpoint(&driver, sockets.listen(driver.script.endpoint_socket()));
    }
    if !driver.script.later {
        register(&driver, &mut sockets);
    }
    let mut commands = Commands::new();
    while let Some(line) = commands.next().await {
        let result = execute(&line, &driver, &mut sockets);
        commands.end(line, result);
    }
}

/// Creates the registration socket.
fn register(driver: &Arc<Driver>, sockets: &mut Sockets) {
    let socket: PathBuf = driver.script.registration_socket();
    serve::registration(driver, sockets.listen(socket));
}

fn execute(line: &str, driver: &Arc<Driver>, sockets: &mut Sockets) -> Result<(), String> {
    let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
    let json = |error: serde_json::Error| error.to_string();
    match command {
        "register" => register(driver, sockets),
        "deregister" => {
            let socket = driver.script.registration_socket();
            std::fs::remove_file(socket).map_err(|error| error.to_string())?;
        }
        "fault" => driver.calls.change(rest)?,
        "proceed" => driver.calls.proceed(),
        "devices" => driver.changing().devices = serde_json::from_str(rest).map_err(json)?,
        "claim" => {
            let (name, devices) = rest.split_once(' ').ok_or("claim NAME JSON")?;
            let devices = serde_json::from_str(devices).map_err(json)?;
            driver.changing().by_claim.insert(name.to_owned(), devices);
        }
        "claims" => {
            let claims = driver.changing().prepared.values().cloned().collect();
            emit(&Event::Prepared { claims });
        }
        "health" => {
            let health = serde_json::from_str(rest).map_err(json)?;
            driver.health.now.send_replace(health);
        }
        "flood" => driver.health.flood(rest)?,
        "end-stream" => driver.health.end_streams(),
        "hang-up" => driver.disconnects.send_modify(|number| *number += 1),
        _ => return Err("no such command".into()),
    }
    Ok(())
}
