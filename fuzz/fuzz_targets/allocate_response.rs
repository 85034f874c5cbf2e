//! The plugins' answers inside a checkpoint.
#![no_main]

use devlet_kubelet_files::device_plugin::response;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = response::decode(bytes);
});
