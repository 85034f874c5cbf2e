//! Calls on plugins and drivers, and the messages that they answer with.

pub mod call;
pub mod fields;
pub(crate) mod oversize;
