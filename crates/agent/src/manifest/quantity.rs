//! Kubernetes quantities, as numbers of devices.

/// The reason why a text is not a quantity of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidQuantity {
    /// Not in the format of Kubernetes quantities.
    #[error("write a number such as 2")]
    Malformed,
    /// Less than nothing.
    #[error("it is negative")]
    Negative,
    /// More than any node has.
    #[error("it is too large")]
    TooLarge,
}

/// Parses a Kubernetes quantity as a number of devices. A fraction is rounded up.
pub fn quantity(text: &str) -> Result<usize, InvalidQuantity> {
    use InvalidQuantity::{Malformed, Negative, TooLarge};
    /// Decimal places that are computed exactly. Further digits only round up.
    const PLACES: u32 = 18;
    let (negative, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let is_number = |each: char| each.is_ascii_digit() || each == '.';
    let (number, suffix) = rest.split_at(rest.find(|each| !is_number(each)).unwrap_or(rest.len()));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || number.len() > 1000 {
        return Err(Malformed);
    }
    let (binary, decimal) = scale(suffix).ok_or(Malformed)?;
    let digits: Vec<u8> = whole
        .bytes()
        .chain(fraction.bytes())
        .map(|digit| digit - b'0')
        .collect();
    if digits.is_empty() {
        return Err(Malformed);
    }
    let Some(first) = (0_i64..)
        .zip(&digits)
        .find(|(_, digit)| **digit != 0)
        .map(|(place, _)| place)
    else {
        return Ok(0);
    };
    if negative {
        return Err(Negative);
    }
    // The place of the point among the digits, or beyond them.
    let point = decimal + i64::try_from(whole.len()).map_err(|_| TooLarge)?;
    if point - first > 19 {
        return Err(TooLarge);
    }
    let digit = |place: i64| {
        usize::try_from(place)
            .ok()
            .and_then(|place| digits.get(place))
            .map_or(0, |digit| *digit)
    };
    let value =
        (first..point + i64::from(PLACES)).fold(0_u128, |value, place| value * 10 + u128::from(digit(place)));
    let more = (0_i64..)
        .zip(&digits)
        .any(|(place, digit)| place >= point + i64::from(PLACES) && *digit != 0);
    let scaled = value
        .checked_mul(1 << binary)
        .and_then(|value| value.checked_add(u128::from(more)));
    let count = scaled.ok_or(TooLarge)?.div_ceil(10_u128.pow(PLACES));
    // The largest quantity that Kubernetes knows.
    i64::try_from(count)
        .ok()
        .and_then(|count| usize::try_from(count).ok())
        .ok_or(TooLarge)
}

/// Returns the powers of two and of ten of a suffix.
fn scale(suffix: &str) -> Option<(u32, i64)> {
    Some(match suffix {
        "" => (0, 0),
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?;
            let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if digits.is_empty() || !digits.bytes().all(|each| each.is_ascii_digit()) {
                return None;
            }
            // An exponent that does not fit is out of range, too.
            let beyond = if exponent.starts_with('-') {
                -100_000
            } else {
                100_000
            };
            (0, exponent.parse().unwrap_or(beyond).clamp(-100_000, 100_000))
        }
    })
}
