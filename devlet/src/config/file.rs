//! The configuration file: YAML, every key optional, none unknown.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use devlet_agent::access::RegisterRule;
use devlet_agent::config::{Config, Deadlines, OnReboot};
use devlet_agent::grpc::server::ServerLimits;
use devlet_agent::limits::Limits;
use serde::{Deserialize, Serialize};

use super::http_address::HttpAddress;
use super::log_level::LogLevel;
use super::uid::Uid;
use crate::duration::Span;
use crate::files;

/// What can be set. Keys that are absent have their defaults.
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
    limits: LimitSettings,
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

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct LimitSettings {
    connections_per_uid: usize,
    callers_per_uid: usize,
    streams_per_connection: u32,
    frames_per_second: u32,
    preface: Span,
    drain: Span,
    request_bytes: usize,
    manifest_bytes: usize,
    registration_bytes: usize,
    list_bytes: usize,
    answer_bytes: usize,
    registrations_per_minute: u32,
    plugins: usize,
    resources_per_plugin: usize,
    devices_per_resource: usize,
    id_bytes: usize,
    lists_per_second: u32,
    entries_per_answer: usize,
    env_bytes: usize,
    path_bytes: usize,
    claim_bytes: usize,
    bytes_per_driver: usize,
    bytes_per_plugin: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            root_dir: None,
            http: None,
            log: LogFormat::default(),
            log_level: None,
            // The root does not matter here.
            wait: Span(Config::new("").wait),
            deadlines: DeadlineSettings::default(),
            foreign: Vec::new(),
            access: AccessSettings::default(),
            on_reboot: RebootSetting::default(),
            limits: LimitSettings::default(),
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

impl Default for LimitSettings {
    fn default() -> Self {
        let Limits {
            server:
                ServerLimits {
                    connections_per_uid,
                    connections_limit: _,
                    streams_per_connection,
                    frames_per_second,
                    preface,
                    expects_call: _,
                    drain,
                },
            callers_per_uid,
            request_bytes,
            manifest_bytes,
            registration_bytes,
            list_bytes,
            answer_bytes,
            registrations_per_minute,
            plugins,
            resources_per_plugin,
            devices_per_resource,
            id_bytes,
            lists_per_second,
            entries_per_answer,
            env_bytes,
            path_bytes,
            claim_bytes,
            bytes_per_driver,
            bytes_per_plugin,
        } = Limits::default();
        Self {
            connections_per_uid,
            callers_per_uid,
            streams_per_connection,
            frames_per_second,
            preface: Span(preface),
            drain: Span(drain),
            request_bytes,
            manifest_bytes,
            registration_bytes,
            list_bytes,
            answer_bytes,
            registrations_per_minute,
            plugins,
            resources_per_plugin,
            devices_per_resource,
            id_bytes,
            lists_per_second,
            entries_per_answer,
            env_bytes,
            path_bytes,
            claim_bytes,
            bytes_per_driver,
            bytes_per_plugin,
        }
    }
}

impl Settings {
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = files::read(path)?;
        let about = || format!("{} is not a configuration", path.display());
        let text = String::from_utf8(bytes).with_context(about)?;
        Self::parse(&text).with_context(about)
    }

    pub(crate) fn parse(text: &str) -> anyhow::Result<Self> {
        // A file of comments only is no document at all.
        let empty = text
            .lines()
            .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        if empty {
            return Ok(Self::default());
        }
        let settings: Self = serde_saphyr::from_str(text).map_err(|error| {
            let complaint = error.without_snippet().to_string();
            if let Some(key) = nearest(&complaint) {
                return anyhow::anyhow!("{complaint}; did you mean {key}?");
            }
            let complaint = complaint
                .replace("invalid u64", "not a whole number")
                .replace("invalid u32", "not a whole number");
            match key_of(&complaint, text) {
                Some(key) => anyhow::anyhow!("{key}: {complaint}"),
                None => anyhow::anyhow!(complaint),
            }
        })?;
        settings.names_are_names()?;
        lets_something_through("deadlines", &serde_json::to_value(&settings.deadlines)?)?;
        lets_something_through("limits", &serde_json::to_value(&settings.limits)?)?;
        Ok(settings)
    }

    /// Nothing is called nothing.
    fn names_are_names(&self) -> anyhow::Result<()> {
        let deadlines = &self.deadlines;
        for (key, name) in (deadlines.allocate_by_resource.keys())
            .map(|name| ("deadlines.allocateByResource", name))
            .chain((deadlines.prepare_by_driver.keys()).map(|name| ("deadlines.prepareByDriver", name)))
            .chain(self.foreign.iter().map(|name| ("foreign", name)))
            .chain((self.access.register.iter()).map(|rule| ("access.register.resource", &rule.resource)))
        {
            anyhow::ensure!(
                !name.trim().is_empty(),
                "{key}: a name is empty; write one, or a pattern such as acme.com/*"
            );
        }
        Ok(())
    }

    /// The node that these settings describe.
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
        let limits = &self.limits;
        config.limits = Limits {
            server: ServerLimits {
                connections_per_uid: limits.connections_per_uid,
                streams_per_connection: limits.streams_per_connection,
                frames_per_second: limits.frames_per_second,
                preface: limits.preface.0,
                drain: limits.drain.0,
                ..ServerLimits::default()
            },
            callers_per_uid: limits.callers_per_uid,
            request_bytes: limits.request_bytes,
            manifest_bytes: limits.manifest_bytes,
            registration_bytes: limits.registration_bytes,
            list_bytes: limits.list_bytes,
            answer_bytes: limits.answer_bytes,
            registrations_per_minute: limits.registrations_per_minute,
            plugins: limits.plugins,
            resources_per_plugin: limits.resources_per_plugin,
            devices_per_resource: limits.devices_per_resource,
            id_bytes: limits.id_bytes,
            lists_per_second: limits.lists_per_second,
            entries_per_answer: limits.entries_per_answer,
            env_bytes: limits.env_bytes,
            path_bytes: limits.path_bytes,
            claim_bytes: limits.claim_bytes,
            bytes_per_driver: limits.bytes_per_driver,
            bytes_per_plugin: limits.bytes_per_plugin,
        };
        config
    }
}

