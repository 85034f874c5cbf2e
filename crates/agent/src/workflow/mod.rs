//! What somebody is waiting for, top to bottom. Workflows ask the node; they decide nothing themselves.

pub mod admit;
pub mod register;
pub mod start_container;
