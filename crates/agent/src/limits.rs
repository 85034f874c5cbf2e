//! Limits on peers: one table, from which the configuration and its documentation are made.
//!
//! A message or request that exceeds a limit is rejected as a whole, with an error that names the limit as the configuration
//! does, and counted. A plugin that sends lists too often is slowed down instead.
//!
//! To add a limit, add a row to the table below: the configuration file reads it, `devlet config print` explains it, and a test
//! compares `docs/configuration.md` with it.

use std::fmt;

use devlet_core::device_plugin::run_options::RunOptions;
use devlet_core::{PluginLimits, QuotaError};

/// Makes the struct of all limits, their names and their rows in the documentation.
macro_rules! limits {
    ($($constant:ident $key:literal $field:ident: $type:ty = $default:expr, $subject:literal => $effect:literal;)*) => {
        /// The value of every limit. The names are those of the configuration.
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "camelCase", default, deny_unknown_fields)]
        pub struct Limits {
            $(#[doc = $subject] pub $field: $type,)*
        }

        impl Default for Limits {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl Limit {
            $(pub const $constant: Self = Self($key);)*

            /// Every limit that can be configured.
            pub const ALL: &[Self] = &[$(Self::$constant,)*];

            /// Returns the subject of the limit and what happens beyond it, for documentation.
            pub fn documentation(self) -> (&'static str, &'static str) {
                match self.0 {
                    $($key => ($subject, $effect),)*
                    _ => ("", ""),
                }
            }
        }
    };
}

limits! {
    CONNECTIONS_PER_UID "connectionsPerUid" connections_per_uid: usize = 256,
        "connections of one user to `kubelet.sock`" => "the connection is closed";
    CALLERS_PER_UID "callersPerUid" callers_per_uid: usize = 4096,
        "connections of one user to `devlet.sock`, and calls in flight on one of them" => "the connection is closed; the call waits";
    REQUEST_BYTES "requestBytes" request_bytes: usize = 64 << 20,
        "a request on devlet's own API" => "rejected";
    MANIFEST_BYTES "manifestBytes" manifest_bytes: usize = 1 << 20,
        "all manifests of an admission, pod and claims together" => "rejected";
    REGISTRATIONS_PER_MINUTE "registrationsPerMinute" registrations_per_minute: u32 = 300,
        "registrations of one process; burst and refill per minute" => "rejected after a second";
    PLUGINS "plugins" plugins: usize = 1024,
        "connected plugins, including those of DRA drivers" => "the plugin is rejected";
    RESOURCES_PER_PLUGIN "resourcesPerPlugin" resources_per_plugin: usize = 256,
        "resources and drivers that one process serves" => "the plugin is rejected";
    LIST_BYTES "listBytes" list_bytes: usize = 64 << 20,
        "a device list, and an answer to `GetPreferredAllocation`" => "the list is rejected; the preference is ignored";
    DEVICES_PER_RESOURCE "devicesPerResource" devices_per_resource: usize = 250_000,
        "devices in a list, or in a driver's health message" => "the list is rejected; the health stream ends";
    LISTS_PER_SECOND "listsPerSecond" lists_per_second: u32 = 10,
        "lists of one plugin; burst and refill per second" => "only the newest list counts";
    ANSWER_BYTES "answerBytes" answer_bytes: usize = 4 << 20,
        "an answer to `Allocate`, an answer or health message of a driver" => "the pod is refused; the driver is called again";
    CLAIM_BYTES "claimBytes" claim_bytes: usize = 128 << 10,
        "memory for a driver's answer about one claim" => "the answer is rejected and asked for again";
    BYTES_PER_DRIVER "bytesPerDriver" bytes_per_driver: usize = 256 << 20,
        "memory for all claims that a driver has prepared" => "the claim is not prepared, and asked for again";
    BYTES_PER_PLUGIN "bytesPerPlugin" bytes_per_plugin: usize = 256 << 20,
        "memory for the lists of one process" => "the list is rejected";
}

/// Maximum length in bytes of short messages: `Register`, and the answers to `GetInfo`, `GetDevicePluginOptions` and
/// `PreStartContainer`.
pub const MAX_SHORT_MESSAGE: usize = 64 << 10;
/// Registrations of one resource by one process; burst and refill per second.
pub const REGISTRATIONS_PER_RESOURCE: u32 = 10;
/// Admissions that fail at plugins of one resource; burst and refill per minute. Further errors come after a pause.
pub const PLUGIN_FAILURES_PER_MINUTE: u32 = 60;
/// Maximum length in bytes of the name of a device or pool.
pub const MAX_NAME_BYTES: usize = 1024;
/// Maximum number of variables, mounts, device nodes, annotations and CDI names in an answer, of each kind.
const MAX_ANSWER_ENTRIES: usize = 16_384;
/// Maximum length in bytes of a variable or annotation, name and value: as `exec` accepts.
const MAX_ENV_BYTES: usize = 128 << 10;
/// Maximum length in bytes of a path or CDI name: as the kernel accepts for paths.
const MAX_PATH_BYTES: usize = 4095;

