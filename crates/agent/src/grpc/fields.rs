//! Iterates over the fields of an encoded message, so that each field can be checked before it is decoded.
//!
//! A few bytes on the wire can become much more memory, and a long message takes a while to decode. Code that
//! `prost` generates cannot stop in between.

use prost::DecodeError;
use prost::bytes::{Buf as _, Bytes};
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// Error in an encoded message.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WireError {
    /// A part cannot be decoded.
    #[error(transparent)]
    Part(#[from] DecodeError),
    /// The message ends before this field does.
    #[error("field {0} is longer than its message")]
    TooShort(u32),
    /// This field has another wire type.
    #[error("field {0} is of another type")]
    Type(u32),
}

/// Iterates over length-delimited fields: texts and messages. Other fields have the number 0, so that the caller can count
/// them.
#[derive(Debug)]
pub(crate) struct FieldIter {
    rest: Bytes,
    known: u32,
}

impl FieldIter {
    /// Fields up to the number `known` must have a length.
    pub(crate) fn of(message: Bytes, known: u32) -> Self {
        Self { rest: message, known }
    }

    fn field(&mut self) -> Result<(u32, Bytes), WireError> {
        let (tag, wire_type) = decode_key(&mut self.rest)?;
        if wire_type != WireType::LengthDelimited {
            // A group, which current messages do not contain, may be as long as the message.
            if tag <= self.known || wire_type == WireType::StartGroup {
                return Err(WireError::Type(tag));
            }
            skip_field(wire_type, tag, &mut self.rest, DecodeContext::default())?;
            return Ok((0, Bytes::new()));
        }
        let length = decode_varint(&mut self.rest)?;
        match usize::try_from(length) {
            Ok(length) if length <= self.rest.remaining() => Ok((tag, self.rest.split_to(length))),
            _ => Err(WireError::TooShort(tag)),
        }
    }
}

impl Iterator for FieldIter {
    type Item = Result<(u32, Bytes), WireError>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.rest.has_remaining() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.rest.clear();
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(bytes: &'static [u8]) -> Vec<Result<(u32, Bytes), WireError>> {
        FieldIter::of(Bytes::from_static(bytes), 1).collect()
    }

    #[test]
    fn length_delimited_fields_are_found_and_others_counted() {
        let found = fields(&[0x0a, 1, b'a', 0x10, 7, 0x1a, 0, 0x0a, 2, b'b', b'c']);
        let wanted = [(1, &b"a"[..]), (0, b""), (3, b""), (1, b"bc")];
        assert_eq!(found.len(), wanted.len());
        for (found, (tag, bytes)) in found.into_iter().zip(wanted) {
            assert_eq!(found, Ok((tag, Bytes::from_static(bytes))));
        }
    }

    #[test]
    fn an_error_is_found_once_and_ends_the_iteration() {
        // A number instead of a text, a group, a text that is longer than the message, and a key without an end.
        let damaged = [
            (&[0x08, 1, 0x0a, 0][..], "field 1 is of another type"),
            (&[0x13, 0x08, 1, 0x14], "field 2 is of another type"),
            (&[0x0a, 9, b'a'], "field 1 is longer than its message"),
            (&[0xff, 0xff], "failed to decode Protobuf message: invalid varint"),
        ];
        for (bytes, wanted) in damaged {
            let found = fields(bytes);
            let [Err(error)] = &found[..] else {
                panic!("{bytes:?}: {found:?}");
            };
            assert_eq!(error.to_string(), wanted);
        }
    }
}
