//! The API between the kubelet and device plugins.

/// The version that all plugins in use implement.
pub mod v1beta1 {
    include!("generated/deviceplugin/v1beta1.rs");

    /// [`RegisterRequest::version`] of a plugin.
    pub const VERSION: &str = "v1beta1";

    /// [`Device::health`] of a device that can be allocated.
    pub const HEALTHY: &str = "Healthy";

    /// [`Device::health`] of a device that cannot be allocated.
    pub const UNHEALTHY: &str = "Unhealthy";

    /// The file name of the socket on which the kubelet serves `Registration`. The plugins' sockets are in the
    /// same directory.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
}

/// The version of 2017. No supported kubelet serves it.
pub mod v1alpha2 {
    include!("generated/deviceplugin/v1alpha2.rs");

    /// [`RegisterRequest::version`] of a plugin.
    pub const VERSION: &str = "v1alpha2";

    /// [`Device::health`] of a device that can be allocated.
    pub const HEALTHY: &str = "Healthy";

    /// [`Device::health`] of a device that cannot be allocated.
    pub const UNHEALTHY: &str = "Unhealthy";

    /// The file name of the socket on which the kubelet serves `Registration`.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
}
