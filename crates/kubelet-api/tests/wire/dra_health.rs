//! Both versions of DRA device health, which are the same on the wire.

const DEVICE: &[u8] = b"\x0a\x06node-1\x12\x05gpu-0"; // 15 bytes

macro_rules! health {
    ($version:ident) => {
        mod $version {
            use devlet_kubelet_api::dra_health::$version::*;
            use prost::Message;

            use super::DEVICE;
            use crate::encodes_as;

            #[test]
            fn report() {
                let device = DeviceIdentifier {
                    pool_name: "node-1".into(),
                    device_name: "gpu-0".into(),
                };
                encodes_as(&device, DEVICE);

                let health = DeviceHealth {
                    device: Some(device),
                    health: HealthStatus::Unhealthy.into(),
                    last_updated_time: 300,
                    health_check_timeout_seconds: 60,
                    message: "hot".into(),
                };
                // 2 + 15 + 2 + 3 + 2 + 5 = 0x1d
                let bytes = [
                    b"\x0a\x0f",
                    DEVICE,
                    b"\x10\x02\x18\xac\x02\x20\x3c\x2a\x03hot",
                ]
                .concat();
                encodes_as(&health, &bytes);
                encodes_as(
                    &NodeWatchResourcesResponse {
                        devices: vec![health],
                    },
                    &[b"\x0a\x1d", &*bytes].concat(),
                );
                encodes_as(&NodeWatchResourcesRequest {}, b"");
            }

            #[test]
            fn states() {
                let state = |health: HealthStatus| DeviceHealth {
                    health: health.into(),
                    ..DeviceHealth::default()
                };
                encodes_as(&state(HealthStatus::Unknown), b"");
                encodes_as(&state(HealthStatus::Healthy), b"\x10\x01");
                encodes_as(&state(HealthStatus::Unhealthy), b"\x10\x02");
            }

            #[test]
            fn an_unknown_state_reads_as_unknown() {
                let health = DeviceHealth::decode(b"\x10\x07".as_slice()).unwrap();
                assert_eq!(health.health(), HealthStatus::Unknown);
                encodes_as(&health, b"\x10\x07");
            }

            #[test]
            fn a_negative_timeout_takes_ten_bytes() {
                let health = DeviceHealth {
                    health_check_timeout_seconds: -1,
                    ..DeviceHealth::default()
                };
                encodes_as(&health, b"\x20\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01");
            }
        }
    };
}

health!(v1);
health!(v1alpha1);
