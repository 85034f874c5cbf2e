//! The API between the kubelet and DRA drivers.
//!
//! A driver names the versions it serves in `supported_versions` when it registers, by `SERVICE` of the modules
//! below. These identifiers are not the names that gRPC uses.

/// The version of kubelet 1.34 and later.
pub mod v1 {
    include!("generated/dra/v1.rs");

    /// How a driver names this version when it registers.
    pub const SERVICE: &str = "v1.DRAPlugin";
}

/// The version of kubelet 1.32 and later: v1 without share IDs.
pub mod v1beta1 {
    include!("generated/dra/v1beta1.rs");

    /// How a driver names this version when it registers.
    pub const SERVICE: &str = "v1beta1.DRAPlugin";
}

/// The version of kubelet 1.31, to which 1.32 and 1.33 fell back.
///
/// The kubelet calls its Go package v1alpha4; `v1alpha3` is what travels.
pub mod v1alpha3 {
    include!("generated/dra/v1alpha3.rs");

    /// How a driver names this version when it registers, if at all: it was also assumed of drivers that named
    /// no version known to the kubelet.
    pub const SERVICE: &str = "v1alpha3.NodeService";

    /// The name gRPC uses, which drivers do not register.
    pub const WIRE_SERVICE: &str = "v1alpha3.Node";
}
