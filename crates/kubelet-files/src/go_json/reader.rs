//! Parser for JSON documents with Go's syntax rules and Go's error texts.

use std::borrow::Cow;
use std::fmt::Display;

/// Maximum nesting that Go's scanner follows.
const MAX_DEPTH: usize = 10_000;

/// Maximum number of warnings that are listed. The rest are only counted, so that the report on a hostile file is not
/// larger than the file.
const MAX_WARNINGS: usize = 64;

/// Maximum number of dropped parts that are listed. The rest are only counted.
const MAX_DROPPED: usize = 1_000;

/// The document is not JSON. The text is the one of Go.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct SyntaxError {
    pub(crate) message: String,
    pub(crate) offset: usize,
}

/// A value has another type than the Go struct requires. The text is the one of Go.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct TypeError {
    pub(crate) message: String,
    pub(crate) offset: usize,
}

/// Unusual input that a decoder accepts silently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Warning {
    pub(crate) kind: WarningKind,
    pub(crate) offset: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WarningKind {
    /// A key that the Go struct does not have.
    UnknownKey(String),
    /// A key that occurs twice in one object.
    DuplicateKey(String),
    /// Bytes that are not UTF-8, or half a surrogate pair, read as U+FFFD.
    Substituted,
}

/// A part of the document that cannot be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Dropped {
    pub(crate) what: String,
    pub(crate) reason: String,
}

/// Parts that cannot be kept. Only the first ones are listed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct DroppedList {
    pub(crate) list: Vec<Dropped>,
    /// Number of parts that are not in the list.
    pub(crate) left_out: usize,
}

impl DroppedList {
    pub(crate) fn push(&mut self, what: String, reason: String) {
        if self.list.len() < MAX_DROPPED {
            self.list.push(Dropped { what, reason });
        } else {
            self.left_out += 1;
        }
    }
}

/// The type of the next value, according to its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Object,
    Array,
    String,
    Number,
    True,
    False,
    Null,
}

impl Kind {
    /// Returns the name of the type in Go's type errors.
    pub(crate) fn go_word(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::Array => "array",
            Self::String => "string",
            Self::Number => "number",
            Self::True | Self::False => "bool",
            Self::Null => "null",
        }
    }
}

/// How an element of the wrong type is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mode {
    /// As in Go: the first type error makes the document invalid.
    #[default]
    Strict,
    /// An element that cannot be kept is dropped, with a warning.
    Salvage,
}

