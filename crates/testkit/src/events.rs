//! Events of a process: JSON lines on standard output.

use std::collections::BTreeSet;
use std::io::Write as _;

use serde::{Deserialize, Serialize};

/// An event of a plugin or a driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case", rename_all_fields = "camelCase")]
pub enum Event {
    /// The socket exists and answers.
    Serving { socket: String },
    /// The kubelet accepted the registration.
    Registered,
    /// The kubelet rejected the registration.
    RegisterFailed { code: i32, message: String },
    /// A call was received; `ids` are the devices in it.
    Called { method: String, ids: Vec<String> },
    /// A DRA driver was called. The service has the name under which the driver registers; `claims` are those in the
    /// call.
    Asked {
        service: String,
        method: String,
        claims: Vec<Claim>,
    },
    /// A call for claims has been executed and waits for the command `proceed`; `ids` as for `Answered`.
    Waits { method: String, ids: Vec<String> },
    /// A call for claims is being answered; `ids` are the UIDs of the claims in the answer.
    Answered { method: String, ids: Vec<String> },
    /// The claims that a driver has prepared, by UID.
    Prepared { claims: Vec<Claim> },
    /// An answer was sent, and then the caller was killed.
    KilledCaller { pid: i32 },
    /// A list was sent.
    ListSent { devices: usize },
    /// A stream has sent its part of a flood.
    Flooded { lists: u32 },
    /// Number of accepted and rejected registrations, and the distinct error messages.
    Registrations {
        accepted: u32,
        refused: u32,
        messages: BTreeSet<String>,
    },
    /// A command was executed.
    Done { command: String },
    /// A command was invalid.
    Refused { command: String, reason: String },
}

/// A claim as in the request to a driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Claim {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

pub(crate) fn emit(event: &Event) {
    let line = serde_json::to_string(event).expect("events are plain");
    let mut stdout = std::io::stdout().lock();
    // The reader has exited: the test is over.
    if writeln!(stdout, "{line}").and_then(|()| stdout.flush()).is_err() {
        std::process::exit(0);
    }
}
