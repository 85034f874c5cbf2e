//! Tests of Go's JSON rules. Expected texts and values are those of Go 1.26.

use std::collections::BTreeMap;

use super::decode::{self, Shape, folds_to};
use super::reader::Dropped;
use super::{DroppedList, Kind, Reader, WarningKind, write};
use crate::go_print::{Fnv1a32, Label, Print};

/// Returns the syntax error of a document, if it has one.
fn syntax_error(document: impl AsRef<[u8]>) -> Option<String> {
    let mut reader = Reader::new(document.as_ref());
    let ended = reader.skip().and_then(|()| reader.end());
    ended.err().map(|error| error.message)
}

fn string(quoted: impl AsRef<[u8]>) -> String {
    let mut reader = Reader::new(quoted.as_ref());
    assert_eq!(reader.kind(), Ok(Kind::String));
    reader.string().expect("a string").into_owned()
}

fn list_of_strings(document: &str) -> (Option<Vec<String>>, Option<String>) {
    let mut reader = Reader::new(document.as_bytes());
    let mut list = None;
    let ended = decode::list(&mut reader, &mut list, "[]string", |reader, item| {
        decode::text(reader, item, "string")
    });
    ended.expect("sound syntax");
    (list, reader.first_type_error().map(|error| error.message.clone()))
}

fn bytes_of(document: &str) -> Result<Option<Vec<u8>>, String> {
    let mut reader = Reader::new(document.as_bytes());
    let mut bytes = None;
    decode::bytes(&mut reader, &mut bytes).expect("sound syntax");
    match reader.first_type_error() {
        None => Ok(bytes),
        Some(error) => Err(error.message.clone()),
    }
}

#[test]
fn syntax_errors_have_the_text_of_go() {
    let cases = [
        ("", "unexpected end of JSON input"),
        (" ", "unexpected end of JSON input"),
        ("{", "unexpected end of JSON input"),
        ("{\"a\"", "unexpected end of JSON input"),
        ("[1", "unexpected end of JSON input"),
        ("\"abc", "unexpected end of JSON input"),
        ("x", "invalid character 'x' looking for beginning of value"),
        ("[,]", "invalid character ',' looking for beginning of value"),
        ("[1,]", "invalid character ']' looking for beginning of value"),
        (
            "{,}",
            "invalid character ',' looking for beginning of object key string",
        ),
        (
            "{\"a\":1,}",
            "invalid character '}' looking for beginning of object key string",
        ),
        (
            "{1:2}",
            "invalid character '1' looking for beginning of object key string",
        ),
        ("{\"a\"}", "invalid character '}' after object key"),
        (
            "{\"a\":1 \"b\"",
            "invalid character '\"' after object key:value pair",
        ),
        ("[1 2]", "invalid character '2' after array element"),
        ("1 2", "invalid character '2' after top-level value"),
        ("{}\0", "invalid character '\\x00' after top-level value"),
        ("01", "invalid character '1' after top-level value"),
        ("-x", "invalid character 'x' in numeric literal"),
        (
            "1.x",
            "invalid character 'x' after decimal point in numeric literal",
        ),
        ("1ex", "invalid character 'x' in exponent of numeric literal"),
        ("nulL", "invalid character 'L' in literal null (expecting 'l')"),
        ("trux", "invalid character 'x' in literal true (expecting 'e')"),
        ("fx", "invalid character 'x' in literal false (expecting 'a')"),
        ("\"\\x\"", "invalid character 'x' in string escape code"),
        (
            "\"\\u12g4\"",
            "invalid character 'g' in \\u hexadecimal character escape",
        ),
        ("\"a\nb\"", "invalid character '\\n' in string literal"),
        ("'", "invalid character '\\'' looking for beginning of value"),
        ("\\", "invalid character '\\\\' looking for beginning of value"),
        (
            "\u{7f}",
            "invalid character '\\x7f' looking for beginning of value",
        ),
        (
            "\u{feff}{}",
            "invalid character 'ï' looking for beginning of value",
        ),
    ];
    for (document, expected) in cases {
        assert_eq!(syntax_error(document).as_deref(), Some(expected), "{document:?}");
    }
    let quoted = |byte: u8| syntax_error([byte]).unwrap_or_default();
    assert_eq!(
        quoted(0x85),
        "invalid character '\\u0085' looking for beginning of value"
    );
    assert_eq!(
        quoted(0xad),
        "invalid character '\\u00ad' looking for beginning of value"
    );
    assert_eq!(
        quoted(0xff),
        "invalid character 'ÿ' looking for beginning of value"
    );
}

