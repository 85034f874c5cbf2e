//! Configuration of a node.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use devlet_core::{DriverName, Node, PluginIdentity, ResourceName};

use crate::access::Access;
use crate::limits::{LimitExceeded, Limits};
use crate::resource_name;

/// Configuration of a node. [`Config::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct Config {
    /// Root directory of sockets and state, with the layout of the kubelet's.
    pub root: PathBuf,
    /// Deadlines of calls on plugins.
    pub deadlines: Deadlines,
    /// Maximum time of an admission without a time of its own, waits for plugins included.
    pub wait: Duration,
    /// Resources that other programs serve: `example.org/*`, `acme.com/seat`.
    pub foreign: Vec<String>,
    /// Access rules.
    pub access: Access,
    /// Treatment of pods that were admitted over our API before the machine rebooted.
    pub on_reboot: OnReboot,
    /// Limits on requests of peers.
    pub limits: Limits,
    /// The kubelet to stand beside, if there is one.
    pub shield: Option<Shield>,
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

/// A kubelet that devlet shields from device plugins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shield {
    /// The root directory of the kubelet.
    pub kubelet: PathBuf,
    /// The directory of the kubelet's static pods.
    pub static_pods: PathBuf,
    /// The directory where CDI specs are written. The runtime must read it.
    pub cdi: PathBuf,
    /// The directory for CDI specs that must survive a reboot, after devlet has left the kubelet.
    pub permanent_cdi: PathBuf,
    /// Time during which the devices of a plugin that is away stay advertised.
    pub away: Duration,
    /// The socket of the container runtime, to check its CDI configuration.
    pub runtime: Option<PathBuf>,
    /// `true` to register only after the runtime has told that its CDI configuration is right.
    pub require_runtime: bool,
    /// The program that the runtime calls when a container starts and ends.
    pub hook: PathBuf,
}

impl Shield {
    /// Returns the default configuration for a kubelet's root directory. `hook` is the devlet program.
    pub fn new(kubelet: impl Into<PathBuf>, hook: impl Into<PathBuf>) -> Self {
        Self {
            kubelet: kubelet.into(),
            static_pods: PathBuf::from("/etc/kubernetes/manifests"),
            cdi: PathBuf::from("/var/run/cdi"),
            permanent_cdi: PathBuf::from("/etc/cdi"),
            away: Duration::from_secs(600),
            runtime: None,
            require_runtime: false,
            hook: hook.into(),
        }
    }

    /// Returns the time during which devices of a plugin that is away stay advertised, in milliseconds.
    pub(crate) fn away_ms(&self) -> u64 {
        u64::try_from(self.away.as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns the directory where devlet registers as a device plugin.
    pub fn device_plugins(&self) -> PathBuf {
        self.kubelet.join("device-plugins")
    }

    /// Returns the kubelet's checkpoint of devices.
    pub fn checkpoint(&self) -> PathBuf {
        self.device_plugins().join("kubelet_internal_checkpoint")
    }
}

/// Deadlines of calls on plugins and drivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deadlines {
    /// To accept a connection.
    pub dial: Duration,
    /// `GetDevicePluginOptions`.
    pub options: Duration,
    /// `GetPreferredAllocation`. A late answer is ignored.
    pub preferred: Duration,
    /// `Allocate`.
    pub allocate: Duration,
    /// `Allocate` for some resources, by name or `acme.com/*`. The longest matching pattern counts.
    pub allocate_by_resource: BTreeMap<String, Duration>,
    /// `PreStartContainer`.
    pub pre_start: Duration,
    /// `NodePrepareResources` and `NodeUnprepareResources`.
    pub prepare: Duration,
    /// `NodePrepareResources` and `NodeUnprepareResources` for some drivers, by name.
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
    /// Returns the deadline of `Allocate` for this resource.
    pub fn allocate_of(&self, resource: &ResourceName) -> Duration {
        self.allocate_by_resource
            .iter()
            .filter(|(pattern, _)| resource_name::matches(pattern, resource.as_str()))
            .max_by_key(|(pattern, _)| pattern.len())
            .map_or(self.allocate, |(_, deadline)| *deadline)
    }

    /// Returns the deadline of this driver to prepare or unprepare claims.
    pub fn prepare_of(&self, driver: &DriverName) -> Duration {
        let own = self.prepare_by_driver.get(driver.as_str());
        own.copied().unwrap_or(self.prepare)
    }
}

impl Config {
    /// Returns the default configuration for a root directory.
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
            shield: None,
        }
    }

    /// Checks that the node has room for a plugin.
    pub(crate) fn check_plugin_quota(
        &self,
        node: &Node,
        plugin: PluginIdentity<'_>,
    ) -> Result<(), LimitExceeded> {
        let limits = self.limits.plugin_limits();
        let checked = node.check_plugin_quota(plugin, &limits, |uid| self.access.is_trusted(uid));
        checked.map_err(|error| self.limits.quota_exceeded(&error))
    }

    /// Returns the directory of the device plugins' sockets and of the kubelet's checkpoint.
    pub fn device_plugins(&self) -> PathBuf {
        self.root.join("device-plugins")
    }

    /// Returns the socket at which device plugins register.
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join("kubelet.sock")
    }

    /// Returns the kubelet's checkpoint of device plugins.
    pub fn kubelet_checkpoint(&self) -> PathBuf {
        self.device_plugins().join("kubelet_internal_checkpoint")
    }

    /// Returns the kubelet's checkpoint of claims.
    pub fn kubelet_claims(&self) -> PathBuf {
        self.root.join("dra_manager_state")
    }

    /// Returns the directory that is watched for sockets of plugins.
    pub fn plugins_registry(&self) -> PathBuf {
        self.root.join("plugins_registry")
    }

    /// Returns the directory of devlet's own files.
    pub fn own(&self) -> PathBuf {
        self.root.join("devlet")
    }

    /// Returns the socket of the API.
    pub fn api_socket(&self) -> PathBuf {
        self.own().join("devlet.sock")
    }

    /// Returns the database.
    pub fn database(&self) -> PathBuf {
        self.own().join("state.redb")
    }

    /// Returns the file outside of devlet's own directory with the node's id.
    pub fn node_id(&self) -> PathBuf {
        self.root.join(".devlet-node-id")
    }

    /// Returns the file that exists while devlet has handed its devices back to the kubelet.
    pub fn left_marker(&self) -> PathBuf {
        self.own().join("left-kubelet")
    }

    /// Returns the lock file, which keeps a second node off the root directory.
    pub fn lock(&self) -> PathBuf {
        self.own().join("lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_matching_pattern_sets_the_deadline() {
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
