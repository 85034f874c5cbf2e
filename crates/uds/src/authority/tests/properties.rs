//! Properties that hold for all connections.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// How a header is written down.
#[derive(Debug, Clone, Copy)]
struct Form {
    /// 0x40 with incremental indexing, 0x00 without, 0x10 never.
    indexing: u8,
    codes_name: bool,
    codes_value: bool,
    names_by_index: bool,
    refers_to_table: bool,
}

fn form() -> impl Strategy<Value = Form> {
    (
        prop::sample::select(vec![0x40, 0x40, 0x00, 0x10]),
        any::<[bool; 4]>(),
    )
        .prop_map(
            |(indexing, [codes_name, codes_value, names_by_index, refers_to_table])| Form {
                indexing,
                codes_name,
                codes_value,
                names_by_index,
                refers_to_table,
            },
        )
}

/// An encoder that writes every form on demand.
#[derive(Default)]
struct Encoder {
    table: VecDeque<(String, String)>,
}

impl Encoder {
    fn encode(&mut self, name: &str, value: &str, form: Form, block: &mut Vec<u8>) {
        let header = (name.to_owned(), value.to_owned());
        if let Some(place) = self
            .table
            .iter()
            .position(|entry| *entry == header)
            .filter(|_| form.refers_to_table)
        {
            let mut index = fluke_hpack::encoder::encode_integer(62 + place, 7);
            index[0] |= 0x80;
            block.extend(index);
            return;
        }
        let known = [(":authority", 1), (":path", 4), ("user-agent", 58)];
        let index = known
            .iter()
            .find(|(known, _)| *known == name)
            .filter(|_| form.names_by_index);
        let mut start = fluke_hpack::encoder::encode_integer(
            index.map_or(0, |(_, index)| *index),
            if form.indexing == 0x40 { 6 } else { 4 },
        );
        start[0] |= form.indexing;
        block.extend(start);
        if index.is_none() {
            block.extend(literal(name.as_bytes(), form.codes_name));
        }
        block.extend(literal(value.as_bytes(), form.codes_value));
        if form.indexing == 0x40 {
            self.table.push_front(header);
            let size = |table: &VecDeque<(String, String)>| -> usize {
                table
                    .iter()
                    .map(|(name, value)| name.len() + value.len() + 32)
                    .sum()
            };
            while size(&self.table) > 4096 {
                self.table.pop_back();
            }
        }
    }
}

#[derive(Debug, Clone)]
struct Call {
    headers: Vec<(String, String, Form)>,
    updates_size: bool,
    padding: Option<u8>,
    has_priority: bool,
    splits: Vec<usize>,
    data: usize,
}

