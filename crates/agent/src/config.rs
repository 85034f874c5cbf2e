//! What can be set.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use devlet_core::{DriverName, ResourceName};

use crate::access::Access;
use crate::limits::Limits;
use crate::resource_name;

/// How a node is set up. [`Config::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where plugins look for us and we keep our state: the kubelet's layout below a directory of our choice.
    pub root: PathBuf,
    /// How long plugins may take.
    pub deadlines: Deadlines,
    /// How long an admission may take, plugins that are not there yet included, unless its caller says otherwise.
    pub wait: Duration,
    /// Resources that others serve: `example.org/*`, `acme.com/seat`.
    pub foreign: Vec<String>,
    /// Who may do what.
    pub access: Access,
    /// What becomes of pods that were admitted over our API before the machine booted.
    pub on_reboot: OnReboot,
    /// How much peers may ask of the node.
    pub limits: Limits,
}

/// Treatment of pods that were admitted over our API before the machine rebooted. Other pods are always kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnReboot {
    /// They are kept, and marked as admitted before the reboot.
    #[default]
    Keep,
    /// They are released.
    Release,
}

/// How long plugins may take to answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deadlines {
    /// To accept a connection.
    pub dial: Duration,
    /// `GetDevicePluginOptions`.
    pub options: Duration,
    /// `GetPreferredAllocation`: advice that comes too late is done without.
    pub preferred: Duration,
    /// `Allocate`.
    pub allocate: Duration,
    /// `Allocate`, for some resources: by name or `acme.com/*`; the longest fitting pattern counts.
    pub allocate_by_resource: BTreeMap<String, Duration>,
    /// `PreStartContainer`.
    pub pre_start: Duration,
    /// `NodePrepareResources` and `NodeUnprepareResources`.
    pub prepare: Duration,
    /// The same, for some drivers by name.
    pub prepare_by_driver: BTreeMap<String, Duration>,
    /// `GetInfo` of a socket in `plugins_registry`.
    pub info: Duration,
    /// `NotifyRegistrationStatus`.
    pub notify: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            dial: seconds(10),
            options: seconds(10),
            preferred: seconds(10),
            allocate: seconds(30),
            allocate_by_resource: BTreeMap::new(),
            pre_start: seconds(30),
            prepare: seconds(45),
            prepare_by_driver: BTreeMap::new(),
            info: seconds(1),
            notify: seconds(5),
        }
    }
}

impl Deadlines {
    /// How long `Allocate` of this resource may take.
    pub fn allocate_of(&self, resource: &ResourceName) -> Duration {
        self.allocate_by_resource
            .iter()
            .filter(|(pattern, _)| resource_name::matches(pattern, resource.as_str()))
            .max_by_key(|(pattern, _)| pattern.len())
            .map_or(self.allocate, |(_, deadline)| *deadline)
    }

    /// How long this driver may take to prepare claims, or to undo that.
    pub fn prepare_of(&self, driver: &DriverName) -> Duration {
        let own = self.prepare_by_driver.get(driver.as_str());
        own.copied().unwrap_or(self.prepare)
    }
}

impl Config {
    /// The defaults, for a root directory.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let own_uid = rustix::process::geteuid().as_raw();
        Self {
            root: root.into(),
            deadlines: Deadlines::default(),
            wait: Duration::from_secs(60),
            foreign: Vec::new(),
            access: Access {
                own_uid,
                ..Access::default()
            },
            on_reboot: OnReboot::default(),
            limits: Limits::default(),
        }
    }

    /// The directory of the device plugins' sockets and of the kubelet's checkpoint.
    pub fn device_plugins(&self) -> PathBuf {
        self.root.join("device-plugins")
    }

    /// The socket that device plugins register at.
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join("kubelet.sock")
    }

    /// The kubelet's own state file.
    pub fn kubelet_checkpoint(&self) -> PathBuf {
        self.device_plugins().join("kubelet_internal_checkpoint")
    }

    /// The kubelet's own state file about claims.
    pub fn kubelet_claims(&self) -> PathBuf {
        self.root.join("dra_manager_state")
    }

    /// The directory in which plugins leave sockets to be found.
    pub fn plugins_registry(&self) -> PathBuf {
        self.root.join("plugins_registry")
    }

    /// The directory of what is ours alone.
    pub fn own(&self) -> PathBuf {
        self.root.join("devlet")
    }

    /// The socket of our API.
    pub fn api_socket(&self) -> PathBuf {
        self.own().join("devlet.sock")
    }

    /// The database.
    pub fn database(&self) -> PathBuf {
        self.own().join("state.redb")
    }

    /// The file outside of our own directory that keeps the node's id.
    pub fn node_id(&self) -> PathBuf {
        self.root.join(".devlet-node-id")
    }

    /// The lock that keeps a second node off the root.
    pub fn lock(&self) -> PathBuf {
        self.own().join("lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_fitting_pattern_sets_the_deadline() {
        let seconds = Duration::from_secs;
        let patterns = [("acme.com/*", 5), ("acme.com/gpu", 7), ("*", 3)];
        let by_resource = patterns.map(|(pattern, time)| (pattern.to_owned(), seconds(time)));
        let deadlines = Deadlines {
            allocate_by_resource: BTreeMap::from(by_resource),
            ..Deadlines::default()
        };
        for (resource, time) in [("acme.com/gpu", 7), ("acme.com/nic", 5), ("other.org/x", 3)] {
            assert_eq!(
                deadlines.allocate_of(&resource.into()),
                seconds(time),
                "{resource}"
            );
        }
        assert_eq!(
            Deadlines::default().allocate_of(&"acme.com/gpu".into()),
            seconds(30)
        );
    }

    #[test]
    fn a_driver_may_have_a_deadline_of_its_own() {
        let deadlines = Deadlines {
            prepare_by_driver: BTreeMap::from([("gpu.acme.com".to_owned(), Duration::from_secs(300))]),
            ..Deadlines::default()
        };
        assert_eq!(
            deadlines.prepare_of(&"gpu.acme.com".into()),
            Duration::from_secs(300)
        );
        assert_eq!(
            deadlines.prepare_of(&"nic.acme.com".into()),
            Duration::from_secs(45)
        );
    }
}
