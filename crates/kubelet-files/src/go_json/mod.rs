//! JSON as Go's `encoding/json` reads and writes it.
//!
//! The kubelet's files are defined by the behaviour of Go's decoder, not by the JSON standard. Keys match without
//! regard to case, and invalid UTF-8 turns into U+FFFD. A repeated key decodes onto the earlier value. `null` leaves
//! strings and numbers unchanged but empties lists and maps. A checksum over the *decoded* value verifies only if all
//! of this is reproduced. `docs/decisions/0002-go-json-by-hand.md` explains why no existing crate is used.
//!
//! - [`Reader`] parses the bytes; it implements Go's syntax rules and error texts.
//! - [`decode`] decodes Go-shaped values from a reader.
//! - [`mod@write`] prints strings with Go's escapes.
//!
//! There are two kinds of error, as in Go. A syntax error ends the reading. A type error is recorded and the reading
//! continues; the first one is returned unless the syntax is broken too. Of a file with broken syntax,
//! `device_plugin::scan`, `dra::scan` and [`decode::find_whole`] read the sound elements.

pub(crate) mod decode;
mod reader;
pub(crate) mod write;

pub(crate) use reader::{DroppedList, Kind, Reader, SyntaxError, TypeError, Warning, WarningKind, unescape};

#[cfg(test)]
mod tests;
