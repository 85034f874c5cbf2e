//! Mutations that keep the syntax valid: values, keys, text and checksums are changed, and sometimes bytes.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use devlet_kubelet_files::{Format, device_plugin, dra};

use crate::protobuf;
use crate::random::Random;
use crate::tree::Node;

/// The files to start from, by kind.
#[derive(Debug, Default)]
pub(crate) struct Seeds {
    pub(crate) trees: Vec<Node>,
    pub(crate) raw: Vec<Vec<u8>>,
}

/// The keys of all formats, and some unknown ones.
const KEYS: &[&str] = &[
    "Data",
    "Checksum",
    "PodDeviceEntries",
    "RegisteredDevices",
    "PodUID",
    "ContainerName",
    "ResourceName",
    "DeviceIDs",
    "AllocResp",
    "kind",
    "apiVersion",
    "ClaimInfoStateList",
    "ClaimUID",
    "ClaimName",
    "Namespace",
    "PodUIDs",
    "DriverState",
    "Devices",
    "skipNodeOperations",
    "PoolName",
    "DeviceName",
    "ShareID",
    "RequestNames",
    "CDIDeviceIDs",
    "version",
    "entries",
    "checksum",
    "DriverName",
    "ClassName",
    "CDIDevices",
    "ResourceHandles",
    "driverName",
    "data",
    "structuredData",
    "vendorClassParameters",
    "vendorClaimParameters",
    "nodeName",
    "results",
    "vendorRequestParameters",
    "namedResources",
    "name",
    "Health",
    "LastUpdated",
    "HealthCheckTimeout",
    "Message",
    "Entries",
    "DeviceID",
    "TypeMeta",
    "x",
    "",
];

const NUMBERS: &[&str] = &[
    "0",
    "-0",
    "1",
    "-1",
    "7",
    "1e3",
    "1.0",
    "0.5",
    "-0.0",
    "1E-2",
    "255",
    "256",
    "-128",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "-9223372036854775809",
    "18446744073709551615",
    "18446744073709551616",
    "1e400",
    "123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123",
];

/// Tokens that are not JSON.
const BROKEN: &[&str] = &[
    "01",
    "+1",
    "1.",
    ".5",
    "1e",
    "1e+",
    "-",
    "--1",
    "0x10",
    "NaN",
    "nul",
    "nulL",
    "tru",
    "True",
    "fals",
    "'a'",
    "\"\\x\"",
    "\"\\u12g4\"",
    "\"\\u12",
    "\"\\",
    "\"",
    "\"a\nb\"",
    "\"\u{1}\"",
    "]",
    "}",
    ":",
    ",",
    "",
    "1 2",
    "\"a\" \"b\"",
    "/",
    "\u{7f}",
    "\u{a0}",
    "\u{feff}",
    "[1,]",
    "{\"a\":1,}",
    "{\"a\"}",
    "{1:2}",
    "{,}",
    "[,]",
    "{\"a\":1 \"b\":2}",
    "[1 2]",
    "{\"a\" 1}",
];

const NUMA_KEYS: &[&str] = &[
    "0",
    "1",
    "-1",
    "10",
    "2",
    "+0",
    "007",
    " 1",
    "1 ",
    "-0",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "-9223372036854775809",
    "",
    "+",
    "-",
    "0x1",
    "1_0",
    "1.0",
    "1e1",
    "\\u0031",
    "٣",
    "a\\\"b",
    "x<y",
    "\u{1f600}",
];

const TIMES: &[&str] = &[
    "2024-02-29T23:59:59Z",
    "2023-02-29T23:59:59Z",
    "2024-02-29T23:59:60Z",
    "2024-02-29T24:00:00Z",
    "2024-13-01T00:00:00Z",
    "2024-00-01T00:00:00Z",
    "2024-04-31T00:00:00Z",
    "2024-04-30T1:02:03Z",
    "2024-04-30T01:2:03Z",
    "2024-04-30T01:02:3Z",
    "2024-04-30T01:02:03.5Z",
    "2024-04-30T01:02:03,5Z",
    "2024-04-30T01:02:03.Z",
    "2024-04-30T01:02:03,Z",
    "2024-04-30T01:02:03.1234567891234+01:00",
    "2024-04-30T01:02:03.000-00:00",
    "2024-04-30T01:02:03+24:00",
    "2024-04-30T01:02:03+25:00",
    "2024-04-30T01:02:03+01:60",
    "2024-04-30T01:02:03+01:61",
    "2024-04-30T01:02:03+0100",
    "2024-04-30T01:02:03+01",
    "2024-04-30t01:02:03z",
    "2024-04-30 01:02:03Z",
    "2024-04-30T01:02:03",
    "2024-04-30T01:02:03Zx",
    "02024-04-30T01:02:03Z",
    "24-04-30T01:02:03Z",
    "0000-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999999Z",
    "2024-04-30T01:02:03\\u005a",
    "",
    "x",
    "2024-04-30T1:02:03,250+24:60",
    "2024-4-30T01:02:03Z",
    "2024-04-3T01:02:03Z",
    "+024-04-30T01:02:03Z",
    "2024-04-30T01:02:03 +01:00",
    "1900-02-29T00:00:00Z",
    "2000-02-29T00:00:00Z",
    "2024-04-30T01:02:03.1\\u0030Z",
    "2024-04-30T01:02:03.100Z",
];

