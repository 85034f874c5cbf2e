//! `testkit-plugin SCRIPT`: a device plugin that does what a script says.
//!
//! SCRIPT is JSON, or `@FILE`. Events come as JSON lines on standard output; commands are lines on standard input:
//!
//! ```text
//! register                       register, or serve the socket to be found
//! list [{"id":"gpu0"}]           another device list
//! health gpu0 Unhealthy          the health of one device
//! fault Allocate "hang"          how a call is answered from now on; null: well
//! answer {"envs":{"A":"b"}}      what Allocate answers from now on
//! offer acme.com/other           registers for another resource too, with the same devices
//! flood 1000 100                 so many lists, so many a second, with alternating health; 0: as many as are taken
//! registrations 1000 100         registers so often, so many times a second
//! proceed                        lets one call go on that waits
//! end-stream                     ends the ListAndWatch streams
//! exit                           ends well, sockets removed; the end of input does the same
//! ```

use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(argument) = std::env::args().nth(1) else {
        eprintln!("usage: testkit-plugin SCRIPT|@FILE");
        return ExitCode::from(2);
    };
    let script = match argument.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(file),
        None => Ok(argument),
    };
    let script = script.map_err(|error| error.to_string());
    match script.and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string())) {
        Ok(script) => {
            devlet_testkit::run(script);
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::from(2)
        }
    }
}
