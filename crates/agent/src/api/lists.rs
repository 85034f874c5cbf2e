//! The lists of the API, at one moment: resources, devices, plugins, pods, drivers and claims.

use devlet_client::v1;
use devlet_core::ResourceName;

use super::service::DevletService;
use super::{convert, convert_claims, lookup};

/// Drivers, and plugins of drivers that were rejected.
pub(super) type Drivers = (Vec<v1::Driver>, Vec<v1::RefusedDriver>);

impl DevletService {
    pub(super) fn resources(&self) -> Vec<v1::Resource> {
        let now = self.now();
        self.read(|node| convert::resources(node, now))
    }

    /// Returns the devices of all resources and DRA drivers, or of one.
    pub(super) fn devices(&self, resource: &str) -> Vec<v1::Device> {
        let now = self.now();
        self.read(|node| {
            let names: Vec<ResourceName> = match resource.is_empty() {
                true => node.capacity(now).into_keys().collect(),
                false => vec![ResourceName::from(resource)],
            };
            let devices = names.iter().flat_map(|name| convert::devices(node, name));
            devices
                .chain(convert_claims::dra_devices(node, resource, now))
                .collect()
        })
    }

    pub(super) fn plugins(&self) -> Vec<v1::Plugin> {
        let now = self.now();
        self.read(|node| {
            let connected = node.plugins().into_iter();
            let connected = connected.map(|view| convert::plugin(view, now));
            let rejected = node.rejected_plugins(now);
            let rejected = rejected.map(|each| convert::rejected_plugin(each, now));
            connected.chain(rejected).collect()
        })
    }

    /// Returns all drivers, or those of a name.
    pub(super) fn drivers(&self, name: &str) -> Drivers {
        let now = self.now();
        self.read(|node| {
            let drivers = convert_claims::drivers(node, name, now);
            (drivers, convert_claims::rejected_drivers(node, name, now))
        })
    }

    /// Returns all claims, or those of a name.
    pub(super) fn claims(&self, name: &str) -> Vec<v1::Claim> {
        let now = self.now();
        self.read(|node| convert_claims::claims(node, name, now))
    }

    fn pods(&self) -> Vec<v1::Pod> {
        let now = self.now();
        let pods = self.read(|node| node.pods().map(|pod| convert::pod(node, pod, now)).collect());
        let mut pods: Vec<v1::Pod> = pods;
        pods.sort_by_cached_key(|pod| {
            let id = pod.id.clone().unwrap_or_default();
            (id.namespace, id.name, id.uid)
        });
        pods
    }

    /// Returns the pod that a name refers to, if it exists, or all pods for an empty name.
    pub(super) fn pods_matching(&self, name: &str) -> Vec<v1::Pod> {
        if name.is_empty() {
            return self.pods();
        }
        let now = self.now();
        self.read(|node| {
            let uid = lookup::find_pod(node, name).ok();
            let pod = uid.and_then(|uid| node.pod(&uid));
            pod.map(|pod| convert::pod(node, pod, now)).into_iter().collect()
        })
    }
}

pub(super) fn resource_list(revision: u64, resources: Vec<v1::Resource>) -> v1::ResourceList {
    v1::ResourceList { revision, resources }
}

pub(super) fn device_list(revision: u64, devices: Vec<v1::Device>) -> v1::DeviceList {
    v1::DeviceList { revision, devices }
}

pub(super) fn plugin_list(revision: u64, plugins: Vec<v1::Plugin>) -> v1::PluginList {
    v1::PluginList { revision, plugins }
}

pub(super) fn pod_list(revision: u64, pods: Vec<v1::Pod>) -> v1::PodList {
    v1::PodList { revision, pods }
}

pub(super) fn driver_list(revision: u64, (drivers, refused): Drivers) -> v1::DriverList {
    v1::DriverList {
        revision,
        drivers,
        refused,
    }
}

pub(super) fn claim_list(revision: u64, claims: Vec<v1::Claim>) -> v1::ClaimList {
    v1::ClaimList { revision, claims }
}
