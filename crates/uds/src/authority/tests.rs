use std::collections::VecDeque;
use std::task::Waker;

use super::*;

mod properties;

/// A connection that brings one chunk per read.
struct Chunks(VecDeque<Vec<u8>>);

impl AsyncRead for Chunks {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(mut chunk) = self.0.pop_front() {
            let count = chunk.len().min(buf.remaining());
            buf.put_slice(&chunk[..count]);
            chunk.drain(..count);
            if !chunk.is_empty() {
                self.0.push_front(chunk);
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Returns the bytes that a reader with a buffer of `room` bytes gets when `bytes` arrive in chunks of these sizes, in turn.
fn through(bytes: &[u8], sizes: &[usize], room: usize) -> Vec<u8> {
    let mut chunks = VecDeque::new();
    let mut rest = bytes;
    for &size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (chunk, after) = rest.split_at(size.clamp(1, rest.len()));
        chunks.push_back(chunk.to_vec());
        rest = after;
    }
    let mut reader = AuthorityRewriter::new(Chunks(chunks));
    let mut cx = Context::from_waker(Waker::noop());
    let mut out = Vec::new();
    loop {
        let mut buffer = vec![0; room];
        let mut buf = ReadBuf::new(&mut buffer);
        let polled = Pin::new(&mut reader).poll_read(&mut cx, &mut buf);
        assert!(matches!(polled, Poll::Ready(Ok(()))), "{polled:?}");
        assert!(
            reader.held.len() <= HELD_LIMIT + HELD_STEP + FRAME_HEAD,
            "holds {}",
            reader.held.len()
        );
        if buf.filled().is_empty() {
            return out;
        }
        out.extend_from_slice(buf.filled());
    }
}

fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    let mut frame = (body.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend_from_slice(body);
    frame
}

fn connection(frames: &[Vec<u8>]) -> Vec<u8> {
    [PREFACE.to_vec(), frame(4, 0, 0, &[])]
        .iter()
        .chain(frames)
        .flatten()
        .copied()
        .collect()
}

/// The body of the only HEADERS frame of a connection, after the wrapper.
fn block_after(block: &[u8]) -> Vec<u8> {
    let bytes = connection(&[frame(HEADERS, END_HEADERS, 1, block)]);
    let out = through(&bytes, &[usize::MAX], 16 * 1024);
    let start = bytes.len() - block.len();
    assert_eq!(out[..start], bytes[..start]);
    out[start..].to_vec()
}

fn literal(text: &[u8], is_coded: bool) -> Vec<u8> {
    let bytes = if is_coded {
        huffman::encode(text)
    } else {
        text.to_vec()
    };
    let mut literal = fluke_hpack::encoder::encode_integer(bytes.len(), 7);
    literal[0] |= u8::from(is_coded) << 7;
    literal.extend(bytes);
    literal
}

fn with_authority(value: &str, is_coded: bool) -> Vec<u8> {
    [&[0x41], &literal(value.as_bytes(), is_coded)[..]].concat()
}

fn decoded(block: &[u8]) -> Vec<(String, String)> {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let headers = fluke_hpack::Decoder::new().decode(block).expect("a header block");
    headers
        .into_iter()
        .map(|(name, value)| (text(name), text(value)))
        .collect()
}

fn authority_after(block: &[u8]) -> String {
    let headers = decoded(&block_after(block));
    let [(name, value)] = &headers[..] else {
        panic!("one header expected: {headers:?}")
    };
    assert_eq!(name, ":authority");
    value.clone()
}

#[test]
fn paths_become_acceptable() {
    for (sent, expected) in [
        ("/var/lib/kubelet/kubelet.sock", ".var.lib.kubelet.kubelet.sock"),
        ("%2Fvar%2Flib%2Fkubelet.sock", ".2Fvar.2Flib.2Fkubelet.sock"),
        ("unix:%2F%2F%2Fvar", "unix:.2F.2F.2Fvar"),
        ("/a b.sock", ".a.b.sock"),
    ] {
        for is_coded in [false, true] {
            assert_eq!(
                authority_after(&with_authority(sent, is_coded)),
                expected,
                "{sent}"
            );
        }
    }
}

#[test]
fn other_characters_are_replaced_where_the_code_allows_it() {
    for (sent, raw, coded) in [
        ("/a?b", ".a.b", ".a!b"),
        ("/a|b", ".a.b", ".a+b"),
        ("/a@", ".a.", ".a~"),
        ("/a:b:c", ".a.b.c", ".axbxc"),
        ("/a[b", ".a.b", ".a~b"),
        ("/a{b", ".a.b", "/a{b"),
        ("/a\\b", ".a.b", "/a\\b"),
        ("/a#b", ".a.b", "/a#b"),
        ("/ä", "...", "/ä"),
    ] {
        assert_eq!(authority_after(&with_authority(sent, false)), raw, "{sent}");
        assert_eq!(authority_after(&with_authority(sent, true)), coded, "{sent}");
    }
}

#[test]
fn acceptable_values_are_left_alone() {
    for value in [
        "localhost",
        "localhost:8080",
        "[::1]:80",
        "user@host",
        "a.b-c_d~e",
        "",
    ] {
        for is_coded in [false, true] {
            assert_eq!(authority_after(&with_authority(value, is_coded)), value);
        }
    }
}

#[test]
fn every_way_to_write_the_name_and_to_index_is_known() {
    let value = literal(b"/run/x", true);
    for name in [vec![1], [&[0], &literal(b":authority", false)[..]].concat(), {
        [&[0], &literal(b":authority", true)[..]].concat()
    }] {
        for kind in [0x40, 0x00, 0x10] {
            let mut block = [&name[..], &value].concat();
            block[0] |= kind;
            assert_eq!(authority_after(&block), ".run.x", "{block:x?}");
        }
    }
}

#[test]
fn requests_of_the_rfc_pass_unchanged() {
    // RFC 7541 C.4.1 to C.4.3: Huffman-coded, the later ones with references to the dynamic table.
    let blocks: [&[u8]; 3] = [
        &[
            0x82, 0x86, 0x84, 0x41, 0x8c, 0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4,
            0xff,
        ],
        &[
            0x82, 0x86, 0x84, 0xbe, 0x58, 0x86, 0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf,
        ],
        &[
            0x82, 0x87, 0x85, 0xbf, 0x40, 0x88, 0x25, 0xa8, 0x49, 0xe9, 0x5b, 0xa9, 0x7d, 0x7f, 0x89, 0x25,
            0xa8, 0x49, 0xe9, 0x5b, 0xb8, 0xe8, 0xb4, 0xbf,
        ],
    ];
    for block in blocks {
        assert_eq!(block_after(block), block);
    }
}

#[test]
fn a_path_in_another_header_is_left_alone() {
    let block = [&[0x44], &literal(b"/v1beta1.Registration/Register", true)[..]].concat();
    assert_eq!(block_after(&block), block);
    let block = [
        &[0x00],
        &literal(b"x-authority", false)[..],
        &literal(b"/a%2F", false),
    ]
    .concat();
    assert_eq!(block_after(&block), block);
}

#[test]
fn a_block_above_the_limit_passes_and_later_ones_are_seen_to() {
    let long = [&[0x41], &literal(&[b'/'; 20_000], false)[..]].concat();
    let huge = [long.repeat(4), with_authority("/a", false)].concat();
    let parts: Vec<&[u8]> = huge.chunks(16_384).collect();
    let mut frames = vec![frame(HEADERS, 0, 1, parts[0])];
    for (index, part) in parts.iter().enumerate().skip(1) {
        let flags = if index + 1 == parts.len() { END_HEADERS } else { 0 };
        frames.push(frame(CONTINUATION, flags, 1, part));
    }
    let before = connection(&frames);
    let bytes = [
        &before[..],
        &frame(HEADERS, END_HEADERS, 3, &with_authority("/b", false)),
    ]
    .concat();
    let expected = [
        &before[..],
        &frame(HEADERS, END_HEADERS, 3, &with_authority(".b", false)),
    ]
    .concat();
    for sizes in [&[usize::MAX][..], &[1000], &[1]] {
        assert_eq!(through(&bytes, sizes, 8192), expected);
    }
}

#[test]
fn a_large_frame_is_seen_to() {
    let padding = [
        &[0x00],
        &literal(b"x-long", false)[..],
        &literal(&[b'l'; 40_000], false),
    ]
    .concat();
    let block = [&padding[..], &with_authority("/b", true)].concat();
    let expected = [&padding[..], &with_authority(".b", true)].concat();
    assert_eq!(block_after(&block), expected);
}

#[test]
fn after_a_broken_block_everything_passes() {
    let later = frame(HEADERS, END_HEADERS, 3, &with_authority("/b", false));
    for broken in [
        frame(HEADERS, END_HEADERS, 1, &[0x41, 0x7f]),
        frame(HEADERS, END_HEADERS | PADDED, 1, &[9, 0x82]),
        frame(HEADERS, END_HEADERS | PADDED, 1, &[]),
        frame(HEADERS, END_HEADERS | PRIORITY, 1, &[0, 0]),
        frame(HEADERS, END_HEADERS, 1, &[0x41, 0x81, 0x00]),
        [frame(HEADERS, 0, 1, &[0x82]), frame(0, 0, 1, &[])].concat(),
        [
            frame(HEADERS, 0, 1, &[0x82]),
            frame(CONTINUATION, END_HEADERS, 5, &[]),
        ]
        .concat(),
    ] {
        let bytes = connection(&[broken, later.clone()]);
        assert_eq!(through(&bytes, &[usize::MAX], 4096), bytes);
    }
}

#[test]
fn a_connection_that_is_not_http2_passes() {
    let bytes = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        frame(HEADERS, END_HEADERS, 1, &with_authority("/b", false)),
    ];
    let bytes = bytes.concat();
    assert_eq!(through(&bytes, &[3], 64), bytes);
}

#[test]
fn a_block_cut_short_by_the_end_passes() {
    let bytes = connection(&[frame(HEADERS, 0, 1, &with_authority("/b", false))]);
    for end in 0..bytes.len() {
        assert_eq!(through(&bytes[..end], &[7], 16), bytes[..end]);
    }
}
