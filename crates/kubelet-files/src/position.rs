//! A position in a document, for display.

use std::fmt;

use crate::go_json::decode::shortened;
use crate::go_json::{Kind, Reader, SyntaxError};

/// A position in a document.
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
        // Only the path to the offset is needed; syntax errors behind it do not matter.
        let _ = steps.walk_to(bytes, offset);
        Self {
            offset,
            line,
            column: before.len() - line_start + 1,
            path: steps.to_string(),
        }
    }

    /// Returns the position for a document that is itself a string in `field` of another document.
    pub(crate) fn inside(mut self, field: &str) -> Self {
        let separator = if self.path.is_empty() { "" } else { "." };
        self.path = format!("{field}{separator}{}", self.path);
        self
    }
}

/// Number of path steps that are displayed. Deeper steps are only counted: only a hostile file has them.
const SHOWN: usize = 12;

/// The path to a position.
#[derive(Debug, Default)]
struct Steps {
    /// The closing bracket of each level.
    open: Vec<u8>,
    /// The step at each of the first levels.
    shown: Vec<Step>,
}

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
                        self.open.push(b'}');
                        if self.key(&mut reader)? >= offset {
                            return Ok(());
                        }
                        continue;
                    }
                }
                Kind::Array => {
                    if reader.enter(b']')? {
                        self.open.push(b']');
                        if self.open.len() <= SHOWN {
                            self.shown.push(Step::Index(0));
                        }
                        continue;
                    }
                }
                _ => reader.skip()?,
            }
            loop {
                let Some(&close) = self.open.last() else {
                    return Ok(());
                };
                if !reader.next(close)? {
                    self.open.pop();
                    self.shown.truncate(self.open.len());
                    continue;
                }
                if close == b'}' {
                    if self.key(&mut reader)? >= offset {
                        return Ok(());
                    }
                } else if let Some(Step::Index(index)) = self.shown.get_mut(self.open.len() - 1) {
                    *index += 1;
                }
                break;
            }
        }
    }

    /// Reads the next key of the innermost object. Returns the offset of the key.
    fn key(&mut self, reader: &mut Reader<'_>) -> Result<usize, SyntaxError> {
        let (key, at) = reader.key()?;
        let level = self.open.len();
        if level <= SHOWN {
            self.shown.truncate(level - 1);
            self.shown.push(Step::Key(shortened(&key)));
        }
        Ok(at)
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (depth, step) in self.shown.iter().enumerate() {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Key(key) => {
                    let separator = if depth > 0 { "." } else { "" };
                    write!(f, "{separator}{}", key.escape_debug())?;
                }
            }
        }
        if self.open.len() > SHOWN {
            f.write_str("...")
        } else {
            Ok(())
        }
    }
}
