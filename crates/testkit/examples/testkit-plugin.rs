//! `testkit-plugin [--driver] SCRIPT`: a device plugin, or a DRA driver, that does what a script says.
//!
//! SCRIPT is JSON, or `@FILE`. Events come as JSON lines on standard output; commands are lines on standard input:
//!
//! ```text
//! register                       register, or serve the socket to be found
//! fault Allocate "hang"          how a call is answered from now on; null: well
//! flood 1000 100                 so many lists, so many a second, with alternating health; 0: as many as are taken
//! proceed                        lets one call go on that waits
//! end-stream                     ends the streams of devices, or of health
//! exit                           ends well, sockets removed; the end of input does the same
//! ```
//!
//! Of a device plugin only:
//!
//! ```text
//! list [{"id":"gpu0"}]           another device list
//! health gpu0 Unhealthy          the health of one device
//! answer {"envs":{"A":"b"}}      what Allocate answers from now on
//! offer acme.com/other           registers for another resource too, with the same devices
//! registrations 1000 100         registers so often, so many times a second
//! ```
//!
//! Of a DRA driver only:
//!
//! ```text
//! deregister                     removes the socket that it was found by
//! devices [{"pool":"p","device":"{name}","cdi":["acme.com/gpu={name}"]}]
//!                                what it prepares for any claim from now on
//! claim NAME [...]               what it prepares for claims of this name
//! claims                         tells what it has prepared
//! health [{"pool":"p","device":"d","health":1}]
//!                                what its streams of health say
//! hang-up                        ends all connections, and takes new ones
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
