//! The API between the kubelet and DRA drivers.
//!
//! A driver lists the versions it serves in `supported_versions` when it registers, by `SERVICE` of the modules
//! below. These identifiers differ from the gRPC service names.

/// The version of kubelet 1.34 and later.
pub mod v1 {
    include!("generated/dra/v1.rs");

    /// Identifier of this version in a driver's registration.
    pub const SERVICE: &str = "v1.DRAPlugin";
}

/// The version of kubelet 1.32 and later: v1 without share IDs.
pub mod v1beta1 {
    include!("generated/dra/v1beta1.rs");

    /// Identifier of this version in a driver's registration.
    pub const SERVICE: &str = "v1beta1.DRAPlugin";
}

/// The version of kubelet 1.31, to which 1.32 and 1.33 fell back.
///
/// The kubelet's Go package is called v1alpha4; the package on the wire is `v1alpha3`.
pub mod v1alpha3 {
    include!("generated/dra/v1alpha3.rs");

    /// Identifier of this version in a driver's registration. Optional: kubelets also assumed this version for
    /// drivers that did not list a known one.
    pub const SERVICE: &str = "v1alpha3.NodeService";

    /// The gRPC service name, which drivers do not register.
    pub const WIRE_SERVICE: &str = "v1alpha3.Node";
}
