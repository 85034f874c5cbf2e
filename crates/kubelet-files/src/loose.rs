//! Finds keys and names in a text with broken syntax.

use crate::go_json::decode::differs_in_one_byte;

/// A key and its position in the text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found<K> {
    pub(crate) key: K,
    pub(crate) start: usize,
    /// The first byte of the value.
    pub(crate) value: usize,
}

/// Returns the first of `keys` at or after `from`. One byte of it may be damaged. Keys include quotes and colon.
pub(crate) fn next_key<K: Copy>(bytes: &[u8], from: usize, keys: &[(K, &[u8])]) -> Option<Found<K>> {
    let quotes = (from..bytes.len()).filter(|&at| bytes[at] == b'"');
    quotes.into_iter().find_map(|quote| {
        keys.iter().find_map(|&(key, name)| {
            // Of the two quotes of a key, at most one is damaged.
            let closing = quote.checked_sub(name.len() - 2).filter(|start| *start >= from);
            let matches = |start: usize| {
                let text = bytes.get(start..start + name.len())?;
                let is_key = text == name || differs_in_one_byte(text, name);
                is_key.then_some(Found {
                    key,
                    start,
                    value: start + name.len(),
                })
            };
            // A damaged escape of the closing quote is one more byte.
            let longer = || {
                let (inner, end) = name.split_at(name.len() - 2);
                let text = bytes.get(quote..quote + name.len() + 1)?;
                let is_key = text.starts_with(inner) && text.ends_with(end);
                is_key.then_some(Found {
                    key,
                    start: quote,
                    value: quote + name.len() + 1,
                })
            };
            matches(quote).or_else(|| matches(closing?)).or_else(longer)
        })
    })
}

/// Returns the possible readings of a name if one of its quotes may be damaged or lost. `text` is the name with the
/// bytes in the positions of its quotes, as far as they exist.
pub(crate) fn names(text: &[u8]) -> Vec<String> {
    let from: &[usize] = if text.starts_with(b"\"") { &[1] } else { &[1, 0] };
    let back: &[usize] = if text.ends_with(b"\"") { &[1] } else { &[1, 0] };
    let is_name = |name: &&[u8]| {
        let is_plain =
            |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\') && !is_structure(*byte);
        !name.is_empty() && name.iter().all(is_plain)
    };
    let readings = from
        .iter()
        .flat_map(|from| back.iter().map(move |back| (*from, *back)));
    let readings = readings.filter_map(|(from, back)| text.get(from..text.len().checked_sub(back)?));
    let names = readings.filter(is_name);
    names
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect()
}

pub(crate) fn is_structure(byte: u8) -> bool {
    matches!(byte, b'{' | b'}' | b'[' | b']' | b',' | b':')
}

/// Returns `true` for a byte that JSON allows neither between values nor in them.
pub(crate) fn is_control(byte: u8) -> bool {
    byte < 0x20 && !byte.is_ascii_whitespace()
}

/// Returns the first byte that is not white space, and the length up to and including it.
pub(crate) fn next_byte(bytes: &[u8]) -> (Option<u8>, usize) {
    let space = space(bytes);
    (bytes.get(space).copied(), space + 1)
}

pub(crate) fn space(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}
