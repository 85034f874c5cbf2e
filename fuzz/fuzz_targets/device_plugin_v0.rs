//! The files without checksum of 1.8 to 1.10.
#![no_main]

use devlet_kubelet_files::{Document, File, convert, device_plugin};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = device_plugin::v0::read(bytes) else { return };
    let text = device_plugin::write(file.unverified());
    assert!(device_plugin::read(text.as_bytes()).expect("a written file decodes").verified().is_ok());
    let file: Option<File<Document>> = devlet_kubelet_files::read(bytes, None).ok();
    if let Some(file) = file {
        let _ = convert(file);
    }
});
