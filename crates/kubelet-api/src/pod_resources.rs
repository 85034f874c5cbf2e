//! What the kubelet tells monitoring agents. Both versions are served on one socket.

/// The version to use.
pub mod v1 {
    include!("generated/podresources/v1.rs");
}

/// The first version: devices of device plugins, nothing else.
pub mod v1alpha1 {
    include!("generated/podresources/v1alpha1.rs");
}
