//! Device plugins: what they offer, who holds it, and what their answers mean for a container.

pub mod bit_set;
pub mod impaired;
pub mod inventory;
pub mod ledger;
pub mod list;
pub mod rejections;
pub mod run_options;
pub mod select;
