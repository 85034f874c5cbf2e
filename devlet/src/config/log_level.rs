//! The log level: `info`, or by module `info,devlet_agent=debug`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use clap_complete::{ArgValueCandidates, CompletionCandidate};
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::{LevelFilter, Targets};

const LEVELS: [(&str, LevelFilter); 6] = [
    ("error", LevelFilter::ERROR),
    ("warn", LevelFilter::WARN),
    ("info", LevelFilter::INFO),
    ("debug", LevelFilter::DEBUG),
    ("trace", LevelFilter::TRACE),
    ("off", LevelFilter::OFF),
];

/// Logs each failed call as an error. devlet logs the errors of an outage once.
const KUBE_TARGET: &str = "kube_client";

/// The prefix of the targets of all crates of this workspace.
const OWN_TARGETS: &str = "devlet";

/// A valid log level, as the user wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct LogLevel(Cow<'static, str>);

/// Why a text is not a log level.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidLogLevel {
    #[error("{word:?} is not a log level; did you mean {near}?")]
    Near { word: String, near: &'static str },
    #[error(
        "{word:?} is not a log level; use error, warn, info, debug, trace or off, \
         or by module: info,devlet_agent=debug"
    )]
    Unknown { word: String },
}

impl LogLevel {
    pub(crate) const INFO: Self = Self(Cow::Borrowed("info"));
    pub(crate) const WARN: Self = Self(Cow::Borrowed("warn"));

    /// Returns the levels that completion offers.
    pub(crate) fn candidates() -> ArgValueCandidates {
        ArgValueCandidates::new(|| {
            LEVELS
                .iter()
                .map(|(name, _)| CompletionCandidate::new(name))
                .collect()
        })
    }

    /// Returns the filter. A level without a module applies to devlet's own crates. Other crates log only errors,
    /// because HTTP/2 libraries log every frame.
    pub(crate) fn filter(&self) -> Targets {
        let directives = self.0.split(',').filter_map(|text| directive(text).ok());
        let initial = Targets::new().with_target(KUBE_TARGET, LevelFilter::OFF);
        directives.fold(initial, |filter, (target, level)| match target {
            Some(target) => filter.with_target(target, level),
            None => filter
                .with_default(level.min(LevelFilter::ERROR))
                .with_target(OWN_TARGETS, level),
        })
    }
}

impl FromStr for LogLevel {
    type Err = InvalidLogLevel;

    fn from_str(text: &str) -> Result<Self, InvalidLogLevel> {
        for part in text.split(',') {
            directive(part)?;
        }
        Ok(Self(Cow::Owned(text.to_owned())))
    }
}

/// Parses `LEVEL` or `MODULE=LEVEL`.
fn directive(text: &str) -> Result<(Option<&str>, LevelFilter), InvalidLogLevel> {
    let text = text.trim();
    match text.split_once('=') {
        Some((target, word)) if !target.trim().is_empty() => Ok((Some(target.trim()), level(word.trim())?)),
        _ => Ok((None, level(text)?)),
    }
}

fn level(word: &str) -> Result<LevelFilter, InvalidLogLevel> {
    let lower = word.to_ascii_lowercase();
    if let Some((_, level)) = LEVELS.iter().find(|(name, _)| *name == lower) {
        return Ok(*level);
    }
    let likeness = |name: &str| strsim::jaro_winkler(name, &lower);
    let near = LEVELS.iter().map(|(name, _)| *name);
    let near = near.max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    let word = word.to_owned();
    Err(match near.filter(|near| likeness(near) > 0.75) {
        Some(near) => InvalidLogLevel::Near { word, near },
        None => InvalidLogLevel::Unknown { word },
    })
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<LogLevel> for String {
    fn from(level: LogLevel) -> Self {
        level.0.into_owned()
    }
}

impl TryFrom<String> for LogLevel {
    type Error = InvalidLogLevel;

    fn try_from(text: String) -> Result<Self, InvalidLogLevel> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn a_mistyped_level_is_refused_with_the_near_match() {
        for (text, near) in [
            ("wran", "warn"),
            ("info,devlet_agent=debg", "debug"),
            ("inf", "info"),
        ] {
            let refused = text.parse::<LogLevel>().unwrap_err().to_string();
            assert!(refused.contains(&format!("did you mean {near}?")), "{refused}");
        }
        for text in ["", "3", "loudly", "info,", "devlet_agent", "=debug"] {
            assert!(text.parse::<LogLevel>().is_err(), "{text}");
        }
    }

    #[test]
    fn debug_applies_to_devlets_crates_and_others_are_enabled_by_name() {
        let level: LogLevel = "Debug, hyper=trace".parse().unwrap();
        let filter = level.filter();
        for target in ["devlet::serve", "devlet_agent::grpc::call"] {
            assert!(filter.would_enable(target, &Level::DEBUG), "{target}");
            assert!(!filter.would_enable(target, &Level::TRACE), "{target}");
        }
        for target in ["h2::codec", "tonic::transport"] {
            assert!(!filter.would_enable(target, &Level::WARN), "{target}");
            assert!(filter.would_enable(target, &Level::ERROR), "{target}");
        }
        assert!(filter.would_enable("hyper::proto", &Level::TRACE));
        assert!(!filter.would_enable("kube_client::client", &Level::ERROR));
        let named: LogLevel = "info,kube_client=debug".parse().unwrap();
        assert!(named.filter().would_enable("kube_client::client", &Level::DEBUG));
        assert!(!LogLevel::WARN.filter().would_enable("devlet", &Level::INFO));
    }
}
