//! JSON text with Go's escapes.

/// Appends `text` as a JSON string, byte for byte as Go's `json.Marshal` does.
pub(crate) fn string(out: &mut String, text: &str) {
    out.push('"');
    let mut plain = 0;
    for (at, character) in text.char_indices() {
        let escape = match character {
            '"' => "\\\"",
            '\\' => "\\\\",
            '\u{8}' => "\\b",
            '\u{c}' => "\\f",
            '\n' => "\\n",
            '\r' => "\\r",
            '\t' => "\\t",
            '<' => "\\u003c",
            '>' => "\\u003e",
            '&' => "\\u0026",
            '\u{2028}' => "\\u2028",
            '\u{2029}' => "\\u2029",
            '\0'..='\u{1f}' => "",
            _ => continue,
        };
        out.push_str(&text[plain..at]);
        if escape.is_empty() {
            const HEX: [char; 16] = [
                '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f',
            ];
            let code = character as usize;
            out.push_str("\\u00");
            out.push(HEX[code >> 4]);
            out.push(HEX[code & 15]);
        } else {
            out.push_str(escape);
        }
        plain = at + character.len_utf8();
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

/// Appends `items` as a JSON list; `None` is Go's `nil`, printed as `null`.
pub(crate) fn list<T>(out: &mut String, items: Option<&[T]>, mut item: impl FnMut(&mut String, &T)) {
    let Some(items) = items else {
        return out.push_str("null");
    };
    out.push('[');
    for (index, value) in items.iter().enumerate() {
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
