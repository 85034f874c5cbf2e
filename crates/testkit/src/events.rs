//! What a plugin tells: JSON lines on standard output.

use std::collections::BTreeSet;
use std::io::Write as _;

use serde::{Deserialize, Serialize};

/// Something that happened to a plugin.
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

pub(crate) fn tell(event: &Event) {
    let line = serde_json::to_string(event).expect("events are plain");
    let mut stdout = std::io::stdout().lock();
    // Nobody reads any longer: the test is over.
    if writeln!(stdout, "{line}").and_then(|()| stdout.flush()).is_err() {
        std::process::exit(0);
    }
}
