//! The rules of the node: who holds which device.
//!
//! A node is one value, [`Node`], that changes only through named, synchronous transitions. Every change is a
//! function of the state, plain input and `now`; same history, same state. Around it others listen to sockets,
//! call plugins and write to disk; none of them decides anything.
//!
//! Two shapes of transition:
//! - **facts**: the world changed ([`Node::plugin_connected`], [`Node::devices_listed`],
//!   [`Node::connection_lost`]);
//! - **two-phase operations**: we want to change the world ([`Node::reserve`], then [`Node::begin_commit`] and
//!   [`Node::finish_commit`], or [`Node::abort`]; [`Node::begin_release`], then [`Node::finish_release`]). The
//!   first phase says what is to be written; the second runs when it is on disk. For claims, see [`dra`].
//!
//! Questions are views: they take `&self` and change nothing.
//!
//! Deliberately absent: IO, clocks, async, logging, gRPC, Kubernetes objects, paths. The crate is `no_std`, so
//! that none of them can creep in.
#![no_std]

extern crate alloc;

pub mod device_plugin;
pub mod dra;
mod id;
mod import;
mod node;
mod plan;
mod pod;
mod resource_name;
mod spec_change;
mod view;

pub use id::{
    CallId, ClaimUid, ConnectionId, ContainerName, DeviceId, DriverName, Moment, PodUid, RecordId,
    ReservationId, ResourceName,
};
pub use import::Importing;
pub use node::{
    Blocked, CommitError, ConnectError, LastSeen, Node, PreferenceQuery, Preferences, PutError, ReleaseError,
    ReserveError, Restored,
};
pub use pod::{
    Allocation, ClaimReference, ClaimRequest, ClaimUse, ContainerKind, ContainerRequest, Pod, PodClaim,
    PodMetadata, PodName, PodRequest, Source,
};
pub use resource_name::InvalidResourceName;
pub use spec_change::SpecChange;
pub use view::{Availability, Capacity, DeviceView, PluginView, ResourceView};

#[cfg(test)]
mod tests;
