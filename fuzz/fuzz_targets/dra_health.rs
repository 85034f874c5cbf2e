//! `dra_health_state`.
#![no_main]

use devlet_kubelet_files::dra::health;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = health::read(bytes);
});
