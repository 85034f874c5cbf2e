//! The text that the kubelet's checksums are taken over.
//!
//! Older kubelet files are protected by FNV-1a over the *printed* Go value: every field with its name and its Go
//! type, lists in brackets, maps sorted by key, strings raw. [`Print`] is where that text goes: into a hash, or,
//! in tests, into memory, to be compared with what a kubelet printed.
//!
//! ```text
//! list   := "<nil>" | "[" item *(" " item) "]"
//! map    := "<nil>" | "map[" [ key ":" value *(" " key ":" value) ] "]"
//! bytes  := "<nil>" | "[" decimal *(" " decimal) "]"
//! ```

use std::fmt::Display;

/// Receives the printed form of a Go value.
pub(crate) trait Print {
    fn raw(&mut self, bytes: &[u8]);

    fn text(&mut self, text: &str) {
        self.raw(text.as_bytes());
    }

    fn nil(&mut self) {
        self.text("<nil>");
    }

    fn number(&mut self, number: impl Display) {
        self.text(&number.to_string());
    }

    fn list<T>(&mut self, items: Option<&[T]>, mut item: impl FnMut(&mut Self, &T)) {
        let Some(items) = items else { return self.nil() };
        self.text("[");
        for (index, value) in items.iter().enumerate() {
            if index > 0 {
                self.text(" ");
            }
            item(self, value);
        }
        self.text("]");
    }

    fn strings(&mut self, items: Option<&[String]>) {
        self.list(items, |out, item| out.text(item));
    }

    fn map<K, V>(
        &mut self,
        entries: Option<impl Iterator<Item = (K, V)>>,
        mut entry: impl FnMut(&mut Self, K, V),
    ) {
        let Some(entries) = entries else { return self.nil() };
        self.text("map[");
        for (index, (key, value)) in entries.enumerate() {
            if index > 0 {
                self.text(" ");
            }
            entry(self, key, value);
        }
        self.text("]");
    }

    fn bytes(&mut self, bytes: Option<&[u8]>) {
        let Some(bytes) = bytes else { return self.nil() };
        self.text("[");
        for (index, &byte) in bytes.iter().enumerate() {
            let padded = &SPACED_DECIMALS[usize::from(byte)];
            let digits = &padded.text[..padded.length];
            self.raw(if index == 0 { &digits[1..] } else { digits });
        }
        self.text("]");
    }
}

/// `" 0"` to `" 255"`.
struct SpacedDecimal {
    text: [u8; 4],
    length: usize,
}

static SPACED_DECIMALS: [SpacedDecimal; 256] = {
    let mut table = [const {
        SpacedDecimal {
            text: *b"    ",
            length: 0,
        }
    }; 256];
    let mut value = 0;
    while value < 256 {
        let mut length = 1;
        let mut power = if value >= 100 {
            100
        } else if value >= 10 {
            10
        } else {
            1
        };
        while power > 0 {
            table[value].text[length] = b'0' + (value / power % 10) as u8;
            length += 1;
            power /= 10;
        }
        table[value].length = length;
        value += 1;
    }
    table
};

/// FNV-1a, 32 bit. (The crate `fnv` has the 64-bit one only.)
#[derive(Debug)]
pub(crate) struct Fnv1a32(u32);

impl Fnv1a32 {
    pub(crate) fn of(print: impl FnOnce(&mut Self)) -> u64 {
        let mut hash = Self(0x811c_9dc5);
        print(&mut hash);
        u64::from(hash.0)
    }
}

impl Print for Fnv1a32 {
    fn raw(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        }
    }
}

#[cfg(test)]
impl Print for Vec<u8> {
    fn raw(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}
