//! Times and ages in texts for people.

use jiff::Timestamp;

use crate::duration::Span;

/// Returns the duration in milliseconds, the unit of the API.
pub(super) fn milliseconds(span: Span) -> u64 {
    u64::try_from(span.0.as_millis()).unwrap_or(u64::MAX)
}

/// Formats milliseconds since the epoch as RFC 3339.
pub(super) fn moment(milliseconds: u64) -> String {
    let moment = i64::try_from(milliseconds)
        .ok()
        .and_then(|time| Timestamp::from_millisecond(time).ok());
    moment.map_or_else(|| milliseconds.to_string(), |moment| moment.to_string())
}

/// Like [`moment`], with `None` for 0, which means unknown.
pub(super) fn known_moment(milliseconds: u64) -> Option<String> {
    (milliseconds > 0).then(|| moment(milliseconds))
}

/// Formats a duration in one unit: `12s`, `3m`, `5h`, `2d`. The daemon measures ages, because clocks may differ.
pub(super) fn age(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_utc() {
        assert_eq!(moment(1_700_000_000_123), "2023-11-14T22:13:20.123Z");
        assert_eq!(moment(u64::MAX), u64::MAX.to_string());
    }

    #[test]
    fn ages_have_one_unit() {
        assert_eq!(age(0), "0s");
        assert_eq!(age(119_999), "119s");
        assert_eq!(age(120_000), "2m");
        assert_eq!(age(7_200_000), "2h");
        assert_eq!(age(172_800_000), "2d");
    }
}