/// A limit, by its name in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Limit(&'static str);

impl Limit {
    /// A limit that cannot be configured.
    pub const FIXED: Self = Self("");

    /// Returns the name without `limits.` before it; empty if it cannot be configured.
    pub fn name(self) -> &'static str {
        self.0
    }

    /// Checks that `number` is at most `max`. `subject` describes the number.
    pub fn check(
        self,
        number: usize,
        max: usize,
        subject: impl FnOnce() -> String,
    ) -> Result<(), LimitExceeded> {
        if number <= max {
            return Ok(());
        }
        Err(self.exceeded(subject(), max))
    }

    pub fn exceeded(self, subject: impl Into<String>, max: usize) -> LimitExceeded {
        LimitExceeded {
            subject: subject.into(),
            limit: self,
            max,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => f.write_str("devlet"),
            name => write!(f, "limits.{name}"),
        }
    }
}

/// A message, request or plugin exceeds a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{subject}, {limit} allows {max}")]
pub struct LimitExceeded {
    /// The thing that exceeds the limit, and its size.
    pub subject: String,
    /// The limit.
    pub limit: Limit,
    /// Its value.
    pub max: usize,
}

impl Limits {
    /// Returns the quotas that the node enforces.
    pub fn plugin_limits(&self) -> PluginLimits {
        PluginLimits {
            plugins: self.plugins,
            names_per_process: self.resources_per_plugin,
            list_bytes_per_process: self.bytes_per_plugin,
        }
    }

    /// Returns the error of a process beyond its rate of registrations.
    pub fn registers_too_often(&self) -> LimitExceeded {
        let max = usize::try_from(self.registrations_per_minute).unwrap_or(usize::MAX);
        Limit::REGISTRATIONS_PER_MINUTE.exceeded("the process registers too often", max)
    }

    /// Returns the limit behind a quota that is exceeded.
    pub fn quota_exceeded(&self, error: &QuotaError) -> LimitExceeded {
        let (limit, max) = match error {
            QuotaError::Plugins { .. }
            | QuotaError::PluginsOfUser { .. }
            | QuotaError::PluginsOfOthers { .. } => (Limit::PLUGINS, self.plugins),
            QuotaError::Names { .. } => (Limit::RESOURCES_PER_PLUGIN, self.resources_per_plugin),
            QuotaError::ListMemory { .. } => (Limit::BYTES_PER_PLUGIN, self.bytes_per_plugin),
        };
        limit.exceeded(error.to_string(), max)
    }
}

/// Checks the name of a device or pool. `kind` is how errors call it, such as "the id".
pub fn check_name(kind: &str, name: &str) -> Result<(), LimitExceeded> {
    Limit::FIXED.check(name.len(), MAX_NAME_BYTES, || {
        format!("{kind} {} has {} bytes", truncate_quoted(name), name.len())
    })
}

/// Checks a path or CDI name.
pub fn check_path(path: &str) -> Result<(), LimitExceeded> {
    Limit::FIXED.check(path.len(), MAX_PATH_BYTES, || {
        format!("the path {} has {} bytes", truncate_quoted(path), path.len())
    })
}

/// Checks a number of entries of an answer. `subject` describes the number.
pub fn check_entries(number: usize, subject: impl FnOnce() -> String) -> Result<(), LimitExceeded> {
    Limit::FIXED.check(number, MAX_ANSWER_ENTRIES, subject)
}

/// Checks the run options that a plugin answers with.
pub fn check_answer(options: &RunOptions) -> Result<(), LimitExceeded> {
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
        check_entries(number, || format!("the answer has {number} {name}"))?;
    }
    for (name, value) in envs.iter().chain(annotations) {
        let bytes = name.len() + value.len() + 1;
        Limit::FIXED.check(bytes, MAX_ENV_BYTES, || {
            format!("{} has {bytes} bytes", truncate_quoted(name))
        })?;
    }
    let in_mounts = mounts
        .iter()
        .flat_map(|each| [&each.container_path, &each.host_path]);
    let in_nodes = device_nodes
        .iter()
        .flat_map(|each| [&each.container_path, &each.host_path]);
    in_mounts
        .chain(in_nodes)
        .chain(cdi_devices)
        .try_for_each(|path| check_path(path))
}

