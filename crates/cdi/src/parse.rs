//! Parses the bytes of a spec file into a [`Spec`].
//!
//! The reference implementation reads every file as YAML, regardless of its name. Here a JSON parser comes first,
//! and YAML is tried if it fails, so both give the same content. Only the first YAML document is read.
//!
//! Work and memory are bounded by the length of the input: aliases may expand a document to at most twice its
//! size, and nesting is limited.

use std::io::Cursor;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_saphyr::{DuplicateKeyPolicy, Options};

use crate::spec::Spec;
use crate::validate::Warning;

/// Maximum size of a spec that is read or written: 16 MiB.
pub const MAX_SPEC_BYTES: usize = 16 << 20;

/// Why a text is not a spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// More than [`MAX_SPEC_BYTES`].
    #[error("the spec has more than {MAX_SPEC_BYTES} bytes")]
    TooLarge,
    /// Empty, or `null`.
    #[error("there is no spec in it")]
    Empty,
    /// JSON and YAML must be UTF-8 here.
    #[error("it is not UTF-8 from byte {valid_up_to}")]
    NotUtf8 {
        /// Number of valid bytes at the start.
        valid_up_to: usize,
    },
    /// Not a spec in JSON.
    #[error("it is not a CDI spec: {message}")]
    Json {
        /// The parser's error text, with the position.
        message: String,
    },
    /// Not a spec in YAML.
    #[error("it is not a CDI spec: {message}")]
    Yaml {
        /// The parser's error text, with the position.
        message: String,
    },
}

/// Returns the qualified names in a file that is not a valid spec, as far as they can be read, to report the
/// affected devices.
pub(crate) fn names_in(bytes: &[u8]) -> Option<Vec<String>> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Outline {
        kind: Option<String>,
        devices: Option<Vec<OutlineDevice>>,
    }

    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct OutlineDevice {
        name: Option<String>,
    }

    let (outline, _): (Outline, _) = document(bytes).ok()?;
    let kind = outline.kind?;
    let names = outline.devices?.into_iter().filter_map(|device| device.name);
    Some(names.map(|name| format!("{kind}={name}")).collect())
}

impl Spec {
    /// Parses a spec from JSON or YAML. Does not validate its content.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        document(bytes).map(|(spec, _)| spec)
    }
}

/// Parses the first document.
pub(crate) fn document<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, Option<Warning>), ParseError> {
    if bytes.len() > MAX_SPEC_BYTES {
        return Err(ParseError::TooLarge);
    }
    let text = std::str::from_utf8(bytes).map_err(|error| ParseError::NotUtf8 {
        valid_up_to: error.valid_up_to(),
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim_start().starts_with('{') {
        match serde_json::from_str(text) {
            Ok(value) => Ok((value, is_json_only(text).then_some(Warning::JsonOnly))),
            Err(error) => yaml_document(text).map_err(|_| ParseError::Json {
                message: error.to_string(),
            }),
        }
    } else {
        yaml_document(text)
    }
}

fn yaml_document<T: DeserializeOwned>(text: &str) -> Result<(T, Option<Warning>), ParseError> {
    let message = |error: serde_saphyr::Error| ParseError::Yaml {
        message: error.to_string(),
    };
    match serde_saphyr::from_str_with_options::<Option<T>>(text, options(text.len())) {
        Ok(value) => Ok((value.ok_or(ParseError::Empty)?, None)),
        Err(error) => {
            // The first document may be valid even if the following text is not.
            let mut stream = Cursor::new(text);
            let mut documents =
                serde_saphyr::read_with_options::<_, Option<T>>(&mut stream, options(text.len()));
            match documents.next() {
                Some(Ok(Some(value))) => Ok((value, Some(Warning::MoreDocuments))),
                _ => Err(message(error)),
            }
        }
    }
}

/// Returns `true` if valid JSON contains text that is not YAML for runtimes: the escape `\/`, a surrogate, or a
/// character that is not printable.
fn is_json_only(json: &str) -> bool {
    if json
        .chars()
        .any(|c| matches!(c, '\u{7f}'..='\u{84}' | '\u{86}'..='\u{9f}' | '\u{fffe}' | '\u{ffff}'))
    {
        return true;
    }
    // Backslashes occur only in strings, and each begins an escape.
    let mut escapes = json.split('\\').skip(1);
    while let Some(escape) = escapes.next() {
        match escape.as_bytes() {
            // An escaped backslash: the next text does not begin with an escape.
            [] => drop(escapes.next()),
            [b'/', ..] | [b'u', b'd' | b'D', b'8' | b'9' | b'a' | b'b' | b'A' | b'B', ..] => return true,
            _ => {}
        }
    }
    false
}

/// Bounds all work by the length of the input, with a minimum for short ones.
fn options(length: usize) -> Options {
    let most = 2 * length + 1024;
    serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::Error,
        legacy_octal_numbers: true,
        with_snippet: false,
        budget: serde_saphyr::budget! {
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

#[cfg(test)]
mod tests;