/// The known key that is most like the unknown one that serde complains about.
fn nearest(complaint: &str) -> Option<&str> {
    let (_, rest) = complaint.split_once("unknown field `")?;
    let (unknown, expected) = rest.split_once('`')?;
    let expected = expected.split(" at line").next()?;
    let known = expected.split(|character: char| !character.is_ascii_alphanumeric());
    known
        .map(|key| {
            (
                strsim::jaro_winkler(&unknown.to_lowercase(), &key.to_lowercase()),
                key,
            )
        })
        .filter(|(likeness, _)| *likeness > 0.75)
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, key)| key)
}

/// The key in front of the value that serde complains about, of which it says only where it is.
fn key_of<'a>(complaint: &str, text: &'a str) -> Option<&'a str> {
    let (_, place) = complaint.rsplit_once(" at line ")?;
    let (line, column) = place.split_once(", column ")?;
    let line = text.lines().nth(line.parse::<usize>().ok()?.checked_sub(1)?)?;
    let (end, _) = line
        .char_indices()
        .nth(column.parse::<usize>().ok()?.checked_sub(1)?)?;
    let before = line[..end].trim_end().strip_suffix(':')?;
    let key = before
        .rsplit(|character: char| !character.is_alphanumeric())
        .next();
    key.filter(|key| !key.is_empty())
}

