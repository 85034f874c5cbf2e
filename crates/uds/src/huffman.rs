//! The Huffman code of HPACK (RFC 7541 Appendix B).
//!
//! The code is canonical: codes of one length are consecutive, in the order of their symbols, and longer codes
//! follow shorter ones. The lengths are therefore all there is to write down.

/// The end-of-string symbol, which no string may contain.
const EOS: usize = 256;
const SYMBOLS: usize = 257;
const LONGEST: usize = 30;

#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

struct Code {
    /// The code of each symbol.
    codes: [u32; SYMBOLS],
    /// The symbols in the order of their codes.
    sorted: [u16; SYMBOLS],
    /// For each length: the first code, how many there are, and where they start in `sorted`.
    lengths: [(u32, u32, usize); LONGEST + 1],
}

static CODE: Code = code();

const fn code() -> Code {
    let mut code = Code {
        codes: [0; SYMBOLS],
        sorted: [0; SYMBOLS],
        lengths: [(0, 0, 0); LONGEST + 1],
    };
    let mut next: u32 = 0;
    let mut rank = 0;
    let mut length = 1;
    while length <= LONGEST {
        next <<= 1;
        let first = next;
        let start = rank;
        let mut symbol = 0;
        while symbol < SYMBOLS {
            if LENGTHS[symbol] as usize == length {
                code.codes[symbol] = next;
                code.sorted[rank] = symbol as u16;
                next += 1;
                rank += 1;
            }
            symbol += 1;
        }
        code.lengths[length] = (first, next - first, start);
        length += 1;
    }
    code
}

/// How many bits the code of `byte` has.
pub(crate) fn length(byte: u8) -> u8 {
    LENGTHS[usize::from(byte)]
}

/// The text that `coded` stands for, unless it stands for none.
pub(crate) fn decode(coded: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(coded.len() * 8 / 5);
    let mut bits: u32 = 0;
    let mut length = 0;
    for byte in coded {
        for shift in (0..8).rev() {
            bits = bits << 1 | u32::from(byte >> shift & 1);
            length += 1;
            let &(first, count, start) = CODE.lengths.get(length)?;
            if let Some(rank) = bits.checked_sub(first).filter(|&rank| rank < count) {
                text.push(u8::try_from(CODE.sorted[start + rank as usize]).ok()?);
                (bits, length) = (0, 0);
            }
        }
    }
    // Padded with the start of the end-of-string symbol: fewer than eight ones.
    let is_padding = length < 8 && bits == (1 << length) - 1;
    is_padding.then_some(text)
}

/// `text`, coded and padded.
pub(crate) fn encode(text: &[u8]) -> Vec<u8> {
    let mut coded = Vec::with_capacity(text.len());
    let mut bits: u64 = 0;
    let mut count = 0;
    for &byte in text {
        bits = bits << length(byte) | u64::from(CODE.codes[usize::from(byte)]);
        count += u32::from(length(byte));
        while count >= 8 {
            count -= 8;
            coded.push((bits >> count) as u8);
        }
    }
    if count > 0 {
        let padding = 8 - count;
        let ones = u64::from(CODE.codes[EOS]) & ((1 << padding) - 1);
        coded.push((bits << padding | ones) as u8);
    }
    coded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex
            .chars()
            .filter_map(|digit| digit.to_digit(16))
            .map(|digit| digit as u8)
            .collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    #[test]
    fn examples_of_the_rfc_read_and_write_back() {
        for (text, hex) in [
            ("www.example.com", "f1e3 c2e5 f23a 6ba0 ab90 f4ff"),
            ("no-cache", "a8eb 1064 9cbf"),
            ("custom-value", "25a8 49e9 5bb8 e8b4 bf"),
            (
                "Mon, 21 Oct 2013 20:13:21 GMT",
                "d07a be94 1054 d444 a820 0595 040b 8166 e082 a62d 1bff",
            ),
            (
                "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1",
                "94e7 821d d7f2 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07",
            ),
        ] {
            assert_eq!(encode(text.as_bytes()), bytes(hex), "{text}");
            assert_eq!(decode(&bytes(hex)).as_deref(), Some(text.as_bytes()));
        }
    }

    #[test]
    fn every_byte_is_coded_as_another_implementation_does() {
        let mut decoder = fluke_hpack::huffman::HuffmanDecoder::new();
        for byte in 0..=255 {
            let text = [byte, b'a', byte, byte];
            let coded = encode(&text);
            assert_eq!(decoder.decode(&coded).expect("decodes"), text, "{byte}");
            assert_eq!(decode(&coded).as_deref(), Some(&text[..]));
        }
    }

    #[test]
    fn the_last_code_is_all_ones() {
        assert_eq!(CODE.codes[EOS], (1 << LONGEST) - 1);
    }

    #[test]
    fn slash_percent_and_dot_are_equally_long() {
        assert_eq!([b'/', b'%', b'.'].map(length), [6, 6, 6]);
    }

    #[test]
    fn wrong_padding_and_end_of_string_are_refused() {
        for hex in ["00", "1c", "ffff ffff", "ffff fffc", "ff", "07ff"] {
            let expected = if hex == "00" { None } else { decode(&bytes(hex)) };
            assert_eq!(expected, None, "{hex}");
        }
        assert_eq!(decode(&[0x07]).as_deref(), Some(&b"0"[..]));
        assert_eq!(decode(&[]).as_deref(), Some(&b""[..]));
    }
}
