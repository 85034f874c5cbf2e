//! All versions of the DRA driver API.

const CLAIM: &[u8] = b"\x0a\x07default\x12\x02u1\x1a\x03gpu"; // 18 bytes
const DEVICE: &[u8] = b"\x0a\x03req\x12\x06node-1\x1a\x05gpu-0\x22\x0eacme.com/gpu=0"; // 36 bytes
const SHARE: &[u8] = b"\x2a\x02s1"; // 4 bytes, at the end of a device

/// Tests that are the same for all versions.
macro_rules! claims_and_unprepare {
    () => {
        fn claim() -> Claim {
            Claim {
                namespace: "default".into(),
                uid: "u1".into(),
                name: "gpu".into(),
            }
        }

        #[test]
        fn claims() {
            encodes_as(&claim(), CLAIM);
            let bytes = [b"\x0a\x12", CLAIM].concat();
            encodes_as(
                &NodePrepareResourcesRequest {
                    claims: vec![claim()],
                },
                &bytes,
            );
            encodes_as(
                &NodeUnprepareResourcesRequest {
                    claims: vec![claim()],
                },
                &bytes,
            );
        }

        #[test]
        fn unprepared() {
            let response = NodeUnprepareResourceResponse {
                error: "busy".into(),
            };
            encodes_as(&response, b"\x0a\x04busy");
            encodes_as(
                &NodeUnprepareResourcesResponse {
                    claims: [("u1".into(), response)].into(),
                },
                b"\x0a\x0c\x0a\x02u1\x12\x06\x0a\x04busy",
            );
        }

        #[test]
        fn an_empty_entry_is_an_entry() {
            let claims = [("u1".into(), NodePrepareResourceResponse::default())].into();
            let response = NodePrepareResourcesResponse { claims };
            encodes_as(&response, b"\x0a\x04\x0a\x02u1");
            // As Go writes it.
            decodes_as(b"\x0a\x06\x0a\x02u1\x12\x00", &response);
        }
    };
}

mod v1 {
    use devlet_kubelet_api::dra::v1::*;

    use super::{CLAIM, DEVICE, SHARE};
    use crate::{decodes_as, encodes_as, strings};

    claims_and_unprepare!();

    fn device(share_id: Option<&str>) -> Device {
        Device {
            request_names: strings(["req"]),
            pool_name: "node-1".into(),
            device_name: "gpu-0".into(),
            cdi_device_ids: strings(["acme.com/gpu=0"]),
            share_id: share_id.map(str::to_owned),
        }
    }

    #[test]
    fn prepared() {
        let device_bytes = [DEVICE, SHARE].concat(); // 36 + 4 = 0x28
        encodes_as(&device(Some("s1")), &device_bytes);

        let response = NodePrepareResourceResponse {
            devices: vec![device(Some("s1"))],
            error: "busy".into(),
        };
        let response_bytes = [b"\x0a\x28", &*device_bytes, b"\x12\x04busy"].concat(); // 2 + 40 + 6 = 0x30
        encodes_as(&response, &response_bytes);

        // The entry: 4 + 2 + 48 = 0x36.
        let claims = [("u1".into(), response)].into();
        encodes_as(
            &NodePrepareResourcesResponse { claims },
            &[b"\x0a\x36\x0a\x02u1\x12\x30", &*response_bytes].concat(),
        );
    }

    #[test]
    fn an_absent_share_id_is_not_an_empty_one() {
        encodes_as(&device(None), DEVICE);
        encodes_as(&device(Some("")), &[DEVICE, b"\x2a\x00"].concat());
    }
}

/// Tests of versions without share IDs.
macro_rules! without_share_ids {
    ($version:ident) => {
        mod $version {
            use devlet_kubelet_api::dra::$version::*;

            use super::{CLAIM, DEVICE, SHARE};
            use crate::{decodes_as, encodes_as, strings};

            claims_and_unprepare!();

            fn device() -> Device {
                Device {
                    request_names: strings(["req"]),
                    pool_name: "node-1".into(),
                    device_name: "gpu-0".into(),
                    cdi_device_ids: strings(["acme.com/gpu=0"]),
                }
            }

            #[test]
            fn prepared() {
                encodes_as(&device(), DEVICE);

                let response = NodePrepareResourceResponse {
                    devices: vec![device()],
                    error: "busy".into(),
                };
                let response_bytes = [b"\x0a\x24", DEVICE, b"\x12\x04busy"].concat(); // 2 + 36 + 6 = 0x2c
                encodes_as(&response, &response_bytes);

                // The entry: 4 + 2 + 44 = 0x32.
                let claims = [("u1".into(), response)].into();
                encodes_as(
                    &NodePrepareResourcesResponse { claims },
                    &[b"\x0a\x32\x0a\x02u1\x12\x2c", &*response_bytes].concat(),
                );
            }

            #[test]
            fn share_ids_are_skipped() {
                decodes_as(&[DEVICE, SHARE].concat(), &device());
            }

            #[test]
            fn resource_handles_of_old_kubelets_are_skipped() {
                decodes_as(&[CLAIM, b"\x22\x06handle\x2a\x00"].concat(), &claim());
            }
        }
    };
}

without_share_ids!(v1beta1);
without_share_ids!(v1alpha3);
