//! CDI spec files, JSON and YAML: a valid one is valid at the lowest version that it needs.
#![no_main]

use devlet_cdi::Spec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(spec) = Spec::parse(bytes) else { return };
    if spec.validate().is_ok() {
        let _ = spec.minimum_version();
        let mut oci = serde_json::json!({});
        let _ = spec.container_edits.apply(&mut oci);
    }
});
