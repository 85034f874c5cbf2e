//! How much a peer may ask of the node.
//!
//! Whatever is over a limit is refused whole, with an error that names the limit as the configuration does, and is
//! counted. A list that comes too often is no error: only the newest one counts ([`devlet_uds::rate_limit::RateLimiter`]).

pub(crate) mod portions;
pub(crate) mod seats;

use std::fmt;

use devlet_core::device_plugin::run_options::RunOptions;
use devlet_uds::server::ServerLimits;

/// Every limit. The names are those of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// What our servers put up with.
    pub server: ServerLimits,
    /// The same on our own socket, where callers wait for plugins: connections that one user may have at a time, and calls
    /// on one of them. Default: 4,096.
    pub callers_per_uid: usize,
    /// Bytes of a request on our own API. Default: 64 MiB, for whole state files.
    pub request_bytes: usize,
    /// Bytes of a pod's manifest on our own API. Default: 1 MiB, about as much as an API server takes.
    pub manifest_bytes: usize,
    /// Bytes of what a plugin says about itself: `Register`, and the answers to `GetInfo` and
    /// `GetDevicePluginOptions`. Default: 64 KiB.
    pub registration_bytes: usize,
    /// Bytes of a list, and of an answer to `GetPreferredAllocation`. Default: 64 MiB.
    pub list_bytes: usize,
    /// Bytes of an answer to `Allocate`. Default: 4 MiB, as in a kubelet.
    pub answer_bytes: usize,
    /// Registrations of one process: so many at once, and as many a minute; a tenth of that of one resource. Default: 300.
    pub registrations_per_minute: u32,
    /// Plugins that are connected; a quarter of that for each user that is not trusted, and three quarters for all of
    /// them. Default: 1024.
    pub plugins: usize,
    /// Resources that one process may serve. Default: 256.
    pub resources_per_plugin: usize,
    /// Devices in a list. Default: 250,000.
    pub devices_per_resource: usize,
    /// Bytes of a device's id. Default: 1024.
    pub id_bytes: usize,
    /// Lists of one plugin: so many at once, and as many a second. Default: 10.
    pub lists_per_second: u32,
    /// Variables, mounts, device nodes, annotations and CDI names in an answer, of each so many. Default: 16,384.
    pub entries_per_answer: usize,
    /// Bytes of a variable or annotation, name and value. Default: 128 KiB, which is what `exec` takes.
    pub env_bytes: usize,
    /// Bytes of a path. Default: 4095, which is what the kernel takes.
    pub path_bytes: usize,
    /// Memory that a DRA driver can fill for a claim, roughly. Default: 128 KiB.
    pub claim_bytes: usize,
    /// Memory that a DRA driver can fill for all claims together, roughly. Default: 256 MiB.
    pub bytes_per_driver: usize,
    /// Memory that the plugins of one process can fill: with their lists, and as much with the answers that pods keep of
    /// their resources. Default: 256 MiB.
    pub bytes_per_plugin: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            server: ServerLimits::default(),
            callers_per_uid: 4096,
            request_bytes: 64 << 20,
            manifest_bytes: 1 << 20,
            registration_bytes: 64 << 10,
            list_bytes: 64 << 20,
            answer_bytes: 4 << 20,
            registrations_per_minute: 300,
            plugins: 1024,
            resources_per_plugin: 256,
            devices_per_resource: 250_000,
            id_bytes: 1024,
            lists_per_second: 10,
            entries_per_answer: 16_384,
            env_bytes: 128 << 10,
            path_bytes: 4095,
            claim_bytes: 128 << 10,
            bytes_per_driver: 256 << 20,
            bytes_per_plugin: 256 << 20,
        }
    }
}

/// The name of a limit, as the configuration has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Limit(&'static str);

impl Limit {
    pub const CONNECTIONS_PER_UID: Self = Self("connectionsPerUid");
    pub const CALLERS_PER_UID: Self = Self("callersPerUid");
    pub const MANIFEST_BYTES: Self = Self("manifestBytes");
    pub const REGISTRATION_BYTES: Self = Self("registrationBytes");
    pub const LIST_BYTES: Self = Self("listBytes");
    pub const ANSWER_BYTES: Self = Self("answerBytes");
    pub const REGISTRATIONS_PER_MINUTE: Self = Self("registrationsPerMinute");
    pub const PLUGINS: Self = Self("plugins");
    pub const RESOURCES_PER_PLUGIN: Self = Self("resourcesPerPlugin");
    pub const DEVICES_PER_RESOURCE: Self = Self("devicesPerResource");
    pub const ID_BYTES: Self = Self("idBytes");
    pub const LISTS_PER_SECOND: Self = Self("listsPerSecond");
    pub const ENTRIES_PER_ANSWER: Self = Self("entriesPerAnswer");
    pub const ENV_BYTES: Self = Self("envBytes");
    pub const PATH_BYTES: Self = Self("pathBytes");
    pub const CLAIM_BYTES: Self = Self("claimBytes");
    pub const BYTES_PER_DRIVER: Self = Self("bytesPerDriver");
    pub const BYTES_PER_PLUGIN: Self = Self("bytesPerPlugin");

