//! Background loops: each compares the node with the world, and acts on the difference.

pub mod capacity;
pub(crate) mod claims;
pub mod orphans;
pub mod slices;
