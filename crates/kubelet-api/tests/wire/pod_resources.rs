//! Both versions of the pod resources API.

mod v1 {
    use devlet_kubelet_api::pod_resources::v1::*;

    use crate::{decodes_as, encodes_as, strings};

    const TOPOLOGY: &[u8] = b"\x0a\x02\x08\x01"; // 4 bytes
    const CDI_DEVICE: &[u8] = b"\x0a\x0eacme.com/gpu=0"; // 16 bytes

    fn topology() -> Option<TopologyInfo> {
        Some(TopologyInfo {
            nodes: vec![NumaNode { id: 1 }],
        })
    }

    fn devices() -> ContainerDevices {
        ContainerDevices {
            resource_name: "acme.com/gpu".into(),
            device_ids: strings(["GPU-0"]),
            topology: topology(),
        }
    }

    // 14 + 7 + 2 + 4 = 0x1b
    fn devices_bytes() -> Vec<u8> {
        [b"\x0a\x0cacme.com/gpu\x12\x05GPU-0\x1a\x04", TOPOLOGY].concat()
    }

    fn memory() -> ContainerMemory {
        ContainerMemory {
            memory_type: "memory".into(),
            size: 1 << 30,
            topology: topology(),
        }
    }

    // 30 bits are four times seven and two more; 8 + 6 + 2 + 4 = 0x14
    fn memory_bytes() -> Vec<u8> {
        [b"\x0a\x06memory\x10\x80\x80\x80\x80\x04\x1a\x04", TOPOLOGY].concat()
    }

    fn share(share_id: Option<&str>) -> ClaimResource {
        ClaimResource {
            cdi_devices: vec![CdiDevice {
                name: "acme.com/gpu=0".into(),
            }],
            driver_name: "gpu.acme.com".into(),
            pool_name: "node-1".into(),
            device_name: "gpu-0".into(),
            share_id: share_id.map(str::to_owned),
        }
    }

    // 2 + 16 + 14 + 8 + 7 = 47
    fn unshared_bytes() -> Vec<u8> {
        [
            b"\x0a\x10",
            CDI_DEVICE,
            b"\x12\x0cgpu.acme.com\x1a\x06node-1\x22\x05gpu-0",
        ]
        .concat()
    }

    fn claim() -> DynamicResource {
        DynamicResource {
            claim_name: "gpu".into(),
            claim_namespace: "default".into(),
            claim_resources: vec![share(Some("s1"))],
        }
    }

    // 47 + 4 = 0x33 inside; 5 + 9 + 2 + 51 = 0x43
    fn claim_bytes() -> Vec<u8> {
        [
            b"\x12\x03gpu\x1a\x07default\x22\x33",
            &*unshared_bytes(),
            b"\x2a\x02s1",
        ]
        .concat()
    }

    fn container() -> ContainerResources {
        ContainerResources {
            name: "main".into(),
            devices: vec![devices()],
            cpu_ids: vec![2, 3],
            memory: vec![memory()],
            dynamic_resources: vec![claim()],
        }
    }

    // 6 + (2 + 27) + 4 + (2 + 20) + (2 + 67) = 130, as a varint 82 01
    fn container_bytes() -> Vec<u8> {
        [
            b"\x0a\x04main\x12\x1b",
            &*devices_bytes(),
            b"\x1a\x02\x02\x03\x22\x14",
            &*memory_bytes(),
            b"\x2a\x43",
            &*claim_bytes(),
        ]
        .concat()
    }

    fn pod() -> PodResources {
        PodResources {
            name: "pod-1".into(),
            namespace: "default".into(),
            containers: vec![container()],
            cpu_ids: vec![2, 3],
            memory: vec![memory()],
        }
    }

    // 7 + 9 + (3 + 130) + 4 + (2 + 20) = 175, as a varint af 01
    fn pod_bytes() -> Vec<u8> {
        [
            b"\x0a\x05pod-1\x12\x07default\x1a\x82\x01",
            &*container_bytes(),
            b"\x22\x02\x02\x03\x2a\x14",
            &*memory_bytes(),
        ]
        .concat()
    }

    #[test]
    fn topologies() {
        encodes_as(&topology().unwrap(), TOPOLOGY);
        encodes_as(&NumaNode { id: 1 }, b"\x08\x01");
        encodes_as(
            &NumaNode { id: -1 },
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        );
    }

    #[test]
    fn devices_of_a_container() {
        encodes_as(&devices(), &devices_bytes());
    }

