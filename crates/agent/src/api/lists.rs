//! The lists of the API, at one moment: resources, devices, plugins, pods, drivers, claims and slices.

use std::collections::BTreeSet;

use devlet_client::v1;
use devlet_core::{PodUid, ResourceName};

use super::lookup::PodLookupError;
use super::service::DevletService;
use super::{convert, convert_claims, convert_cluster, kubelet_pods, lookup};

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
        let mut devices: Vec<v1::Device> = self.read(|node| {
            let names: Vec<ResourceName> = match resource.is_empty() {
                true => node.capacity(now).into_keys().collect(),
                false => vec![ResourceName::from(resource)],
            };
            let devices = names.iter().flat_map(|name| convert::devices(node, name));
            devices
                .chain(convert_claims::dra_devices(node, resource, now))
                .collect()
        });
        if self.agent.config().shield.is_some() {
            kubelet_pods::name_holders(&mut devices, &self.agent.shield().get());
        }
        devices
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
        let slices = self.slices(name);
        let (mut drivers, rejected) = self.read(|node| {
            let drivers = convert_claims::drivers(node, name, now);
            (drivers, convert_claims::rejected_drivers(node, name, now))
        });
        add_slices(&mut drivers, slices);
        (drivers, rejected)
    }

    /// Returns all claims, or those of a name.
    pub(super) fn claims(&self, name: &str) -> Vec<v1::Claim> {
        let now = self.now();
        self.read(|node| convert_claims::claims(node, name, now))
    }

    /// Returns all slices, or those of a driver.
    pub(super) fn slices(&self, driver: &str) -> Vec<v1::Slice> {
        let now = self.now();
        let cluster = self.agent.cluster();
        let (slices, wipes_since) = cluster.read(|state| (state.slices.clone(), state.wipes_slices_since));
        self.read(|node| convert_cluster::slices(node, &slices, wipes_since, driver, now))
    }

    pub(super) fn pods(&self) -> Vec<v1::Pod> {
        let now = self.now();
        let mut pods = self.kubelet_pods();
        pods.extend(self.read(|node| {
            let pods = node.pods().map(|pod| convert::pod(node, pod, now));
            pods.collect::<Vec<v1::Pod>>()
        }));
        self.agent.cluster().read(|state| {
            pods.iter_mut()
                .for_each(|pod| convert_cluster::mark(state, pod, now));
            let recorded: BTreeSet<PodUid> = pods.iter().map(uid).collect();
            let others = state.waiting.iter().filter(|(uid, _)| !recorded.contains(*uid));
            pods.extend(others.map(|(uid, pod)| convert_cluster::waiting_pod(uid, pod, now)));
        });
        pods.sort_by_cached_key(|pod| {
            let id = pod.id.clone().unwrap_or_default();
            (id.namespace, id.name, id.uid)
        });
        pods
    }

    /// Returns the pods with devices of a kubelet beside devlet.
    fn kubelet_pods(&self) -> Vec<v1::Pod> {
        if self.agent.config().shield.is_none() {
            return Vec::new();
        }
        let (state, now) = (self.agent.shield().get(), self.now());
        self.read(|node| kubelet_pods::pods(node, &state, now))
    }

    /// Returns the pods that a name refers to: one on record, those of an API server that wait, or those of a kubelet
    /// beside devlet.
    pub(super) fn pods_named(&self, name: &str) -> Result<Vec<v1::Pod>, PodLookupError> {
        let now = self.now();
        let mut of_kubelet = self.kubelet_pods();
        of_kubelet.retain(|pod| kubelet_pods::is_called(pod, name));
        if !of_kubelet.is_empty() {
            return Ok(of_kubelet);
        }
        let recorded = self.read(|node| {
            let uid = lookup::find_pod(node, name)?;
            Ok(node.pod(&uid).map(|pod| convert::pod(node, pod, now)))
        });
        self.agent.cluster().read(|state| match recorded {
            Ok(pod) => {
                let mut pods = Vec::from_iter(pod);
                pods.iter_mut()
                    .for_each(|pod| convert_cluster::mark(state, pod, now));
                Ok(pods)
            }
            Err(PodLookupError::Unknown { .. }) => {
                let found = lookup::find_waiting(state, name)?.into_iter();
                let found = found.filter_map(|uid| {
                    let pod = state.waiting.get(&uid)?;
                    Some(convert_cluster::waiting_pod(&uid, pod, now))
                });
                Ok(found.collect())
            }
            Err(error) => Err(error),
        })
    }

    /// Returns the pods that a name refers to, if there are any, or all pods for an empty name.
    pub(super) fn pods_matching(&self, name: &str) -> Vec<v1::Pod> {
        match name {
            "" => self.pods(),
            name => self.pods_named(name).unwrap_or_default(),
        }
    }
}

fn uid(pod: &v1::Pod) -> PodUid {
    PodUid::from(pod.id.as_ref().map_or("", |id| id.uid.as_str()))
}

/// Adds slices to their drivers, and the drivers that have only slices.
fn add_slices(drivers: &mut Vec<v1::Driver>, slices: Vec<v1::Slice>) {
    for slice in slices {
        let place = drivers.binary_search_by(|driver| driver.name.cmp(&slice.driver));
        let place = place.unwrap_or_else(|place| {
            let driver = v1::Driver {
                name: slice.driver.clone(),
                ..v1::Driver::default()
            };
            drivers.insert(place, driver);
            place
        });
        drivers[place].slices.push(slice);
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

pub(super) fn slice_list(revision: u64, slices: Vec<v1::Slice>) -> v1::SliceList {
    v1::SliceList { revision, slices }
}
