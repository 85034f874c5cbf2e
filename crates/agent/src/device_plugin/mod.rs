//! Device plugins: their clients, and the decoding of their messages.

pub mod answer;
pub mod client;
pub mod clients;
pub(crate) mod impaired;
pub(crate) mod list_intake;
pub mod wire;
