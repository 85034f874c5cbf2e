//! The API by which DRA drivers report the health of their devices.
//!
//! The versions differ only in their package. A driver lists the versions it serves in `supported_versions` when it
//! registers; here the identifiers are the gRPC service names.

/// The current version.
pub mod v1 {
    include!("generated/dra_health/v1.rs");

    /// Identifier of this version in a driver's registration.
    pub const SERVICE: &str = "v1.DRAResourceHealth";
}

/// The first version, for drivers that serve only this one.
pub mod v1alpha1 {
    include!("generated/dra_health/v1alpha1.rs");

    /// Identifier of this version in a driver's registration.
    pub const SERVICE: &str = "v1alpha1.DRAResourceHealth";
}