/// A limit or a deadline of zero would turn everybody away, and leaving one out is no way to be rid of it.
fn lets_something_through(key: &str, value: &serde_json::Value) -> anyhow::Result<()> {
    match value {
        serde_json::Value::Object(values) => values
            .iter()
            // Connections may be cut at once when the node stops.
            .filter(|(name, _)| *name != "drain")
            .try_for_each(|(name, value)| lets_something_through(&format!("{key}.{name}"), value)),
        value if *value == 0 || *value == "0s" => {
            anyhow::bail!(
                "{key}: 0 would let nothing through; give it at least 1, or leave it out for the default"
            )
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_key_reaches_the_node() {
        let text = "
rootDir: /srv/node
http: 127.0.0.1:7350
log: json
logLevel: debug
wait: 5m
deadlines: {dial: 1s, options: 2s, preferred: 3s, allocate: 4s, preStart: 5s, info: 6s, notify: 7s,
  allocateByResource: {acme.com/*: 90s}, prepare: 8s, prepareByDriver: {gpu.acme.com: 2m}}
foreign: [example.org/*]
access: {register: [{resource: acme.com/*, uids: [1001], share: true}], admit: [1002]}
onReboot: release
limits: {connectionsPerUid: 8, callersPerUid: 28, streamsPerConnection: 9, framesPerSecond: 30, preface: 10s, drain: 11s, requestBytes: 12, manifestBytes: 13,
  registrationBytes: 14, listBytes: 15, answerBytes: 16, registrationsPerMinute: 17, plugins: 18,
  resourcesPerPlugin: 19, devicesPerResource: 20, idBytes: 21, listsPerSecond: 22, entriesPerAnswer: 23, envBytes: 24,
  pathBytes: 25, bytesPerPlugin: 26, claimBytes: 27, bytesPerDriver: 29}
";
        let settings = Settings::parse(text).unwrap();
        let config = settings.node("/srv/node".into());
        let seconds = Duration::from_secs;
        assert_eq!(settings.root_dir, Some("/srv/node".into()));
        assert_eq!(settings.http, Some("127.0.0.1:7350".parse().unwrap()));
        assert_eq!(
            (settings.log, settings.log_level),
            (LogFormat::Json, "debug".parse().ok())
        );
        assert_eq!(config.wait, seconds(300));
        assert_eq!(config.deadlines.allocate_of(&"acme.com/gpu".into()), seconds(90));
        let of = &config.deadlines;
        let all = [
            of.dial,
            of.options,
            of.preferred,
            of.allocate,
            of.pre_start,
            of.info,
            of.notify,
            of.prepare,
        ];
        assert_eq!(all, [1, 2, 3, 4, 5, 6, 7, 8].map(seconds));
        assert_eq!(of.prepare_of(&"gpu.acme.com".into()), seconds(120));
        assert_eq!(config.foreign, ["example.org/*"]);
        assert!(config.access.may_register(1001, "acme.com/gpu") && config.access.may_admit(1002));
        assert!(config.access.may_share(1001, "acme.com/gpu"));
        assert_eq!(config.on_reboot, OnReboot::Release);
        let limits = Limits {
            server: ServerLimits {
                connections_per_uid: 8,
                streams_per_connection: 9,
                frames_per_second: 30,
                preface: seconds(10),
                drain: seconds(11),
                ..ServerLimits::default()
            },
            callers_per_uid: 28,
            request_bytes: 12,
            manifest_bytes: 13,
            registration_bytes: 14,
            list_bytes: 15,
            answer_bytes: 16,
            registrations_per_minute: 17,
            plugins: 18,
            resources_per_plugin: 19,
            devices_per_resource: 20,
            id_bytes: 21,
            lists_per_second: 22,
            entries_per_answer: 23,
            env_bytes: 24,
            path_bytes: 25,
            claim_bytes: 27,
            bytes_per_driver: 29,
            bytes_per_plugin: 26,
        };
        assert_eq!(config.limits, limits);
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_nearest_known_one() {
        for (text, hint) in [
            ("rootdir: /x", "did you mean rootDir?"),
            ("deadlines:\n  alocate: 5s", "did you mean allocate?"),
            ("access: {registers: []}", "did you mean register?"),
            ("onreboot: keep", "did you mean onReboot?"),
        ] {
            let problem = Settings::parse(text).unwrap_err().to_string();
            assert!(
                problem.contains("unknown field") && problem.contains(hint),
                "{problem}"
            );
        }
        let problem = Settings::parse("zebra: 1").unwrap_err().to_string();
        assert!(
            problem.contains("`zebra`") && !problem.contains("did you mean"),
            "{problem}"
        );
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_place() {
        for text in [
            "wait: soon",
            "wait: -5",
            "wait: 1.5",
            "wait: [5]",
            "onReboot: forget",
            "http: localhost",
            "foreign: x",
        ] {
            let problem = Settings::parse(text).unwrap_err().to_string();
            assert!(problem.contains("line 1"), "{problem}");
        }
    }

    #[test]
    fn a_limit_or_deadline_of_nothing_is_refused() {
        for (text, key) in [
            ("limits: {connectionsPerUid: 0}", "limits.connectionsPerUid: 0"),
            ("limits: {preface: 0s}", "limits.preface: 0"),
            ("deadlines: {allocate: 0}", "deadlines.allocate: 0"),
            (
                "deadlines: {prepareByDriver: {gpu.acme.com: 0s}}",
                "deadlines.prepareByDriver.gpu.acme.com: 0",
            ),
        ] {
            let problem = Settings::parse(text).unwrap_err().to_string();
            assert!(problem.contains(key), "{problem}");
        }
        assert!(Settings::parse("limits: {drain: 0s}\nwait: 0s").is_ok());
    }

    #[test]
    fn a_number_that_is_none_is_refused_with_its_key() {
        for (text, said) in [
            (
                "limits: {plugins: abc}",
                "plugins: not a whole number at line 1, column 19",
            ),
            (
                "limits:\n  callersPerUid: -1",
                "callersPerUid: not a whole number at line 2, column 18",
            ),
            ("limits: {listsPerSecond: 1.5}", "listsPerSecond: "),
            ("wait: soon", "wait: "),
        ] {
            let problem = Settings::parse(text).unwrap_err().to_string();
            assert!(problem.starts_with(said), "{problem}");
        }
    }

    #[test]
    fn a_name_that_is_empty_is_refused_with_its_key() {
        for (text, key) in [
            (
                "deadlines: {allocateByResource: {'': 1s}}",
                "deadlines.allocateByResource: ",
            ),
            (
                "deadlines: {prepareByDriver: {' ': 1s}}",
                "deadlines.prepareByDriver: ",
            ),
            ("foreign: ['']", "foreign: "),
            (
                "access: {register: [{resource: '', uids: [1]}]}",
                "access.register.resource: ",
            ),
        ] {
            let problem = Settings::parse(text).unwrap_err().to_string();
            assert!(problem.starts_with(key), "{problem}");
        }
    }

    #[test]
    fn a_plain_number_is_a_time_in_seconds() {
        let set = Settings::parse("wait: 5\ndeadlines: {dial: '7'}")
            .unwrap()
            .node("/".into());
        assert_eq!(set.wait, Duration::from_secs(5));
        assert_eq!(set.deadlines.dial, Duration::from_secs(7));
    }

    #[test]
    fn sharing_must_be_said() {
        let text = "access: {register: [{resource: acme.com/*, uids: [1001]}]}";
        let access = Settings::parse(text).unwrap().node("/".into()).access;
        assert!(access.may_register(1001, "acme.com/gpu") && !access.may_share(1001, "acme.com/gpu"));
    }

    #[test]
    fn the_name_of_a_user_is_refused_with_the_way_to_its_number() {
        for text in [
            "access: {admit: [alice]}",
            "access: {register: [{resource: acme.com/*, uids: [alice]}]}",
        ] {
            let problem = Settings::parse(text).unwrap_err().to_string();
            for part in ["alice", "`id -u alice`", "line 1"] {
                assert!(problem.contains(part), "{problem}");
            }
        }
        for text in [
            "access: {admit: [-1]}",
            "access: {admit: [4294967296]}",
            "access: {admit: ['']}",
        ] {
            let problem = Settings::parse(text).unwrap_err().to_string();
            assert!(problem.contains("not the number of a user"), "{problem}");
        }
        let quoted = Settings::parse("access: {admit: ['1002']}").unwrap();
        assert!(quoted.node("/".into()).access.may_admit(1002));
    }

    #[test]
    fn an_empty_file_sets_nothing() {
        for text in ["", "# nothing yet\n", "\n"] {
            assert_eq!(Settings::parse(text).unwrap(), Settings::default());
        }
    }
}
