use proptest::prelude::*;

use super::*;
use crate::spec::{ContainerEdits, Device};

const HEAD: &str = "cdiVersion: \"1.1.0\"\nkind: v.com/c\ndevices:\n- name: d\n  containerEdits:\n    ";

fn yaml(edits: &str) -> Result<ContainerEdits, ParseError> {
    Spec::parse(format!("{HEAD}{edits}\n").as_bytes()).map(|mut spec| spec.devices.remove(0).container_edits)
}

fn warning(text: &str) -> Option<Warning> {
    document::<Spec>(text.as_bytes()).unwrap().1
}

fn small() -> Spec {
    let container_edits = ContainerEdits {
        env: vec!["A=b".into()],
        ..ContainerEdits::default()
    };
    Spec {
        version: "1.1.0".into(),
        kind: "v.com/c".into(),
        devices: vec![Device {
            name: "d".into(),
            container_edits,
            ..Device::default()
        }],
        ..Spec::default()
    }
}

const JSON: &str =
    r#"{"cdiVersion":"1.1.0","kind":"v.com/c","devices":[{"name":"d","containerEdits":{"env":["A=b"]}}]}"#;

#[test]
fn json_and_yaml_give_the_same_spec_with_any_file_name() {
    let texts = [
        JSON.to_owned(),
        format!("\u{feff}\n\t {JSON}\n"),
        format!("{HEAD}env: [A=b]\n"),
        format!("{HEAD}env: [A=b]\n").replace('\n', "\r\n"),
        format!("---\n{HEAD}env: # why\n    - A=b\n"),
        "{cdiVersion: 1.1.0, kind: v.com/c, devices: [{name: d, containerEdits: {env: [A=b]}}]}".to_owned(),
        format!("{HEAD}env: &e [A=b]\ncontainerEdits:\n").replace("&e ", ""),
        format!("{HEAD}{{<<: {{env: [A=b]}}}}\n"),
    ];
    for text in texts {
        assert_eq!(Spec::parse(text.as_bytes()), Ok(small()), "{text}");
    }
}

#[test]
fn an_empty_or_null_document_is_not_a_spec() {
    for text in ["", "\n", "# only a comment\n", "null", "~", "---\n"] {
        assert_eq!(Spec::parse(text.as_bytes()), Err(ParseError::Empty), "{text:?}");
    }
    for text in [
        "5",
        "[]",
        "a text",
        "xyzzy: garbled",
        "{",
        "{}}",
        "[{]",
        "\"",
        "devices: {}",
        "devices: [5]",
    ] {
        assert!(Spec::parse(text.as_bytes()).is_err(), "{text:?}");
    }
}

#[test]
fn unknown_fields_are_errors_at_every_level() {
    for edits in [
        "bogus: 1",
        "Env: [A=b]",
        "deviceNodes: [{path: /x, mode: 5}]",
        "mounts: [{hostPath: /h, containerPath: /c, source: x}]",
        "hooks: [{hookName: prestart, path: /x, dir: /}]",
        "intelRdt: {enableCMT: true}",
        "netDevices: [{name: x, mtu: 5}]",
    ] {
        assert!(yaml(edits).is_err(), "{edits}");
    }
    assert!(Spec::parse(JSON.replace("\"kind\"", "\"Kind\"").as_bytes()).is_err());
    assert!(Spec::parse(JSON.replace("\"name\"", "\"title\"").as_bytes()).is_err());
}

#[test]
fn a_repeated_key_is_an_error() {
    assert!(yaml("env: [A=b]\n    env: [C=d]").is_err());
    assert!(yaml("env: [A=b]\nannotations: {a: b, a: c}").is_err());
    let json = JSON.replace("\"kind\"", "\"annotations\":{\"a\":\"b\",\"a\":\"c\"},\"kind\"");
    assert!(Spec::parse(json.as_bytes()).is_err());
}

