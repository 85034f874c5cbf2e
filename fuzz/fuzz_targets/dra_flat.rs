//! `dra_manager_state` of 1.27 to 1.30.
#![no_main]

use devlet_kubelet_files::dra::{envelope, flat};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = flat::read(bytes) else { return };
    let claims: Option<Vec<_>> = file
        .unverified()
        .claims
        .as_ref()
        .map(|claims| claims.iter().cloned().map(flat::FlatClaim::into_claim).collect());
    let text = envelope::write(claims.as_deref());
    let again = envelope::read(text.as_bytes()).expect("a written file decodes").verified().expect("valid");
    assert_eq!(again.claims, claims);
});
