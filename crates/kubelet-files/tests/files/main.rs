//! Files of kubelets, read, written, converted and damaged.

// Clippy does not treat helper functions as tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod damage;
mod properties;
mod vectors;