#[test]
fn null_is_the_same_as_an_absent_value() {
    let spec = Spec::parse(
        b"cdiVersion: ~\nkind:\nannotations: null\ncontainerEdits:\ndevices:\n- {name: d, containerEdits: ~}",
    );
    let device = Device {
        name: "d".into(),
        ..Device::default()
    };
    assert_eq!(
        spec,
        Ok(Spec {
            devices: vec![device],
            ..Spec::default()
        })
    );
    let edits = yaml("{env: [~, A=b], deviceNodes: , additionalGids: [null, 5], intelRdt: , mounts: null}");
    let expected = ContainerEdits {
        env: vec!["A=b".into()],
        additional_gids: vec![5],
        ..ContainerEdits::default()
    };
    assert_eq!(edits, Ok(expected));
    for edits in [
        "deviceNodes: [null]",
        "mounts: [~]",
        "hooks: [null]",
        "netDevices: [null]",
    ] {
        assert!(yaml(edits).is_err(), "{edits}");
    }
}

#[test]
fn numbers_are_those_that_runtimes_accept() {
    for (text, mode) in [
        ("0660", 432),
        ("0o660", 432),
        ("0x1B0", 432),
        ("432", 432),
        ("1e2", 100),
        ("3.0", 3),
        ("08", 8),
        ("0", 0),
    ] {
        let edits = yaml(&format!("deviceNodes: [{{path: /x, fileMode: {text}}}]")).unwrap();
        assert_eq!(edits.device_nodes[0].file_mode, Some(mode), "{text}");
    }
    for text in [
        "-1",
        "4294967296",
        "'432'",
        "1.5",
        ".inf",
        "x",
        "[]",
        "true",
        "1e300",
    ] {
        assert!(
            yaml(&format!("deviceNodes: [{{path: /x, fileMode: {text}}}]")).is_err(),
            "{text}"
        );
    }
    assert!(yaml("additionalGids: ['5']").is_err());
    assert!(yaml("additionalGids: [-1]").is_err());
}

#[test]
fn booleans_are_those_that_runtimes_accept() {
    for (text, on) in [
        ("true", true),
        ("True", true),
        ("yes", true),
        ("on", true),
        ("false", false),
        ("off", false),
    ] {
        let edits = yaml(&format!("intelRdt: {{enableMonitoring: {text}}}")).unwrap();
        assert_eq!(edits.intel_rdt.unwrap().enable_monitoring, on, "{text}");
    }
    for text in ["'true'", "1", "x", "[]"] {
        assert!(
            yaml(&format!("intelRdt: {{enableMonitoring: {text}}}")).is_err(),
            "{text}"
        );
    }
}

#[test]
fn any_plain_scalar_can_be_a_text() {
    let edits =
        yaml("hooks: [{hookName: prestart, path: /x, args: [1, 1.50, 0x10, true, 2001-01-01, 0660, .inf]}]");
    assert_eq!(
        edits.unwrap().hooks[0].args,
        ["1", "1.50", "0x10", "true", "2001-01-01", "0660", ".inf"]
    );
}

#[test]
fn only_the_first_document_is_read_and_more_are_a_warning() {
    for rest in ["---\nother: document\n", "---\n{ broken"] {
        let text = format!("{HEAD}env: [A=b]\n{rest}");
        assert_eq!(Spec::parse(text.as_bytes()), Ok(small()), "{rest}");
        assert_eq!(warning(&text), Some(Warning::MoreDocuments), "{rest}");
    }
    assert_eq!(warning(&format!("{HEAD}env: [A=b]\n...\n")), None);
    assert_eq!(warning(JSON), None);
}

#[test]
fn json_that_is_not_yaml_to_runtimes_is_a_warning() {
    for (value, refused) in [
        (r"A=\/", true),
        (r"A=\ud83d\ude00", true),
        (r"A=\uD83D\uDE00", true),
        ("A=\u{7f}", true),
        ("A=😀", false),
        (r"A=\\/", false),
        (r"A=\\\/", true),
        (r"A=\\ud83d", false),
        (r"A=\u00e9\n\t", false),
        (r"A=\ud7ff", false),
    ] {
        let text = JSON.replace("A=b", value);
        assert_eq!(warning(&text), refused.then_some(Warning::JsonOnly), "{value}");
    }
}

