//! Device plugins: what they offer, who holds it, and what their answers mean for a container.

pub mod bits;
pub mod inventory;
pub mod ledger;
pub mod list;
pub mod run_options;
pub mod select;
