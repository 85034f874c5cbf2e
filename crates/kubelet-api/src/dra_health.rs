//! How DRA drivers tell the health of their devices.
//!
//! The versions differ in nothing but their package. A driver names those it serves in `supported_versions`
//! when it registers; here the identifiers are the names that gRPC uses.

/// The version to use.
pub mod v1 {
    include!("generated/dra_health/v1.rs");

    /// How a driver names this version when it registers.
    pub const SERVICE: &str = "v1.DRAResourceHealth";
}

/// The first version, for drivers that have no other.
pub mod v1alpha1 {
    include!("generated/dra_health/v1alpha1.rs");

    /// How a driver names this version when it registers.
    pub const SERVICE: &str = "v1alpha1.DRAResourceHealth";
}
