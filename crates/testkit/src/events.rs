//! What a process tells: JSON lines on standard output.

use std::collections::BTreeSet;
use std::io::Write as _;

use serde::{Deserialize, Serialize};

/// Something that happened to a plugin or a driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case", rename_all_fields = "camelCase")]
pub enum Event {
    /// The socket is there and answers.
    Serving { socket: String },
    /// The kubelet took the plugin in.
    Registered,
    /// The kubelet did not.
    RegisterFailed { code: i32, message: String },
    /// A call came in; `ids` are the devices that it names.
    Called { method: String, ids: Vec<String> },
    /// A DRA driver was called, by the name of the service under which it registers; `claims` are those that the call
    /// names.
    Asked {
        service: String,
        method: String,
        claims: Vec<Claim>,
    },
    /// A call for claims has been carried out, and waits for the command `proceed`; `ids` as for `Answered`.
    Waits { method: String, ids: Vec<String> },
    /// A call for claims is being answered; `ids` are the UIDs of those that the answer names.
    Answered { method: String, ids: Vec<String> },
    /// The claims that a driver has prepared, by UID.
    Prepared { claims: Vec<Claim> },
    /// An answer went out, and whoever had asked was killed.
    KilledCaller { pid: i32 },
    /// A list went out.
    ListSent { devices: usize },
    /// A stream has sent its part of a flood.
    Flooded { lists: u32 },
    /// How many registrations ended well and not; the words of the refusals, each once.
    Registrations {
        taken_in: u32,
        refused: u32,
        messages: BTreeSet<String>,
    },
    /// A command was carried out.
    Done { command: String },
    /// A command made no sense.
    Refused { command: String, reason: String },
}

/// A claim as a driver hears of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Claim {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

pub(crate) fn tell(event: &Event) {
    let line = serde_json::to_string(event).expect("events are plain");
    let mut stdout = std::io::stdout().lock();
    // Nobody reads any longer: the test is over.
    if writeln!(stdout, "{line}").and_then(|()| stdout.flush()).is_err() {
        std::process::exit(0);
    }
}
