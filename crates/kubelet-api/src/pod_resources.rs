//! The API by which the kubelet reports resources of pods to monitoring agents. Both versions share one socket.

/// The current version.
pub mod v1 {
    include!("generated/podresources/v1.rs");
}

/// The first version: only devices of device plugins.
pub mod v1alpha1 {
    include!("generated/podresources/v1alpha1.rs");
}
