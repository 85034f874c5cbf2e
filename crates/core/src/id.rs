//! Identifier types and points in time.

use alloc::sync::Arc;
use core::borrow::Borrow;
use core::fmt;

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Returns the text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }

        impl From<alloc::string::String> for $name {
            fn from(text: alloc::string::String) -> Self {
                Self(text.into())
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    )*};
}

names! {
    /// A pod's UID.
    PodUid,
    /// A container's name, unique within its pod.
    ContainerName,
    /// An extended resource, such as `acme.com/gpu`.
    ResourceName,
    /// A device ID, unique within its resource only.
    DeviceId,
    /// A ResourceClaim's UID.
    ClaimUid,
    /// The name of a DRA driver, such as `gpu.acme.com`.
    DriverName,
    /// The name of a lease, unguessable.
    LeaseName,
}

/// One connection to a plugin. A number is never reused, so late messages of a replaced connection are recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub(crate) u64);

/// A process that runs a plugin or driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId {
    /// The user that it runs as.
    pub uid: u32,
    /// The process ID, if it is visible from this PID namespace.
    pub pid: Option<i32>,
}

/// One reservation of devices and claims during an admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReservationId(pub(crate) u64);

/// One call of a DRA plugin. A number is never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub(crate) u64);

/// One write of claim records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId(pub(crate) u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A point in time: milliseconds since the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// Returns the moment this many milliseconds later.
    pub fn after(self, milliseconds: u64) -> Self {
        Self(self.0.saturating_add(milliseconds))
    }

    /// Returns the milliseconds since `earlier`; 0 if the clock was set back.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
