//! Both versions of the device plugin API.

const MOUNT: &[u8] = b"\x0a\x09/lib/acme\x12\x09/opt/acme\x18\x01"; // 24 bytes
const DEVICE_SPEC: &[u8] = b"\x0a\x08/dev/gpu\x12\x09/dev/gpu0\x1a\x02rw"; // 25 bytes
const CDI_DEVICE: &[u8] = b"\x0a\x0eacme.com/gpu=0"; // 16 bytes

mod v1beta1 {
    use std::collections::BTreeMap;

    use devlet_kubelet_api::device_plugin::v1beta1::*;
    use prost::Message;

    use super::{CDI_DEVICE, DEVICE_SPEC, MOUNT};
    use crate::{decodes_as, encodes_as, strings};

    #[test]
    fn options() {
        let options = DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        };
        encodes_as(&options, b"\x08\x01\x10\x01");
    }

    #[test]
    fn registration() {
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: "gpu.sock".into(),
            resource_name: "acme.com/gpu".into(),
            options: Some(DevicePluginOptions {
                pre_start_required: true,
                get_preferred_allocation_available: true,
            }),
        };
        encodes_as(
            &request,
            b"\x0a\x07v1beta1\x12\x08gpu.sock\x1a\x0cacme.com/gpu\x22\x04\x08\x01\x10\x01",
        );
        encodes_as(&Empty {}, b"");
    }

    #[test]
    fn absent_options_are_not_empty_options() {
        let without = RegisterRequest {
            version: VERSION.into(),
            ..RegisterRequest::default()
        };
        let with = RegisterRequest {
            options: Some(DevicePluginOptions::default()),
            ..without.clone()
        };
        encodes_as(&without, b"\x0a\x07v1beta1");
        encodes_as(&with, b"\x0a\x07v1beta1\x22\x00");
    }

    #[test]
    fn topology() {
        encodes_as(&NumaNode { id: 5 }, b"\x08\x05");
        let nodes = vec![NumaNode { id: 0 }, NumaNode { id: 1 }];
        encodes_as(&TopologyInfo { nodes }, b"\x0a\x00\x0a\x02\x08\x01");
    }

    #[test]
    fn a_negative_numa_node_takes_ten_bytes() {
        // 64 one bits: nine times seven, and one more.
        encodes_as(
            &NumaNode { id: -1 },
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        );
    }

    #[test]
    fn device() {
        let device = Device {
            id: "GPU-0".into(),
            health: HEALTHY.into(),
            topology: Some(TopologyInfo {
                nodes: vec![NumaNode { id: 1 }],
            }),
        };
        encodes_as(&device, b"\x0a\x05GPU-0\x12\x07Healthy\x1a\x04\x0a\x02\x08\x01");
    }

    #[test]
    fn device_list() {
        let device = |id: &str, health: &str| Device {
            id: id.into(),
            health: health.into(),
            topology: None,
        };
        let list = ListAndWatchResponse {
            devices: vec![device("GPU-0", HEALTHY), device("GPU-1", UNHEALTHY)],
        };
        encodes_as(
            &list,
            b"\x0a\x10\x0a\x05GPU-0\x12\x07Healthy\x0a\x12\x0a\x05GPU-1\x12\x09Unhealthy",
        );
    }

    #[test]
    fn pre_start() {
        let request = PreStartContainerRequest {
            devices_ids: strings(["GPU-0", "GPU-1"]),
        };
        encodes_as(&request, b"\x0a\x05GPU-0\x0a\x05GPU-1");
        encodes_as(&PreStartContainerResponse {}, b"");
    }

    #[test]
    fn preferred_allocation() {
        let request = ContainerPreferredAllocationRequest {
            available_device_ids: strings(["a", "b"]),
            must_include_device_ids: strings(["a"]),
            allocation_size: 2,
        };
        encodes_as(&request, b"\x0a\x01a\x0a\x01b\x12\x01a\x18\x02");
        encodes_as(
            &PreferredAllocationRequest {
                container_requests: vec![request],
            },
            b"\x0a\x0b\x0a\x01a\x0a\x01b\x12\x01a\x18\x02",
        );

        let response = ContainerPreferredAllocationResponse {
            device_ids: strings(["a", "b"]),
        };
        encodes_as(&response, b"\x0a\x01a\x0a\x01b");
        encodes_as(
            &PreferredAllocationResponse {
                container_responses: vec![response],
            },
            b"\x0a\x06\x0a\x01a\x0a\x01b",
        );
    }

    #[test]
    fn allocate_request() {
        let request = ContainerAllocateRequest {
            devices_ids: strings(["GPU-0", "GPU-1"]),
        };
        encodes_as(&request, b"\x0a\x05GPU-0\x0a\x05GPU-1");
        encodes_as(
            &AllocateRequest {
                container_requests: vec![request],
            },
            b"\x0a\x0e\x0a\x05GPU-0\x0a\x05GPU-1",
        );
    }

    #[test]
    fn allocate_response() {
        let mount = Mount {
            container_path: "/lib/acme".into(),
            host_path: "/opt/acme".into(),
            read_only: true,
        };
        let device = DeviceSpec {
            container_path: "/dev/gpu".into(),
            host_path: "/dev/gpu0".into(),
            permissions: "rw".into(),
        };
        let cdi_device = CdiDevice {
            name: "acme.com/gpu=0".into(),
        };
        encodes_as(&mount, MOUNT);
        encodes_as(&device, DEVICE_SPEC);
        encodes_as(&cdi_device, CDI_DEVICE);

        let response = ContainerAllocateResponse {
            envs: BTreeMap::from([("B".into(), "y".into()), ("A".into(), "x".into())]),
            mounts: vec![mount],
            devices: vec![device],
            annotations: BTreeMap::from([("k".into(), "v".into())]),
            cdi_devices: vec![cdi_device],
        };
        let bytes = [
            b"\x0a\x06\x0a\x01A\x12\x01x\x0a\x06\x0a\x01B\x12\x01y".as_slice(), // 16, in key order
            b"\x12\x18",                                                        // 2 + 24
            MOUNT,
            b"\x1a\x19", // 2 + 25
            DEVICE_SPEC,
            b"\x22\x06\x0a\x01k\x12\x01v", // 8
            b"\x2a\x10",                   // 2 + 16
            CDI_DEVICE,
        ]
        .concat();
        encodes_as(&response, &bytes);
        // 16 + 26 + 27 + 8 + 18 = 95 = 0x5f
        encodes_as(
            &AllocateResponse {
                container_responses: vec![response],
            },
            &[b"\x0a\x5f", bytes.as_slice()].concat(),
        );
    }

    #[test]
    fn a_map_entry_may_contain_empty_values() {
        // Go always writes key and value; prost omits empty ones.
        let response = ContainerAllocateResponse {
            envs: BTreeMap::from([("A".into(), String::new())]),
            ..ContainerAllocateResponse::default()
        };
        encodes_as(&response, b"\x0a\x03\x0a\x01A");
        decodes_as(b"\x0a\x05\x0a\x01A\x12\x00", &response);
    }

    #[test]
    fn the_last_of_two_map_entries_with_one_key_wins() {
        let response = ContainerAllocateResponse {
            envs: BTreeMap::from([("A".into(), "y".into())]),
            ..ContainerAllocateResponse::default()
        };
        decodes_as(b"\x0a\x06\x0a\x01A\x12\x01x\x0a\x06\x0a\x01A\x12\x01y", &response);
    }

    #[test]
    fn unknown_fields_are_skipped() {
        let device = Device {
            id: "GPU-0".into(),
            health: HEALTHY.into(),
            topology: None,
        };
        let bytes = [
            b"\x7a\x03new".as_slice(), // 15, a string: 15 << 3 | 2 = 0x7a
            b"\x0a\x05GPU-0",
            b"\x80\x01\x05",                             // 16, a varint: 16 << 3 = 0x80
            b"\x8d\x01\x01\x02\x03\x04",                 // 17, four bytes: 17 << 3 | 5 = 0x8d
            b"\x91\x01\x01\x02\x03\x04\x05\x06\x07\x08", // 18, eight bytes: 18 << 3 | 1 = 0x91
            b"\x12\x07Healthy",
        ]
        .concat();
        decodes_as(&bytes, &device);
        assert_eq!(Empty::decode(b"\x0a\x03new".as_slice()), Ok(Empty {}));
    }

    #[test]
    fn a_malformed_message_is_an_error() {
        assert!(Device::decode(b"\x0a\x05GPU".as_slice()).is_err(), "cut off");
        assert!(
            Device::decode(b"\x0a\x02\xc3\x28".as_slice()).is_err(),
            "not UTF-8"
        );
        assert!(
            Device::decode(b"\x08\x05".as_slice()).is_err(),
            "a number where a string belongs"
        );
        assert!(Device::decode(b"\x02\x00".as_slice()).is_err(), "field 0");
    }
}

