//! Edits of OCI runtime specs that keep numbers as they were written.
//!
//! A [`Value`] holds numbers as 64 bits, which changes `12345678901234567890123` and `0.10`. Such numbers are replaced
//! by unique placeholder strings before parsing, and restored when the spec is printed. Edits never read them.

use std::collections::BTreeMap;
use std::path::Path;

use devlet_cdi::{ApplyError, ContainerEdits};
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::{files, output};

/// Changes to a runtime spec.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Additions {
    pub(crate) edits: ContainerEdits,
    /// Annotations of the container, which CDI edits do not have.
    pub(crate) annotations: BTreeMap<String, String>,
}

impl From<ContainerEdits> for Additions {
    fn from(edits: ContainerEdits) -> Self {
        Self {
            edits,
            ..Self::default()
        }
    }
}

impl Additions {
    fn apply(&self, oci: &mut Value) -> Result<(), EditError> {
        self.edits.apply(oci)?;
        if self.annotations.is_empty() {
            return Ok(());
        }
        let annotations = oci.as_object_mut().map(|oci| {
            oci.entry("annotations")
                .or_insert_with(|| Value::Object(serde_json::Map::new()))
        });
        let annotations = annotations.and_then(Value::as_object_mut);
        let added = self.annotations.iter();
        annotations
            .ok_or(EditError::Annotations)?
            .extend(added.map(|(key, value)| (key.clone(), value.as_str().into())));
        Ok(())
    }
}

/// Why a runtime spec cannot be edited.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EditError {
    #[error("not an OCI runtime spec: {0}")]
    Json(#[from] serde_json::Error),
    #[error("not an OCI runtime spec: it is nested too deeply, at most 127 levels are read")]
    TooDeep,
    #[error("not an OCI runtime spec: its annotations are not an object")]
    Annotations,
    #[error(transparent)]
    Apply(#[from] ApplyError),
}

impl EditError {
    /// Prints the error, with a hint.
    pub(crate) fn print(&self, file: &Path) {
        match self {
            Self::Apply(ApplyError::HostDevice { .. } | ApplyError::NodeType { .. }) => {
                output::warn(&format!("error: {self}"));
                output::warn(
                    "hint: device nodes whose type or numbers a spec leaves out are looked up on this host",
                );
            }
            Self::Apply(ApplyError::HookName { .. }) => output::warn(&format!("error: {self}")),
            Self::Apply(ApplyError::OciSpec { .. }) | Self::Json(_) | Self::TooDeep | Self::Annotations => {
                output::warn(&format!("error: {}: {self}", files::name_of(file)));
                output::warn("hint: --oci-spec takes the config.json of an OCI bundle");
            }
        }
    }
}

/// A runtime spec with its edits.
#[derive(Debug)]
pub(crate) struct Edited {
    value: Value,
    /// Prefix of all placeholders, followed by an index into `numbers` and [`END`].
    mark: String,
    numbers: Vec<String>,
}

const END: char = 'z';

impl Edited {
    pub(crate) fn new(json: &[u8], additions: &Additions) -> Result<Self, EditError> {
        // Reports malformed JSON with its position, before placeholders change positions.
        let _: IgnoredAny = serde_json::from_slice(json)?;
        let text = std::str::from_utf8(json).map_err(|_| {
            // The parser above does not check ignored strings for UTF-8.
            match serde_json::from_slice::<Value>(json) {
                Err(error) => error,
                Ok(_) => serde::de::Error::custom("it is not UTF-8"),
            }
        })?;
        let pieces = pieces(text);
        let numbers: Vec<String> = pieces.iter().map(|piece| piece.number.to_owned()).collect();
        let mut mark = "devletnumber".to_owned();
        if !numbers.is_empty() {
            // Printing resolves escapes, which could hide the mark.
            let rest = parse(&joined(&pieces, text, |_| "0".to_owned()))?.to_string();
            let added = serde_json::to_string(additions)?;
            while rest.contains(&mark) || added.contains(&mark) {
                mark.push('x');
            }
        }
        let mut value = parse(&joined(&pieces, text, |place| format!("\"{mark}{place}{END}\"")))?;
        additions.apply(&mut value)?;
        Ok(Self { value, mark, numbers })
    }

    pub(crate) fn to_json(&self) -> anyhow::Result<String> {
        Ok(self.restored(&serde_json::to_string_pretty(&self.value)?, "\""))
    }

    pub(crate) fn to_yaml(&self) -> anyhow::Result<String> {
        Ok(self.restored(&serde_saphyr::to_string(&self.value)?, ""))
    }

    /// Returns `text` with placeholders, enclosed in `quote`s, replaced by their numbers.
    fn restored(&self, text: &str, quote: &str) -> String {
        let (begin, end) = (format!("{quote}{}", self.mark), format!("{END}{quote}"));
        let mut parts = text.split(begin.as_str());
        let mut restored = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (place, rest) = part.split_once(end.as_str()).unwrap_or((part, ""));
            let number = place
                .parse::<usize>()
                .ok()
                .and_then(|place| self.numbers.get(place));
            restored.push_str(number.map_or(place, String::as_str));
            restored.push_str(rest);
        }
        restored
    }
}

fn parse(text: &str) -> Result<Value, EditError> {
    serde_json::from_str(text).map_err(|error| {
        if error.to_string().starts_with("recursion limit exceeded") {
            EditError::TooDeep
        } else {
            error.into()
        }
    })
}

