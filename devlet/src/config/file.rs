//! The configuration file: YAML in which every key is optional and unknown keys are errors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use devlet_agent::access::RegisterRule;
use devlet_agent::config::{Config, Deadlines, OnReboot};
use devlet_agent::limits::Limits;
use devlet_agent::manifest::syntax::{self, Malformed, UnknownKey};
use devlet_agent::manifest::{Place, Position, position_of};
use devlet_core::ResourceName;
use devlet_host_devices::{InvalidRule, Rule};
use serde::{Deserialize, Serialize};

use super::http_address::HttpAddress;
use super::log_level::LogLevel;
use super::shield::ShieldSettings;
use super::uid::Uid;
use crate::duration::Span;
use crate::files;

/// Maximum known keys that an error lists.
const MAX_LISTED_KEYS: usize = 13;

/// The content of a configuration file. Absent keys have their defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct Settings {
    pub(crate) root_dir: Option<PathBuf>,
    pub(crate) http: Option<HttpAddress>,
    pub(crate) log: LogFormat,
    pub(crate) log_level: Option<LogLevel>,
    wait: Span,
    deadlines: DeadlineSettings,
    foreign: Vec<String>,
    access: AccessSettings,
    on_reboot: RebootSetting,
    pub(crate) kubernetes: KubernetesSettings,
    pub(crate) shield: ShieldSettings,
    pub(crate) host_devices: Vec<Rule>,
    limits: Limits,
}

/// The shape of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct DeadlineSettings {
    dial: Span,
    options: Span,
    preferred: Span,
    allocate: Span,
    allocate_by_resource: BTreeMap<String, Span>,
    pre_start: Span,
    prepare: Span,
    prepare_by_driver: BTreeMap<String, Span>,
    info: Span,
    notify: Span,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct AccessSettings {
    register: Vec<RegisterSetting>,
    admit: Vec<Uid>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RegisterSetting {
    resource: String,
    uids: Vec<Uid>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    share: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RebootSetting {
    #[default]
    Keep,
    Release,
}

/// The connection to the API server of a cluster, and the part that devlet plays for its node.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct KubernetesSettings {
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) in_cluster: bool,
    pub(crate) node_name: Option<String>,
    pub(crate) mode: Option<ModeSetting>,
    pub(crate) final_delete: bool,
    pub(crate) abandon_after: BTreeMap<String, Span>,
    pub(crate) beside_kubelet: bool,
    pub(crate) heartbeat: bool,
    pub(crate) slices: SliceSettings,
    pub(crate) on_unhealthy: BTreeMap<String, UnhealthySetting>,
}

/// Deletion of the ResourceSlices of this node.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct SliceSettings {
    pub(crate) wipe_at_start: WipeSetting,
}

/// The ResourceSlices that are deleted when devlet starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WipeSetting {
    #[default]
    Absent,
    All,
}

/// The removal of a pod whose device is unhealthy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum UnhealthySetting {
    Evict,
    Delete,
}

/// The part that devlet plays for a node of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModeSetting {
    /// The device part of the node: pods are admitted and removed by themselves
    Agent,
    /// Claims are looked up for admissions over devlet's API; nothing is written
    Observe,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            root_dir: None,
            http: None,
            log: LogFormat::default(),
            log_level: None,
            // The default wait does not depend on the root.
            wait: Span(Config::new("").wait),
            deadlines: DeadlineSettings::default(),
            foreign: Vec::new(),
            access: AccessSettings::default(),
            on_reboot: RebootSetting::default(),
            kubernetes: KubernetesSettings::default(),
            shield: ShieldSettings::default(),
            host_devices: Vec::new(),
            limits: Limits::default(),
        }
    }
}

impl Default for DeadlineSettings {
    fn default() -> Self {
        let Deadlines {
            dial,
            options,
            preferred,
            allocate,
            allocate_by_resource: _,
            pre_start,
            prepare,
            prepare_by_driver: _,
            info,
            notify,
        } = Deadlines::default();
        Self {
            dial: Span(dial),
            options: Span(options),
            preferred: Span(preferred),
            allocate: Span(allocate),
            allocate_by_resource: BTreeMap::new(),
            pre_start: Span(pre_start),
            prepare: Span(prepare),
            prepare_by_driver: BTreeMap::new(),
            info: Span(info),
            notify: Span(notify),
        }
    }
}