mod v1alpha2 {
    use std::collections::BTreeMap;

    use devlet_kubelet_api::device_plugin::v1alpha2::*;

    use super::{DEVICE_SPEC, MOUNT};
    use crate::{encodes_as, strings};

    #[test]
    fn registration() {
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: "gpu.sock".into(),
            resource_name: "acme.com/gpu".into(),
        };
        encodes_as(&request, b"\x0a\x08v1alpha2\x12\x08gpu.sock\x1a\x0cacme.com/gpu");
        encodes_as(&Empty {}, b"");
    }

    #[test]
    fn device_list() {
        let device = Device {
            id: "GPU-0".into(),
            health: HEALTHY.into(),
        };
        let other = Device {
            id: "GPU-1".into(),
            health: UNHEALTHY.into(),
        };
        encodes_as(&device, b"\x0a\x05GPU-0\x12\x07Healthy");
        encodes_as(
            &ListAndWatchResponse {
                devices: vec![device, other],
            },
            b"\x0a\x10\x0a\x05GPU-0\x12\x07Healthy\x0a\x12\x0a\x05GPU-1\x12\x09Unhealthy",
        );
    }

    #[test]
    fn allocate_request() {
        let request = AllocateRequest {
            devices_ids: strings(["GPU-0", "GPU-1"]),
        };
        encodes_as(&request, b"\x0a\x05GPU-0\x0a\x05GPU-1");
    }

    #[test]
    fn allocate_response() {
        let mount = Mount {
            container_path: "/lib/acme".into(),
            host_path: "/opt/acme".into(),
            read_only: true,
        };
        let device = DeviceSpec {
            container_path: "/dev/gpu".into(),
            host_path: "/dev/gpu0".into(),
            permissions: "rw".into(),
        };
        encodes_as(&mount, MOUNT);
        encodes_as(&device, DEVICE_SPEC);

        let response = AllocateResponse {
            envs: BTreeMap::from([("B".into(), "y".into()), ("A".into(), "x".into())]),
            mounts: vec![mount],
            devices: vec![device],
            annotations: BTreeMap::from([("k".into(), "v".into())]),
        };
        let bytes = [
            b"\x0a\x06\x0a\x01A\x12\x01x\x0a\x06\x0a\x01B\x12\x01y".as_slice(),
            b"\x12\x18",
            MOUNT,
            b"\x1a\x19",
            DEVICE_SPEC,
            b"\x22\x06\x0a\x01k\x12\x01v",
        ];
        encodes_as(&response, &bytes.concat());
    }
}
