//! `kubelet_internal_checkpoint`, V1 and V2: a decoded file can be written, and reads back equal.
#![no_main]

use devlet_kubelet_files::device_plugin;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = device_plugin::read(bytes) else { return };
    let text = device_plugin::write(file.unverified());
    let again = device_plugin::read(text.as_bytes()).expect("a written file decodes");
    assert!(again.checksum.expect("V2 has one").is_valid());
    assert_eq!(again.verified().expect("valid"), file.unverified().clone().into_per_numa());
});