impl Settings {
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = files::read(path)?;
        let name = match path == Path::new("-") {
            true => "standard input".to_owned(),
            false => path.display().to_string(),
        };
        let text = std::str::from_utf8(&bytes).map_err(|error| {
            let before = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
            let message = "the file is not UTF-8".to_owned();
            let position = Some(end_of(&before));
            Invalid { message, position }.at(&name)
        });
        Self::parse(text?).map_err(|invalid| invalid.at(&name))
    }

    pub(crate) fn parse(text: &str) -> Result<Self, Invalid> {
        let mut documents: Vec<Self> = syntax::yaml_documents(text)?;
        if documents.len() > 1 {
            return Err(Invalid {
                message: "there are several documents; a configuration has only one".to_owned(),
                position: None,
            });
        }
        // A file of comments only does not contain a document.
        let settings = documents.pop().unwrap_or_default();
        settings.check_names(text)?;
        settings.check_host_devices(text)?;
        check_not_zero(text, &["deadlines"], &serde_json::json!(settings.deadlines))?;
        check_not_zero(text, &["limits"], &serde_json::json!(settings.limits))?;
        Ok(settings)
    }

    /// Refuses empty names.
    fn check_names(&self, text: &str) -> Result<(), Invalid> {
        let by_resource = self.deadlines.allocate_by_resource.keys();
        let by_driver = self.deadlines.prepare_by_driver.keys();
        let abandoned = self.kubernetes.abandon_after.keys();
        let unhealthy = self.kubernetes.on_unhealthy.keys();
        let rules = self.access.register.iter().map(|rule| &rule.resource);
        let all = (by_resource.map(|name| (vec!["deadlines", "allocateByResource", name], name, None)))
            .chain(by_driver.map(|name| (vec!["deadlines", "prepareByDriver", name], name, None)))
            .chain(abandoned.map(|name| (vec!["kubernetes", "abandonAfter", name], name, None)))
            .chain(unhealthy.map(|name| (vec!["kubernetes", "onUnhealthy", name], name, None)))
            .chain((self.foreign.iter()).map(|name| (vec!["foreign"], name, Some(name.as_str()))))
            .chain(rules.map(|name| (vec!["access", "register", "resource"], name, Some(name.as_str()))));
        for (path, name, value) in all {
            if name.trim().is_empty() {
                let key = path.join(".");
                let key = key.trim().trim_end_matches('.');
                return Err(Invalid {
                    message: format!("{key}: a name is empty; write one, or a pattern such as acme.com/*"),
                    position: position_of(text, &path, value),
                });
            }
        }
        Ok(())
    }

    /// Returns the settings that the plugin of host devices needs.
    pub(crate) fn of_host_devices(&self) -> Self {
        Self {
            log: self.log,
            log_level: self.log_level.clone(),
            host_devices: self.host_devices.clone(),
            ..Self::default()
        }
    }

    /// Refuses rules that could not offer devices.
    fn check_host_devices(&self, text: &str) -> Result<(), Invalid> {
        let resources = self.host_devices.iter().map(|rule| &rule.resource);
        if let Some(name) = resources
            .into_iter()
            .find(|name| ResourceName::parse(name).is_err())
        {
            return Err(Invalid {
                message: format!(
                    "hostDevices.resource: {name:?} is not the name of a resource; write a domain and a name, such as \
                     host.devlet.dev/serial"
                ),
                position: position_of(text, &["hostDevices", "resource"], Some(name)),
            });
        }
        devlet_host_devices::check(&self.host_devices).map_err(|invalid: InvalidRule| {
            let keys = invalid.key.split('.');
            let path: Vec<&str> = std::iter::once("hostDevices").chain(keys).collect();
            Invalid {
                position: position_of(text, &path, invalid.value.as_deref()),
                message: format!("hostDevices: {invalid}"),
            }
        })
    }

    /// Returns the configuration of a node with these settings.
    pub(crate) fn node(&self, root: PathBuf) -> Config {
        let mut config = Config::new(root);
        let deadlines = &self.deadlines;
        let spans = |by_name: &BTreeMap<String, Span>| {
            let spans = by_name.iter().map(|(name, span)| (name.clone(), span.0));
            spans.collect()
        };
        config.deadlines = Deadlines {
            dial: deadlines.dial.0,
            options: deadlines.options.0,
            preferred: deadlines.preferred.0,
            allocate: deadlines.allocate.0,
            allocate_by_resource: spans(&deadlines.allocate_by_resource),
            pre_start: deadlines.pre_start.0,
            prepare: deadlines.prepare.0,
            prepare_by_driver: spans(&deadlines.prepare_by_driver),
            info: deadlines.info.0,
            notify: deadlines.notify.0,
        };
        config.wait = self.wait.0;
        config.foreign.clone_from(&self.foreign);
        let rule = |rule: &RegisterSetting| RegisterRule {
            resource: rule.resource.clone(),
            uids: rule.uids.iter().map(|uid| uid.0).collect(),
            share: rule.share,
        };
        config.access.register = self.access.register.iter().map(rule).collect();
        config.access.admit = self.access.admit.iter().map(|uid| uid.0).collect();
        config.on_reboot = match self.on_reboot {
            RebootSetting::Keep => OnReboot::Keep,
            RebootSetting::Release => OnReboot::Release,
        };
        config.shield = self.shield.node();
        config.limits = self.limits.clone();
        config
    }
}

