//! The documents of a text, which is JSON or YAML, and plain words for what is wrong with it.

use serde::de::DeserializeOwned;
use serde_saphyr::budget::BudgetBreach;
use serde_saphyr::{Error, MessageFormatter as _, UserMessageFormatter};

use super::place::Position;

/// How deep a manifest may be nested; those of Kubernetes are a dozen levels deep.
const DEEPEST: usize = 64;

/// How much of a parser's message is kept: it may quote the text.
const LONGEST_MESSAGE: usize = 500;

/// Why a text has no such documents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    /// What is wrong, in plain words.
    pub message: String,
    /// Where, if the parser knows.
    pub position: Option<Position>,
    /// The key that is not known, if that is what is wrong.
    pub unknown: Option<UnknownKey>,
}

/// A key that is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownKey {
    /// The key.
    pub key: String,
    /// The keys that are known in its place.
    pub known: Vec<&'static str>,
}

/// All documents of a text that are not null.
pub(super) fn documents<T: DeserializeOwned>(text: &str) -> Result<Vec<T>, Malformed> {
    match json_documents(text.trim_start_matches('\u{feff}')) {
        Some(documents) => Ok(documents),
        None => yaml_documents(text),
    }
}

/// The documents of a text in which each is JSON, as programs write them: that takes much less time than YAML
/// does. Text that is not JSON may still be YAML, such as `{kind: Pod}`.
pub(super) fn json_documents<T: DeserializeOwned>(text: &str) -> Option<Vec<T>> {
    // No text in JSON spans lines.
    let documents = text
        .split("\n---\n")
        .filter(|document| !document.trim().is_empty());
    let documents = documents.map(|document| {
        let is_object = document.trim_start().starts_with('{');
        is_object.then(|| serde_json::from_str(document).ok())?
    });
    documents.collect()
}

/// The same for YAML, of which JSON is a part.
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
            message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
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

/// Bounds what aliases can make of a text by its length, with room for small ones.
fn options(length: usize) -> serde_saphyr::Options {
    let most = 2 * length + 1024;
    serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::Error,
        with_snippet: false,
        budget: serde_saphyr::budget! {
            max_depth: DEEPEST,
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

/// The words of the parser are about its own types and options.
fn plain(error: &Error) -> String {
    let too_deep = || format!("it is nested more than {DEEPEST} levels deep");
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

/// serde's word for a value.
fn found(unexpected: &str) -> &str {
    match unexpected {
        "unit value" | "unit" | "Option value" => "nothing",
        "map" => "keys and values",
        "sequence" => "a list",
        other => other,
    }
}
