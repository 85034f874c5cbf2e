//! What somebody is waiting for, top to bottom. Workflows ask the node; they decide nothing themselves.

pub mod admit;
pub mod claims;
pub mod register;
pub mod remove;
pub mod start_container;