const TEXTS: &[&str] = &[
    "",
    "a",
    "b",
    "gpu-0",
    "vendor.com/gpu",
    "a b",
    "]",
    "<nil>",
    "<&>",
    "ü",
    "\u{2028}\u{2029}",
    "\u{1f600}",
    "\\u0000",
    "\\b\\f\\n\\r\\t\\\\\\/\\\"",
    "\\ud83d\\ude00",
    "\\ud83d",
    "\\ude00",
    "\\ud83d\\ud83d\\ude00",
    "\\ud83dx",
    "\\ud83d\\n",
    "\\uD800\\uDBFF",
    "\\uFFFF",
    "\\uFFFE\\ufdd0",
    "\\u007f",
    "\u{7f}",
    "\\u2028",
    "\u{fffd}",
    "\\u00e9",
    "{\\\"kind\\\":\\\"DRACheckpoint\\\"}",
    "{}",
    "null",
    "[]",
    "{\\\"ClaimInfoStateList\\\":[{}]}",
];

/// Bytes that are not UTF-8, of every kind.
const NOT_UTF8: &[&[u8]] = &[
    b"\x80",
    b"\xbf",
    b"\xff",
    b"\xfe",
    b"\xc0\x80",
    b"\xc1\xbf",
    b"\xc3",
    b"\xe2\x82",
    b"\xe2",
    b"\xe0\x80\x80",
    b"\xe0\x9f\xbf",
    b"\xed\xa0\x80",
    b"\xed\xbf\xbf",
    b"\xf0\x80\x80\x80",
    b"\xf0\x9f\x98",
    b"\xf0\x9f",
    b"\xf0",
    b"\xf4\x90\x80\x80",
    b"\xf5\x80\x80\x80",
    b"\xf8\x88\x80\x80\x80",
    b"\xc3\xc3\xa9",
    b"\xe2\x82a",
    b"\xe2\x28\xa1",
    b"\xf0\x28\x8c\xbc",
];

const ANSWERS: &[&str] = &[
    "",
    "CgA=",
    "CgQKAWESAA==",
    "Eg0KBS9kZXYvEgQvaG9z",
    "Q",
    "QQ",
    "QQ=",
    "QQ==",
    "QQ===",
    "QR==",
    "QUI=",
    "QUJ=",
    "QUJD",
    "QUJDRA",
    "QUJD RA==",
    "QUJD\\nRA==",
    "QUJD\\r\\nRA==\\r\\n",
    "\\nQUJD",
    "QU\\nJD",
    "QQ=\\n=",
    "QQ\\n==",
    "QQ==\\n",
    "QQ==Q",
    "QQ==\\nQ",
    "=",
    "==",
    "A===",
    "=QQ=",
    "Q=Q=",
    "QUJDRERF",
    "QUJDREVGR0hJSktM",
    "QUJDREVGR0hJ-_==",
    "QUJDREVGR0hJ+/==",
    "QUJDREVGR0hJSktMT*",
    "QUJD\\u0052A==",
    "ü",
    "QUJDREVGR0hJSktMTQ",
    "/////w==",
    "QUJDREV\\nGR0hJSktMTQ=",
    "\\r\\n",
    "\\t",
    "QUJDREVGR0hJSktM\\nX",
    "Q\\nQ",
    "QUJDR\\n",
    "QUJDRA=\\n",
    "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=*",
];

