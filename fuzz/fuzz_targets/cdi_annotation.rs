//! Container annotations that request CDI devices: a generated key fits and is usable, and inserted devices are
//! parsed back.
#![no_main]

use std::collections::BTreeMap;

use devlet_cdi::annotations::{self, MAX_KEY_NAME, PREFIX};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (&str, &str, &str)| {
    let (plugin, device, value) = input;
    let _ = annotations::parse([(plugin, value), (device, value)]);
    let (plain, hashed) = (annotations::key(plugin, device), annotations::hashed_key(plugin, device));
    if let Ok(plain) = &plain {
        assert_eq!(hashed.as_ref(), Ok(plain), "a key that fits is not hashed");
    }
    let parsed = annotations::parse([(PREFIX, value)]);
    // Names may be any text here. If they are not devices, a valid device name tests the key.
    for names in [value, "vendor.com/class=name"] {
        let devices: Vec<&str> = names.split(',').collect();
        for key in [&plain, &hashed].into_iter().flatten() {
            let name = key.strip_prefix(PREFIX).expect("the prefix");
            assert!(name.len() <= MAX_KEY_NAME, "{key} is too long");
            let mut inserted = BTreeMap::new();
            if let Err(error) = annotations::insert(&mut inserted, key.clone(), &devices) {
                assert!(names == value && parsed.is_err(), "{key}: {error}");
                assert!(inserted.is_empty());
                continue;
            }
            let requests = annotations::parse(&inserted).expect("inserted annotations parse");
            assert_eq!(requests.len(), 1);
            assert_eq!(&requests[0].key, key);
            let back: Vec<&str> = requests[0].devices.iter().map(|device| device.as_str()).collect();
            assert_eq!(back, devices);
        }
    }
});