#[test]
fn bytes_that_are_not_utf8_are_located() {
    assert_eq!(
        Spec::parse(b"kind: \xff"),
        Err(ParseError::NotUtf8 { valid_up_to: 6 })
    );
}

#[test]
fn an_overlong_text_is_rejected_before_it_is_parsed() {
    let text = " ".repeat(MAX_SPEC_BYTES + 1);
    assert_eq!(Spec::parse(text.as_bytes()), Err(ParseError::TooLarge));
    assert_eq!(
        ParseError::TooLarge.to_string(),
        "the spec has more than 16777216 bytes"
    );
}

#[test]
fn alias_bombs_are_refused() {
    let mut nested = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
    for level in 1..9 {
        let former = format!("*a{}", level - 1);
        nested.push_str(&format!("a{level}: &a{level} [{}]\n", [&*former; 10].join(",")));
    }
    assert!(document::<serde_json::Value>(nested.as_bytes()).is_err());

    let long = "x".repeat(100_000);
    let wide = format!("{HEAD}env: [&a \"A={long}\"{}]\n", ", *a".repeat(90));
    assert!(matches!(
        Spec::parse(wide.as_bytes()),
        Err(ParseError::Yaml { .. })
    ));

    let harmless = yaml("env: [&a A=b, *a]").unwrap();
    assert_eq!(harmless.env, ["A=b", "A=b"]);
}

#[test]
fn reading_stops_at_the_first_entry_without_a_required_field() {
    for (text, message) in [
        (
            "devices: [{name: d}, {}, {name: e}]",
            "entry 2 of the list lacks name",
        ),
        (
            "containerEdits: {deviceNodes: [{type: c}]}",
            "entry 1 of the list lacks path",
        ),
        (
            "containerEdits: {mounts: [{hostPath: /h}]}",
            "entry 1 of the list lacks containerPath",
        ),
        (
            "containerEdits: {hooks: [{path: /h}]}",
            "entry 1 of the list lacks hookName",
        ),
        (
            "containerEdits: {netDevices: [{name: n}]}",
            "entry 1 of the list lacks hostInterfaceName",
        ),
    ] {
        let refused = Spec::parse(text.as_bytes()).unwrap_err().to_string();
        assert!(refused.contains(message), "{refused}");
    }
}

#[test]
fn deep_nesting_is_refused_without_a_stack_overflow() {
    for open in ["[", "{\"a\":", "- ", "{a: "] {
        let text = format!("annotations: {}", open.repeat(200_000));
        assert!(Spec::parse(text.as_bytes()).is_err());
        assert!(Spec::parse(open.repeat(200_000).as_bytes()).is_err());
    }
}

#[test]
fn a_spec_with_very_many_values_is_not_rejected_as_a_bomb() {
    let edits = yaml(&format!("env: [{}]", "A=,".repeat(260_000))).unwrap();
    assert_eq!(edits.env.len(), 260_000);
}

#[test]
fn names_are_read_from_a_file_that_is_not_a_spec() {
    let text = "kind: v.com/c\nsurprise: true\ndevices: [{name: a, shape: round}, {}, {name: b}]";
    assert!(Spec::parse(text.as_bytes()).is_err());
    assert_eq!(
        names_in(text.as_bytes()),
        Some(vec!["v.com/c=a".to_owned(), "v.com/c=b".to_owned()])
    );
    assert_eq!(names_in(b"{ broken"), None);
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Spec::parse(&bytes);
    }

    #[test]
    fn any_yaml_like_text_is_parsed_or_refused(text in "[a-c:,&*!|>%@'\"{}\\[\\]<~\n -]{0,120}") {
        let _ = Spec::parse(text.as_bytes());
    }
}
