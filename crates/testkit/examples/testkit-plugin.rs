//! `testkit-plugin [--driver] SCRIPT`: a device plugin, or a DRA driver, that follows a script.
//!
//! SCRIPT is JSON, or `@FILE`. Events come as JSON lines on standard output; commands are lines on standard input:
//!
//! ```text
//! register                       registers, or serves the registration socket
//! fault Allocate "hang"          sets the fault of a call; null: no fault
//! flood 1000 100                 sends 1000 lists, 100 per second, with alternating health; 0: without a rate limit
//! proceed                        lets one waiting call continue
//! end-stream                     ends the streams of devices, or of health
//! exit                           exits and removes the sockets; the end of input does the same
//! ```
//!
//! For a device plugin only:
//!
//! ```text
//! list [{"id":"gpu0"}]           sends another device list
//! health gpu0 Unhealthy          sets the health of one device
//! answer {"envs":{"A":"b"}}      sets the answer to Allocate
//! offer acme.com/other           registers for another resource too, with the same devices
//! registrations 1000 100         registers 1000 times, 100 times per second
//! ```
//!
//! For a DRA driver only:
//!
//! ```text
//! deregister                     removes the registration socket
//! devices [{"pool":"p","device":"{name}","cdi":["acme.com/gpu={name}"]}]
//!                                sets the devices that it prepares for any claim
//! claim NAME [...]               sets the devices that it prepares for claims of this name
//! claims                         reports the prepared claims
//! health [{"pool":"p","device":"d","health":1}]
//!                                sets the reported health
//! hang-up                        closes all connections, and accepts new ones
//! ```

use std::process::ExitCode;

use devlet_testkit::Role;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_driver = arguments.first().is_some_and(|first| first == "--driver");
    arguments.drain(..usize::from(is_driver));
    let [argument] = &arguments[..] else {
        eprintln!("usage: testkit-plugin [--driver] SCRIPT|@FILE");
        return ExitCode::from(2);
    };
    let script = match argument.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(file),
        None => Ok(argument.clone()),
    };
    let role = script
        .map_err(|error| error.to_string())
        .and_then(|text| parse(&text, is_driver).map_err(|error| error.to_string()));
    match role {
        Ok(role) => {
            devlet_testkit::run(role);
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::from(2)
        }
    }
}

fn parse(script: &str, is_driver: bool) -> Result<Role, serde_json::Error> {
    match is_driver {
        true => serde_json::from_str(script).map(Role::Driver),
        false => serde_json::from_str(script).map(Role::Plugin),
    }
}