/// Quotes the beginning of a text that may be long.
pub fn truncate_quoted(text: &str) -> String {
    const MAX_CHARS: usize = 64;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use devlet_core::device_plugin::run_options::{DeviceNode, Mount};

    use super::*;

    fn error(options: &RunOptions) -> String {
        check_answer(options).unwrap_err().to_string()
    }

    fn env(bytes: usize) -> RunOptions {
        RunOptions {
            envs: [("NAME".into(), "x".repeat(bytes - "NAME=".len()))].into(),
            ..RunOptions::default()
        }
    }

    #[test]
    fn names_of_limits_are_their_keys_in_the_configuration() {
        let limits = serde_json::to_value(Limits::default()).unwrap();
        let keys: Vec<&str> = limits.as_object().unwrap().keys().map(String::as_str).collect();
        let mut names: Vec<&str> = Limit::ALL.iter().map(|limit| limit.name()).collect();
        names.sort_unstable();
        assert_eq!(keys, names);
    }

    // `DEVLET_REGENERATE=1 cargo test -p devlet-agent limits` writes the table.
    #[test]
    fn the_documentation_has_a_row_for_each_limit() {
        const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
        let (begin, end) = ("<!-- limits: begin -->\n", "<!-- limits: end -->");
        let text = std::fs::read_to_string(PATH).unwrap();
        let (before, rest) = text.split_once(begin).unwrap();
        let (table, after) = rest.split_once(end).unwrap();
        let defaults = serde_json::to_value(Limits::default()).unwrap();
        let rows = Limit::ALL.iter().map(|limit| {
            let (subject, effect) = limit.documentation();
            let default = size(defaults[limit.name()].as_u64().unwrap());
            format!("| `{}` | {default} | {subject} | {effect} |\n", limit.name())
        });
        let expected = format!(
            "\n| key | default | limits | over the limit |\n| --- | --- | --- | --- |\n{}\n",
            rows.collect::<String>()
        );
        if std::env::var_os("DEVLET_REGENERATE").is_some_and(|value| value == "1") {
            std::fs::write(PATH, format!("{before}{begin}{expected}{end}{after}")).unwrap();
        } else {
            assert_eq!(
                table, expected,
                "DEVLET_REGENERATE=1 cargo test -p devlet-agent limits writes it"
            );
        }
    }

    #[test]
    fn the_documents_name_only_limits_that_exist() {
        for document in [
            "configuration",
            "metrics",
            "operations",
            "troubleshooting",
            "compatibility",
        ] {
            let path = format!("{}/../../docs/{document}.md", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(path).unwrap();
            for after in text.split("`limits.").skip(1) {
                let name = after.split(|c: char| !c.is_alphanumeric()).next().unwrap();
                let exists = Limit::ALL.iter().any(|limit| limit.name() == name);
                assert!(exists || name.is_empty(), "{document}.md names limits.{name}");
            }
        }
    }

    fn size(number: u64) -> String {
        match number {
            number if number % (1 << 20) == 0 => format!("{} MiB", number >> 20),
            number if number % (1 << 10) == 0 && number > 8192 => format!("{} KiB", number >> 10),
            number => number.to_string(),
        }
    }

    #[test]
    fn an_answer_at_every_limit_is_accepted() {
        let mount = Mount {
            container_path: "x".repeat(MAX_PATH_BYTES),
            host_path: "/abc".into(),
            read_only: false,
        };
        let options = RunOptions {
            mounts: vec![mount; MAX_ANSWER_ENTRIES],
            ..env(MAX_ENV_BYTES)
        };
        assert_eq!(check_answer(&options), Ok(()));
    }

    #[test]
    fn an_answer_over_a_limit_is_rejected() {
        let envs = env(MAX_ENV_BYTES + 1);
        assert_eq!(error(&envs), "\"NAME\" has 131073 bytes, devlet allows 131072");
        let annotations = RunOptions {
            annotations: envs.envs,
            ..RunOptions::default()
        };
        assert!(error(&annotations).contains("131073"));
        let node = |path: String| DeviceNode {
            container_path: "/dev".into(),
            host_path: path,
            permissions: "r".into(),
        };
        let nodes = |path: String, count| RunOptions {
            device_nodes: vec![node(path); count],
            ..RunOptions::default()
        };
        let long = error(&nodes("x".repeat(4096), 1));
        assert!(long.ends_with("has 4096 bytes, devlet allows 4095"), "{long}");
        assert_eq!(
            error(&nodes("/dev/x".into(), 16_385)),
            "the answer has 16385 device nodes, devlet allows 16384"
        );
    }

    #[test]
    fn a_long_text_is_quoted_in_part() {
        assert_eq!(truncate_quoted("short\n"), r#""short\n""#);
        assert_eq!(
            truncate_quoted(&"ä".repeat(100)),
            format!("\"{}\"…", "ä".repeat(64))
        );
    }
}