/// Returns a mutated file.
pub(crate) fn file(random: &mut Random, seeds: &Seeds) -> Vec<u8> {
    if random.once_in(12) {
        let seed = &seeds.raw[random.below(seeds.raw.len())];
        return bytes(random, seed.clone());
    }
    let mut tree = seeds.trees[random.below(seeds.trees.len())].clone();
    let inner = inner_document(&mut tree);
    if let Some(mut inner) = inner.filter(|_| !random.once_in(5)) {
        for _ in 0..=random.below(3) {
            tree_change(random, &mut inner, seeds);
        }
        let mut text = print(random, &inner);
        if random.once_in(12) {
            text = bytes(random, text);
        }
        wrap(random, &mut tree, &text);
        return print(random, &tree);
    }
    for _ in 0..=random.below(4) {
        tree_change(random, &mut tree, seeds);
    }
    if !random.once_in(4) {
        mend_checksum(random, &mut tree);
    }
    let printed = print(random, &tree);
    if random.once_in(15) {
        return bytes(random, printed);
    }
    printed
}

/// Returns the document inside an envelope.
fn inner_document(tree: &mut Node) -> Option<Node> {
    let Some(Node::Token(token)) = tree.get_mut("Data") else {
        return None;
    };
    let text: String = serde_json::from_slice(token).ok()?;
    Node::parse(text.as_bytes())
}

/// Puts a document into an envelope, usually with the checksum that Go computes.
fn wrap(random: &mut Random, tree: &mut Node, inner: &[u8]) {
    let mut token = vec![b'"'];
    for &byte in inner {
        match byte {
            b'"' | b'\\' => token.extend([b'\\', byte]),
            b'\n' => token.extend(b"\\n"),
            0..0x20 => token.extend(format!("\\u{byte:04x}").bytes()),
            _ if random.once_in(200) && byte < 0x80 => token.extend(format!("\\u{byte:04x}").bytes()),
            _ => token.push(byte),
        }
    }
    token.push(b'"');
    if let Some(data) = tree.get_mut("Data") {
        *data = Node::Token(token);
    }
    if random.once_in(10) {
        return;
    }
    let sum = match dra::envelope::read(&tree.compact()) {
        Ok(file) => file.checksum.map(|checksum| checksum.computed),
        // The inner document does not decode, so compute the checksum here.
        Err(_) => Some(u64::from(crc32fast::hash(&crate::go_text(inner)))),
    };
    if let (Some(sum), Some(checksum)) = (sum, tree.get_mut("Checksum")) {
        *checksum = Node::token(sum.to_string());
    }
}

/// Sets a checksum that some release accepts.
fn mend_checksum(random: &mut Random, tree: &mut Node) {
    let printed = tree.compact();
    let computed = if tree.get_mut("version").is_some() || tree.get_mut("entries").is_some() {
        let formats = [Format::DraFlat1_27, Format::DraFlat1_28, Format::DraFlat1_30];
        let format = formats[random.below(formats.len())];
        dra::flat::read_as(&printed, format)
            .and_then(Result::ok)
            .and_then(|file| file.checksum)
    } else {
        device_plugin::read(&printed).ok().and_then(|file| file.checksum)
    };
    if let (Some(computed), Some(checksum)) = (computed, tree.get_mut("checksum")) {
        *checksum = Node::token(computed.computed.to_string());
    }
}

fn print(random: &mut Random, tree: &Node) -> Vec<u8> {
    if !random.once_in(6) {
        return tree.compact();
    }
    let mut out = Vec::new();
    let mut spaces = random.clone();
    tree.print(&mut out, &mut |out| {
        for _ in 0..spaces.below(3) {
            out.extend_from_slice(spaces.pick(&["\n", " ", "\t", "\r\n", "  "]).as_bytes());
        }
    });
    random.next();
    out
}

/// Changes one node of the tree.
fn tree_change(random: &mut Random, tree: &mut Node, seeds: &Seeds) {
    let number = random.below(tree.count());
    let Some((node, key)) = tree.nth(number) else {
        return;
    };
    match node {
        Node::Object(entries) if !random.once_in(6) => change_object(random, entries, seeds),
        Node::List(items) if !random.once_in(4) => change_list(random, items, seeds),
        Node::Token(token) if token.first() == Some(&b'"') && random.once_in(2) => {
            change_string(random, token);
        }
        _ => *node = value(random, &key, seeds),
    }
}