    /// Every one of them.
    pub const ALL: [Self; 18] = [
        Self::CONNECTIONS_PER_UID,
        Self::CALLERS_PER_UID,
        Self::MANIFEST_BYTES,
        Self::REGISTRATION_BYTES,
        Self::LIST_BYTES,
        Self::ANSWER_BYTES,
        Self::REGISTRATIONS_PER_MINUTE,
        Self::PLUGINS,
        Self::RESOURCES_PER_PLUGIN,
        Self::DEVICES_PER_RESOURCE,
        Self::ID_BYTES,
        Self::LISTS_PER_SECOND,
        Self::ENTRIES_PER_ANSWER,
        Self::ENV_BYTES,
        Self::PATH_BYTES,
        Self::CLAIM_BYTES,
        Self::BYTES_PER_DRIVER,
        Self::BYTES_PER_PLUGIN,
    ];

    /// Without `limits.` before it.
    pub fn name(self) -> &'static str {
        self.0
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limits.{}", self.0)
    }
}

/// Too much of something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}, {limit} allows {most}")]
pub struct OverLimit {
    /// What there is too much of.
    pub what: String,
    /// Which limit says so.
    pub limit: Limit,
    /// What it is set to.
    pub most: usize,
}

impl Limit {
    /// Whether there is not too much. `what` says what there is.
    pub fn check(self, number: usize, most: usize, what: impl FnOnce() -> String) -> Result<(), OverLimit> {
        if number <= most {
            return Ok(());
        }
        Err(self.exceeded(what(), most))
    }

    /// Too much of this.
    pub fn exceeded(self, what: impl Into<String>, most: usize) -> OverLimit {
        OverLimit {
            what: what.into(),
            limit: self,
            most,
        }
    }
}

impl Limits {
    /// Whether what a plugin wants to add to a container is within bounds.
    pub fn check_answer(&self, options: &RunOptions) -> Result<(), OverLimit> {
        let RunOptions {
            envs,
            mounts,
            device_nodes,
            annotations,
            cdi_devices,
        } = options;
        for (number, name) in [
            (envs.len(), "variables"),
            (mounts.len(), "mounts"),
            (device_nodes.len(), "device nodes"),
            (annotations.len(), "annotations"),
            (cdi_devices.len(), "CDI devices"),
        ] {
            let what = || format!("the answer has {number} {name}");
            Limit::ENTRIES_PER_ANSWER.check(number, self.entries_per_answer, what)?;
        }
        for (name, value) in envs.iter().chain(annotations) {
            let bytes = name.len() + value.len() + 1;
            Limit::ENV_BYTES.check(bytes, self.env_bytes, || {
                format!("{} has {bytes} bytes", shortened(name))
            })?;
        }
        let in_mounts = mounts
            .iter()
            .flat_map(|each| [&each.container_path, &each.host_path]);
        let in_nodes = device_nodes
            .iter()
            .flat_map(|each| [&each.container_path, &each.host_path]);
        for path in in_mounts.chain(in_nodes).chain(cdi_devices) {
            Limit::PATH_BYTES.check(path.len(), self.path_bytes, || {
                format!("the path {} has {} bytes", shortened(path), path.len())
            })?;
        }
        Ok(())
    }

    /// Whether answers of a process's plugins that take so much memory are within bounds. Pods that are admitted at the
    /// same moment do not see each other's.
    pub fn check_answers(&self, memory: usize) -> Result<(), OverLimit> {
        Limit::BYTES_PER_PLUGIN.check(memory, self.bytes_per_plugin, || {
            format!("the answers that pods keep of the plugin's process, with this one, take {memory} bytes of memory")
        })
    }
}

/// The beginning of a text that may be long.
pub fn shortened(text: &str) -> String {
    const MOST: usize = 64;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use devlet_core::device_plugin::run_options::{DeviceNode, Mount};

    use super::*;

    fn small() -> Limits {
        Limits {
            entries_per_answer: 2,
            env_bytes: 8,
            path_bytes: 4,
            ..Limits::default()
        }
    }

    fn said(options: &RunOptions) -> String {
        small().check_answer(options).unwrap_err().to_string()
    }

    #[test]
    fn an_answer_at_every_limit_is_taken() {
        let mount = Mount {
            container_path: "/abc".into(),
            host_path: "/abc".into(),
            read_only: false,
        };
        let options = RunOptions {
            envs: [("NAME".into(), "abc".into())].into(),
            mounts: vec![mount.clone(), mount],
            ..RunOptions::default()
        };
        assert_eq!(small().check_answer(&options), Ok(()));
    }

    #[test]
    fn what_is_too_much_is_named_with_its_limit() {
        let envs = RunOptions {
            envs: [("NAME".into(), "abcd".into())].into(),
            ..RunOptions::default()
        };
        assert_eq!(said(&envs), "\"NAME\" has 9 bytes, limits.envBytes allows 8");
        let annotations = RunOptions {
            annotations: envs.envs,
            ..RunOptions::default()
        };
        assert!(said(&annotations).contains("limits.envBytes"));
        let node = DeviceNode {
            container_path: "/dev".into(),
            host_path: "/dev/x".into(),
            permissions: "r".into(),
        };
        let nodes = |count| RunOptions {
            device_nodes: vec![node.clone(); count],
            ..RunOptions::default()
        };
        assert_eq!(
            said(&nodes(1)),
            "the path \"/dev/x\" has 6 bytes, limits.pathBytes allows 4"
        );
        assert_eq!(
            said(&nodes(3)),
            "the answer has 3 device nodes, limits.entriesPerAnswer allows 2"
        );
    }

    #[test]
    fn a_long_text_is_quoted_in_part() {
        assert_eq!(shortened("short\n"), r#""short\n""#);
        assert_eq!(shortened(&"ä".repeat(100)), format!("\"{}\"…", "ä".repeat(64)));
    }
}
