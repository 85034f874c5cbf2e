//! CDI spec files, JSON and YAML: a valid one is written with the lowest version that it needs, and the written file
//! is valid and has the same content.
#![no_main]

use devlet_cdi::{Spec, WriteError};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(spec) = Spec::parse(bytes) else { return };
    if spec.validate().is_err() {
        return;
    }
    let expected = Spec { version: spec.minimum_version().to_string(), ..spec.clone() };
    for name in ["x.json", "x.yaml"] {
        let text = match spec.to_text(name) {
            Ok(text) => text,
            // Valid, but not for runtimes.
            Err(WriteError::OneCharacter { .. }) => continue,
            Err(error) => panic!("a valid spec cannot be written as {name}: {error}"),
        };
        let read = Spec::parse(text.as_bytes()).unwrap_or_else(|error| panic!("{name}: {error}: {text}"));
        assert_eq!(read, expected, "{name}: {text}");
        if let Err(error) = read.validate() {
            panic!("{name}: {error}: {text}");
        }
        assert_eq!(read.to_text(name).ok(), Some(text));
    }
    let mut oci = serde_json::json!({});
    let _ = spec.container_edits.apply(&mut oci);
});
