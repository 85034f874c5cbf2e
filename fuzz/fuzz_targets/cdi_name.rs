//! Qualified CDI device names.
#![no_main]

use devlet_cdi::QualifiedName;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(name) = text.parse::<QualifiedName>() {
        assert_eq!(name.to_string(), text);
    }
});