fn change_object(random: &mut Random, entries: &mut Vec<(Vec<u8>, Node)>, seeds: &Seeds) {
    let place = random.below(entries.len());
    match random.below(8) {
        0 if !entries.is_empty() => drop(entries.remove(place)),
        1 | 2 if !entries.is_empty() => {
            let (key, mut same) = entries[place].clone();
            match random.below(3) {
                0 => same = value(random, &key, seeds),
                1 => tree_change(random, &mut same, seeds),
                _ => {}
            }
            let key = if random.once_in(2) {
                key
            } else {
                respelled(random, &key)
            };
            entries.insert(random.below(entries.len() + 1), (key, same));
        }
        3 if !entries.is_empty() => entries[place].0 = respelled(random, &entries[place].0.clone()),
        4 if !entries.is_empty() => {
            let other = random.below(entries.len());
            entries.swap(place, other);
        }
        5 if !entries.is_empty() => entries[place].0 = quoted(random.pick(NUMA_KEYS)),
        6 if !entries.is_empty() => {
            entries[place].1 = value(random, &entries[place].0.clone(), seeds);
        }
        _ => {
            let name = if random.once_in(3) {
                random.pick(NUMA_KEYS)
            } else {
                random.pick(KEYS)
            };
            let key = quoted(name);
            let fresh = value(random, &key, seeds);
            entries.insert(random.below(entries.len() + 1), (key, fresh));
        }
    }
}

fn change_list(random: &mut Random, items: &mut Vec<Node>, seeds: &Seeds) {
    let place = random.below(items.len());
    match random.below(4) {
        0 if !items.is_empty() => drop(items.remove(place)),
        1 if !items.is_empty() => items.insert(random.below(items.len() + 1), items[place].clone()),
        2 if !items.is_empty() => {
            let other = random.below(items.len());
            items.swap(place, other);
        }
        _ => {
            let fresh = value(random, b"", seeds);
            items.insert(random.below(items.len() + 1), fresh);
        }
    }
}

/// Changes the text between two quotes.
fn change_string(random: &mut Random, token: &mut Vec<u8>) {
    let mut inner = token
        .get(1..token.len().saturating_sub(1))
        .unwrap_or_default()
        .to_vec();
    let at = random.below(inner.len() + 1);
    // Not inside an escape: `bytes` does that.
    let at = if inner.contains(&b'\\') { inner.len() } else { at };
    let addition: Vec<u8> = match random.below(4) {
        0 => random.pick(NOT_UTF8).to_vec(),
        1 => vec![random.byte()],
        2 => random.pick(ANSWERS).as_bytes().to_vec(),
        _ => random.pick(TEXTS).as_bytes().to_vec(),
    };
    if random.once_in(3) {
        inner.truncate(at);
    }
    let at = at.min(inner.len());
    inner.splice(at..at, addition);
    *token = [b"\"", inner.as_slice(), b"\""].concat();
}

fn quoted(text: &str) -> Vec<u8> {
    [b"\"", text.as_bytes(), b"\""].concat()
}

/// Returns the key in other letters: Go compares without regard to case, and folds two letters into ASCII.
fn respelled(random: &mut Random, key: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(key).into_owned();
    let change = random.below(7);
    let chosen = random.below(text.chars().count());
    text.chars()
        .enumerate()
        .map(|(index, letter)| match (change, letter) {
            (_, '"' | '\\') => letter.to_string(),
            (0, _) => letter.to_ascii_uppercase().to_string(),
            (1, _) => letter.to_ascii_lowercase().to_string(),
            (2, 's' | 'S') => "\u{17f}".into(),
            (2 | 3, 'k' | 'K') => "\u{212a}".into(),
            (3, 's' | 'S') => "\\u017f".into(),
            (4, _) if index == chosen => format!("\\u{:04x}", u32::from(letter)),
            (5, _) if index == chosen && letter.is_ascii_lowercase() => {
                letter.to_ascii_uppercase().to_string()
            }
            (5, _) if index == chosen => letter.to_ascii_lowercase().to_string(),
            (6, _) if index == chosen => format!("{letter}\u{301}"),
            _ => letter.to_string(),
        })
        .collect::<String>()
        .into_bytes()
}

