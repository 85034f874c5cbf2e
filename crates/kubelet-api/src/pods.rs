//! The API by which the kubelet reports its pods.

/// The only version.
pub mod v1alpha1 {
    include!("generated/pods/v1alpha1.rs");
}
