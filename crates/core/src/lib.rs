//! State machine of a node: which pods hold which devices and claims.
//!
//! A node is one value, [`Node`], that changes only through named, synchronous transitions. Every change is a
//! function of the state, plain input and `now`, so equal histories lead to equal states. Other crates listen to
//! sockets, call plugins and write to disk. All decisions are made here.
//!
//! There are two kinds of transitions:
//! - **facts** record an event that has happened ([`Node::plugin_connected`], [`Node::devices_listed`],
//!   [`Node::connection_lost`]);
//! - **two-phase operations** change pods and claims ([`Node::reserve`], then [`Node::begin_commit`] and
//!   [`Node::finish_commit`], or [`Node::abort`]; [`Node::begin_release`], then [`Node::finish_release`]). The
//!   first phase returns the records to write; the second runs when they are on disk. For claims, see [`dra`]; for leases,
//!   see [`shield`].
//!
//! Queries are views: they take `&self` and change nothing.
//!
//! The crate does not use IO, clocks, async, logging, gRPC, Kubernetes objects or paths. It is `no_std`, so that the
//! compiler rejects most of them.
#![no_std]

extern crate alloc;

pub mod device_plugin;
pub mod dra;
mod id;
mod import;
mod node;
mod plan;
mod pod;
mod quota;
mod resource_name;
pub mod shield;
mod spec_change;
mod view;

pub use id::{
    CallId, ClaimUid, ConnectionId, ContainerName, DeviceId, DriverName, LeaseName, Moment, PodUid,
    ProcessId, RecordId, ReservationId, ResourceName,
};
pub use import::Importing;
pub use node::{
    Blocked, CommitError, ConnectError, LastSeen, Node, PreferenceQuery, Preferences, PutError, ReleaseError,
    ReserveError, Reserved, Restored,
};
pub use pod::{
    Allocation, ClaimReference, ClaimRequest, ClaimUse, ContainerKind, ContainerRequest, Pod, PodClaim,
    PodMetadata, PodName, PodRequest, Source,
};
pub use quota::{PluginIdentity, PluginLimits, QuotaError};
pub use resource_name::InvalidResourceName;
pub use spec_change::SpecChange;
pub use view::{Availability, Capacity, DeviceView, PluginView, ResourceView};

#[cfg(test)]
mod tests;
