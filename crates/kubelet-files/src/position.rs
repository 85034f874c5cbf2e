//! A place in a document, for people.

use std::fmt;

use crate::go_json::{Kind, Reader, SyntaxError};

/// Where in a document something is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// Bytes from the start.
    pub offset: usize,
    /// From 1.
    pub line: usize,
    /// In bytes, from 1.
    pub column: usize,
    /// The keys that lead there, `Data.PodDeviceEntries[3].DeviceIDs`; empty at the top.
    pub path: String,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(f, "at {}, ", self.path)?;
        }
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

impl Position {
    pub(crate) fn of(bytes: &[u8], offset: usize) -> Self {
        let before = &bytes[..offset.min(bytes.len())];
        let line_start = before
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |newline| newline + 1);
        let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
        let mut steps = Steps::default();
        // Only the way to the offset is wanted; that the document is broken further on does not matter.
        let _ = steps.walk_to(bytes, offset);
        Self {
            offset,
            line,
            column: before.len() - line_start + 1,
            path: steps.to_string(),
        }
    }

    /// The same place, for a document that is itself a string in `field` of another one.
    pub(crate) fn inside(mut self, field: &str) -> Self {
        let separator = if self.path.is_empty() { "" } else { "." };
        self.path = format!("{field}{separator}{}", self.path);
        self
    }
}

#[derive(Debug, Default)]
struct Steps(Vec<Step>);

#[derive(Debug)]
enum Step {
    Key(String),
    Index(usize),
}

impl Steps {
    fn walk_to(&mut self, bytes: &[u8], offset: usize) -> Result<(), SyntaxError> {
        let mut reader = Reader::new(bytes);
        loop {
            let kind = reader.kind()?;
            if reader.offset() >= offset {
                return Ok(());
            }
            match kind {
                Kind::Object => {
                    if reader.enter(b'}')? {
                        let (key, at) = reader.key()?;
                        self.0.push(Step::Key(key.into_owned()));
                        if at >= offset {
                            return Ok(());
                        }
                        continue;
                    }
                }
                Kind::Array => {
                    if reader.enter(b']')? {
                        self.0.push(Step::Index(0));
                        continue;
                    }
                }
                _ => reader.skip()?,
            }
            loop {
                let close = match self.0.last() {
                    None => return Ok(()),
                    Some(Step::Key(_)) => b'}',
                    Some(Step::Index(_)) => b']',
                };
                if !reader.next(close)? {
                    self.0.pop();
                    continue;
                }
                match self.0.last_mut() {
                    Some(Step::Index(index)) => *index += 1,
                    Some(Step::Key(name)) => {
                        let (key, at) = reader.key()?;
                        *name = key.into_owned();
                        if at >= offset {
                            return Ok(());
                        }
                    }
                    None => {}
                }
                break;
            }
        }
    }
}

/// Steps that are shown; deeper ones are cut, since only a hostile file has them.
const SHOWN: usize = 12;

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (depth, step) in self.0.iter().take(SHOWN).enumerate() {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Key(key) => {
                    let separator = if depth > 0 { "." } else { "" };
                    write!(
                        f,
                        "{separator}{}",
                        crate::go_json::decode::shortened(key).escape_debug()
                    )?;
                }
            }
        }
        if self.0.len() > SHOWN {
            f.write_str("...")
        } else {
            Ok(())
        }
    }
}