/// Returns a value, usually one that is meaningful for `key`.
fn value(random: &mut Random, key: &[u8], seeds: &Seeds) -> Node {
    let name = String::from_utf8_lossy(key).to_ascii_lowercase();
    if !random.once_in(3) {
        match name.trim_matches('"') {
            "allocresp" => return answer(random),
            "deviceids" => return devices(random),
            "checksum" => return Node::token(random.pick(NUMBERS)),
            "lastupdated" => return Node::Token(quoted(random.pick(TIMES))),
            "healthchecktimeout" => return Node::token(random.pick(NUMBERS)),
            "poduids" => {
                let pod = |random: &mut Random| {
                    let value = random.pick(&["{}", "{}", "null", "{\"a\":1}", "[]", "1", "\"\""]);
                    (quoted(random.pick(TEXTS)), Node::token(value))
                };
                let pods = (0..random.below(4)).map(|_| pod(random)).collect();
                return Node::Object(pods);
            }
            _ => {}
        }
    }
    match random.below(14) {
        0 | 1 => Node::token("null"),
        2 => Node::Object(Vec::new()),
        3 => Node::List(Vec::new()),
        4 | 5 => Node::token(random.pick(NUMBERS)),
        6 | 7 => Node::Token(quoted(random.pick(TEXTS))),
        8 => Node::token(random.pick(&["true", "false"])),
        9 if random.once_in(2) => Node::token(random.pick(BROKEN)),
        10 if random.once_in(20) => {
            let depth = random.below(4) + 9_996;
            let nested = ["[".repeat(depth), "]".repeat(depth)].concat();
            Node::token(if random.once_in(3) {
                nested
                    .replace('[', "{\"a\":")
                    .replace("}]", "1}")
                    .replace(']', "}")
            } else {
                nested
            })
        }
        11 | 12 => {
            // A part of another file.
            let mut other = seeds.trees[random.below(seeds.trees.len())].clone();
            if random.once_in(2) {
                other = inner_document(&mut other).unwrap_or(other);
            }
            let number = random.below(other.count());
            other
                .nth(number)
                .map_or(Node::token("null"), |(node, _)| node.clone())
        }
        _ => {
            let first = quoted(random.pick(KEYS));
            let items = vec![
                Node::token(random.pick(NUMBERS)),
                Node::Token(quoted(random.pick(TEXTS))),
            ];
            if random.once_in(2) {
                Node::List(items)
            } else {
                Node::Object(vec![(first, Node::List(items))])
            }
        }
    }
}

fn answer(random: &mut Random) -> Node {
    match random.below(5) {
        0 => {
            let numbers = (0..random.below(5)).map(|_| match random.below(3) {
                0 => Node::token(random.pick(NUMBERS)),
                1 => Node::token(random.pick(&["null", "\"1\"", "[]", "true"])),
                _ => Node::token(random.byte().to_string()),
            });
            Node::List(numbers.collect())
        }
        1 => Node::Token(quoted(&STANDARD.encode(protobuf::message(random)))),
        _ => Node::Token(quoted(random.pick(ANSWERS))),
    }
}

fn devices(random: &mut Random) -> Node {
    let list = |random: &mut Random| {
        if random.once_in(6) {
            return Node::token(random.pick(&["null", "{}", "1", "\"a\""]));
        }
        let ids = (0..random.below(3)).map(|_| {
            if random.once_in(8) {
                Node::token(random.pick(&["null", "1", "[]"]))
            } else {
                Node::Token(quoted(random.pick(TEXTS)))
            }
        });
        Node::List(ids.collect())
    };
    if random.once_in(4) {
        return list(random);
    }
    let nodes = (0..random.below(4)).map(|_| {
        let nodes = if random.once_in(3) {
            NUMA_KEYS
        } else {
            &NUMA_KEYS[..8]
        };
        (quoted(random.pick(nodes)), list(random))
    });
    Node::Object(nodes.collect())
}

/// Changes arbitrary bytes.
fn bytes(random: &mut Random, mut bytes: Vec<u8>) -> Vec<u8> {
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len() + 1);
        match random.below(9) {
            0 => bytes.truncate(at),
            1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            2 if at < bytes.len() => bytes[at] = random.byte(),
            3 => bytes.insert(at, random.byte()),
            4 => {
                let end = (at + random.below(6)).min(bytes.len());
                bytes.drain(at..end);
            }
            5 => {
                let end = (at + random.below(20)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                let place = random.below(bytes.len() + 1);
                bytes.splice(place..place, part);
            }
            6 => bytes.extend_from_slice(
                random
                    .pick(&["\n", " ", "x", "}", "\0", ",", "{}", "null", "\t1"])
                    .as_bytes(),
            ),
            7 => {
                let start: &[u8] = random.pick(&[
                    b"\xef\xbb\xbf".as_slice(),
                    b"\0",
                    b" ",
                    b"x",
                    b"\xff\xfe",
                    b"\x0b",
                ]);
                bytes.splice(0..0, start.iter().copied());
            }
            _ => {
                let noise = random.pick(NOT_UTF8);
                bytes.splice(at..at, noise.iter().copied());
            }
        }
    }
    bytes
}