    #[test]
    fn memory_of_a_container() {
        encodes_as(&memory(), &memory_bytes());
        let all = ContainerMemory {
            size: u64::MAX,
            ..ContainerMemory::default()
        };
        encodes_as(&all, b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01");
    }

    #[test]
    fn claims_of_a_container() {
        encodes_as(
            &CdiDevice {
                name: "acme.com/gpu=0".into(),
            },
            CDI_DEVICE,
        );
        encodes_as(&share(Some("s1")), &[&*unshared_bytes(), b"\x2a\x02s1"].concat());
        encodes_as(&claim(), &claim_bytes());
    }

    #[test]
    fn an_absent_share_id_is_not_an_empty_one() {
        encodes_as(&share(None), &unshared_bytes());
        encodes_as(&share(Some("")), &[&*unshared_bytes(), b"\x2a\x00"].concat());
    }

    #[test]
    fn the_former_class_name_is_skipped() {
        decodes_as(&[b"\x0a\x05class", &*claim_bytes()].concat(), &claim());
    }

    #[test]
    fn pods() {
        encodes_as(&container(), &container_bytes());
        encodes_as(&pod(), &pod_bytes());
    }

    #[test]
    fn list() {
        encodes_as(&ListPodResourcesRequest {}, b"");
        let response = ListPodResourcesResponse {
            pod_resources: vec![pod()],
        };
        encodes_as(&response, &[b"\x0a\xaf\x01", &*pod_bytes()].concat());
    }

    #[test]
    fn get() {
        let request = GetPodResourcesRequest {
            pod_name: "pod-1".into(),
            pod_namespace: "default".into(),
        };
        encodes_as(&request, b"\x0a\x05pod-1\x12\x07default");
        let response = GetPodResourcesResponse {
            pod_resources: Some(pod()),
        };
        encodes_as(&response, &[b"\x0a\xaf\x01", &*pod_bytes()].concat());
    }

    #[test]
    fn allocatable() {
        encodes_as(&AllocatableResourcesRequest {}, b"");
        let response = AllocatableResourcesResponse {
            devices: vec![devices()],
            cpu_ids: vec![0, 1, 300],
            memory: vec![memory()],
        };
        let bytes = [
            b"\x0a\x1b",
            &*devices_bytes(),
            b"\x12\x04\x00\x01\xac\x02", // packed
            b"\x1a\x14",
            &*memory_bytes(),
        ];
        encodes_as(&response, &bytes.concat());
    }

    #[test]
    fn cpus_may_be_encoded_one_by_one() {
        let response = AllocatableResourcesResponse {
            cpu_ids: vec![0, 1, 300],
            ..AllocatableResourcesResponse::default()
        };
        encodes_as(&response, b"\x12\x04\x00\x01\xac\x02");
        decodes_as(b"\x10\x00\x10\x01\x10\xac\x02", &response);
        // Both ways in one message.
        decodes_as(b"\x10\x00\x12\x03\x01\xac\x02", &response);
    }
}

mod v1alpha1 {
    use devlet_kubelet_api::pod_resources::v1alpha1::*;

    use crate::{encodes_as, strings};

    #[test]
    fn list() {
        let devices = ContainerDevices {
            resource_name: "acme.com/gpu".into(),
            device_ids: strings(["GPU-0"]),
        };
        let devices_bytes = b"\x0a\x0cacme.com/gpu\x12\x05GPU-0"; // 14 + 7 = 0x15
        encodes_as(&devices, devices_bytes);

        let container = ContainerResources {
            name: "main".into(),
            devices: vec![devices],
        };
        let container_bytes = [b"\x0a\x04main\x12\x15", devices_bytes.as_slice()].concat(); // 8 + 21 = 0x1d
        encodes_as(&container, &container_bytes);

        let pod = PodResources {
            name: "pod-1".into(),
            namespace: "default".into(),
            containers: vec![container],
        };
        let pod_bytes = [b"\x0a\x05pod-1\x12\x07default\x1a\x1d", &*container_bytes].concat(); // 18 + 29 = 0x2f
        encodes_as(&pod, &pod_bytes);

        let response = ListPodResourcesResponse {
            pod_resources: vec![pod],
        };
        encodes_as(&response, &[b"\x0a\x2f", &*pod_bytes].concat());
        encodes_as(&ListPodResourcesRequest {}, b"");
    }
}
