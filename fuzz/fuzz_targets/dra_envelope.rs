//! `dra_manager_state` of 1.31 and later. The input is the inner document: a checksum would reject most mutations.
#![no_main]

use devlet_kubelet_files::dra::envelope;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = envelope::read(bytes);
    let wrapped = format!(
        "{{\"Data\":{},\"Checksum\":0}}",
        serde_json::to_string(&String::from_utf8_lossy(bytes)).expect("a string")
    );
    let Ok(file) = envelope::read(wrapped.as_bytes()) else { return };
    let claims = file.unverified().claims.as_deref();
    let text = envelope::write(claims);
    let again = envelope::read(text.as_bytes()).expect("a written file decodes").verified().expect("valid");
    assert_eq!(again.claims.map(normal), claims.map(<[_]>::to_vec).map(normal));
});

/// An empty list of operations is not written.
fn normal(mut claims: Vec<devlet_kubelet_files::dra::Claim>) -> Vec<devlet_kubelet_files::dra::Claim> {
    let drivers = claims.iter_mut().filter_map(|claim| claim.drivers.as_mut());
    for driver in drivers.flat_map(|drivers| drivers.values_mut()) {
        driver.skip_node_operations.take_if(|operations| operations.is_empty());
    }
    claims
}