#[derive(Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: usize,
    mode: Mode,
    /// `true` while an element that is dropped as a whole is being read.
    inside_unit: bool,
    first_type_error: Option<TypeError>,
    /// `true` if `first_type_error` ends the decoding.
    aborted: bool,
    type_errors: usize,
    warnings: Vec<Warning>,
    warnings_left_out: usize,
    dropped: DroppedList,
    /// The type of the innermost Go struct and the fields that lead to it, for Go's error texts.
    struct_type: &'static str,
    fields: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self::with_mode(bytes, Mode::Strict)
    }

    pub(crate) fn salvaging(bytes: &'a [u8]) -> Self {
        Self::with_mode(bytes, Mode::Salvage)
    }

    fn with_mode(bytes: &'a [u8], mode: Mode) -> Self {
        Self {
            bytes,
            at: 0,
            depth: 0,
            mode,
            inside_unit: false,
            first_type_error: None,
            aborted: false,
            type_errors: 0,
            warnings: Vec::new(),
            warnings_left_out: 0,
            dropped: DroppedList::default(),
            struct_type: "",
            fields: Vec::new(),
        }
    }

    pub(crate) fn offset(&self) -> usize {
        self.at
    }

    /// Returns the number of bytes left.
    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len() - self.at.min(self.bytes.len())
    }

    /// Returns the document's bytes between two offsets.
    pub(crate) fn slice(&self, from: usize, to: usize) -> &'a [u8] {
        self.bytes.get(from..to).unwrap_or_default()
    }

    pub(crate) fn is_salvaging(&self) -> bool {
        self.mode == Mode::Salvage
    }

    pub(crate) fn first_type_error(&self) -> Option<&TypeError> {
        self.first_type_error.as_ref()
    }

    pub(crate) fn take_warnings(&mut self) -> (Vec<Warning>, usize) {
        (
            std::mem::take(&mut self.warnings),
            std::mem::take(&mut self.warnings_left_out),
        )
    }

    pub(crate) fn warn(&mut self, kind: WarningKind, offset: usize) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(Warning { kind, offset });
        } else {
            self.warnings_left_out += 1;
        }
    }

    // ---- syntax

    /// Returns the type of the next value, according to its first byte.
    pub(crate) fn kind(&mut self) -> Result<Kind, SyntaxError> {
        self.skip_space();
        match self.peek() {
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::Array),
            Some(b'"') => Ok(Kind::String),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            Some(b't') => Ok(Kind::True),
            Some(b'f') => Ok(Kind::False),
            Some(b'n') => Ok(Kind::Null),
            _ => Err(self.unexpected("looking for beginning of value")),
        }
    }

    /// Checks that only white space follows the last value.
    pub(crate) fn end(&mut self) -> Result<(), SyntaxError> {
        self.skip_space();
        if self.at == self.bytes.len() {
            Ok(())
        } else {
            Err(self.unexpected("after top-level value"))
        }
    }

    /// Enters an object or list. Returns `false` if it is empty; then the reader is already behind it.
    pub(crate) fn enter(&mut self, close: u8) -> Result<bool, SyntaxError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.unexpected("exceeded max depth"));
        }
        self.at += 1;
        self.skip_space();
        if self.peek() == Some(close) {
            self.at += 1;
            self.depth -= 1;
            return Ok(false);
        }
        Ok(true)
    }

    /// Moves to the next element. Returns `false` at the closing bracket, which is consumed.
    pub(crate) fn next(&mut self, close: u8) -> Result<bool, SyntaxError> {
        self.skip_space();
        match self.peek() {
            Some(b',') => {
                self.at += 1;
                Ok(true)
            }
            Some(byte) if byte == close => {
                self.at += 1;
                self.depth -= 1;
                Ok(false)
            }
            _ if close == b'}' => Err(self.unexpected("after object key:value pair")),
            _ => Err(self.unexpected("after array element")),
        }
    }

    /// Reads an object key and its colon.
    pub(crate) fn key(&mut self) -> Result<(Cow<'a, str>, usize), SyntaxError> {
        self.skip_space();
        if self.peek() != Some(b'"') {
            return Err(self.unexpected("looking for beginning of object key string"));
        }
        let offset = self.at;
        let key = self.string()?;
        self.skip_space();
        if self.peek() != Some(b':') {
            return Err(self.unexpected("after object key"));
        }
        self.at += 1;
        Ok((key, offset))
    }

    /// Reads the key only if it is spelled exactly like `name` and the colon follows at once, as in files that a
    /// kubelet wrote. Otherwise nothing is consumed. See [`Reader::key`].
    pub(crate) fn exact_key(&mut self, name: &str) -> Option<usize> {
        self.skip_space();
        let rest = self.bytes.get(self.at..)?.strip_prefix(b"\"")?;
        let rest = rest.strip_prefix(name.as_bytes())?.strip_prefix(b"\":")?;
        let offset = self.at;
        self.at = self.bytes.len() - rest.len();
        Some(offset)
    }

    /// Reads and unescapes a string. Call it only where [`Reader::kind`] has returned a string.
    pub(crate) fn string(&mut self) -> Result<Cow<'a, str>, SyntaxError> {
        let start = self.at + 1;
        let plain = self.bytes.get(start..).unwrap_or_default();
        let end = plain_length(plain);
        if plain.get(end) == Some(&b'"')
            && let Ok(text) = std::str::from_utf8(&plain[..end])
        {
            self.at = start + end + 1;
            return Ok(Cow::Borrowed(text));
        }
        self.string_with_escapes(start, start + end)
    }

    fn string_with_escapes(&mut self, start: usize, plain_until: usize) -> Result<Cow<'a, str>, SyntaxError> {
        // Find the closing quote and check the syntax, then unescape the part in between.
        let mut at = plain_until;
        let mut escaped = false;
        loop {
            match self.bytes.get(at) {
                None => return Err(self.eof()),
                Some(b'"') => break,
                Some(b'\\') => {
                    escaped = true;
                    at = self.escape_end(at)?;
                }
                Some(0..0x20) => return Err(self.unexpected_at(at, "in string literal")),
                Some(_) => at += 1,
            }
        }
        let inner = &self.bytes[start..at];
        let opening = self.at;
        self.at = at + 1;
        if !escaped && let Ok(text) = std::str::from_utf8(inner) {
            return Ok(Cow::Borrowed(text));
        }
        let (text, substituted) = unescape(inner);
        if substituted {
            self.warn(WarningKind::Substituted, opening);
        }
        Ok(Cow::Owned(text))
    }

    /// Returns the offset behind the escape that begins at `at`.
    fn escape_end(&self, at: usize) -> Result<usize, SyntaxError> {
        match self.bytes.get(at + 1) {
            Some(b'b' | b'f' | b'n' | b'r' | b't' | b'\\' | b'/' | b'"') => Ok(at + 2),
            Some(b'u') => {
                for digit in at + 2..at + 6 {
                    if !self.bytes.get(digit).is_some_and(u8::is_ascii_hexdigit) {
                        return Err(self.cut_or_wrong(digit, "in \\u hexadecimal character escape"));
                    }
                }
                Ok(at + 6)
            }
            _ => Err(self.cut_or_wrong(at + 1, "in string escape code")),
        }
    }

    /// Reads the text of a number. Call it only where [`Reader::kind`] has returned a number.
    pub(crate) fn number(&mut self) -> Result<&'a str, SyntaxError> {
        let start = self.at;
        let mut at = start;
        if self.bytes.get(at) == Some(&b'-') {
            at += 1;
        }
        match self.bytes.get(at) {
            Some(b'0') => at += 1,
            Some(b'1'..=b'9') => at = self.digits_end(at),
            _ => return Err(self.cut_or_wrong(at, "in numeric literal")),
        }
        if self.bytes.get(at) == Some(&b'.') {
            at = self.some_digits(at + 1, "after decimal point in numeric literal")?;
        }
        if matches!(self.bytes.get(at), Some(b'e' | b'E')) {
            at += 1;
            if matches!(self.bytes.get(at), Some(b'+' | b'-')) {
                at += 1;
            }
            at = self.some_digits(at, "in exponent of numeric literal")?;
        }
        self.at = at;
        Ok(std::str::from_utf8(&self.bytes[start..at]).unwrap_or_default())
    }

    fn digits_end(&self, from: usize) -> usize {
        let digits = self.bytes[from..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        from + digits
    }

    fn some_digits(&self, from: usize, context: &str) -> Result<usize, SyntaxError> {
        match self.bytes.get(from) {
            Some(byte) if byte.is_ascii_digit() => Ok(self.digits_end(from)),
            _ => Err(self.cut_or_wrong(from, context)),
        }
    }

    /// Reads `true`, `false` or `null`.
    pub(crate) fn literal(&mut self, word: &'static str) -> Result<(), SyntaxError> {
        for (index, expected) in word.bytes().enumerate() {
            if self.bytes.get(self.at + index) != Some(&expected) {
                let context = format!("in literal {word} (expecting '{}')", char::from(expected));
                return Err(self.cut_or_wrong(self.at + index, &context));
            }
        }
        self.at += word.len();
        Ok(())
    }

    /// Skips one value of any type, without recursion.
    pub(crate) fn skip(&mut self) -> Result<(), SyntaxError> {
        let mut open: Vec<u8> = Vec::new();
        loop {
            match self.kind()? {
                Kind::Object => {
                    if self.enter(b'}')? {
                        open.push(b'}');
                        self.key()?;
                        continue;
                    }
                }
                Kind::Array => {
                    if self.enter(b']')? {
                        open.push(b']');
                        continue;
                    }
                }
                Kind::String => {
                    self.string()?;
                }
                Kind::Number => {
                    self.number()?;
                }
                Kind::True => self.literal("true")?,
                Kind::False => self.literal("false")?,
                Kind::Null => self.literal("null")?,
            }
            loop {
                let Some(&close) = open.last() else { return Ok(()) };
                if self.next(close)? {
                    if close == b'}' {
                        self.key()?;
                    }
                    break;
                }
                open.pop();
            }
        }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    fn eof(&self) -> SyntaxError {
        SyntaxError {
            message: "unexpected end of JSON input".into(),
            offset: self.bytes.len(),
        }
    }

    fn unexpected(&self, context: &str) -> SyntaxError {
        self.unexpected_at(self.at, context)
    }

    fn unexpected_at(&self, offset: usize, context: &str) -> SyntaxError {
        match self.bytes.get(offset) {
            None => self.eof(),
            Some(&byte) => SyntaxError {
                message: format!("invalid character {} {context}", go_quoted(byte)),
                offset,
            },
        }
    }

    /// Returns the error inside a token. If the document ends there, Go's scanner reads a space and reports that.
    fn cut_or_wrong(&self, offset: usize, context: &str) -> SyntaxError {
        let byte = self.bytes.get(offset).copied().unwrap_or(b' ');
        SyntaxError {
            message: format!("invalid character {} {context}", go_quoted(byte)),
            offset,
        }
    }

    // ---- types

    /// Records that the current value has the wrong type, and skips it.
    pub(crate) fn mismatch(&mut self, kind: Kind, go_type: &str) -> Result<(), SyntaxError> {
        let offset = self.at;
        self.skip()?;
        self.type_error(kind.go_word(), go_type, offset);
        Ok(())
    }

    pub(crate) fn type_error(&mut self, value: impl Display, go_type: &str, offset: usize) {
        let name = self.struct_type.rsplit('.').next().unwrap_or_default();
        let path = &self.fields;
        let message = || {
            if name.is_empty() && path.is_empty() {
                format!("json: cannot unmarshal {value} into Go value of type {go_type}")
            } else {
                let path = path.join(".");
                format!("json: cannot unmarshal {value} into Go struct field {name}.{path} of type {go_type}")
            }
        };
        self.type_errors += 1;
        if self.first_type_error.is_none() {
            let message = message();
            self.first_type_error = Some(TypeError { message, offset });
        }
    }

    /// Records a type error with its own text.
    pub(crate) fn fail(&mut self, message: String, offset: usize) {
        self.type_errors += 1;
        self.first_type_error.get_or_insert(TypeError { message, offset });
    }

    /// Records an error of a type with its own decoder. Go stops there, and discards earlier type errors.
    pub(crate) fn abort(&mut self, message: String, offset: usize) {
        self.type_errors += 1;
        if !std::mem::replace(&mut self.aborted, true) {
            self.first_type_error = Some(TypeError { message, offset });
        }
    }

    /// Runs `read` as the value of field `field` of a struct of type `go_type`.
    pub(crate) fn in_field<T>(
        &mut self,
        go_type: &'static str,
        field: &'static str,
        read: impl FnOnce(&mut Self) -> Result<T, SyntaxError>,
    ) -> Result<T, SyntaxError> {
        let outer = std::mem::replace(&mut self.struct_type, go_type);
        self.fields.push(field);
        let answer = read(self)?;
        self.fields.pop();
        self.struct_type = outer;
        Ok(answer)
    }

    /// Runs `read` for an element that is kept or dropped as a whole. When salvaging, returns why it cannot be kept,
    /// and that error no longer counts for the document.
    pub(crate) fn unit(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<(), SyntaxError>,
    ) -> Result<Option<TypeError>, SyntaxError> {
        if self.mode == Mode::Strict || self.inside_unit {
            return read(self).map(|()| None);
        }
        let earlier = self.first_type_error.take();
        let errors = self.type_errors;
        self.inside_unit = true;
        let ended = read(self);
        self.inside_unit = false;
        let reason = std::mem::replace(&mut self.first_type_error, earlier);
        self.type_errors = errors;
        ended.map(|()| reason)
    }

    /// Records that a unit was dropped. `what` is added to the path to it.
    pub(crate) fn left_out(&mut self, what: &str, reason: String) {
        self.dropped
            .push(format!("{}{what}", self.fields.join(".")), reason);
    }

    pub(crate) fn take_dropped(&mut self) -> DroppedList {
        std::mem::take(&mut self.dropped)
    }
}

/// Returns the length of the plain ASCII text before a quote, an escape or any other special byte.
fn plain_length(text: &[u8]) -> usize {
    const ONES: u64 = u64::from_le_bytes([1; 8]);
    const HIGHS: u64 = ONES << 7;
    let (words, rest) = text.as_chunks::<8>();
    for (index, &word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(word);
        let quote = word ^ (ONES * b'"' as u64);
        let escape = word ^ (ONES * b'\\' as u64);
        // The high bit of a byte that is zero here, below 0x20 there, or not ASCII. A borrow can set a false mark,
        // but only above a true one, so the lowest mark is always right.
        let controls = word.wrapping_sub(ONES * 0x20) & !word;
        let zeros = (quote.wrapping_sub(ONES) & !quote) | (escape.wrapping_sub(ONES) & !escape);
        let ends = (controls | zeros | word) & HIGHS;
        if ends != 0 {
            return index * 8 + ends.trailing_zeros() as usize / 8;
        }
    }
    let is_end = |byte: &u8| matches!(byte, 0..0x20 | 0x80.. | b'"' | b'\\');
    text.len() - rest.len() + rest.iter().position(is_end).unwrap_or(rest.len())
}

/// Unescapes the text between two quotes. Returns `true` with it if a byte was replaced by U+FFFD.
pub(crate) fn unescape(inner: &[u8]) -> (String, bool) {
    let mut text = String::with_capacity(inner.len());
    let mut substituted = false;
    let mut at = 0;
    while let Some(&byte) = inner.get(at) {
        if byte != b'\\' {
            let run = inner[at..]
                .iter()
                .position(|&byte| byte == b'\\')
                .map_or(inner.len(), |n| at + n);
            substituted |= push_lossy(&mut text, &inner[at..run]);
            at = run;
            continue;
        }
        let plain = match inner.get(at + 1) {
            Some(b'u') => {
                let (character, length) = unicode_escape(&inner[at..]);
                substituted |= character.is_none();
                text.push(character.unwrap_or(char::REPLACEMENT_CHARACTER));
                at += length;
                continue;
            }
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(&other) => char::from(other),
            None => break,
        };
        text.push(plain);
        at += 2;
    }
    (text, substituted)
}

/// Decodes one character from `\uXXXX`, or from two of them that form a surrogate pair. Returns its length too.
fn unicode_escape(escape: &[u8]) -> (Option<char>, usize) {
    let unit = |from: usize| -> Option<u32> {
        let digits = std::str::from_utf8(escape.get(from + 2..from + 6)?).ok()?;
        let is_escape = escape.get(from..from + 2) == Some(b"\\u");
        is_escape.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
    };
    match unit(0) {
        Some(high @ 0xD800..=0xDBFF) => match unit(6) {
            Some(low @ 0xDC00..=0xDFFF) => (
                char::from_u32(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)),
                12,
            ),
            _ => (None, 6),
        },
        Some(code) => (char::from_u32(code), 6),
        None => (None, escape.len().min(6)),
    }
}

/// Appends bytes, with one U+FFFD for each byte that is not part of valid UTF-8, as Go does. Returns `true` if
/// there was such a byte.
fn push_lossy(text: &mut String, mut bytes: &[u8]) -> bool {
    let mut substituted = false;
    loop {
        match std::str::from_utf8(bytes) {
            Ok(rest) => {
                text.push_str(rest);
                return substituted;
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                text.push(char::REPLACEMENT_CHARACTER);
                substituted = true;
                bytes = &rest[1..];
            }
        }
    }
}

/// Formats a byte as Go's JSON errors do: as the code point of the same number.
fn go_quoted(byte: u8) -> String {
    match byte {
        b'\'' => r"'\''".into(),
        b'\\' => r"'\\'".into(),
        7 => r"'\a'".into(),
        8 => r"'\b'".into(),
        9 => r"'\t'".into(),
        10 => r"'\n'".into(),
        11 => r"'\v'".into(),
        12 => r"'\f'".into(),
        13 => r"'\r'".into(),
        0..0x20 | 0x7f => format!("'\\x{byte:02x}'"),
        0x80..=0xa0 | 0xad => format!("'\\u{byte:04x}'"),
        _ => format!("'{}'", char::from(byte)),
    }
}
