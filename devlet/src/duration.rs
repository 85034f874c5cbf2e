//! Durations on the command line and in files: `500ms`, `30s`, `5m`, `1h30m`, or a number of seconds.
//!
//! They are capped at one year, so that no deadline overflows.

use std::fmt;
use std::time::Duration;

use devlet_agent::deadline::MAX_DURATION;
use jiff::SignedDuration;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A duration as a user writes it, at most one year.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span(pub(crate) Duration);

/// Why a text is not a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidSpan {
    #[error("{0:?} is not a time; write it as 500ms, 30s, 5m, 1h30m, or a number of seconds")]
    Malformed(String),
    #[error("{0:?} is negative; write a time from 0s on")]
    Negative(String),
}

impl std::str::FromStr for Span {
    type Err = InvalidSpan;

    fn from_str(text: &str) -> Result<Self, InvalidSpan> {
        if let Ok(seconds) = text.parse() {
            return Ok(Self::capped(Duration::from_secs(seconds)));
        }
        // jiff also reads ISO 8601 (`PT5S`), which is not supported here.
        let plain = text.starts_with(|character: char| character.is_ascii_digit());
        let span: Option<SignedDuration> = plain.then(|| text.parse().ok()).flatten();
        let span = span.and_then(|span| Duration::try_from(span).ok());
        span.map(Self::capped)
            .ok_or_else(|| match text.strip_prefix('-') {
                Some(rest) if rest.parse::<Self>().is_ok() => InvalidSpan::Negative(text.to_owned()),
                _ => InvalidSpan::Malformed(text.to_owned()),
            })
    }
}

impl Span {
    fn capped(time: Duration) -> Self {
        Self(time.min(MAX_DURATION))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let span = SignedDuration::try_from(self.0).unwrap_or(SignedDuration::MAX);
        // jiff writes spaces between the parts, and reads them with or without.
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
        // Not `any`: the error for a list would lack its position.
        deserializer.deserialize_str(SpanVisitor)
    }
}

struct SpanVisitor;

impl de::Visitor<'_> for SpanVisitor {
    type Value = Span;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a time, such as 30s")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Span, E> {
        text.parse().map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_written_with_units() {
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
        assert_eq!("90".parse(), Ok(Span(Duration::from_secs(90))));
        assert_eq!("1.5s".parse(), Ok(Span(Duration::from_millis(1500))));
    }

    #[test]
    fn durations_are_capped_at_a_year() {
        for text in ["18446744073709551615", "9223372036854775807s", "876000h"] {
            assert_eq!(text.parse(), Ok(Span(MAX_DURATION)), "{text}");
            let span: Span = serde_json::from_str(&format!("{text:?}")).unwrap();
            assert_eq!(span, Span(MAX_DURATION), "{text}");
        }
        let span: Span = serde_saphyr::from_str("18446744073709551615").unwrap();
        assert_eq!(span, Span(MAX_DURATION));
        assert_eq!(span.to_string().parse(), Ok(span));
    }

    #[test]
    fn malformed_durations_are_refused() {
        for text in ["", "-5s", "-5", "1.5", "1.5.2", "soon", "5 parsecs", "PT5S"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }
}
