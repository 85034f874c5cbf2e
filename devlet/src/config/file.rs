//! The configuration file: YAML, every key optional, none unknown.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use devlet_agent::access::RegisterRule;
use devlet_agent::config::{Config, Deadlines, OnReboot};
use devlet_agent::limits::Limits;
use devlet_agent::manifest::syntax::{self, Malformed, UnknownKey};
use devlet_agent::manifest::{Place, Position, position_of};
use devlet_uds::server::ServerLimits;
use serde::{Deserialize, Serialize};

use super::http_address::HttpAddress;
use super::log_level::LogLevel;
use super::uid::Uid;
use crate::duration::Span;
use crate::files;

/// More known keys than this are not listed in an error.
const FEW_KEYS: usize = 12;

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
                    streams_per_connection,
                    preface,
                    expects_call: _,
                    idle: _,
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
                message: "there are several documents; a configuration is one".to_owned(),
                position: None,
            });
        }
        // A file of comments only is no document at all.
        let settings = documents.pop().unwrap_or_default();
        settings.check_names(text)?;
        check_not_zero(text, &["deadlines"], &serde_json::json!(settings.deadlines))?;
        check_not_zero(text, &["limits"], &serde_json::json!(settings.limits))?;
        Ok(settings)
    }

    /// Refuses empty names.
    fn check_names(&self, text: &str) -> Result<(), Invalid> {
        let by_resource = self.deadlines.allocate_by_resource.keys();
        let by_driver = self.deadlines.prepare_by_driver.keys();
        let rules = self.access.register.iter().map(|rule| &rule.resource);
        let all = (by_resource.map(|name| (vec!["deadlines", "allocateByResource", name], name, None)))
            .chain(by_driver.map(|name| (vec!["deadlines", "prepareByDriver", name], name, None)))
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

/// Settings that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", .position.map(|at| format!("{}:{}: ", at.line, at.column)).unwrap_or_default())]
pub(crate) struct Invalid {
    message: String,
    position: Option<Position>,
}

impl Invalid {
    /// The error, with the name of the file.
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

/// The known key that is most like an unknown one, or all of them if they are few.
fn known_keys(UnknownKey { key, known }: &UnknownKey) -> String {
    let likeness = |known: &str| strsim::jaro_winkler(&key.to_lowercase(), &known.to_lowercase());
    let near = known
        .iter()
        .max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    let near = near.filter(|near| likeness(near) > 0.75);
    let all = (known.len() <= FEW_KEYS).then(|| known.join(", "));
    match (near, all) {
        (Some(near), Some(all)) => format!("; did you mean {near}? Known keys are {all}"),
        (Some(near), None) => format!("; did you mean {near}?"),
        (None, Some(all)) => format!("; known keys are {all}"),
        (None, None) => String::new(),
    }
}

/// The position behind a text.
fn end_of(text: &str) -> Position {
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let line = text.rsplit('\n').next().unwrap_or_default();
    Position {
        line: count(text.matches('\n').count() + 1),
        column: count(line.chars().count() + 1),
    }
}

/// Refuses limits and deadlines of zero, which would turn every caller away.
fn check_not_zero(text: &str, path: &[&str], value: &serde_json::Value) -> Result<(), Invalid> {
    match value {
        serde_json::Value::Object(values) => values
            .iter()
            // Connections may be cut at once when the node stops.
            .filter(|(name, _)| *name != "drain")
            .try_for_each(|(name, value)| check_not_zero(text, &[path, &[name]].concat(), value)),
        value if *value == 0 || *value == "0s" => Err(Invalid {
            message: format!(
                "{}: 0 would let nothing through; give it at least 1, or leave it out for the default",
                path.join(".")
            ),
            position: position_of(text, path, None),
        }),
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
limits: {connectionsPerUid: 8, callersPerUid: 28, streamsPerConnection: 9, preface: 10s, drain: 11s, requestBytes: 12, manifestBytes: 13,
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

    fn refused(text: &str) -> String {
        Settings::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_nearest_and_the_known_ones() {
        for (text, said) in [
            (
                "rootdir: /x",
                "1:1: unknown key rootdir; did you mean rootDir? Known keys are rootDir, http, log, logLevel, wait, \
                 deadlines, foreign, access, onReboot, limits",
            ),
            (
                "access: {registers: []}",
                "1:10: unknown key registers; did you mean register? Known keys are register, admit",
            ),
            (
                "access:\n  zebra: 1",
                "2:3: unknown key zebra; known keys are register, admit",
            ),
            (
                "limits:\n  plugin: 5",
                "2:3: unknown key plugin; did you mean plugins?",
            ),
        ] {
            assert_eq!(refused(text), said);
        }
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_place() {
        for (text, said) in [
            ("wait: soon", "1:7: \"soon\" is not a time; write it as"),
            ("log: json\nwait: -5", "2:7: \"-5\" is negative"),
            ("wait: 1.5", "1:7: \"1.5\" is not a time"),
            ("log: json\nwait: [5]", "2:7: expected a text"),
            ("access:\n  admit:\n  - {}", "3:5: expected a text"),
            ("onReboot: forget", "1:11: expected keep or release, found forget"),
            ("http: localhost", "1:7: \"localhost\" is not an address"),
            ("foreign: x", "1:10: expected a list"),
            ("access: x", "1:9: expected keys and values"),
            ("- wait: 5s", "1:1: expected keys and values"),
            ("limits: {plugins: abc}", "1:19: expected a whole number"),
            ("limits:\n  callersPerUid: -1", "2:18: expected a whole number"),
            ("limits: {listsPerSecond: 1.5}", "1:26: expected a whole number"),
            (
                "access: {register: [{uids: [1]}]}",
                "1:22: the key resource is missing",
            ),
            (
                "access: {register: [{resource: a, uids: [1], share: 7}]}",
                "1:53: expected true or false",
            ),
            ("wait: 5s\nwait: 6s", "2:1: the key wait is there twice"),
            ("wait: 5s\n---\nwait: 6s", "there are several documents"),
        ] {
            let problem = refused(text);
            assert!(problem.starts_with(said), "{text}: {problem}");
        }
    }

    #[test]
    fn a_syntax_error_has_a_place_and_no_words_of_the_parser() {
        for (text, said) in [
            ("foreign: [5s", "1:"),
            (
                "wait: 5s\n\tlog: json",
                "1:7: this value goes on in a line that begins with a tab; indent with spaces",
            ),
            ("wait: 5s\n log: json", "1:7: \"5s log\" is not a time"),
            ("log: json: x", "1:10: a colon is not allowed here"),
        ] {
            let problem = refused(text);
            assert!(problem.starts_with(said), "{text}: {problem}");
            for word in ["field", "scalar", "variant", "mapping", "u64", " at line"] {
                assert!(!problem.contains(word), "{text}: {problem}");
            }
        }
    }

    #[test]
    fn an_error_names_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let name = file.path().display();
        for (text, said) in [
            (
                &b"wait: 5s\nlog: jsn\n"[..],
                "2:6: expected text or json, found jsn",
            ),
            (&b"wait: 5s\nlog: \xff"[..], "2:6: the file is not UTF-8"),
        ] {
            std::fs::write(file.path(), text).unwrap();
            let problem = Settings::read(file.path()).unwrap_err().to_string();
            assert_eq!(problem, format!("{name}:{said}"));
        }
    }

    #[test]
    fn a_limit_or_deadline_of_nothing_is_refused() {
        for (text, key) in [
            (
                "limits: {connectionsPerUid: 0}",
                "1:29: limits.connectionsPerUid: 0",
            ),
            ("limits:\n  preface: 0s", "2:12: limits.preface: 0"),
            ("deadlines: {allocate: 0}", "1:23: deadlines.allocate: 0"),
            (
                "deadlines: {prepareByDriver: {gpu.acme.com: 0s}}",
                "1:45: deadlines.prepareByDriver.gpu.acme.com: 0",
            ),
        ] {
            let problem = Settings::parse(text).unwrap_err().to_string();
            assert!(problem.starts_with(key), "{problem}");
        }
        assert!(Settings::parse("limits: {drain: 0s}\nwait: 0s").is_ok());
    }

    #[test]
    fn a_name_that_is_empty_is_refused_with_its_key() {
        for (text, key) in [
            (
                "deadlines: {allocateByResource: {'': 1s}}",
                "1:38: deadlines.allocateByResource: ",
            ),
            (
                "deadlines: {prepareByDriver: {' ': 1s}}",
                "1:36: deadlines.prepareByDriver: ",
            ),
            ("foreign: [a, '']", "1:14: foreign: "),
            (
                "access:\n  register:\n  - {resource: a, uids: [1]}\n  - {resource: '', uids: [1]}",
                "4:16: access.register.resource: ",
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
            for part in ["alice", "`id -u alice`", "1:"] {
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