fn header() -> impl Strategy<Value = (String, String)> {
    prop_oneof![
        3 => prop_oneof!["/[a-z/]{0,40}\\.sock", "(%2F[a-z]{1,6}){1,6}", "localhost(:[0-9]{2})?", "[ -~]{0,12}", "/[a-z]{300}"]
            .prop_map(|value| (":authority".to_owned(), value)),
        2 => "/[a-zA-Z1.]{1,12}/[a-zA-Z]{1,8}".prop_map(|value| (":path".to_owned(), value)),
        1 => "grpc-go/1\\.[0-9]{2}".prop_map(|value| ("user-agent".to_owned(), value)),
        2 => ("[a-z]{1,8}", "[ -~]{0,200}"),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    let headers = vec((header(), form()), 0..8).prop_map(|headers| {
        headers
            .into_iter()
            .map(|((name, value), form)| (name, value, form))
            .collect()
    });
    let padding = prop::option::of(any::<u8>());
    (
        headers,
        any::<bool>(),
        padding,
        any::<bool>(),
        vec(0..2000usize, 0..5),
        0..3000usize,
    )
        .prop_map(
            |(headers, updates_size, padding, has_priority, splits, data)| Call {
                headers,
                updates_size,
                padding,
                has_priority,
                splits,
                data,
            },
        )
}

impl Call {
    fn frames(&self, encoder: &mut Encoder, stream: u32) -> Vec<u8> {
        let mut block = Vec::new();
        if self.updates_size && !self.headers.is_empty() {
            block.extend([0x3f, 0xe1, 0x1f]);
        }
        for (name, value, form) in &self.headers {
            encoder.encode(name, value, *form, &mut block);
        }
        let mut splits: Vec<usize> = self
            .splits
            .iter()
            .map(|split| split % (block.len() + 1))
            .collect();
        splits.extend([0, block.len()]);
        splits.sort_unstable();
        let mut frames = Vec::new();
        let pieces: Vec<&[u8]> = splits.windows(2).map(|ends| &block[ends[0]..ends[1]]).collect();
        for (index, piece) in pieces.iter().enumerate() {
            let mut flags = if index + 1 == pieces.len() { END_HEADERS } else { 0 };
            if index > 0 {
                frames.extend(frame(CONTINUATION, flags, stream, piece));
                continue;
            }
            let mut body = Vec::new();
            if let Some(padding) = self.padding {
                flags |= PADDED;
                body.push(padding);
            }
            if self.has_priority {
                flags |= PRIORITY;
                body.extend([0, 0, 0, 0, 15]);
            }
            body.extend_from_slice(piece);
            body.extend(vec![0; usize::from(self.padding.unwrap_or(0))]);
            frames.extend(frame(HEADERS, flags, stream, &body));
        }
        frames.extend(frame(0, 1, stream, &vec![b'/'; self.data]));
        // A frame of an unknown kind.
        frames.extend(frame(0xfa, 0xff, stream, b"\x41\x02/a"));
        frames
    }
}

/// The header lists of a connection, as another implementation reads them.
fn header_lists(bytes: &[u8]) -> Vec<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut decoder = fluke_hpack::Decoder::new();
    let mut lists = Vec::new();
    let mut block = Vec::new();
    let mut rest = &bytes[PREFACE.len()..];
    while !rest.is_empty() {
        let length = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
        let (kind, flags, mut body) = (rest[3], rest[4], &rest[FRAME_HEAD..FRAME_HEAD + length]);
        rest = &rest[FRAME_HEAD + length..];
        if kind == HEADERS {
            if flags & PADDED != 0 {
                body = &body[1..body.len() - usize::from(body[0])];
            }
            if flags & PRIORITY != 0 {
                body = &body[5..];
            }
        } else if kind != CONTINUATION {
            continue;
        }
        block.extend_from_slice(body);
        if flags & END_HEADERS != 0 {
            lists.push(decoder.decode(&block).expect("a header block"));
            block.clear();
        }
    }
    lists
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn only_authorities_change_whatever_the_connection(
        calls in vec(call(), 1..6),
        sizes in vec(1..3000usize, 1..6),
        room in 1..20_000usize,
    ) {
        let mut encoder = Encoder::default();
        let frames: Vec<Vec<u8>> =
            calls.iter().enumerate().map(|(index, call)| call.frames(&mut encoder, 1 + 2 * index as u32)).collect();
        let bytes = connection(&frames);

        let out = through(&bytes, &sizes, room);

        prop_assert_eq!(out.len(), bytes.len());
        prop_assert_eq!(&out, &through(&bytes, &[usize::MAX], usize::MAX >> 40), "the split matters");
        let (before, after) = (header_lists(&bytes), header_lists(&out));
        prop_assert_eq!(before.len(), calls.len());
        prop_assert_eq!(after.len(), calls.len());
        for (before, after) in before.iter().zip(&after) {
            prop_assert_eq!(before.len(), after.len());
            for ((name, sent), (name_after, seen)) in before.iter().zip(after) {
                prop_assert_eq!(name, name_after);
                if name != b":authority" || uri::Authority::try_from(&sent[..]).is_ok() {
                    prop_assert_eq!(sent, seen);
                    continue;
                }
                prop_assert_eq!(sent.len(), seen.len());
                let is_path = sent.iter().all(|&byte| is_plain(byte) || b"/%".contains(&byte));
                let is_accepted = uri::Authority::try_from(&seen[..]).is_ok();
                prop_assert!(is_accepted || sent == seen, "half replaced: {:?}", seen);
                prop_assert!(is_accepted || !is_path || sent.is_empty(), "a path is refused: {:?}", seen);
            }
        }
    }

    #[test]
    fn blocks_of_another_encoder_are_understood(
        lists in vec(vec(header(), 0..8), 1..8),
        sizes in vec(1..300usize, 1..6),
    ) {
        let mut encoder = fluke_hpack::Encoder::new();
        let frames: Vec<Vec<u8>> = lists
            .iter()
            .map(|list| {
                let block = encoder.encode(list.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())));
                frame(HEADERS, END_HEADERS, 1, &block)
            })
            .collect();
        let after = header_lists(&through(&connection(&frames), &sizes, 8192));
        for (list, after) in lists.iter().zip(&after) {
            prop_assert_eq!(list.len(), after.len());
            for ((name, sent), (name_after, seen)) in list.iter().zip(after) {
                prop_assert_eq!(name.as_bytes(), &name_after[..]);
                if name == ":authority" && !sent.is_empty() {
                    prop_assert!(uri::Authority::try_from(&seen[..]).is_ok(), "{:?}", seen);
                } else {
                    prop_assert_eq!(sent.as_bytes(), &seen[..]);
                }
            }
        }
    }

    #[test]
    fn arbitrary_bytes_come_out_as_many_and_the_same_however_split(
        junk in vec(any::<u8>(), 0..600),
        heads in vec((0..40usize, prop::sample::select(vec![0, 1, 1, 9, 4]), any::<u8>()), 0..12),
        has_preface in any::<bool>(),
        sizes in vec(1..60usize, 1..6),
    ) {
        let mut bytes = if has_preface { PREFACE.to_vec() } else { Vec::new() };
        let mut rest = &junk[..];
        for (length, kind, flags) in heads {
            let (body, after) = rest.split_at(length.min(rest.len()));
            bytes.extend(frame(kind, flags, 1, body));
            rest = after;
        }
        bytes.extend_from_slice(rest);

        let out = through(&bytes, &sizes, 50);

        prop_assert_eq!(out.len(), bytes.len());
        prop_assert_eq!(out, through(&bytes, &[usize::MAX], 1 << 16));
    }
}
