//! Device plugins: their device lists, the holders of devices, and the run options of containers.

pub mod bit_set;
pub mod impaired;
pub mod inventory;
pub mod ledger;
pub mod list;
pub mod rejections;
pub mod run_options;
pub mod select;
