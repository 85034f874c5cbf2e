//! gRPC bindings of the kubelet's device APIs, one module per API version.
//!
//! | module | protobuf package | served by |
//! | --- | --- | --- |
//! | [`device_plugin::v1beta1`] | `v1beta1` | kubelet (`Registration`), plugin (`DevicePlugin`) |
//! | [`device_plugin::v1alpha2`] | `deviceplugin` | as above |
//! | [`plugin_registration`] | `pluginregistration` | plugin |
//! | [`dra::v1`] | `k8s.io.kubelet.pkg.apis.dra.v1` | driver |
//! | [`dra::v1beta1`] | `k8s.io.kubelet.pkg.apis.dra.v1beta1` | driver |
//! | [`dra::v1alpha3`] | `v1alpha3` | driver |
//! | [`dra_health::v1`] | `v1` | driver |
//! | [`dra_health::v1alpha1`] | `v1alpha1` | driver |
//! | [`pod_resources::v1`] | `v1` | kubelet |
//! | [`pod_resources::v1alpha1`] | `v1alpha1` | kubelet |
//! | [`pods::v1alpha1`] | `v1alpha1` | kubelet |
//! | [`cri::v1`] | `runtime.v1` | container runtime |
//!
//! The messages, clients and servers are generated from the files under `proto/` and checked in;
//! `tests/wire/generated.rs` generates them. Only the strings with a meaning in the protocols are written by hand.
//! Validation and domain types are deliberately absent.
//!
//! Map fields are `BTreeMap`s, so that equal messages encode to equal bytes.

// tonic qualifies every name.
#![allow(unused_qualifications)]

pub mod cri;
pub mod device_plugin;
pub mod dra;
pub mod dra_health;
pub mod plugin_registration;
pub mod pod_resources;
pub mod pods;
