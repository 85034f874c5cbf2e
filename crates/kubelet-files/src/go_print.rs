//! The printed Go values that the kubelet's checksums cover.
//!
//! Older kubelet files are protected by FNV-1a over the *printed* Go value: every field with its name and its Go
//! type, lists in brackets, maps sorted by key, strings raw. [`Print`] receives that text. It hashes the text or,
//! in tests, stores it for a comparison with the output of a kubelet.
//!
//! ```text
//! list   := "<nil>" | "[" item *(" " item) "]"
//! map    := "<nil>" | "map[" [ key ":" value *(" " key ":" value) ] "]"
//! bytes  := "<nil>" | "[" decimal *(" " decimal) "]"
//! ```

/// Receives the printed form of a Go value.
pub(crate) trait Print {
    fn raw(&mut self, bytes: &[u8]);

    fn text(&mut self, text: &str) {
        self.raw(text.as_bytes());
    }

    fn label(&mut self, label: &Label) {
        self.text(label.text);
    }

    fn nil(&mut self) {
        self.text("<nil>");
    }

    fn number(&mut self, number: i64) {
        let mut digits = [0; 20];
        let mut start = digits.len();
        let mut rest = number.unsigned_abs();
        loop {
            start -= 1;
            digits[start] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if number < 0 {
            start -= 1;
            digits[start] = b'-';
        }
        self.raw(&digits[start..]);
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

/// FNV-1a, 32 bit. (The crate `fnv` implements only the 64-bit variant.)
#[derive(Debug)]
pub(crate) struct Fnv1a32(u32);

const FNV_PRIME: u32 = 0x0100_0193;

impl Fnv1a32 {
    pub(crate) fn of(print: impl FnOnce(&mut Self)) -> u64 {
        let mut hash = Self(0x811c_9dc5);
        print(&mut hash);
        u64::from(hash.0)
    }
}

impl Print for Fnv1a32 {
    fn raw(&mut self, bytes: &[u8]) {
        self.0 = fnv(self.0, bytes);
    }

    fn label(&mut self, label: &Label) {
        let [low, ..] = self.0.to_le_bytes();
        let high = self.0 & !0xff;
        self.0 = high
            .wrapping_mul(label.power)
            .wrapping_add(label.from_low[usize::from(low)]);
    }
}

const fn fnv(mut hash: u32, bytes: &[u8]) -> u32 {
    let mut index = 0;
    while index < bytes.len() {
        hash = (hash ^ bytes[index] as u32).wrapping_mul(FNV_PRIME);
        index += 1;
    }
    hash
}

/// A constant text that is hashed in one step.
///
/// A byte changes the low eight bits of the hash; then the whole hash is multiplied. So the part above the low
/// bits is only multiplied, and the effect on the low bits depends on nothing else: a table of 256 results is
/// complete.
#[derive(Debug)]
pub(crate) struct Label {
    text: &'static str,
    /// The prime raised to the length of the text.
    power: u32,
    /// The hash after the text, by the low bits of the hash before it.
    from_low: [u32; 256],
}

impl Label {
    pub(crate) const fn new(text: &'static str) -> Self {
        let mut power: u32 = 1;
        let mut index = 0;
        while index < text.len() {
            power = power.wrapping_mul(FNV_PRIME);
            index += 1;
        }
        let mut from_low = [0; 256];
        let mut low = 0;
        while low < 256 {
            from_low[low] = fnv(low as u32, text.as_bytes());
            low += 1;
        }
        Self {
            text,
            power,
            from_low,
        }
    }
}

#[cfg(test)]
impl Print for Vec<u8> {
    fn raw(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}
