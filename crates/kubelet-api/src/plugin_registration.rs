//! How the kubelet asks a plugin whose socket it found who it is.
//!
//! The package has no version in it, so neither has this module: the three versions that kubelets have had are
//! the same on the wire.

include!("generated/pluginregistration/v1.rs");

/// [`PluginInfo::type`](PluginInfo#structfield.type) of a storage driver.
pub const CSI_PLUGIN: &str = "CSIPlugin";

/// [`PluginInfo::type`](PluginInfo#structfield.type) of a device plugin.
pub const DEVICE_PLUGIN: &str = "DevicePlugin";

/// [`PluginInfo::type`](PluginInfo#structfield.type) of a DRA driver.
pub const DRA_PLUGIN: &str = "DRAPlugin";
