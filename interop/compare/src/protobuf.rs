//! Random answers of plugins, valid and broken, as protobuf bytes.

use crate::random::Random;

/// Returns a `ContainerAllocateResponse`, or similar bytes.
pub(crate) fn message(random: &mut Random) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..random.below(5) {
        field(random, &mut out, 0);
    }
    for _ in 0..if random.once_in(3) { 1 + random.below(2) } else { 0 } {
        let at = random.below(out.len() + 1);
        match random.below(5) {
            0 => out.truncate(at),
            1 if at < out.len() => out[at] = random.byte(),
            2 => out.insert(at, random.byte()),
            3 if at < out.len() => drop(out.remove(at)),
            _ if at < out.len() => out[at] ^= 1 << random.below(8),
            _ => {}
        }
    }
    out
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

/// Appends an overlong varint.
fn odd_varint(random: &mut Random, out: &mut Vec<u8>) {
    let length = 1 + random.below(11);
    for _ in 1..length {
        out.push(if random.once_in(2) {
            0x80
        } else {
            0x80 | random.byte()
        });
    }
    out.push(random.byte() & if random.once_in(2) { 0x7f } else { 0x01 });
}

fn number(random: &mut Random) -> u64 {
    match random.below(20) {
        0 => 0,
        1 => (1 << 29) - 1,
        2 => 1 << 29,
        3 => (1 << 31) - 1,
        4 => 1 << 31,
        5 => u64::MAX >> 3,
        6 => 6 + random.next() % 100,
        _ => 1 + random.next() % 5,
    }
}

fn text(random: &mut Random) -> Vec<u8> {
    match random.below(8) {
        0 => b"\xff".to_vec(),
        1 => b"\xed\xa0\x80".to_vec(),
        2 => "ü\0".as_bytes().to_vec(),
        3 => Vec::new(),
        4 => vec![b'a'; random.below(200)],
        _ => random.pick(&["A", "B", "/dev/gpu0", "rw"]).as_bytes().to_vec(),
    }
}

fn field(random: &mut Random, out: &mut Vec<u8>, depth: usize) {
    let number = number(random);
    let wire_type = match random.below(12) {
        0 => random.next() % 8,
        1 => 3,
        2 => 0,
        _ => 2,
    };
    if random.once_in(40) {
        odd_varint(random, out);
    } else {
        varint(out, number.wrapping_shl(3) | wire_type);
    }
    match wire_type {
        0 if random.once_in(4) => odd_varint(random, out),
        0 => {
            let value = random.next() >> random.below(64);
            varint(out, value);
        }
        1 => out.extend(
            random
                .next()
                .to_le_bytes()
                .iter()
                .take(if random.once_in(9) { 7 } else { 8 }),
        ),
        5 => out.extend(
            random
                .next()
                .to_le_bytes()
                .iter()
                .take(if random.once_in(9) { 3 } else { 4 }),
        ),
        3 if random.once_in(20) => deep_group(random, out, number),
        3 => {
            if depth < 4 {
                for _ in 0..random.below(3) {
                    field(random, out, depth + 1);
                }
            }
            let end = if random.once_in(6) { number ^ 1 } else { number };
            if !random.once_in(10) {
                varint(out, end.wrapping_shl(3) | 4);
            }
        }
        2 => {
            let mut inner = Vec::new();
            if depth < 3 && !random.once_in(4) {
                for _ in 0..random.below(4) {
                    field(random, &mut inner, depth + 1);
                }
                if random.once_in(2) {
                    // Map entries, mounts and devices have texts in fields 1 to 3.
                    inner.clear();
                    for number in 1..=random.below(4) as u64 {
                        let text = text(random);
                        varint(&mut inner, number << 3 | 2);
                        varint(&mut inner, text.len() as u64);
                        inner.extend(text);
                    }
                }
            } else {
                inner = text(random);
            }
            match random.below(30) {
                0 => odd_varint(random, out),
                1 => varint(out, inner.len() as u64 + 1),
                2 => varint(out, u64::MAX),
                3 => varint(out, 1 << 63),
                _ => varint(out, inner.len() as u64),
            }
            out.extend(inner);
        }
        _ => {}
    }
}

/// Appends nested groups, about as deep as the kubelet follows them. `number` is already open.
fn deep_group(random: &mut Random, out: &mut Vec<u8>, number: u64) {
    let depth = 9_996 + random.below(8);
    out.extend(std::iter::repeat_n(1 << 3 | 3, depth));
    out.extend(std::iter::repeat_n(1 << 3 | 4, depth));
    varint(out, number.wrapping_shl(3) | 4);
}
