//! Leases outside of core: their names, their CDI specs, the kubelet's record of them, and their containers and processes.

pub(crate) mod cgroup;
pub mod checkpoint;
pub(crate) mod conflicts;
pub mod containers;
pub mod process;
pub mod spec;

use devlet_core::LeaseName;

/// The CDI kind of all leases.
pub const KIND: &str = "devlet.dev/lease";

/// Returns a new name, which cannot be guessed.
pub fn new_name() -> LeaseName {
    uuid::Uuid::new_v4().simple().to_string().into()
}

/// Returns the CDI device of a lease.
pub fn qualified(name: &LeaseName) -> String {
    format!("{KIND}={name}")
}

/// Returns the lease of a CDI device.
pub fn unqualified(device: &str) -> Option<LeaseName> {
    let name = device.strip_prefix(KIND)?.strip_prefix('=')?;
    let is_plain = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_plain.then(|| name.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_in_its_cdi_device() {
        let name = new_name();
        assert_eq!(unqualified(&qualified(&name)), Some(name.clone()));
        assert_ne!(new_name(), name);
        for other in [
            "",
            "acme.com/gpu=0",
            "devlet.dev/lease",
            "devlet.dev/lease=",
            "devlet.dev/lease=../x",
        ] {
            assert_eq!(unqualified(other), None, "{other}");
        }
    }
}
