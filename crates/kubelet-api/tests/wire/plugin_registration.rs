//! The registration handshake.

use devlet_kubelet_api::plugin_registration::*;
use devlet_kubelet_api::{device_plugin, dra};

use crate::{strings, travels_as};

#[test]
fn who_a_dra_driver_is() {
    let info = PluginInfo {
        r#type: DRA_PLUGIN.into(),
        name: "gpu.acme.com".into(),
        endpoint: "/run/dra.sock".into(),
        supported_versions: strings([dra::v1::SERVICE, dra::v1beta1::SERVICE, dra::v1alpha3::SERVICE]),
    };
    let bytes = [
        b"\x0a\x09DRAPlugin".as_slice(),
        b"\x12\x0cgpu.acme.com",
        b"\x1a\x0d/run/dra.sock",
        b"\x22\x0cv1.DRAPlugin\x22\x11v1beta1.DRAPlugin\x22\x14v1alpha3.NodeService",
    ];
    travels_as(&info, &bytes.concat());
    travels_as(&InfoRequest {}, b"");
}

#[test]
fn who_other_plugins_are() {
    let device_plugin = PluginInfo {
        r#type: DEVICE_PLUGIN.into(),
        supported_versions: strings([device_plugin::v1beta1::VERSION]),
        ..PluginInfo::default()
    };
    travels_as(&device_plugin, b"\x0a\x0cDevicePlugin\x22\x07v1beta1");
    let storage = PluginInfo {
        r#type: CSI_PLUGIN.into(),
        ..PluginInfo::default()
    };
    travels_as(&storage, b"\x0a\x09CSIPlugin");
}

#[test]
fn what_came_of_it() {
    let status = RegistrationStatus {
        plugin_registered: true,
        error: "why".into(),
    };
    travels_as(&status, b"\x08\x01\x12\x03why");
    travels_as(&RegistrationStatusResponse {}, b"");
}
