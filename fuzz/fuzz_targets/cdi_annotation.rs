//! Container annotations that ask for CDI devices.
#![no_main]

use devlet_cdi::annotations;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (&str, &str, &str)| {
    let (plugin, device, value) = input;
    let _ = annotations::parse([(plugin, value), (device, value)]);
    for key in [annotations::key(plugin, device), annotations::hashed_key(plugin, device)].into_iter().flatten() {
        let _ = annotations::parse([(key.as_str(), value)]);
    }
});
