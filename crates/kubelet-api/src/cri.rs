//! The API of container runtimes (CRI), as far as it tells which containers run.

/// The current version.
pub mod v1 {
    include!("generated/cri/v1.rs");
}
