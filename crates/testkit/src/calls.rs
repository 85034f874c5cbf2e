//! Faults of calls, set by a script or a command.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;
use tonic::{Code, Status};

use crate::script::{Fault, Faults};

/// The faults of a process, and the waiting calls.
#[derive(Debug)]
pub(crate) struct Calls {
    faults: Mutex<Faults>,
    proceed: Semaphore,
}

impl Calls {
    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults: Mutex::new(faults),
            proceed: Semaphore::new(0),
        }
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fault(&self, method: &str) -> Option<Fault> {
        self.faults().get(method).cloned()
    }

    /// Executes the command `fault`: a call and a fault, or `null`.
    pub(crate) fn change(&self, text: &str) -> Result<(), String> {
        let (call, fault) = text.split_once(' ').ok_or("fault CALL JSON")?;
        let fault: Option<Fault> = serde_json::from_str(fault).map_err(|error| error.to_string())?;
        match fault {
            Some(fault) => self.faults().insert(call.to_owned(), fault),
            None => self.faults().remove(call),
        };
        Ok(())
    }

    /// Lets one waiting call continue.
    pub(crate) fn proceed(&self) {
        self.proceed.add_permits(1);
    }

    pub(crate) async fn wait(&self) -> Result<(), Status> {
        match self.proceed.acquire().await {
            Ok(permit) => permit.forget(),
            Err(_) => return Err(Status::internal("the semaphore of waiting calls is closed")),
        }
        Ok(())
    }

    /// Returns the fault of a call that is answered with hand-made bytes.
    pub(crate) fn wire_fault(&self, method: &str) -> Option<Fault> {
        let is_wire_fault = |fault: &Fault| {
            matches!(
                fault,
                Fault::Half
                    | Fault::Drip { .. }
                    | Fault::Raw(_)
                    | Fault::Zeros(_)
                    | Fault::Endless(_)
                    | Fault::EndlessDevices(_)
            )
        };
        self.fault(method).filter(is_wire_fault)
    }
}

/// Fails a call according to its fault. Returns faults that only change the answer.
pub(crate) async fn apply_fault(fault: Option<Fault>) -> Result<Option<Fault>, Status> {
    match fault {
        Some(Fault::Hang) => std::future::pending().await,
        Some(Fault::Die) => std::process::abort(),
        Some(Fault::Refuse { code, message }) => Err(Status::new(Code::from(code), message)),
        other => Ok(other),
    }
}
