//! Parses the documents of a JSON or YAML text, with plain error messages.

use serde::de::DeserializeOwned;
use serde_saphyr::budget::BudgetBreach;
use serde_saphyr::{Error, MessageFormatter as _, UserMessageFormatter};

use super::place::Position;

/// Maximum nesting of a manifest. Those of Kubernetes have about twelve levels.
const MAX_DEPTH: usize = 64;

/// Maximum bytes of a parser's message, which may quote the text.
const MAX_MESSAGE: usize = 500;

/// The reason why a text could not be parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    /// The message.
    pub message: String,
    /// The position, if the parser reports it.
    pub position: Option<Position>,
    /// The unknown key, if that is the problem.
    pub unknown: Option<UnknownKey>,
}

/// An unknown key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownKey {
    /// The key.
    pub key: String,
    /// The keys that are known at that place.
    pub known: Vec<&'static str>,
}

/// Parses all documents of a text that are not null.
pub(super) fn documents<T: DeserializeOwned>(text: &str) -> Result<Vec<T>, Malformed> {
    match json_documents(text.trim_start_matches('\u{feff}')) {
        Some(documents) => Ok(documents),
        None => yaml_documents(text),
    }
}

/// Parses a text in which each document is JSON, which is much faster than YAML. Returns `None` for other text; it may
/// still be YAML, such as `{kind: Pod}`.
pub(super) fn json_documents<T: DeserializeOwned>(text: &str) -> Option<Vec<T>> {
    // A string in JSON does not span lines.
    let documents = text
        .split("\n---\n")
        .filter(|document| !document.trim().is_empty());
    let documents = documents.map(|document| {
        let is_object = document.trim_start().starts_with('{');
        is_object.then(|| serde_json::from_str(document).ok())?
    });
    documents.collect()
}

/// Parses all documents of a YAML text that are not null. JSON is a part of YAML.
pub fn yaml_documents<T: DeserializeOwned>(text: &str) -> Result<Vec<T>, Malformed> {
    let text = text.trim_start_matches('\u{feff}');
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let documents = serde_saphyr::from_multiple_with_options::<Option<T>>(text, options(text.len()));
    match documents {
        Ok(documents) => Ok(documents.into_iter().flatten().collect()),
        Err(error) => {
            let mut message = plain(error.without_snippet());
            message.truncate(message.floor_char_boundary(MAX_MESSAGE));
            let position = error.location().filter(|location| location.line() > 0);
            let position = position.map(|location| Position {
                line: location.line(),
                column: location.column(),
            });
            let unknown = match error.without_snippet() {
                Error::SerdeUnknownField { field, expected, .. } => Some(UnknownKey {
                    key: field.clone(),
                    known: expected.clone(),
                }),
                _ => None,
            };
            Err(Malformed {
                message,
                position,
                unknown,
            })
        }
    }
}

/// Limits the expansion of aliases in proportion to the length of the text, with room for small texts.
fn options(length: usize) -> serde_saphyr::Options {
    let most = 2 * length + 1024;
    serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::Error,
        with_snippet: false,
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            max_events: 2 * most,
            max_nodes: most,
            max_total_scalar_bytes: most,
            max_recorded_anchor_events: most,
            max_recorded_anchor_bytes: most,
            max_aliases: most,
            max_anchors: most,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: most,
        },
    }
}

/// Returns a plain message for an error. Those of the parser are about its own types and options.
fn plain(error: &Error) -> String {
    let too_deep = || format!("it is nested more than {MAX_DEPTH} levels deep");
    match error {
        Error::AliasError { error, .. } => plain(error),
        Error::DuplicateMappingKey { key: Some(key), .. } => format!("the key {key} is there twice"),
        Error::DuplicateMappingKey { key: None, .. } => "a key is there twice".to_owned(),
        Error::Unexpected { expected, .. } => match *expected {
            "mapping start" => "expected keys and values, as in `name: value`".to_owned(),
            "sequence start" => "expected a list, as in `- name: value`".to_owned(),
            "string scalar" => "expected a text".to_owned(),
            other => format!("expected {other}"),
        },
        Error::SerdeInvalidType {
            unexpected, expected, ..
        }
        | Error::SerdeInvalidValue {
            unexpected, expected, ..
        } => format!("expected {expected}, found {}", found(unexpected)),
        Error::Message { msg, .. } => msg.clone(),
        Error::SerdeUnknownField { field, .. } => format!("unknown key {field}"),
        Error::SerdeMissingField { field, .. } => format!("the key {field} is missing"),
        Error::SerdeUnknownVariant {
            variant, expected, ..
        } => format!("expected {}, found {variant}", expected.join(" or ")),
        Error::InvalidScalar { ty, .. } if ty.starts_with(['u', 'i']) => "expected a whole number".to_owned(),
        Error::InvalidScalar { ty, .. } if ty.starts_with("bool") => "expected true or false".to_owned(),
        Error::InvalidBooleanStrict { .. } => "expected true or false".to_owned(),
        Error::NullIntoString { .. } => "expected a text, found nothing".to_owned(),
        Error::UnknownAnchor { .. } => "the alias refers to an anchor that is not there".to_owned(),
        Error::Budget {
            breach: BudgetBreach::Depth { .. },
            ..
        } => too_deep(),
        Error::Budget { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => {
            "it is too large once its aliases are replaced".to_owned()
        }
        other => match &*UserMessageFormatter.format_message(other) {
            // The scanner has a limit of its own.
            text if text.starts_with("recursion limit exceeded") => too_deep(),
            text if text.starts_with("tabs disallowed") => {
                "a tab is not allowed here; indent with spaces".to_owned()
            }
            text if text.ends_with("plain scalar, found a tab") => {
                "this value goes on in a line that begins with a tab; indent with spaces".to_owned()
            }
            text if text.starts_with("mapping values are not allowed") => {
                "a colon is not allowed here; check the indentation, or quote the text".to_owned()
            }
            text => format!("neither YAML nor JSON: {text}"),
        },
    }
}

/// Replaces serde's word for a value.
fn found(unexpected: &str) -> &str {
    match unexpected {
        "unit value" | "unit" | "Option value" => "nothing",
        "map" => "keys and values",
        "sequence" => "a list",
        other => other,
    }
}
