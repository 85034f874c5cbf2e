//! A JSON document as a tree of raw tokens, so that it can be changed and printed in ways that libraries do not allow.

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Node {
    /// A string with its quotes, a number, a literal, or any text that a mutation created.
    Token(Vec<u8>),
    List(Vec<Node>),
    /// Keys with their quotes.
    Object(Vec<(Vec<u8>, Node)>),
}

impl Node {
    pub(crate) fn token(text: impl AsRef<[u8]>) -> Self {
        Self::Token(text.as_ref().to_vec())
    }

    /// Parses a sound document; `None` for any other.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let mut parser = Parser { bytes, at: 0 };
        let node = parser.value(0)?;
        parser.space();
        (parser.at == bytes.len()).then_some(node)
    }

    pub(crate) fn print(&self, out: &mut Vec<u8>, space: &mut impl FnMut(&mut Vec<u8>)) {
        space(out);
        match self {
            Self::Token(token) => out.extend_from_slice(token),
            Self::List(items) => {
                out.push(b'[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.push(b',');
                    }
                    item.print(out, space);
                }
                space(out);
                out.push(b']');
            }
            Self::Object(entries) => {
                out.push(b'{');
                for (index, (key, value)) in entries.iter().enumerate() {
                    if index > 0 {
                        out.push(b',');
                    }
                    space(out);
                    out.extend_from_slice(key);
                    space(out);
                    out.push(b':');
                    value.print(out, space);
                }
                space(out);
                out.push(b'}');
            }
        }
        space(out);
    }

    pub(crate) fn compact(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.print(&mut out, &mut |_| {});
        out
    }

    pub(crate) fn count(&self) -> usize {
        1 + match self {
            Self::Token(_) => 0,
            Self::List(items) => items.iter().map(Self::count).sum(),
            Self::Object(entries) => entries.iter().map(|(_, value)| value.count()).sum(),
        }
    }

    /// Returns the node with this number, counted from the root, and its key.
    pub(crate) fn nth(&mut self, number: usize) -> Option<(&mut Self, Vec<u8>)> {
        self.walk(&mut { number }, b"")
    }

    fn walk(&mut self, number: &mut usize, key: &[u8]) -> Option<(&mut Self, Vec<u8>)> {
        if *number == 0 {
            return Some((self, key.to_vec()));
        }
        *number -= 1;
        match self {
            Self::Token(_) => None,
            Self::List(items) => items.iter_mut().find_map(|item| item.walk(number, key)),
            Self::Object(entries) => entries
                .iter_mut()
                .find_map(|(key, value)| value.walk(number, key)),
        }
    }

    /// Returns the last value of a key of the top object, compared without regard to case.
    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Self> {
        let Self::Object(entries) = self else { return None };
        let quoted = format!("\"{name}\"");
        entries
            .iter_mut()
            .rev()
            .find(|(key, _)| key.eq_ignore_ascii_case(quoted.as_bytes()))
            .map(|(_, value)| value)
    }
}

struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn space(&mut self) {
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    fn eat(&mut self, byte: u8) -> bool {
        self.space();
        let there = self.bytes.get(self.at) == Some(&byte);
        self.at += usize::from(there);
        there
    }

    fn value(&mut self, depth: usize) -> Option<Node> {
        if depth > 100 {
            return None;
        }
        if self.eat(b'[') {
            let mut items = Vec::new();
            if self.eat(b']') {
                return Some(Node::List(items));
            }
            loop {
                items.push(self.value(depth + 1)?);
                if self.eat(b']') {
                    return Some(Node::List(items));
                }
                self.eat(b',').then_some(())?;
            }
        }
        if self.eat(b'{') {
            let mut entries = Vec::new();
            if self.eat(b'}') {
                return Some(Node::Object(entries));
            }
            loop {
                self.space();
                let key = self.token()?;
                self.eat(b':').then_some(())?;
                entries.push((key, self.value(depth + 1)?));
                if self.eat(b'}') {
                    return Some(Node::Object(entries));
                }
                self.eat(b',').then_some(())?;
            }
        }
        self.token().map(Node::Token)
    }

    fn token(&mut self) -> Option<Vec<u8>> {
        let rest = &self.bytes[self.at..];
        let length = if rest.first() == Some(&b'"') {
            let mut at = 1;
            while *rest.get(at)? != b'"' {
                at += 1 + usize::from(rest[at] == b'\\');
            }
            at + 1
        } else {
            rest.iter()
                .position(|byte| b",:[]{} \t\r\n\"".contains(byte))
                .unwrap_or(rest.len())
        };
        self.at += length;
        (length > 0).then(|| rest[..length].to_vec())
    }
}
