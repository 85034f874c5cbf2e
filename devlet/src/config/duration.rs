//! Times as people write them: `500ms`, `30s`, `5m`, `1h30m`.

use std::fmt;
use std::time::Duration;

use jiff::SignedDuration;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A time in a configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span(pub(crate) Duration);

/// Not a time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a time; write it as 500ms, 30s, 5m or 1h30m")]
pub(crate) struct InvalidSpan(String);

impl std::str::FromStr for Span {
    type Err = InvalidSpan;

    fn from_str(text: &str) -> Result<Self, InvalidSpan> {
        // Without a unit nobody knows; ISO 8601 is more than anybody needs here.
        let plain = text.starts_with(|character: char| character.is_ascii_digit());
        let span: Option<SignedDuration> = plain.then(|| text.parse().ok()).flatten();
        let span = span.and_then(|span| Duration::try_from(span).ok());
        span.map(Self).ok_or_else(|| InvalidSpan(text.to_owned()))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let span = SignedDuration::try_from(self.0).unwrap_or(SignedDuration::MAX);
        // jiff puts blanks between the parts, which it also reads without.
        f.write_str(&format!("{span:#}").replace(' ', ""))
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_written_as_people_do() {
        for (text, milliseconds) in [
            ("500ms", 500),
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("0s", 0),
        ] {
            let span: Span = text.parse().unwrap();
            assert_eq!(span.0, Duration::from_millis(milliseconds));
            assert_eq!(span.to_string(), text);
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in ["30", "", "-5s", "soon", "5 parsecs", "PT5S"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }
}
