//! The handshake between the kubelet and a plugin found by its socket.
//!
//! The package does not contain a version, so this module does not either: the three versions of the kubelet are
//! identical on the wire.

include!("generated/pluginregistration/v1.rs");

/// [`PluginInfo::type`](PluginInfo#structfield.type) of a storage driver.
pub const CSI_PLUGIN: &str = "CSIPlugin";

/// [`PluginInfo::type`](PluginInfo#structfield.type) of a device plugin.
pub const DEVICE_PLUGIN: &str = "DevicePlugin";

/// [`PluginInfo::type`](PluginInfo#structfield.type) of a DRA driver.
pub const DRA_PLUGIN: &str = "DRAPlugin";
