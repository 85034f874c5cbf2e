//! Writes JSON text with Go's escapes.

/// Appends `text` as a JSON string, byte for byte as Go's `json.Marshal` does.
pub(crate) fn string(out: &mut String, text: &str) {
    out.push('"');
    let mut plain = 0;
    let mut at = 0;
    while let Some(next) = text.as_bytes()[at..]
        .iter()
        .position(|&byte| SPECIAL[usize::from(byte)])
    {
        at += next;
        let rest = &text.as_bytes()[at..];
        let (escape, length) = match rest {
            [b'"', ..] => ("\\\"", 1),
            [b'\\', ..] => ("\\\\", 1),
            [8, ..] => ("\\b", 1),
            [12, ..] => ("\\f", 1),
            [b'\n', ..] => ("\\n", 1),
            [b'\r', ..] => ("\\r", 1),
            [b'\t', ..] => ("\\t", 1),
            [b'<', ..] => ("\\u003c", 1),
            [b'>', ..] => ("\\u003e", 1),
            [b'&', ..] => ("\\u0026", 1),
            [0xe2, 0x80, 0xa8, ..] => ("\\u2028", 3),
            [0xe2, 0x80, 0xa9, ..] => ("\\u2029", 3),
            [0..0x20, ..] => ("", 1),
            _ => {
                // Another character with the same first byte as the two above.
                at += 1;
                continue;
            }
        };
        out.push_str(&text[plain..at]);
        if escape.is_empty() {
            const HEX: [char; 16] = [
                '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f',
            ];
            let code = usize::from(rest[0]);
            out.push_str("\\u00");
            out.push(HEX[code >> 4]);
            out.push(HEX[code & 15]);
        } else {
            out.push_str(escape);
        }
        at += length;
        plain = at;
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

/// Bytes that are escaped, or that begin an escaped character.
static SPECIAL: [bool; 256] = {
    let mut special = [false; 256];
    let mut byte = 0;
    while byte < 0x20 {
        special[byte] = true;
        byte += 1;
    }
    special[b'"' as usize] = true;
    special[b'\\' as usize] = true;
    special[b'<' as usize] = true;
    special[b'>' as usize] = true;
    special[b'&' as usize] = true;
    special[0xe2] = true;
    special
};

/// Appends `items` as a JSON list; `None` is Go's `nil`, printed as `null`.
pub(crate) fn list<T>(out: &mut String, items: Option<&[T]>, item: impl FnMut(&mut String, &T)) {
    self::items(out, items.map(<[T]>::iter), item);
}

/// Appends the items as a JSON list.
pub(crate) fn items<T>(
    out: &mut String,
    items: Option<impl Iterator<Item = T>>,
    mut item: impl FnMut(&mut String, T),
) {
    let Some(items) = items else {
        return out.push_str("null");
    };
    out.push('[');
    for (index, value) in items.enumerate() {
        if index > 0 {
            out.push(',');
        }
        item(out, value);
    }
    out.push(']');
}

/// Appends a list of strings.
pub(crate) fn strings(out: &mut String, items: Option<&[String]>) {
    list(out, items, |out, item| string(out, item));
}

/// Appends an object with the entries in the order given.
pub(crate) fn object<K: AsRef<str>, V>(
    out: &mut String,
    entries: Option<impl Iterator<Item = (K, V)>>,
    mut value: impl FnMut(&mut String, V),
) {
    let Some(entries) = entries else {
        return out.push_str("null");
    };
    out.push('{');
    for (index, (key, entry)) in entries.enumerate() {
        if index > 0 {
            out.push(',');
        }
        string(out, key.as_ref());
        out.push(':');
        value(out, entry);
    }
    out.push('}');
}