/// Why a text is not a valid configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", .position.map(|at| format!("{}:{}: ", at.line, at.column)).unwrap_or_default())]
pub(crate) struct Invalid {
    message: String,
    position: Option<Position>,
}

impl Invalid {
    /// Returns the error with the name of the file.
    fn at(self, name: &str) -> anyhow::Error {
        let place = Place::in_file(name, self.position);
        anyhow::anyhow!("{place}: {}", self.message)
    }
}

impl From<Malformed> for Invalid {
    fn from(malformed: Malformed) -> Self {
        let hint = malformed.unknown.as_ref().map(known_keys).unwrap_or_default();
        Self {
            message: malformed.message + &hint,
            position: malformed.position,
        }
    }
}

/// Returns a hint with the known key most similar to an unknown one, and all known keys if they are few.
fn known_keys(UnknownKey { key, known }: &UnknownKey) -> String {
    let likeness = |known: &str| strsim::jaro_winkler(&key.to_lowercase(), &known.to_lowercase());
    let near = known
        .iter()
        .max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    let near = near.filter(|near| likeness(near) > 0.75);
    let all = (known.len() <= MAX_LISTED_KEYS).then(|| known.join(", "));
    match (near, all) {
        (Some(near), Some(all)) => format!("; did you mean {near}? Known keys are {all}"),
        (Some(near), None) => format!("; did you mean {near}?"),
        (None, Some(all)) => format!("; known keys are {all}"),
        (None, None) => String::new(),
    }
}

/// Returns the position after a text.
fn end_of(text: &str) -> Position {
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let line = text.rsplit('\n').next().unwrap_or_default();
    Position {
        line: count(text.matches('\n').count() + 1),
        column: count(line.chars().count() + 1),
    }
}

/// Refuses limits and deadlines of zero, which would reject every caller.
fn check_not_zero(text: &str, path: &[&str], value: &serde_json::Value) -> Result<(), Invalid> {
    match value {
        serde_json::Value::Object(values) => values
            .iter()
            .try_for_each(|(name, value)| check_not_zero(text, &[path, &[name]].concat(), value)),
        value if *value == 0 || *value == "0s" => Err(Invalid {
            message: format!(
                "{}: 0 would reject everything; set it to at least 1, or omit it for the default",
                path.join(".")
            ),
            position: position_of(text, path, None),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
