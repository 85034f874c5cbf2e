//! Why a change of leases is refused. The texts reach `kubectl describe pod`.

use alloc::string::String;

use crate::id::{DeviceId, PodUid};

/// Why a lease is not granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// The kubelet has chosen no device.
    #[error("Allocate names no device")]
    NoDevices,
    /// Another lease has the name.
    #[error("the name of the lease is taken")]
    NameTaken,
}

/// Why leases cannot be prepared yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PrepareError {
    /// No lease has these devices.
    #[error("no lease of devlet has these devices")]
    Unknown,
    /// A container still has a device.
    #[error("waiting for container {container}{} to end: it still has device {device}", of_pod(.pod.as_ref()))]
    Running {
        /// The device.
        device: DeviceId,
        /// The runtime's ID of the container.
        container: String,
        /// The pod of the container.
        pod: Option<PodUid>,
    },
    /// A container from before the adoption may still have a device.
    #[error("waiting for a container{} from before devlet took over to end: it still has device {device}", of_pod(.pod.as_ref()))]
    Adopted {
        /// The device.
        device: DeviceId,
        /// The pod of the container.
        pod: Option<PodUid>,
    },
    /// A container that devlet did not see start may have a device.
    #[error("waiting for the container runtime to tell whether a container{} runs with device {device}", of_pod(.pod.as_ref()))]
    Unwitnessed {
        /// The device.
        device: DeviceId,
        /// The pod of the container.
        pod: Option<PodUid>,
    },
    /// The plugin is being called for a device.
    #[error("device {device} is being prepared for another container")]
    Preparing {
        /// The device.
        device: DeviceId,
    },
    /// The end of an earlier lease is being written.
    #[error("the earlier lease of device {device} is ending")]
    Ending {
        /// The device.
        device: DeviceId,
    },
}

/// Why a container must not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// The lease is unknown or ending.
    #[error("the lease of the container has ended: the kubelet has removed its pod")]
    Ended,
    /// The plugin has not been called.
    #[error("the devices of the container are not prepared")]
    NotPrepared,
    /// The plugin is being called for one of the devices.
    #[error("the devices of the container are being prepared for another start")]
    Preparing,
    /// A container that devlet did not see start may have a device.
    #[error("the container runtime has not told whether another container runs with device {device}")]
    Unwitnessed {
        /// The device.
        device: DeviceId,
    },
    /// Another container has a device.
    #[error("container {container} still has device {device}")]
    Running {
        /// The device.
        device: DeviceId,
        /// The runtime's ID of the other container.
        container: String,
    },
}

/// Why a lease does not end yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndError {
    /// There is no such lease.
    #[error("no such lease")]
    Unknown,
    /// It is being prepared, or it is ending.
    #[error("another change of the lease is in progress")]
    Busy,
    /// A container that devlet did not see start may run.
    #[error("the container runtime has not told whether a container of it runs")]
    Unwitnessed,
    /// A container may run.
    #[error("container {container} may still run")]
    Running {
        /// The runtime's ID of the container.
        container: String,
    },
}

fn of_pod(pod: Option<&PodUid>) -> String {
    pod.map_or_else(String::new, |pod| alloc::format!(" of pod {pod}"))
}
