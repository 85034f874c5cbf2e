//! Device plugins: how they register, what is called on them, and what they say.

pub mod answer;
pub mod client;
pub mod connection;
pub(crate) mod impaired;
pub mod plugins;
pub mod registration;
pub mod wire;