/// A number that a [`Value`] would change, and the text between it and the previous one.
struct Piece<'t> {
    before: &'t str,
    number: &'t str,
}

fn pieces(json: &str) -> Vec<Piece<'_>> {
    let bytes = json.as_bytes();
    let mut pieces = Vec::new();
    let (mut at, mut last) = (0, 0);
    while let Some(&byte) = bytes.get(at) {
        let start = at;
        at += 1;
        match byte {
            b'"' => {
                while let Some(&byte) = bytes.get(at) {
                    at += if byte == b'\\' { 2 } else { 1 };
                    if byte == b'"' {
                        break;
                    }
                }
            }
            b'-' | b'0'..=b'9' => {
                while matches!(
                    bytes.get(at),
                    Some(b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E')
                ) {
                    at += 1;
                }
                let number = &json[start..at];
                if !survives(number) {
                    let before = &json[last..start];
                    pieces.push(Piece { before, number });
                    last = at;
                }
            }
            _ => {}
        }
    }
    pieces
}

fn survives(number: &str) -> bool {
    let read = serde_json::from_str::<Value>(number);
    read.and_then(|value| serde_json::to_string(&value))
        .is_ok_and(|printed| printed == number)
}

/// Returns `json` with the numbers of `pieces` replaced.
fn joined(pieces: &[Piece<'_>], json: &str, number: impl Fn(usize) -> String) -> String {
    let mut text = String::with_capacity(json.len());
    let mut end = 0;
    for (place, piece) in pieces.iter().enumerate() {
        text.push_str(piece.before);
        text.push_str(&number(place));
        end += piece.before.len() + piece.number.len();
    }
    text.push_str(&json[end..]);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edits(variable: &str) -> Additions {
        let edits = ContainerEdits {
            env: vec![variable.to_owned()],
            ..ContainerEdits::default()
        };
        edits.into()
    }

    #[test]
    fn numbers_stay_as_they_were_written() {
        let numbers = "[12345678901234567890123, 0.1234567890123456789012, -0, 1e5, 1e400, -1.50E+07, 0.10, 7, -3, \
                       18446744073709551615, 1.5]";
        let json =
            format!(r#"{{"future": {numbers}, "process": {{"user": {{"uid": 1E3}}}}, "x\"1e5": "1e5"}}"#);
        let edited = Edited::new(json.as_bytes(), &edits("A=1")).unwrap();
        let text = edited.to_json().unwrap();
        for number in numbers.trim_matches(['[', ']']).split(", ") {
            assert!(text.contains(&format!("\n    {number}")), "{number}: {text}");
        }
        assert!(text.contains(r#""uid": 1E3"#), "{text}");
        assert!(text.contains(r#""x\"1e5": "1e5""#), "{text}");
        let yaml = edited.to_yaml().unwrap();
        for number in numbers.trim_matches(['[', ']']).split(", ") {
            assert!(yaml.contains(&format!("- {number}\n")), "{number}: {yaml}");
        }
    }

    #[test]
    fn strings_that_look_like_placeholders_are_kept() {
        let json = r#"{"a": "devletnumber0z", "b": "\u0064evletnumberx0z", "c": 1e5, "devletnumberxx0z": 1}"#;
        let edited = Edited::new(json.as_bytes(), &edits("A=devletnumberxxx0z")).unwrap();
        let text = edited.to_json().unwrap();
        assert!(text.contains(r#""a": "devletnumber0z""#), "{text}");
        assert!(text.contains(r#""b": "devletnumberx0z""#), "{text}");
        assert!(text.contains(r#""c": 1e5"#), "{text}");
        assert!(text.contains("A=devletnumberxxx0z"), "{text}");
    }

    #[test]
    fn annotations_are_added_to_those_that_are_there() {
        let additions = Additions {
            annotations: [("b".to_owned(), "devletnumber0z".to_owned())].into(),
            ..Additions::default()
        };
        let json = r#"{"annotations": {"a": "1"}, "x": 1e5}"#;
        let text = Edited::new(json.as_bytes(), &additions)
            .unwrap()
            .to_json()
            .unwrap();
        for part in [r#""a": "1""#, r#""b": "devletnumber0z""#, r#""x": 1e5"#] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let refused = Edited::new(br#"{"annotations": []}"#, &additions).unwrap_err();
        assert!(refused.to_string().contains("annotations"), "{refused}");
    }

    #[test]
    fn malformed_json_is_reported_with_its_position() {
        for (json, says) in [
            (&b"{\"a\": 1e5, \"b\": 01}"[..], "line 1 column 18"),
            (b"{\"a\": \"\xff\"}", "line 1 column"),
            (b"{\"a\": 1.}", "line 1 column"),
            (b"{\"a\": \"", "EOF"),
            (b"{\"a\\", "EOF"),
            (b"", "EOF"),
        ] {
            let error = Edited::new(json, &edits("A=1")).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn nesting_over_the_limit_is_reported() {
        let nested = |levels: usize| format!("{{\"a\": {}{}}}", "[".repeat(levels), "]".repeat(levels));
        assert!(Edited::new(nested(126).as_bytes(), &edits("A=1")).is_ok());
        let error = Edited::new(nested(127).as_bytes(), &edits("A=1")).unwrap_err();
        assert!(error.to_string().contains("at most 127 levels"), "{error}");
    }
}