#[test]
fn a_document_that_ends_inside_a_token_gets_the_error_for_a_space() {
    let cases = [
        ("n", "in literal null (expecting 'u')"),
        ("-", "in numeric literal"),
        ("1.", "after decimal point in numeric literal"),
        ("1e", "in exponent of numeric literal"),
        ("1e+", "in exponent of numeric literal"),
        ("\"\\", "in string escape code"),
        ("\"\\u12", "in \\u hexadecimal character escape"),
    ];
    for (document, context) in cases {
        let expected = format!("invalid character ' ' {context}");
        assert_eq!(syntax_error(document), Some(expected), "{document:?}");
    }
}

#[test]
fn the_maximum_nesting_is_that_of_go() {
    let nested = |depth: usize| ["[".repeat(depth), "]".repeat(depth)].concat();
    assert_eq!(syntax_error(nested(10_000)), None);
    let refused = syntax_error(nested(10_001));
    assert_eq!(
        refused.as_deref(),
        Some("invalid character '[' exceeded max depth")
    );
}

#[test]
fn escapes_and_surrogates_are_read_as_in_go() {
    assert_eq!(string(r#""\b\f\n\r\t\/\\\"""#), "\u{8}\u{c}\n\r\t/\\\"");
    assert_eq!(string(r#""\u00e9\u2028\ud83d\ude00""#), "é\u{2028}\u{1f600}");
    for (half, expected) in [
        (r#""\ud83d""#, "\u{fffd}"),
        (r#""\ude00""#, "\u{fffd}"),
        (r#""\ud83dx""#, "\u{fffd}x"),
        (r#""\ud83d\n""#, "\u{fffd}\n"),
        (r#""\ud83d\ud83d\ude00""#, "\u{fffd}\u{1f600}"),
        (r#""\ud800\udbff""#, "\u{fffd}\u{fffd}"),
    ] {
        assert_eq!(string(half), expected, "{half}");
    }
}

#[test]
fn every_byte_that_is_not_utf8_becomes_one_replacement_character() {
    let read = |bytes: &[u8]| string([b"\"", bytes, b"\""].concat());
    assert_eq!(read(b"\xff"), "\u{fffd}");
    assert_eq!(read(b"\xe2\x82"), "\u{fffd}".repeat(2));
    assert_eq!(read(b"\xf0\x9f\x98"), "\u{fffd}".repeat(3));
    assert_eq!(read(b"\xed\xa0\x80"), "\u{fffd}".repeat(3));
    assert_eq!(read(b"\xc0\x80"), "\u{fffd}".repeat(2));
    assert_eq!(read(b"a\xc3\xc3\xa9b"), "a\u{fffd}éb");
    assert_eq!(
        read(b"\xf4\x90\x80\x80\\n"),
        ["\u{fffd}".repeat(4).as_str(), "\n"].concat()
    );
}

#[test]
fn plain_text_ends_at_the_right_byte_at_any_offset() {
    for length in 0..40 {
        for end in ["\"", "\\n\"", "ü\"", "\u{7f}\""] {
            let text = ["\"", &"x".repeat(length), end].concat();
            let expected = ["x".repeat(length).as_str(), end.trim_end_matches('"')]
                .concat()
                .replace("\\n", "\n");
            assert_eq!(string(&text), expected, "{text}");
        }
        let control = format!("\"{}\u{1}\"", "x".repeat(length));
        let refused = syntax_error(control);
        assert_eq!(
            refused.as_deref(),
            Some("invalid character '\\x01' in string literal")
        );
    }
}

#[test]
fn keys_match_without_regard_to_case_and_two_letters_fold_into_ascii() {
    assert!(folds_to("poduid", "PodUID"));
    assert!(folds_to("Check\u{17f}um", "Checksum"));
    assert!(folds_to("chec\u{212a}sum", "Checksum"));
    assert!(!folds_to("Poduıd", "PodUID"));
    assert!(!folds_to("PodUI", "PodUID"));
}

const PAIR: Shape = Shape::promoted("pkg.Pair", &["a", "B"], &["a", "Inner.B"]);

fn pair(document: &str) -> ((String, Option<Vec<String>>), Reader<'_>) {
    let mut reader = Reader::new(document.as_bytes());
    let mut pair = (String::new(), None);
    let ended = decode::object(&mut reader, &PAIR, |field, reader| match field {
        0 => decode::text(reader, &mut pair.0, "string"),
        _ => decode::list(reader, &mut pair.1, "[]string", |reader, item| {
            decode::text(reader, item, "string")
        }),
    });
    ended.expect("sound syntax");
    (pair, reader)
}

#[test]
fn an_exact_key_comes_before_one_in_other_letters() {
    let (value, mut reader) = pair(r#"{"A":"1","a":"2","\u0062":["x"],"c":0}"#);
    assert_eq!(value, ("2".into(), Some(vec!["x".into()])));
    let (warnings, left_out) = reader.take_warnings();
    let kinds: Vec<WarningKind> = warnings.into_iter().map(|warning| warning.kind).collect();
    assert_eq!(
        kinds,
        [
            WarningKind::DuplicateKey("a".into()),
            WarningKind::UnknownKey("c".into())
        ]
    );
    assert_eq!(left_out, 0);
}

#[test]
fn a_promoted_field_matches_only_its_own_name() {
    let (value, mut reader) = pair(r#"{"a":"x","Inner.B":["x"]}"#);
    assert_eq!(value.1, None);
    assert_eq!(reader.take_warnings().0.len(), 1);
}

#[test]
fn a_repeated_list_is_decoded_onto_the_earlier_one() {
    let (value, _) = pair(r#"{"b":["x","y","z"],"b":[null,"Y"]}"#);
    assert_eq!(value.1, Some(vec!["x".into(), "Y".into()]));
    let (value, _) = pair(r#"{"b":["x"],"b":[]}"#);
    assert_eq!(value.1, Some(vec![]));
}

#[test]
fn null_empties_lists_and_leaves_text_unchanged() {
    let (value, reader) = pair(r#"{"a":"x","b":["y"],"a":null,"b":null}"#);
    assert_eq!(value, ("x".into(), None));
    assert!(reader.first_type_error().is_none());
}

#[test]
fn type_errors_name_the_struct_and_the_path_to_the_field() {
    let message = |document| {
        let (_, reader) = pair(document);
        reader.first_type_error().map(|error| error.message.clone())
    };
    let expected = "json: cannot unmarshal number into Go struct field Pair.a of type string";
    assert_eq!(message(r#"{"a":1,"b":2}"#).as_deref(), Some(expected));
    let expected = "json: cannot unmarshal bool into Go struct field Pair.Inner.B of type string";
    assert_eq!(message(r#"{"b":["x",true]}"#).as_deref(), Some(expected));
    let (_, error) = list_of_strings("{}");
    assert_eq!(
        error.as_deref(),
        Some("json: cannot unmarshal object into Go value of type []string")
    );
}

#[test]
fn only_integers_in_range_are_accepted() {
    let read = |document: &str| {
        let mut reader = Reader::new(document.as_bytes());
        let mut number = 7;
        decode::unsigned(&mut reader, &mut number, u64::from(u32::MAX), "uint32").expect("sound syntax");
        (
            number,
            reader.first_type_error().map(|error| error.message.clone()),
        )
    };
    assert_eq!(read("4294967295"), (4_294_967_295, None));
    assert_eq!(read("null"), (7, None));
    for refused in ["4294967296", "-1", "-0", "1.0", "1e3", "18446744073709551616"] {
        let message = format!("json: cannot unmarshal number {refused} into Go value of type uint32");
        assert_eq!(read(refused), (7, Some(message)));
    }
    // Not truncated: users search for the kubelet's text in logs.
    let long = "9".repeat(500);
    assert!(read(&long).1.is_some_and(|message| message.contains(&long)));
}

#[test]
fn an_error_of_a_type_with_its_own_decoder_replaces_earlier_ones() {
    let mut reader = Reader::new(b"");
    reader.fail("first".into(), 0);
    reader.abort("second".into(), 1);
    reader.abort("third".into(), 2);
    reader.fail("fourth".into(), 3);
    assert_eq!(
        reader.first_type_error().map(|error| error.message.as_str()),
        Some("second")
    );
}

#[test]
fn bytes_are_base64_or_a_list_of_numbers() {
    assert_eq!(bytes_of(r#""QUJD""#), Ok(Some(b"ABC".to_vec())));
    assert_eq!(bytes_of(r#""""#), Ok(Some(vec![])));
    assert_eq!(bytes_of("null"), Ok(None));
    assert_eq!(bytes_of("[1,null,255]"), Ok(Some(vec![1, 0, 255])));
    assert_eq!(bytes_of(r#""QUJD\r\nRA==\n""#), Ok(Some(b"ABCD".to_vec())));
    assert_eq!(
        bytes_of(r#""QR==""#),
        Ok(Some(b"A".to_vec())),
        "unused bits are ignored"
    );
    let refused = bytes_of("[256]").unwrap_err();
    assert_eq!(
        refused,
        "json: cannot unmarshal number 256 into Go value of type uint8"
    );
}

#[test]
fn broken_base64_is_reported_at_the_offset_of_go() {
    for (encoded, at) in [
        ("Q", 0),
        ("QQ", 0),
        ("QQ=", 3),
        ("QQ===", 4),
        ("QUJDRA", 4),
        ("QUJD RA==", 4),
        ("QQ==Q", 4),
        ("QQ==\\nQ", 5),
        ("QQ=x", 2),
        ("QQ=\\nx", 3),
        ("=", 0),
        ("A===", 1),
        ("QUI=Q", 4),
        ("Q\\nU", 1),
        ("QUJDREVGR0hJSktM\\nX", 17),
        ("QUJDREVGR0hJ-_==", 12),
    ] {
        let expected = format!("illegal base64 data at input byte {at}");
        assert_eq!(bytes_of(&format!("\"{encoded}\"")), Err(expected), "{encoded}");
    }
}

#[test]
fn integer_keys_are_read_as_go_reads_integers() {
    let read = |key: &str| {
        let document = format!("{{\"{key}\":[]}}");
        let mut reader = Reader::new(document.as_bytes());
        let mut map: Option<BTreeMap<i64, Option<Vec<String>>>> = None;
        let ended = decode::int_map(&mut reader, &mut map, "T", |reader, ids| {
            decode::list(reader, ids, "[]string", |reader, id| {
                decode::text(reader, id, "string")
            })
        });
        ended.expect("sound syntax");
        let number = map.and_then(|map| map.into_keys().next());
        (
            number,
            reader.first_type_error().map(|error| error.message.clone()),
        )
    };
    for (key, number) in [
        ("0", 0),
        ("+0", 0),
        ("-0", 0),
        ("007", 7),
        ("-1", -1),
        ("\\u0031", 1),
    ] {
        assert_eq!(read(key), (Some(number), None), "{key}");
    }
    for key in ["", "+", " 1", "1 ", "1.0", "0x1", "1_0", "9223372036854775808"] {
        let message = format!("json: cannot unmarshal number {key} into Go value of type int64");
        assert_eq!(read(key), (None, Some(message)), "{key}");
    }
}

#[test]
fn strings_are_written_with_the_escapes_of_go() {
    let written = |text: &str| {
        let mut out = String::new();
        write::string(&mut out, text);
        out
    };
    assert_eq!(written("a\"\\\u{8}\u{c}\n\r\t"), r#""a\"\\\b\f\n\r\t""#);
    assert_eq!(
        written("<&>\u{0}\u{1f}\u{7f}"),
        "\"\\u003c\\u0026\\u003e\\u0000\\u001f\u{7f}\""
    );
    assert_eq!(
        written("€\u{2028}\u{2029}\u{2030}é"),
        "\"€\\u2028\\u2029\u{2030}é\""
    );
}

const ITEM: decode::Unit<String> = decode::Unit {
    describe: String::clone,
    is_kept: |_| false,
};

fn salvaged(text: &str) -> (Option<Vec<String>>, Vec<Dropped>, bool) {
    let mut reader = Reader::salvaging(text.as_bytes());
    let mut items: Option<Vec<String>> = None;
    let ended = decode::units(&mut reader, &mut items, "[]string", &ITEM, |reader, item| {
        decode::text(reader, item, "string")
    });
    assert!(reader.first_type_error().is_none());
    (items, reader.take_dropped().list, ended.is_ok())
}

#[test]
fn an_element_is_dropped_as_a_whole_when_salvaging() {
    let (items, dropped, whole) = salvaged(r#"["a",["b",1],"c"]"#);
    assert_eq!(items, Some(vec!["a".into(), "c".into()]));
    let reason = "json: cannot unmarshal array into Go value of type string".into();
    assert_eq!(
        dropped,
        [Dropped {
            what: "[1]".into(),
            reason
        }]
    );
    assert!(whole);
}

#[test]
fn whole_elements_are_found_behind_broken_syntax() {
    let shape = Shape::new("a.T", &["a"]);
    let find = |text: &str| {
        let mut dropped = DroppedList::default();
        let items = decode::find_whole(text.as_bytes(), "a", &ITEM, &mut dropped, |reader, item| {
            decode::object(reader, &shape, |_, reader| decode::text(reader, item, "string"))
        });
        (items.concat(), dropped.list.len())
    };
    assert_eq!(
        find("[{\"a\":\"1\"},{\"a\":\"2\u{1}\"},{ \"a\":\"3\"}]"),
        ("13".into(), 1)
    );
    // A lost quote or bracket does not hide the next element.
    assert_eq!(find(r#"x{"a":"1},{"a":"2",{"a":"3"}}],{"a""#), ("3".into(), 3));
}

#[test]
fn a_label_is_hashed_as_its_text_is() {
    static LABEL: Label = Label::new(" DeviceIDs:(checkpoint.DevicesPerNUMA)");
    for before in ["", "a", "\u{ff}", "a longer text", "{PodUID:(string)"] {
        let by_label = Fnv1a32::of(|out| {
            out.text(before);
            out.label(&LABEL);
        });
        let by_text = Fnv1a32::of(|out| {
            out.text(before);
            out.text(" DeviceIDs:(checkpoint.DevicesPerNUMA)");
        });
        assert_eq!(by_label, by_text, "{before:?}");
    }
}

#[test]
fn numbers_are_printed_in_full() {
    for number in [0, 7, -1, 10, i64::MAX, i64::MIN] {
        let mut out = Vec::new();
        out.number(number);
        assert_eq!(out, number.to_string().into_bytes());
    }
}
