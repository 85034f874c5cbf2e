//! The registration handshake.

use devlet_kubelet_api::plugin_registration::*;
use devlet_kubelet_api::{device_plugin, dra};

use crate::{encodes_as, strings};

#[test]
fn info_of_a_dra_driver() {
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
    encodes_as(&info, &bytes.concat());
    encodes_as(&InfoRequest {}, b"");
}

#[test]
fn info_of_other_plugins() {
    let device_plugin = PluginInfo {
        r#type: DEVICE_PLUGIN.into(),
        supported_versions: strings([device_plugin::v1beta1::VERSION]),
        ..PluginInfo::default()
    };
    encodes_as(&device_plugin, b"\x0a\x0cDevicePlugin\x22\x07v1beta1");
    let storage = PluginInfo {
        r#type: CSI_PLUGIN.into(),
        ..PluginInfo::default()
    };
    encodes_as(&storage, b"\x0a\x09CSIPlugin");
}

#[test]
fn registration_status() {
    let status = RegistrationStatus {
        plugin_registered: true,
        error: "why".into(),
    };
    encodes_as(&status, b"\x08\x01\x12\x03why");
    encodes_as(&RegistrationStatusResponse {}, b"");
}
