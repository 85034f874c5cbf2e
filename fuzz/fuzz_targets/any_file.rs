//! Any file: a salvaged file is always one that a kubelet loads in full.
#![no_main]

use devlet_kubelet_files::{convert, read, salvage, verify};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let verdict = verify(bytes, None);
    if let Ok(file) = read(bytes, None) {
        let _ = convert(file);
    }
    if let Ok(salvaged) = salvage(bytes, None) {
        let again = verify(salvaged.text.as_bytes(), None);
        assert!(again.is_fine(), "salvaged {:?}: {:?}", salvaged.text, again.problems);
        assert!(!verdict.is_fine() || salvaged.dropped.is_empty(), "{:?}", salvaged.dropped);
    }
});
