//! JSON as Go's `encoding/json` reads and writes it.
//!
//! The kubelet's files are defined by what Go's decoder makes of them, not by the JSON standard: keys match
//! without regard to case, invalid UTF-8 turns into U+FFFD, a repeated key decodes on top of the earlier value,
//! `null` leaves strings and numbers alone but empties lists and maps. A checksum over the *decoded* value only
//! verifies if all of that is the same here. `docs/decisions/0002-go-json-by-hand.md` says why no crate does it.
//!
//! - [`Reader`] walks the bytes; it knows the syntax, and Go's words for what is wrong with it.
//! - [`decode`] fills Go-shaped values from a reader.
//! - [`mod@write`] prints strings with Go's escapes.
//!
//! Two kinds of error, as in Go. A syntax error ends the reading. A type error is remembered, the reading goes
//! on, and the first one is the answer unless the syntax turns out to be broken too. Of a file with
//! broken syntax, `device_plugin::scan`, `dra::scan` and [`decode::find_whole`] read the sound elements.

pub(crate) mod decode;
mod reader;
pub(crate) mod write;

pub(crate) use reader::{DroppedList, Kind, Reader, SyntaxError, TypeError, Warning, WarningKind, unescape};

#[cfg(test)]
mod tests;
