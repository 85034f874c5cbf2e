//! Device nodes of this host as devices that a device plugin can offer.
//!
//! ```text
//!   /sys, /dev, /run/udev/data ──► Host::nodes ──► Inventory::scan ──► devices, warnings
//!   uevents, inotify ──► Watcher::changed            ▲
//!                                     rules ─────────┘
//! ```
//!
//! Each event causes a scan of everything, and its content is ignored. So an overflow, a burst and the start need no
//! code of their own. Discovery reads below a root directory, which a test replaces.
//!
//! Deliberately absent: libudev, the protocol of device plugins, and a memory of devices beyond the process.

mod identity;
mod inventory;
mod node;
mod rule;
mod value;
mod watch;

pub use inventory::{Device, Inventory, Problem, Scan};
pub use node::{Host, Node, Pci, Usb};
pub use rule::{GroupBy, InvalidRule, Match, PciMatch, Rule, UsbMatch, check};
pub use value::{Glob, HexId, IdSource, Permissions};
pub use watch::Watcher;
